"""Finds the case folders below a directory and knows which reader understands which case."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from tests.parity.class_cases import replay_flexvar, replay_published_tokenizer, replay_var
from tests.parity.code_cases import replay_code
from tests.parity.compare import Expected
from tests.parity.fastvar_cases import replay_fastvar_hart, replay_fastvar_infinity
from tests.parity.hart_cases import replay_hart
from tests.parity.infinity_cases import replay_infinity, replay_rope, replay_roundtrip
from tests.parity.recipe import drawn_tensors
from tests.parity.scalekv_cases import replay_scalekv
from tests.parity.skipvar_cases import replay_skipvar, replay_skipvar_decisions
from tests.parity.sparsevar_cases import replay_sparsevar
from tests.parity.stagevar_cases import replay_stagevar
from tests.parity.star_cases import replay_star, replay_star_encoder


@dataclass(frozen=True)
class Case:
    name: str
    description: Path | None  # the json file; None: the folder holds files but no case

    def replay(self) -> int:
        """Returns how many tensors were compared. AssertionError if one differs or the case is not understood."""
        assert self.description is not None, f"{self.name}: no case here, that is no .json with a .safetensors of the same name"
        return replay(self.description)


def find_cases(root: Path) -> list[Case]:
    """Returns all cases: each json with a safetensors file of the same name. Reports folders with other files and without a case.

    Folders whose tensors are all weights of cases in other folders are skipped.
    """
    cases, weights = [], weights_elsewhere(root)
    for folder in sorted({path.parent for path in root.rglob("*") if path.is_file() and path.name != "README.md"}):
        tensors = set(folder.glob("*.safetensors"))
        if tensors and tensors <= weights:
            continue
        name = str(Path(root.name) / folder.relative_to(root))
        found = [path for path in sorted(folder.glob("*.json")) if path.with_suffix(".safetensors").exists()]
        cases += [Case(name if path.stem == "case" else f"{name}/{path.stem}", path) for path in found] or [Case(name, None)]
    return cases


def weights_elsewhere(root: Path) -> set[Path]:
    """Files that a case reads from another folder, such as "../vae/vae.safetensors"."""
    mentions = [(path, name) for path in root.rglob("case.json") for name in re.findall(r"\.\./[\w./-]+\.safetensors", path.read_text())]
    return {Path(os.path.normpath(path.parent / name)) for path, name in mentions}


def replay(description: Path) -> int:
    case = json.loads(description.read_text())
    expected = Expected.read(description.with_suffix(".safetensors"), drawn_tensors(case.get("drawn_tensors", {})))
    folder, config = description.parent, case.get("config", {})
    model = config.get("model", "")
    in_other_files = 0
    if model == "VAR pair":
        replay_code(folder, case, expected)
    elif model == "VAR":
        replay_var(folder, case, expected)
    elif model == "FlexVAR":
        replay_flexvar(folder, case, expected)
    elif model.endswith("published size") and "salt" in case:
        replay_published_tokenizer(folder, case, expected)
    elif "FastVAR-on-Infinity" in case.get("what", ""):
        replay_fastvar_infinity(folder, case, expected)
    elif case.get("what", "").startswith("StageVAR on Infinity"):
        replay_stagevar(folder, case, expected)
    elif case.get("what", "").startswith("SparseVAR on Infinity"):
        replay_sparsevar(folder, case, expected)
    elif case.get("what", "").startswith("ScaleKV on Infinity"):
        replay_scalekv(folder, case, expected)
    elif case.get("what", "").startswith("SkipVAR decision only"):
        replay_skipvar_decisions(folder, case, expected)
    elif case.get("what", "").startswith("SkipVAR on Infinity"):
        replay_skipvar(folder, case, expected)
    elif "vae_bits" in config and "cfg_list" in case:
        replay_infinity(folder, case, expected)
    elif "vae_scale_schedule" in case:
        replay_roundtrip(folder, case, expected)
    elif "RoPE" in case.get("what", ""):
        replay_rope(case, expected)
    elif "transformer_config" in case and "FastVAR" in case.get("generator", ""):
        replay_fastvar_hart(folder, case, expected)
    elif "transformer_config" in case and "HART" in case.get("generator", ""):
        replay_hart(folder, case, expected)
    elif "runs" in case and case.get("model", "").startswith("STAR"):
        in_other_files = replay_star(folder, case, expected)
    elif "official VQVAE" in case.get("what", "") and "patch_nums" in case:
        replay_star_encoder(folder, case, expected)
    else:
        raise AssertionError(f"{description}: no reader understands this case")
    return in_other_files + expected.finish()
