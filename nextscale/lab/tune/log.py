"""The trials of a search on disk: one line each, so that a search that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import NextscaleError
from ..results import write_rows
from .trials import Trial

FORMAT = "nextscale trials 1"


@dataclass(eq=False)
class TrialLog:
    """Trials by candidate and number of images. Everything that the search decides follows from them."""

    file: Path | None = None
    trials: dict[tuple[str, int], Trial] = field(default_factory=dict)

    @classmethod
    def open(cls, file: Path, conditions: dict[str, Any]) -> TrialLog:
        """Reads the trials of an earlier start under the same conditions, or begins the file. A torn last line is dropped."""
        log = cls(file)
        head = {"format": FORMAT, **conditions}
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            append(file, head)
            return log
        whole, torn = complete_lines(file)
        try:
            lines = [json.loads(line) for line in whole]
            if lines and lines[0] != json.loads(json.dumps(head)):
                raise NextscaleError(
                    f"{file} belongs to a search under other conditions ({difference(lines[0], head)}): remove it, or give another --out"
                )
            found = [Trial.from_json(line) for line in lines[1:]]
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise NextscaleError(f"{file} cannot be read as trials of a search ({error}): remove it, or give another --out") from error
        if torn or not lines:
            write_rows(lines or [head], file)
        log.trials = {(trial.text, trial.images): trial for trial in found}
        return log

    def get(self, text: str, images: int) -> Trial | None:
        return self.trials.get((text, images))

    def add(self, trial: Trial) -> Trial:
        self.trials[trial.text, trial.images] = trial
        if self.file is not None:
            append(self.file, trial.to_json())
        return trial


def append(file: Path, values: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(values, allow_nan=False) + "\n")
        out.flush()
        os.fsync(out.fileno())


def complete_lines(file: Path) -> tuple[list[str], bool]:
    """The lines that end, and whether something after them does not."""
    try:
        whole, _, rest = file.read_text(encoding="utf-8").rpartition("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise NextscaleError(f"{file} cannot be read ({error}): remove it, or give another --out") from error
    return whole.splitlines(), bool(rest)


def difference(found: Any, expected: dict[str, Any]) -> str:
    if not isinstance(found, dict):
        return "no header"
    names = [name for name in expected if found.get(name) != json.loads(json.dumps(expected[name]))]
    return ", ".join(f"{name}: {found.get(name)!r} there, {expected[name]!r} here" for name in names[:3]) or "other fields"
