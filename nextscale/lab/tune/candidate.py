"""One setting of all knobs that the search turns, and the settings next to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ...accel.method import Method
from ...accel.registry import resolve_method
from ...guidance import CfgBranch

Reducer = Literal["sparse", "fast", "rank"]
Amounts = tuple[tuple[int, float], ...]

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1)  # of the cells that SparseVAR or FastVAR runs
RANKS = (0.3, 0.2, 0.1, 0.05, 0.02, 0.01)  # of the tokens that StageVAR runs
ALPHAS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, order=True)
class Candidate:
    """What is done to the late stages. As it stands it is dense generation."""

    reducer: Reducer = "sparse"
    amounts: Amounts = ()  # stage index to the share that the reducer runs; other stages are whole
    alpha: int = 4  # of SparseVAR's anchors
    change: str = ""  # where SparseVAR measures change, as its setting; "": its default
    unguided: int | None = None  # the first stage that runs one cfg branch
    kept_rows: CfgBranch = "cond"
    skipped: int = 0  # of the last stages

    @property
    def text(self) -> str:
        """As the command line takes it."""
        parts = [self._reducing] if self.amounts else []
        if self.unguided is not None:
            rows = "" if self.kept_rows == "cond" else f",kept_rows={self.kept_rows}"
            parts.append(f"dropguidance:first_stage={self.unguided}{rows}")
        if self.skipped:
            parts.append(f"skip:last={self.skipped}")
        return " + ".join(parts) or "dense"

    @property
    def _reducing(self) -> str:
        if self.reducer == "sparse":
            change = f",{self.change}" if self.change else ""
            return f"sparsevar:keep={dict(self.amounts)},alpha={self.alpha}{change}"
        if self.reducer == "fast":
            return f"fastvar:ratios={ {stage: round(1 - share, 2) for stage, share in self.amounts} }"
        alphas = {stage: 0.96 for stage, _ in self.amounts}  # the published one, for which the ranks take the place of a table
        return f"stagevar:alphas={alphas},ranks={self.amounts[0][1]},guidance_off=999"

    @property
    def method(self) -> Method:
        return resolve_method(self.text.split(" + "))

    def neighbours(self, stages: int) -> Iterator[Candidate]:
        """Candidates that differ in one knob by one step."""
        scale = RANKS if self.reducer == "rank" else SHARES
        late = range(max(1, stages - 4), stages - self.skipped)
        amounts = dict(self.amounts)
        for stage in late:
            for share in adjacent(scale, amounts.get(stage)):
                changed = {**amounts, stage: share} if share is not None else {k: v for k, v in amounts.items() if k != stage}
                yield self.with_amounts(changed)
        if self.reducer == "sparse" and self.amounts:
            yield from (replace(self, alpha=int(alpha)) for alpha in adjacent(ALPHAS, self.alpha) if alpha is not None)
        first = stages if self.unguided is None else self.unguided
        for unguided in (first - 1, first + 1):
            if 1 <= unguided <= stages:
                yield replace(self, unguided=None if unguided == stages else unguided)
        for skipped in (self.skipped - 1, self.skipped + 1):
            if 0 <= skipped < stages - 1:
                yield replace(self, skipped=skipped).with_amounts({k: v for k, v in amounts.items() if k < stages - skipped})

    def with_amounts(self, amounts: dict[int, float]) -> Candidate:
        """The same with other shares. One rank holds for all stages of StageVAR, and SparseVAR's shares never grow."""
        if self.reducer == "rank" and amounts:
            changed = [share for stage, share in amounts.items() if dict(self.amounts).get(stage) != share]
            amounts = dict.fromkeys(amounts, (changed or list(amounts.values()))[0])
        if self.reducer == "sparse":
            least = 1.0
            for stage in sorted(amounts):
                least = amounts[stage] = min(least, amounts[stage])
        return replace(self, amounts=tuple(sorted(amounts.items())))


def adjacent(scale: tuple[float, ...], value: float | None) -> list[float | None]:
    """The steps before and after a value on its scale; None, which is "not at all", comes before the first."""
    steps: list[float | None] = [None, *scale]
    place = steps.index(value)
    return [steps[near] for near in (place - 1, place + 1) if 0 <= near < len(steps)]
