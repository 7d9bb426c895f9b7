"""The search: cheap measurements first, then real runs of what they promise, on ever more prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ...planning.cost import Workload
from .candidate import Candidate
from .foresight import foresight
from .frontier import frontier, near_frontier, thinned
from .log import TrialLog
from .predict import LATE, Predictor, combinations, singles
from .trials import Bench, Trial

EXPLORED = 0.65  # of the time, until candidates meet more prompts
STEPPED = 8  # neighbours that are run before the frontier is drawn anew
CHANGES = 3  # groups of blocks, besides the default and the logits, that are tried where change is measured
MOST_CANDIDATES, MOST_WINNERS = 40, 14
MOST_ROUNDS = 4  # of prompts: what is left then is told apart by the proof
FEWEST, MOST_PREDICTED = 12, 500  # candidates of the predicted frontier that are run whatever the time, and at most

Progress = Callable[[str, float], None]
"""Called with what is done next, and the share of the time that is spent."""


@dataclass(eq=False)
class Search:
    """One search. It decides by its trials alone, so that one that was stopped and starts again goes the same way."""

    bench: Bench
    log: TrialLog
    seconds: float
    workload: Workload
    on_progress: Progress = lambda what, share: None
    tried: dict[str, Candidate] = field(default_factory=dict)
    seen: dict[tuple[str, int], Trial] = field(default_factory=dict)  # by candidate and rounds, in the order of the search
    predictor: Predictor = field(init=False)

    @property
    def stages(self) -> int:
        return len(self.bench.schedule)

    @property
    def most(self) -> float:
        """The largest distance to dense of a single knob: what is further away than leaving out three stages is of no interest."""
        return max(self.predictor.distances.values())

    @property
    def spent(self) -> float:
        """Share of the time that the trials so far have taken. Those of an earlier start count when the search comes to them."""
        return sum(trial.took for trial in self.seen.values()) / self.seconds

    def trial(self, candidate: Candidate, rounds: int = 1, what: str = "runs", timed: bool = True) -> Trial:
        """A run of the candidate, or what the log has of it. Where it is not timed, its speed is predicted."""
        key = candidate.text, rounds
        if key not in self.seen:
            self.on_progress(f"{what}: {candidate.text}", min(self.spent, 1.0))
            self.tried[candidate.text] = candidate
            batches = rounds * self.bench.unit
            found = self.log.get(candidate.text, self.bench.images(batches))
            self.seen[key] = found or self.log.add(self.bench.run(candidate.text, candidate.method, batches, timed))
        return self.seen[key]

    # --- the way of a search

    def run(self) -> list[Candidate]:
        """The winners, slowest first."""
        self.predictor = self.sensitivities()
        self.explore()
        self.refine()
        return self.halve()

    def sensitivities(self) -> Predictor:
        """Dense generation, where change is best measured, and every knob alone."""
        dense = Candidate()
        measured = [(dense, self.trial(dense, what="dense"))]
        change = self.best_change()
        for candidate in singles(self.stages, self.workload.guided, change):
            measured.append((candidate, self.trial(candidate, what="one knob")))
        known = Candidate("sparse", self.all_late(0.4), change=change)
        return Predictor(self.bench.pipeline.model, self.workload, measured, [(known, self.trial(known))], change)

    def all_late(self, share: float) -> tuple[tuple[int, float], ...]:
        return tuple((stage, share) for stage in range(max(1, self.stages - LATE), self.stages))

    def best_change(self) -> str:
        """Where SparseVAR measures change: real runs of the blocks that foresee best, of the logits, and of the default."""
        prompts, seeds = self.bench.part(0)
        self.on_progress("which blocks foresee the next stage", self.spent)
        seen = foresight(self.bench.pipeline, self.bench.schedule, prompts, seeds, LATE)
        best = sorted(seen, key=lambda group: (-seen[group], group))[:CHANGES]
        settings = ["", "metric=logits", *(f"blocks={list(group)}" for group in best)]
        trials = {
            change: self.trial(Candidate("sparse", self.all_late(0.4), change=change), what="where change is measured")
            for change in settings
        }
        usable = {change: trial for change, trial in trials.items() if trial.error is None}
        return min(usable, key=lambda change: usable[change].lpips / usable[change].speedup, default="")

    def explore(self) -> None:
        """Runs what the prediction puts at the frontier or near it. What is further from dense than any single knob is left out."""
        predictor = self.predictor
        places = {}
        for candidate in combinations(self.stages, self.workload.guided, predictor.change, predictor.rows):
            if predictor.possible(candidate) and predictor.distance(candidate) <= self.most:
                places[candidate] = predictor.speedup(candidate), predictor.distance(candidate)
        for number, candidate in enumerate(near_frontier(list(places), places.__getitem__, MOST_PREDICTED)):
            if self.spent > EXPLORED / 2 and number >= FEWEST:
                break
            self.trial(candidate, what="predicted", timed=False)
        several = [
            (c, self.seen[c.text, 1]) for c in places if (c.text, 1) in self.seen and c.amounts and (c.unguided is not None or c.skipped)
        ]
        self.predictor = replace(predictor, together=several or predictor.together)

    def refine(self) -> None:
        """Steps away from the measured frontier, one knob at a time, those first that are predicted to move it most."""
        while self.spent < EXPLORED:
            steps = self.next_steps()
            if not steps:
                return
            for candidate in steps:
                if self.spent >= EXPLORED:
                    return
                self.trial(candidate, what="one step further", timed=False)

    def next_steps(self) -> list[Candidate]:
        """Untried neighbours of the frontier. Each is predicted from what its origin measured and the change that the prediction sees."""
        predictor, measured = self.predictor, self.places(1)
        known = list(measured.values())
        promise: dict[Candidate, float] = {}
        for origin in frontier(list(measured), measured.__getitem__):
            for candidate in origin.neighbours(self.stages):
                if candidate.text in self.tried or not predictor.possible(candidate):
                    continue
                speedup = measured[origin][0] * predictor.speedup(candidate) / predictor.speedup(origin)
                distance = measured[origin][1] * ratio(predictor.distance(candidate), predictor.distance(origin))
                if distance <= self.most:
                    promise[candidate] = max(promise.get(candidate, 0.0), speedup / behind(distance, known))
        return sorted(promise, key=lambda candidate: (-promise[candidate], candidate.text))[:STEPPED]

    def halve(self) -> list[Candidate]:
        """Candidates near the frontier run twice as many prompts, and half of them again, until prompts or time are used up."""
        rounds, count = 1, MOST_CANDIDATES
        while rounds * 2 <= min(MOST_ROUNDS, self.bench.batches // self.bench.unit) and self.spent < 1:
            before = self.places(rounds)
            rounds, count = rounds * 2, max(MOST_WINNERS, count // 2)
            for candidate in near_frontier(list(before), before.__getitem__, count):
                if self.spent >= 1:
                    break
                self.trial(candidate, rounds, what="more prompts")
        last = self.places(rounds) or self.places(max(1, rounds // 2))
        best = frontier([candidate for candidate, (speedup, _) in last.items() if speedup > 1], last.__getitem__)
        return thinned(best, last.__getitem__, MOST_WINNERS)

    def places(self, rounds: int) -> dict[Candidate, tuple[float, float]]:
        """Speedup and distance of what ran so many rounds of prompts and is of interest; dense generation is no candidate."""
        trials = ((self.tried[text], trial) for (text, n), trial in self.seen.items() if n == rounds and text != "dense")
        usable = {candidate: trial for candidate, trial in trials if trial.error is None}
        found = {c: (trial.speedup if trial.timed else self.predictor.speedup(c), trial.lpips) for c, trial in usable.items()}
        return {candidate: place for candidate, place in found.items() if place[1] <= self.most}


def behind(distance: float, known: Iterable[tuple[float, float]]) -> float:
    """The speedup of the frontier at a distance, along straight lines between its points."""
    points = frontier([(1.0, 0.0), *known], lambda place: place)
    for (slow, near), (fast, far) in pairwise(points):
        if distance <= far:
            return slow + (fast - slow) * (distance - near) / (far - near) if far > near else fast
    return points[-1][0]


def ratio(after: float, before: float) -> float:
    return after / before if before > 0 and math.isfinite(after) else 1.0


def tune(bench: Bench, log: TrialLog, seconds: float, workload: Workload, on_progress: Progress | None = None) -> list[Candidate]:
    """The candidates at the frontier of the prompts of the search, slowest first."""
    search = Search(bench, log, seconds, workload)
    if on_progress is not None:
        search.on_progress = on_progress
    return search.run()
