"""Trials of a search on disk, one line each, so that a search that was stopped continues."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import NextscaleError
from ..io import append_text, regular, write_text
from ..serialization import from_plain, parse_json
from .foresight import Foresight
from .trials import Trial

FORMAT = "nextscale trials 2"
SUFFIX = ".trials.jsonl"
FORESIGHT = "foresight"


@dataclass(eq=False)
class TrialLog:
    """Trials by candidate, number of images and whether they were timed. Everything that the search decides follows from them."""

    file: Path | None = None
    conditions: dict[str, Any] = field(default_factory=dict)  # empty before the first start
    trials: dict[tuple[str, int, bool], Trial] = field(default_factory=dict)
    foresight: Foresight | None = None

    @classmethod
    def read(cls, file: Path) -> TrialLog:
        """Reads the trials of a search, none if the file does not exist. Removes an incomplete last line."""
        log = cls(file)
        try:
            whole, _, torn = (regular(file).read_text(encoding="utf-8") if file.exists() else "").rpartition("\n")
            lines = [from_plain(dict[str, Any], parse_json(line), f"line {n}") for n, line in enumerate(whole.splitlines(), 1)]
            if lines and (found := lines[0].pop("format", None)) != FORMAT:
                raise ValueError(f"its format must be {FORMAT!r}; got {found!r}")
            log.conditions, *trials = lines or [{}]
            for line in trials:
                log.hold(line)
        except (OSError, ValueError) as error:
            raise NextscaleError(f"{file} cannot be read as trials of a search ({error}). Remove it, or choose another --out.") from error
        if torn:
            write_text(whole + "\n" * bool(whole), file)
        return log

    def start(self, conditions: dict[str, Any]) -> None:
        """Creates the file. One of an earlier start must have the same conditions."""
        if not self.conditions:
            self._append({"format": FORMAT, **conditions})
            self.conditions = conditions
        known = json.loads(json.dumps(conditions))
        names = sorted(name for name in {*known, *self.conditions} if known.get(name) != self.conditions.get(name))
        if names:
            different = ", ".join(f"{name}: {self.conditions.get(name)!r} there, {known.get(name)!r} here" for name in names[:3])
            raise NextscaleError(
                f"{self.file} belongs to a search under other conditions ({different}). Remove it, or choose another --out."
            )

    def get(self, text: str, images: int, timed: bool) -> Trial | None:
        """Returns a trial. A failed one has no time and counts as timed too."""
        untimed = self.trials.get((text, images, False))
        return self.trials.get((text, images, True), untimed if untimed and untimed.error else None) if timed else untimed

    def add(self, trial: Trial) -> Trial:
        self._append(asdict(trial))
        return self.trials.setdefault((trial.text, trial.images, trial.timed), trial)

    def add_foresight(self, found: Foresight) -> Foresight:
        self.foresight = found
        self._append({FORESIGHT: [[*blocks, share] for blocks, share in found.items()]})
        return found

    def hold(self, line: dict[str, Any]) -> None:
        if FORESIGHT in line:
            found = from_plain(tuple[tuple[int, int, float], ...], line[FORESIGHT], FORESIGHT)
            self.foresight = {(first, stop): share for first, stop, share in found}
            return
        trial = from_plain(Trial, line, "trial")
        if trial.timed and len(trial.stages) != len(self.conditions.get("grids", trial.stages)):
            raise ValueError(f"{len(trial.stages)} stages of the trial {trial.text!r}")
        self.trials[trial.text, trial.images, trial.timed] = trial

    def _append(self, values: dict[str, Any]) -> None:
        if self.file is not None:
            append_text(json.dumps(values, allow_nan=False) + "\n", self.file)
