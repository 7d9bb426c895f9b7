"""A predicted frontier: powers of the distances of single knobs add up, and a stage takes an overhead and its MACs at a measured rate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import get_args

from ...errors import NextscaleError
from ...guidance import CfgBranch
from ...models.base import NextScaleModel
from ...planning.cost import Workload, request_cost
from .candidate import Candidate, Reducer
from .trials import Trial

PROBED_SHARES = (0.5, 0.2)  # of every late stage alone
PROBED_ALPHAS = (3, 6)
COARSE = (1.0, 0.8, 0.6, 0.4, 0.25, 0.15)  # shares that are combined; the search then steps more finely
LATE = 4  # stages that are reduced
UNGUIDED = 5  # stages that may be the first without guidance
SKIPPED = 3  # stages at most
POWERS = tuple(1 + step / 10 for step in range(16))  # 1 to 2.5
USUAL_POWER, TINY = 1.7, 1e-9


def singles(stages: int, guided: bool, change: str) -> list[Candidate]:
    """One knob at a time, and plain skipping."""
    late = range(max(1, stages - LATE), stages)
    found = [Candidate(skipped=last) for last in range(1, min(SKIPPED, stages - 1) + 1)]
    if guided:
        first = range(max(1, stages - UNGUIDED), stages)
        found += [Candidate(unguided=stage, kept_rows=rows) for stage in first for rows in ("cond", "uncond")]
    found += [Candidate("sparse", ((stage, share),), change=change) for stage in late for share in PROBED_SHARES]
    found += [Candidate("sparse", ((stages - 1, PROBED_SHARES[0]),), alpha=alpha, change=change) for alpha in PROBED_ALPHAS]
    found += [Candidate("fast", ((stage, 0.5),)) for stage in late[-2:]]
    found += [Candidate("rank", ((stage, rank),)) for stage in late[-2:] for rank in (0.1, 0.02)]
    return found


def combinations(stages: int, guided: bool, change: str, rows: CfgBranch) -> Iterator[Candidate]:
    """What is predicted: all knobs together, in coarse steps."""
    late = range(max(1, stages - LATE), stages)
    starts = [None, *range(max(1, stages - UNGUIDED), stages)] if guided else [None]
    for unguided, skipped in itertools.product(starts, range(min(SKIPPED, stages - 1))):
        left = [stage for stage in late if stage < stages - skipped]
        plain = Candidate(unguided=unguided, kept_rows="cond" if unguided is None else rows, skipped=skipped)
        yield plain
        for shares in itertools.combinations_with_replacement(COARSE, len(left)):  # they never grow
            amounts = tuple((stage, share) for stage, share in zip(left, shares, strict=True) if share < 1)
            if amounts:
                yield replace(plain, amounts=amounts, change=change)
        for some in ((left[-1:]), left[-2:]) if left else ():
            yield from (replace(plain, reducer="fast", amounts=tuple((stage, share) for stage in some)) for share in (0.6, 0.4, 0.25))
            yield from (replace(plain, reducer="rank", amounts=tuple((stage, rank) for stage in some)) for rank in (0.1, 0.05, 0.02))


@dataclass(frozen=True)
class Predictor:
    """What the trials of single knobs say about all of them together."""

    model: NextScaleModel
    workload: Workload
    trials: Sequence[tuple[Candidate, Trial]]  # of single knobs, dense generation first
    together: Sequence[tuple[Candidate, Trial]] = ()  # of several knobs
    change: str = ""  # where SparseVAR measures change
    counted: dict[Candidate, tuple[int, ...] | None] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        return len(self.workload.schedule)

    @cached_property
    def distances(self) -> dict[Candidate, float]:
        return {candidate: trial.lpips for candidate, trial in self.trials if trial.error is None}

    @cached_property
    def rows(self) -> CfgBranch:
        """The branch whose rows are nearer to dense where guidance is dropped."""
        total = {"cond": 0.0, "uncond": 0.0}
        for candidate, distance in self.distances.items():
            if candidate.unguided is not None:
                total[candidate.kept_rows] += distance
        return "cond" if total["cond"] <= total["uncond"] else "uncond"

    # --- distance

    def distance(self, candidate: Candidate) -> float:
        return self._norm(candidate, self.power)

    @cached_property
    def power(self) -> float:
        """Such that candidates with several knobs among the trials are predicted best; without one, what fits nano."""
        several = [(c, trial.lpips) for c, trial in self.together if trial.error is None and trial.lpips > 0]
        if not several:
            return USUAL_POWER
        return min(POWERS, key=lambda power: sum(abs(math.log(max(self._norm(c, power), TINY) / lpips)) for c, lpips in several))

    def _norm(self, candidate: Candidate, power: float) -> float:
        """The distance if the powers of its parts add up. What several knobs spoil is partly the same, so it is more than 1."""
        last, rows = self.stages - candidate.skipped, candidate.kept_rows
        total = self._skipping(candidate.skipped) ** power
        if candidate.unguided is not None:
            total += max(0.0, self._unguided(candidate.unguided, rows) ** power - self._unguided(last, rows) ** power)
        parts = (self._reduced(candidate.reducer, stage, share) for stage, share in candidate.amounts)
        return (total + sum((part * self._alpha(candidate)) ** power for part in parts)) ** (1 / power)

    def _skipping(self, skipped: int) -> float:
        return self.distances.get(Candidate(skipped=skipped), 0.0) if skipped else 0.0

    def _unguided(self, first: int, rows: str) -> float:
        measured = {c.unguided: d for c, d in self.distances.items() if c.unguided is not None and c.kept_rows == rows}
        return measured.get(first, 0.0) if first < self.stages else 0.0

    def _reduced(self, reducer: Reducer, stage: int, share: float) -> float:
        points = {1.0: 0.0}
        for candidate, distance in self.distances.items():
            if (candidate.reducer, [s for s, _ in candidate.amounts], candidate.alpha) == (reducer, [stage], 4):
                points[candidate.amounts[0][1]] = distance
        return interpolated(points, share)

    def _alpha(self, candidate: Candidate) -> float:
        """How much more than with every fourth cell an anchor the same shares cost."""
        if candidate.reducer != "sparse" or candidate.alpha == 4:
            return 1.0
        share = ((self.stages - 1, PROBED_SHARES[0]),)
        of = {c.alpha: d for c, d in self.distances.items() if c.reducer == "sparse" and c.amounts == share}
        if 4 not in of or of[4] <= 0:
            return 1.0
        return interpolated({float(alpha): distance / of[4] for alpha, distance in of.items()}, float(candidate.alpha))

    # --- time

    def speedup(self, candidate: Candidate) -> float:
        return self.trials[0][1].seconds / self.seconds(candidate)

    def seconds(self, candidate: Candidate) -> float:
        """Of a batch, decoding included."""
        macs = self.macs(candidate)
        if macs is None:
            return math.inf
        _, dense = self.trials[0]
        other = dense.seconds - sum(dense.stages)
        rates = self.rates[candidate.reducer]
        return other + sum(overhead + slope * work if work else 0.0 for work, (overhead, slope) in zip(macs, rates, strict=True))

    def macs(self, candidate: Candidate) -> tuple[int, ...] | None:
        """Of every stage; None where the model or the schedule does not allow the candidate."""
        if candidate not in self.counted:
            try:
                plans = candidate.method.forecast(self.model, self.workload.schedule, self.workload.guided)
            except NextscaleError:
                self.counted[candidate] = None
            else:
                self.counted[candidate] = tuple(stage.total for stage in request_cost(self.model, self.workload, plans).stages)
        return self.counted[candidate]

    @cached_property
    def rates(self) -> dict[Reducer, list[tuple[float, float]]]:
        """Of every stage: its overhead in seconds, and seconds per MAC. Each reducer has an overhead of its own."""
        return {reducer: self._rates(reducer) for reducer in get_args(Reducer)}

    def _rates(self, reducer: Reducer) -> list[tuple[float, float]]:
        fitting = [(c, trial) for c, trial in self.trials if trial.error is None and (not c.amounts or c.reducer == reducer)]
        counted = ((self.macs(candidate), trial.stages) for candidate, trial in fitting)
        measured = [(macs, times) for macs, times in counted if macs is not None]
        return [fitted([(macs[k], times[k]) for macs, times in measured if macs[k]]) for k in range(self.stages)]

    def possible(self, candidate: Candidate) -> bool:
        return self.macs(candidate) is not None


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Overhead and slope of a line through (MACs, seconds), neither of them negative."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread > (1e-3 * mean_x) ** 2 else 0.0
    slope = min(max(slope, 0.0), mean_y / mean_x)
    return mean_y - slope * mean_x, slope


def interpolated(points: dict[float, float], place: float) -> float:
    """The value at a place between known ones, along straight lines; beyond the last two along theirs, and never negative."""
    known = sorted(points.items())
    if len(known) == 1:
        return known[0][1]
    pairs = list(itertools.pairwise(known))
    (x0, y0), (x1, y1) = next(((a, b) for a, b in pairs if place <= b[0]), pairs[-1])
    return max(0.0, y0 + (y1 - y0) * (place - x0) / (x1 - x0))
