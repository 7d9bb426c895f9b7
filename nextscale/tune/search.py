"""The search: cheap measurements first, then real runs of promising candidates, on more and more prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ..errors import NextscaleError
from ..eval.compare import OnProgress
from ..planning.cost import Workload
from .candidate import Amounts, Candidate
from .foresight import foresight
from .frontier import WANTED, frontier, gaps, near_frontier, spread, thinned
from .log import TrialLog
from .predict import Predictor
from .space import CONTENT, LATE, LOGITS, Space, ladders, probed
from .trials import Bench, Trial

EXPLORED, HALVED = 0.6, 0.85  # of the time, until candidates meet more prompts, and until only the winners' neighbours are tried
STEPPED = 12  # neighbours that are run before the frontier is drawn anew
CHANGES = 3  # groups of blocks, besides the default and the logits, that are tried where change is measured
ALIKE = 1.1  # of the least LPIPS: where else change may be measured
STEEP = 2  # along nano's frontier LPIPS grows with this power of the speed
ALL_LATE = 0.4  # of the cells of all late stages, with which other choices are compared
NEAR = 0.97  # of the predicted frontier's speedup, which another method must reach with some of the other knobs
MAX_CANDIDATES, MAX_WINNERS = 48, 20
MAX_ROUNDS = 4  # of prompts; validation tells the rest apart
WORTH = 1.03  # of dense generation's speed, that a winner has
MIN_PREDICTED, MAX_PREDICTED = 12, 500  # candidates of the predicted frontier that are run: in any case, and at most


@dataclass(eq=False)
class Search:
    """One search. Its trials alone decide, so a search that was stopped and starts again takes the same steps."""

    bench: Bench
    log: TrialLog
    seconds: float
    workload: Workload
    on_progress: OnProgress = lambda what, share: None  # the next step, and the share of the time: above 1 if needed trials take longer
    tried: dict[str, Candidate] = field(default_factory=dict)
    seen: dict[tuple[str, int, bool], Trial] = field(default_factory=dict)  # by candidate, rounds and whether timed, in order
    space: Space = field(init=False)
    predictor: Predictor = field(init=False)

    def __post_init__(self) -> None:
        self.space = Space(len(self.bench.schedule), self.workload.guided)
        self.predictor = Predictor(self.bench.pipeline.model, self.workload, (), ladders=ladders(self.space.stages))

    @property
    def most(self) -> float:
        """The largest distance of a single knob: candidates further away than leaving out three stages are of no interest."""
        return max(distance for candidate, distance in self.predictor.distances.items() if not candidate.peer)

    @property
    def spent(self) -> float:
        """Share of the time that the trials have taken. Those of an earlier start count when the search comes to them."""
        return sum(trial.took for trial in self.seen.values()) / self.seconds

    def trial(self, candidate: Candidate, rounds: int = 1, what: str = "runs", timed: bool = True) -> Trial:
        """Returns a run of the candidate, or its trial in the log. The speed of an untimed one is predicted."""
        timed = self.bench.times(timed)
        key = candidate.text, rounds, timed
        if key not in self.seen:
            self.on_progress(f"trial {len(self.seen) + 1}, {what}: {candidate.text}", self.spent)
            self.tried[candidate.text] = candidate
            batches = rounds * self.bench.unit
            found = self.log.get(candidate.text, self.bench.images(batches), timed)
            self.seen[key] = found or self.log.add(
                replace(self.bench.run(candidate.text, batches, timed), predicted=self.expected(candidate))
            )
        return self.seen[key]

    def expected(self, candidate: Candidate) -> float:
        """Returns the predicted distance if several knobs are turned; 0 for single ones, from which it is predicted."""
        known = candidate.knobs > 1 and self.predictor.trials
        return distance if known and math.isfinite(distance := self.predictor.distance(candidate)) else 0.0

    def run(self) -> list[Candidate]:
        """Returns the winners, slowest first."""
        self.measure_knobs()
        self.measure_peers()
        self.explore()
        self.refine(1, EXPLORED, timed=False)
        rounds = self.halve()
        self.refine(rounds, 1.0, timed=True)
        last = self.places(rounds)
        best = frontier([candidate for candidate, (speedup, _) in last.items() if speedup > WORTH], last.__getitem__)
        return thinned(best, last.__getitem__, MAX_WINNERS)

    def measure_knobs(self) -> None:
        """Runs dense generation, finds where change is best measured, and runs every knob alone."""
        dense = Candidate()
        measured = [(dense, self.trial(dense, what="dense"))]
        if (error := measured[0][1].error) is not None:
            raise NextscaleError(f"dense generation fails: {error}")
        best, *others = self.best_changes()
        self.space = replace(self.space, change=best, changes=tuple(others))
        measured += [(candidate, self.trial(candidate, what="one knob", timed=timed)) for candidate, timed in self.space.singles()]
        known = Candidate(self.all_late, change=self.space.change)
        self.predictor = replace(self.predictor, trials=measured, together=[(known, self.trial(known, timed=False))])
        self.space = replace(self.space, rows=self.predictor.rows)

    @property
    def all_late(self) -> Amounts:
        """Equal shares for every late stage, with which other choices are compared."""
        return tuple((stage, ALL_LATE) for stage in self.space.late(LATE))

    def best_changes(self) -> list[str]:
        """Returns the places where SparseVAR measures change, the best first, then those nearly as good.

        Real runs of the blocks with the best foresight, of the logits, and of the default decide. All of them cost the same.
        """
        self.on_progress("which blocks foresee the next stage", self.spent)
        prompts, seeds = self.bench.part(0)
        seen = self.log.foresight
        if seen is None:
            seen = self.log.add_foresight(foresight(self.bench.pipeline, self.bench.schedule, prompts, seeds, LATE))
        best = sorted(seen, key=lambda group: (-seen[group], group))[:CHANGES]
        settings = ["", LOGITS, *(f"blocks={list(group)}" for group in best)]
        reduced = {change: Candidate(self.all_late, change=change) for change in settings}
        trials = {change: self.trial(reduced[change], what="where change is measured", timed=False) for change in settings}
        usable = {trial.lpips: change for change, trial in reversed(trials.items()) if trial.error is None}  # of equals the first
        return self.with_anchors([usable[distance] for distance in sorted(usable) if distance <= ALIKE * min(usable)] or [""])

    def with_anchors(self, changes: list[str]) -> list[str]:
        """Adds anchors by content: first if they pay for the time of finding them, else as another choice."""
        grid, content = changes[0], ",".join(filter(None, (changes[0], CONTENT)))
        trials = [self.trial(Candidate(self.all_late, change=change), what="where anchors lie") for change in (grid, content)]
        if any(trial.error is not None for trial in trials):
            return changes
        on_grid, by_content = (trial.lpips * trial.seconds**STEEP for trial in trials)
        return [content, *changes] if by_content < on_grid else [grid, content, *changes[1:]]

    def measure_peers(self) -> None:
        """Runs other methods alone, untimed. Those that could come near the frontier if they were as fast as their MACs are timed once."""
        known = self.predictor.ladders
        alone = [Candidate(peer=peer) for steps in known.values() for peer in probed(steps)]
        found = [(candidate, self.trial(candidate, what="another method", timed=False)) for candidate in alone]
        self.predictor = replace(self.predictor, trials=[*self.predictor.trials, *found])
        usable = {name: tuple(peer for peer in steps if self.predictor.possible(Candidate(peer=peer))) for name, steps in known.items()}
        best = self.nearest_peers({name: steps for name, steps in usable.items() if steps})
        timed = [(candidate, self.trial(candidate, what="another method, timed")) for candidate in best.values()]
        self.predictor = replace(self.predictor, trials=[*self.predictor.trials, *timed])
        left = self.nearest_peers({name: usable[name] for name in best})
        apart = frozenset(name for name, candidate in left.items() if not self.goes_with_budgets(candidate.peer))
        self.space = replace(self.space, peers={name: usable[name] for name in left}, apart=apart)

    def goes_with_budgets(self, peer: str) -> bool:
        """Returns False if another method fails beside SparseVAR's budgets when it runs; that holds for all candidates, plans for each."""
        for change in dict.fromkeys((self.space.change, LOGITS)):
            together = Candidate(self.all_late, change=change, peer=peer)
            failed = self.trial(together, what="with budgets", timed=False).error is not None
            if not failed or self.predictor.possible(together):
                return not failed
        return True

    def nearest_peers(self, peers: Mapping[str, tuple[str, ...]]) -> dict[str, Candidate]:
        """Returns, for each method that comes near the predicted frontier alone or with other knobs, its nearest setting."""
        places = self.predicted(replace(self.space, peers=peers))
        best: dict[str, tuple[float, str]] = {}
        for (candidate, (speedup, _)), gap in zip(places.items(), gaps(list(places.values())), strict=True):
            if candidate.peer and gap >= NEAR and speedup >= WANTED[0]:
                best[candidate.peer_name] = max(best.get(candidate.peer_name, (0.0, "")), (gap, candidate.peer))
        return {name: Candidate(peer=peer) for name, (_, peer) in sorted(best.items())}

    def predicted(self, space: Space) -> dict[Candidate, tuple[float, float]]:
        """Returns speedup and distance of all combinations that are no further from dense than some single knob."""
        possible = (candidate for candidate in space.combinations() if self.predictor.possible(candidate))
        places = {candidate: self.predictor.place(candidate) for candidate in possible}
        return {candidate: place for candidate, place in places.items() if place[1] <= self.most}

    def explore(self) -> None:
        """Runs candidates at or near the predicted frontier."""
        places = self.predicted(self.space)
        for number, candidate in enumerate(near_frontier(list(places), places.__getitem__, MAX_PREDICTED)):
            if self.spent > EXPLORED / 2 and number >= MIN_PREDICTED:
                break
            self.trial(candidate, what="predicted", timed=False)
        measured = [(self.tried[text], trial) for (text, rounds, _), trial in self.seen.items() if rounds == 1]
        several = [(c, trial) for c, trial in measured if c in places and c.amounts and c.knobs > len(c.amounts)]
        self.predictor = replace(self.predictor, together=several or self.predictor.together)

    def refine(self, rounds: int, until: float, timed: bool) -> None:
        """Steps away from the measured frontier, one knob at a time, first where the prediction moves it most."""
        while self.spent < until:
            steps = self.next_steps(rounds, fine=timed)
            if not steps:
                return
            for candidate in steps:
                if self.spent >= until:
                    return
                self.trial(candidate, rounds, what="a finer step" if timed else "one step further", timed=timed)

    def next_steps(self, rounds: int, fine: bool) -> list[Candidate]:
        """Returns untried neighbours of the frontier, of all ranges of speed.

        Each is predicted from its origin's measurement and the predicted change.
        """
        predictor, measured = self.predictor, self.places(rounds)
        edge = frontier([(1.0, 0.0), *measured.values()], lambda place: place)
        promise: dict[Candidate, tuple[float, float]] = {}
        for origin in frontier(list(measured), measured.__getitem__):
            for candidate in self.space.neighbours(origin, fine):
                if candidate.text in self.tried or not predictor.possible(candidate):
                    continue
                speedup = measured[origin][0] * predictor.speedup(candidate) / predictor.speedup(origin)
                distance = measured[origin][1] * ratio(predictor.distance(candidate), predictor.distance(origin))
                if distance <= self.most:
                    promise[candidate] = max(promise.get(candidate, (0.0, 1.0)), (speedup / behind(distance, edge), speedup))
        ordered = sorted(promise, key=lambda candidate: candidate.text)
        return spread(ordered, [promise[c][1] for c in ordered], [promise[c][0] for c in ordered], STEPPED)

    def halve(self) -> int:
        """Runs candidates near the frontier on twice as many prompts, and half of them again, until prompts or time are used up.

        Returns the number of rounds after which some are left.
        """
        rounds, count = 1, MAX_CANDIDATES
        while rounds * 2 <= min(MAX_ROUNDS, self.bench.batches // self.bench.unit) and self.spent < HALVED:
            before = self.places(rounds)
            rounds, count = rounds * 2, max(MAX_WINNERS, count // 2)
            for candidate in near_frontier(list(before), before.__getitem__, count):
                if self.spent >= 1:
                    break
                self.trial(candidate, rounds, what="more prompts")
        return rounds if self.places(rounds) else max(1, rounds // 2)

    def places(self, rounds: int) -> dict[Candidate, tuple[float, float]]:
        """Returns speedup and distance of the candidates of interest that ran this many rounds, without dense generation."""
        found: dict[Candidate, tuple[float, float]] = {}
        for (text, ran, timed), trial in self.seen.items():
            candidate = self.tried[text]
            if ran == rounds and trial.error is None and text != "dense" and (timed or candidate not in found):
                found[candidate] = (trial.speedup if trial.timed else self.predictor.speedup(candidate), trial.lpips)
        return {candidate: place for candidate, place in found.items() if place[1] <= self.most}


def behind(distance: float, edge: Sequence[tuple[float, float]]) -> float:
    """Returns the speedup of a frontier at a distance, along straight lines between its points."""
    for (slow, near), (fast, far) in pairwise(edge):
        if distance <= far:
            return slow + (fast - slow) * (distance - near) / (far - near) if far > near else fast
    return edge[-1][0]


def ratio(after: float, before: float) -> float:
    return after / before if before > 0 and math.isfinite(after) else 1.0


def tune(bench: Bench, log: TrialLog, seconds: float, workload: Workload, on_progress: OnProgress) -> list[Candidate]:
    """Returns the candidates at the frontier of the prompts of the search, slowest first."""
    return Search(bench, log, seconds, workload, on_progress).run()
