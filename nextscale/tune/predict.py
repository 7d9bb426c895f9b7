"""Predictions: powers of the distances of single knobs add up; a stage takes an overhead and its MACs at a measured rate."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..errors import NextscaleError
from ..methods.registry import resolve_method
from ..models.base import NextScaleModel
from ..planning.cost import Workload, request_cost
from .candidate import Candidate
from .space import PROBED_SHARES
from .trials import Trial

POWERS = tuple(1 + step / 10 for step in range(16))  # 1 to 2.5
USUAL_POWER, TINY = 1.7, 1e-9
PLAIN, SPARSE = "", "sparsevar"  # kinds of stages whose time is fitted, besides peers by their names


@dataclass(frozen=True)
class Predictor:
    """Predictions for several knobs together from trials of single ones."""

    model: NextScaleModel
    workload: Workload
    trials: Sequence[tuple[Candidate, Trial]]  # of single knobs, dense generation first
    together: Sequence[tuple[Candidate, Trial]] = ()  # of several knobs
    counted: dict[Candidate, tuple[int, ...] | None] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        return len(self.workload.schedule)

    @cached_property
    def distances(self) -> dict[Candidate, float]:
        return {candidate: trial.lpips for candidate, trial in self.trials if trial.error is None}

    def distance(self, candidate: Candidate) -> float:
        return self._norm(candidate, self.power)

    @cached_property
    def power(self) -> float:
        """The power that predicts the trials with several knobs best; without such trials one that fits nano."""
        several = [(c, trial.lpips) for c, trial in self.together if trial.error is None and trial.lpips > 0]
        if not several:
            return USUAL_POWER
        return min(POWERS, key=lambda power: sum(abs(math.log(max(self._norm(c, power), TINY) / lpips)) for c, lpips in several))

    def _norm(self, candidate: Candidate, power: float) -> float:
        """Returns the distance if the powers of its parts add up. Knobs spoil partly the same, so the power is above 1."""
        alone = [Candidate(skipped=candidate.skipped), *(Candidate(left_out=(stage,)) for stage in candidate.left_out)]
        parts = [self.distances.get(one, 0.0) for one in alone]
        parts += [self.distances.get(Candidate(peer=candidate.peer), math.inf)] if candidate.peer else []
        parts += [interpolated(self._shares[stage], share) * self._alpha(candidate.alpha) for stage, share in candidate.amounts]
        total = sum(part**power for part in parts)
        if candidate.unguided is not None:
            dropped, last = (Candidate(unguided=first) for first in (candidate.unguided, self.stages - candidate.skipped))
            total += max(0.0, self.distances.get(dropped, 0.0) ** power - self.distances.get(last, 0.0) ** power)
        return total ** (1 / power)

    @cached_property
    def _shares(self) -> dict[int, dict[float, float]]:
        """Distances of every stage that was reduced alone, by the share of its cells."""
        found: dict[int, dict[float, float]] = defaultdict(lambda: {1.0: 0.0})
        for candidate, distance in self.distances.items():
            if len(candidate.amounts) == 1 and candidate.alpha == Candidate.alpha:
                stage, share = candidate.amounts[0]
                found[stage][share] = distance
        return found

    def _alpha(self, alpha: int) -> float:
        """Returns the distance relative to the usual anchors with the same shares."""
        known = self._alphas.get(Candidate.alpha, 0.0)
        return interpolated(self._alphas, alpha) / known if known > 0 and alpha != Candidate.alpha else 1.0

    @cached_property
    def _alphas(self) -> dict[float, float]:
        probed = ((self.stages - 1, PROBED_SHARES[-1]),)
        return {candidate.alpha: distance for candidate, distance in self.distances.items() if candidate.amounts == probed}

    def speedup(self, candidate: Candidate) -> float:
        return self.trials[0][1].seconds / self.seconds(candidate)

    def seconds(self, candidate: Candidate) -> float:
        """Returns the predicted time of a batch with decoding."""
        macs = self.macs(candidate)
        if macs is None:
            return math.inf
        _, dense = self.trials[0]
        kinds = [*([SPARSE] if candidate.amounts else []), *([candidate.peer_name] if candidate.peer else [])] or [PLAIN]
        rates = zip(*(self.rates.get(kind, self.rates[PLAIN]) for kind in kinds), strict=True)
        stages = sum(max(overhead + slope * work for overhead, slope in each) for work, each in zip(macs, rates, strict=True) if work)
        return max(0.0, dense.seconds - sum(dense.stages)) + stages  # decoding: medians of their own, which need not add up

    def macs(self, candidate: Candidate) -> tuple[int, ...] | None:
        """Returns the MACs of every stage; None if the model or the schedule does not allow the candidate."""
        if candidate not in self.counted:
            try:
                plans = resolve_method(candidate.text).forecast(self.model, self.workload.schedule, self.workload.guided)
            except NextscaleError:
                self.counted[candidate] = None
            else:
                self.counted[candidate] = tuple(stage.total for stage in request_cost(self.model, self.workload, plans).stages)
        return self.counted[candidate]

    @cached_property
    def rates(self) -> dict[str, list[tuple[float, float]]]:
        """Overhead of every stage in seconds, and its seconds per MAC. SparseVAR and every timed peer have their own."""
        peers = {c.peer_name for c, trial in self.trials if c.peer and trial.timed}
        return {kind: self._rates(kind) for kind in (PLAIN, SPARSE, *sorted(peers))}

    def _rates(self, kind: str) -> list[tuple[float, float]]:
        fitting = [(c, t) for c, t in self.trials if t.timed and (SPARSE if c.amounts else c.peer_name) in (PLAIN, kind)]
        measured = [(macs, trial.stages) for candidate, trial in fitting if (macs := self.macs(candidate)) is not None]
        return [fitted([(macs[k], times[k]) for macs, times in measured if macs[k]]) for k in range(self.stages)]

    def possible(self, candidate: Candidate) -> bool:
        return self.macs(candidate) is not None


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns overhead and slope of a line through (MACs, seconds), neither of them negative."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread > (1e-3 * mean_x) ** 2 else 0.0
    slope = min(max(slope, 0.0), mean_y / mean_x)
    return mean_y - slope * mean_x, slope


def interpolated(points: dict[float, float], place: float) -> float:
    """Returns the value at a place, along straight lines between known ones; beyond the last two along theirs, and never negative."""
    known = sorted(points.items())
    if len(known) == 1:
        return known[0][1]
    pairs = list(itertools.pairwise(known))
    (x0, y0), (x1, y1) = next(((a, b) for a, b in pairs if place <= b[0]), pairs[-1])
    return max(0.0, y0 + (y1 - y0) * (place - x0) / (x1 - x0))
