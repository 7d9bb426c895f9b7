"""The search: cheap measurements first, then real runs of promising candidates, on more and more prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..errors import NextscaleError
from ..eval.compare import OnProgress
from ..planning.cost import Workload
from .budget import NEEDED
from .candidate import Amounts, Candidate
from .foresight import foresight
from .frontier import WANTED, Place, frontier, near_frontier, speed_by_distance, spread
from .log import TrialLog
from .predict import Predictor
from .space import CONTENT, LATE, LOGITS, Space, ladders
from .trials import Bench, Trial

EXPLORED, HALVED = 0.6, 0.85  # of the time, until candidates meet more prompts, and until only the winners' neighbors are tried
STEPPED = 12  # neighbors that are run before the frontier is computed again
CHANGES = 3  # groups of blocks, besides the default and the logits, that are tried where change is measured
ALIKE = 1.1  # of the least LPIPS: where else change may be measured
STEEP = 2  # along nano's frontier LPIPS grows with this power of the speed
ALL_LATE = 0.4  # of the cells of all late stages, with which other choices are compared
NEAR = 0.97  # of the predicted frontier's speedup, which another method must reach with some of the other knobs
MAX_CANDIDATES, MAX_WINNERS = 48, 20
MAX_ROUNDS = 4  # of prompts; validation tells the rest apart
WORTH = 1.03  # of dense generation's speed, that a winner has
MIN_PREDICTED, MAX_PREDICTED = 12, 500  # candidates of the predicted frontier that are run: in any case, and at most

Places = dict[Candidate, Place]


@dataclass(eq=False)
class Search:
    """One search. Its trials alone decide, so a search that was stopped and starts again takes the same steps."""

    bench: Bench
    log: TrialLog
    images: int  # of a candidate's first round
    seconds: float
    workload: Workload
    on_progress: OnProgress = lambda what, share: None  # the next step, and the share of the time: above 1 if needed trials take longer
    seen: dict[tuple[Candidate, int, bool], Trial] = field(default_factory=dict)  # by candidate, rounds and whether timed, in order
    space: Space = field(init=False)
    predictor: Predictor = field(init=False)

    def __post_init__(self) -> None:
        self.space = Space(len(self.bench.schedule), self.workload.guided)
        self.predictor = Predictor(self.bench.pipeline.model, self.workload, ())

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
        text, images, timed = candidate.text, rounds * self.images, self.bench.times(timed)
        key = candidate, rounds, timed
        if key not in self.seen:
            number = len(self.seen) + 1
            self.on_progress(f"trial {number}{f' of about {NEEDED}' if number <= NEEDED else ''}, {what}: {text}", self.spent)
            known = candidate.knobs > 1 and self.predictor.trials  # single knobs are what predictions come from
            expected = self.predictor.distance(candidate) if known else 0.0
            self.seen[key] = self.log.get(text, images, timed) or self.log.add(
                replace(self.bench.run(text, images, timed), predicted=expected if math.isfinite(expected) else 0.0)
            )
        return self.seen[key]

    def run(self) -> list[Candidate]:
        """Returns the winners, slowest first."""
        self.measure_knobs()
        self.measure_peers()
        self.explore()
        self.refine(1, EXPLORED, timed=False)
        rounds = self.halve()
        self.refine(rounds, 1.0, timed=True)
        return frontier({candidate: place for candidate, place in self.places(rounds).items() if place[0] > WORTH})

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

    @property
    def all_late(self) -> Amounts:
        """Equal shares for every late stage, with which other choices are compared."""
        return tuple((stage, ALL_LATE) for stage in self.space.late(LATE))

    def best_changes(self) -> list[str]:
        """Returns the places where SparseVAR measures change, the best first, then those nearly as good.

        Real runs of the blocks with the best foresight, of the logits, and of the default decide. All of them cost the same.
        """
        self.on_progress("which blocks predict the next stage", self.spent)
        prompts, seeds = self.bench.part(0)
        seen = self.log.foresight
        if seen is None:
            seen = self.log.add_foresight(foresight(self.bench.pipeline, self.bench.schedule, prompts, seeds, LATE))
        best = sorted(seen, key=lambda group: (-seen[group], group))[:CHANGES]
        settings = ["", LOGITS, *(f"blocks={list(group)}" for group in best)]
        reduced = ((change, Candidate(self.all_late, change=change)) for change in settings)
        trials = {change: self.trial(candidate, what="where change is measured", timed=False) for change, candidate in reduced}
        usable = {trial.lpips: change for change, trial in reversed(trials.items()) if trial.error is None}  # of equals the first
        return self.with_anchors([usable[distance] for distance in sorted(usable) if distance <= ALIKE * min(usable)] or [""])

    def with_anchors(self, changes: list[str]) -> list[str]:
        """Adds anchors by content: first if they pay for the time of finding them, else as another choice."""
        grid, content = changes[0], ",".join(filter(None, (changes[0], CONTENT)))
        trials = [self.trial(Candidate(self.all_late, change=change), what="where anchors are") for change in (grid, content)]
        if any(trial.error is not None for trial in trials):
            return changes
        on_grid, by_content = (trial.lpips * trial.seconds**STEEP for trial in trials)
        return [content, *changes] if by_content < on_grid else [grid, content, *changes[1:]]

    def measure_peers(self) -> None:
        """Runs other methods alone, untimed. Those that could come near the frontier if they were as fast as their MACs are timed once."""
        known = ladders(self.space.stages)
        alone = [Candidate(peer=peer) for steps in known.values() for peer in steps]
        found = [(candidate, self.trial(candidate, what="another method", timed=False)) for candidate in alone]
        self.predictor = replace(self.predictor, trials=[*self.predictor.trials, *found])
        best = self.nearest_peers(known)
        timed = [(candidate, self.trial(candidate, what="another method, timed")) for candidate in best.values()]
        self.predictor = replace(self.predictor, trials=[*self.predictor.trials, *timed])
        self.space = replace(self.space, peers={name: known[name] for name in self.nearest_peers({name: known[name] for name in best})})

    def nearest_peers(self, peers: Mapping[str, tuple[str, ...]]) -> dict[str, Candidate]:
        """Returns, for each method that comes near the predicted frontier alone or with other knobs, its nearest setting."""
        places = self.predicted(replace(self.space, peers=peers))
        fastest = speed_by_distance(places.values())
        best: dict[str, tuple[float, str]] = {}
        for candidate, (speedup, distance) in places.items():
            if candidate.peer and speedup >= max(WANTED[0], NEAR * fastest(distance)):
                best[candidate.peer_name] = max(best.get(candidate.peer_name, (0.0, "")), (speedup / fastest(distance), candidate.peer))
        return {name: Candidate(peer=peer) for name, (_, peer) in sorted(best.items())}

    def predicted(self, space: Space) -> Places:
        """Returns speedup and distance of all combinations that are at most as far from dense as some single knob."""
        possible = (candidate for candidate in space.combinations() if self.predictor.possible(candidate))
        places = {candidate: (self.predictor.speedup(candidate), self.predictor.distance(candidate)) for candidate in possible}
        return {candidate: place for candidate, place in places.items() if place[1] <= self.most}

    def explore(self) -> None:
        """Runs candidates at or near the predicted frontier."""
        places = self.predicted(self.space)
        for number, candidate in enumerate(near_frontier(places, MAX_PREDICTED)):
            if self.spent > EXPLORED / 2 and number >= MIN_PREDICTED:
                break
            self.trial(candidate, what="predicted", timed=False)
        several = [
            (c, trial) for (c, rounds, _), trial in self.seen.items() if rounds == 1 and c in places and c.knobs > len(c.amounts) > 0
        ]
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
        """Returns untried neighbors of the frontier, of all ranges of speed.

        Each is predicted from its origin's measurement and the predicted change.
        """
        predictor, measured, tried = self.predictor, self.places(rounds), {candidate for candidate, _, _ in self.seen}
        fastest = speed_by_distance(measured.values())
        promise: Places = {}
        for origin in frontier(measured):
            for candidate in self.space.neighbors(origin, fine):
                if candidate in tried or not predictor.possible(candidate):
                    continue
                speedup = measured[origin][0] * predictor.speedup(candidate) / predictor.speedup(origin)
                distance = measured[origin][1] * ratio(predictor.distance(candidate), predictor.distance(origin))
                if distance <= self.most:
                    scored = speedup, speedup / fastest(distance)
                    promise[candidate] = max(promise.get(candidate, scored), scored, key=lambda one: one[1])
        return spread(promise, STEPPED)

    def halve(self) -> int:
        """Runs candidates near the frontier on twice as many prompts, and half of them again, until prompts or time are used up.

        Returns the number of rounds after which some are left.
        """
        rounds, count = 1, MAX_CANDIDATES
        while rounds * 2 <= min(MAX_ROUNDS, len(self.bench.prompts) // self.images) and self.spent < HALVED:
            before = self.places(rounds)
            rounds, count = rounds * 2, max(MAX_WINNERS, count // 2)
            for candidate in near_frontier(before, count):
                if self.spent >= 1:
                    break
                self.trial(candidate, rounds, what="more prompts")
        return rounds if self.places(rounds) else max(1, rounds // 2)

    def places(self, rounds: int) -> Places:
        """Returns speedup and distance of the candidates of interest that ran this many rounds, without dense generation."""
        found: Places = {}
        for (candidate, ran, timed), trial in self.seen.items():
            if ran == rounds and trial.error is None and candidate.knobs and trial.lpips <= self.most and (timed or candidate not in found):
                found[candidate] = (trial.speedup if trial.timed else self.predictor.speedup(candidate), trial.lpips)
        return found


def ratio(after: float, before: float) -> float:
    return after / before if before > 0 and math.isfinite(after) else 1.0
