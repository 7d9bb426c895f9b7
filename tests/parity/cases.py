"""Finds the case folders below a directory and knows which reader understands which case."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .class_cases import replay_flexvar, replay_published_tokenizer, replay_var
from .compare import Expected
from .infinity_cases import replay_infinity, replay_rope, replay_roundtrip


@dataclass(frozen=True)
class Case:
    name: str
    description: Path | None  # the json file; None: the folder holds files but no case

    def replay(self) -> int:
        """Number of tensors compared; AssertionError if one differs or the case is not understood."""
        assert self.description is not None, f"{self.name}: no case here, that is no .json with a .safetensors of the same name"
        return replay(self.description)


def find_cases(root: Path) -> list[Case]:
    """Every json with a safetensors of the same name is a case; a folder with other files and no case is reported as not understood."""
    cases = []
    for folder in sorted({path.parent for path in root.rglob("*") if path.is_file() and path.name != "README.md"}):
        name = str(Path(root.name) / folder.relative_to(root))
        found = [path for path in sorted(folder.glob("*.json")) if path.with_suffix(".safetensors").exists()]
        cases += [Case(name if path.stem == "case" else f"{name}/{path.stem}", path) for path in found] or [Case(name, None)]
    return cases


def replay(description: Path) -> int:
    case = json.loads(description.read_text())
    expected = Expected.read(description.with_suffix(".safetensors"))
    folder, config = description.parent, case.get("config", {})
    model = config.get("model", "")
    if model == "VAR":
        replay_var(folder, case, expected)
    elif model == "FlexVAR":
        replay_flexvar(folder, case, expected)
    elif model.endswith("published size") and "salt" in case:
        replay_published_tokenizer(folder, case, expected)
    elif "vae_bits" in config and "cfg_list" in case:
        replay_infinity(folder, case, expected)
    elif "vae_scale_schedule" in case:
        replay_roundtrip(folder, case, expected)
    elif "RoPE" in case.get("what", ""):
        replay_rope(case, expected)
    else:
        raise AssertionError(f"{description}: no reader understands this case")
    return expected.finish()
