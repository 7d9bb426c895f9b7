"""Trials of a search on disk, one line each, so that a search that was stopped continues."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import NextscaleError
from ..io import append_text, regular, write_text
from ..serialization import from_plain, parse_json
from ..validation import is_int
from .foresight import Foresight
from .trials import Trial

FORMAT = "nextscale trials 2"
SUFFIX = ".trials.jsonl"
FORESIGHT = "foresight"


@dataclass(eq=False)
class TrialLog:
    """Trials by candidate, number of images and whether they were timed. Everything that the search decides follows from them."""

    file: Path | None = None
    conditions: dict[str, Any] = field(default_factory=dict)
    trials: dict[tuple[str, int, bool], Trial] = field(default_factory=dict)
    foresight: Foresight | None = None

    @classmethod
    def open(cls, file: Path, conditions: dict[str, Any]) -> TrialLog:
        """Reads the trials of an earlier start under the same conditions, or creates the file. Drops an incomplete last line."""
        head = json.loads(json.dumps({"format": FORMAT, **conditions}))
        lines, torn = complete_lines(file)
        log = cls.of_lines(file, lines or [json.dumps(head)])
        if log.conditions != head:
            different = [
                f"{name}: {log.conditions.get(name)!r} there, {head[name]!r} here"
                for name in head
                if log.conditions.get(name) != head[name]
            ]
            raise NextscaleError(
                f"{file} belongs to a search under other conditions ({', '.join(different[:3]) or 'other fields'}). Remove it, or choose"
                " another --out."
            )
        if torn or not lines:
            write_text("\n".join([json.dumps(head), *lines[1:]]) + "\n", file)
        return log

    @classmethod
    def first_round(cls, file: Path) -> int | None:
        """Returns the images of a candidate's first round in an earlier start; None if there was none."""
        images = cls.of_lines(file, complete_lines(file)[0][:1]).conditions.get("images")
        return images if is_int(images, 1) else None

    @classmethod
    def read(cls, file: Path) -> TrialLog:
        """Reads the trials of any search."""
        log = cls.of_lines(file, complete_lines(file)[0])
        if log.conditions.get("format") != FORMAT:
            raise NextscaleError(f"{file} must hold trials of the format {FORMAT!r}. Run `nextscale tune` again.")
        return log

    @classmethod
    def of_lines(cls, file: Path, lines: list[str]) -> TrialLog:
        log = cls(file)
        try:
            log.conditions, *found = [from_plain(dict[str, Any], parse_json(line), f"line {n}") for n, line in enumerate(lines, 1)] or [{}]
            for line in found if log.conditions.get("format") == FORMAT else ():
                if FORESIGHT in line:
                    log.foresight = {(first, stop): float(share) for first, stop, share in line[FORESIGHT]}
                else:
                    trial = from_plain(Trial, line, "trial")
                    if trial.timed and len(trial.stages) != len(log.conditions.get("grids", trial.stages)):
                        raise ValueError(f"{len(trial.stages)} stages of the trial {trial.text!r}")
                    log.hold(trial)
        except (TypeError, ValueError) as error:
            raise NextscaleError(f"{file} cannot be read as trials of a search ({error}). Remove it, or choose another --out.") from error
        return log

    def get(self, text: str, images: int, timed: bool) -> Trial | None:
        """Returns a trial. A failed one has no time and counts as timed too."""
        untimed = self.trials.get((text, images, False))
        return self.trials.get((text, images, True), untimed if untimed and untimed.error else None) if timed else untimed

    def add(self, trial: Trial) -> Trial:
        self.hold(trial)
        self._append(asdict(trial))
        return trial

    def add_foresight(self, found: Foresight) -> Foresight:
        self.foresight = found
        self._append({FORESIGHT: [[*blocks, share] for blocks, share in found.items()]})
        return found

    def hold(self, trial: Trial) -> None:
        self.trials[trial.text, trial.images, trial.timed] = trial

    def _append(self, values: dict[str, Any]) -> None:
        if self.file is not None:
            append_text(json.dumps(values, allow_nan=False) + "\n", self.file)


def complete_lines(file: Path) -> tuple[list[str], bool]:
    """Returns the complete lines of a file, none if it does not exist, and whether an incomplete one follows."""
    try:
        whole, _, rest = (regular(file).read_text(encoding="utf-8") if file.exists() else "").rpartition("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise NextscaleError(f"{file} cannot be read ({error}). Remove it, or choose another --out.") from error
    return whole.splitlines(), bool(rest)
