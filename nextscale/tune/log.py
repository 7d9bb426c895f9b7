"""The trials of a search on disk: one line each, so that a search that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import NextscaleError
from ..eval.results import write_rows
from ..io import append_text, regular
from ..validation import is_int
from .trials import Trial

FORMAT = "nextscale trials 2"
SUFFIX = ".trials.jsonl"
FORESIGHT = "foresight"

Foresight = Mapping[tuple[int, int], float]
"""First block and last block + 1 to a share."""


@dataclass(eq=False)
class TrialLog:
    """Trials by candidate, number of images and whether they were timed. Everything that the search decides follows from them."""

    file: Path | None = None
    conditions: dict[str, Any] = field(default_factory=dict)
    trials: dict[tuple[str, int, bool], Trial] = field(default_factory=dict)
    foresight: Foresight | None = None

    @classmethod
    def open(cls, file: Path, conditions: dict[str, Any]) -> TrialLog:
        """Reads the trials of an earlier start under the same conditions, or begins the file. A torn last line is dropped."""
        head = json.loads(json.dumps({"format": FORMAT, **conditions}))
        if not file.exists():
            append(file, head)
            return cls(file, head)
        whole, torn = complete_lines(file)
        log = cls.of_lines(file, whole) if whole else cls(file, head)
        if log.conditions != head:
            raise NextscaleError(
                f"{file} belongs to a search under other conditions ({difference(log.conditions, head)}): remove it, or give another"
                " --trials"
            )
        if torn or not whole:
            write_rows([head, *(json.loads(line) for line in whole[1:])], file)
        return log

    @staticmethod
    def first_round(file: Path) -> int | None:
        """The images of a candidate's first round in an earlier start; None where there was none."""
        lines = complete_lines(file)[0] if file.exists() else []
        images = TrialLog.of_lines(file, lines[:1]).conditions.get("images")
        return images if is_int(images, 1) else None

    @classmethod
    def read(cls, file: Path) -> TrialLog:
        """The trials of any search, to look at."""
        log = cls.of_lines(file, complete_lines(file)[0])
        if log.conditions.get("format") != FORMAT:
            raise NextscaleError(
                f"{file} holds no trials that this version reads ({FORMAT}): make them anew with `nextscale tune --trials`"
            )
        return log

    @classmethod
    def of_lines(cls, file: Path, whole: list[str]) -> TrialLog:
        log = cls(file)
        try:
            head, *lines = [json.loads(line) for line in whole] or [{}]
            if not isinstance(head, dict):
                raise TypeError("its first line is no JSON object")
            log.conditions = head
            for line in lines if head.get("format") == FORMAT else ():
                if FORESIGHT in line:
                    log.foresight = {(first, stop): float(share) for first, stop, share in line[FORESIGHT]}
                else:
                    trial = Trial.from_json(line)
                    if trial.timed and len(trial.stages) != len(head.get("grids", trial.stages)):
                        raise ValueError(f"{len(trial.stages)} stages of the trial {trial.text!r}")
                    log._hold(trial)
        except (TypeError, KeyError, ValueError, RecursionError) as error:
            raise NextscaleError(f"{file} cannot be read as trials of a search ({error}): remove it, or give another --trials") from error
        return log

    def get(self, text: str, images: int, timed: bool) -> Trial | None:
        """What failed has no time whichever was asked for."""
        untimed = self.trials.get((text, images, False))
        return self.trials.get((text, images, True), untimed if untimed and untimed.error else None) if timed else untimed

    def add(self, trial: Trial) -> Trial:
        self._hold(trial)
        self._append(trial.to_json())
        return trial

    def add_foresight(self, found: Foresight) -> Foresight:
        self.foresight = found
        self._append({FORESIGHT: [[*blocks, share] for blocks, share in found.items()]})
        return found

    def _hold(self, trial: Trial) -> None:
        self.trials[trial.text, trial.images, trial.timed] = trial

    def _append(self, values: dict[str, Any]) -> None:
        if self.file is not None:
            append(self.file, values)


def append(file: Path, values: dict[str, Any]) -> None:
    append_text(json.dumps(values, allow_nan=False) + "\n", file)


def complete_lines(file: Path) -> tuple[list[str], bool]:
    """The lines that end, and whether something after them does not."""
    try:
        whole, _, rest = regular(file).read_text(encoding="utf-8").rpartition("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise NextscaleError(f"{file} cannot be read ({error}): remove it, or give another --trials") from error
    return whole.splitlines(), bool(rest)


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    names = [name for name in expected if found.get(name) != expected[name]]
    return ", ".join(f"{name}: {found.get(name)!r} there, {expected[name]!r} here" for name in names[:3]) or "other fields"
