"""What the search may turn: single knobs, all of them together in coarse steps, and the settings next to one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..guidance import CfgBranch
from .candidate import Candidate

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.0)  # of the cells besides the anchors that SparseVAR runs
FINE = tuple(step / 20 for step in reversed(range(20)))  # the same in steps of 0.05
COARSE = (1.0, 0.8, 0.6, 0.4, 0.25, 0.15)  # that are combined; the search then steps more finely
ALPHAS = (2, 3, 4, 5, 6, 8)
LOGITS = "metric=logits"  # a change for which no block is watched
CONTENT = "anchors=content"
PROBED_SHARES = (0.5, 0.2)  # of every late stage alone
PROBED_ALPHAS = (2, 8)
LATE = 4  # stages whose shares are combined; steps may reduce one more
UNGUIDED = 5  # stages that may be the first without guidance
FADED = 2  # stages at most over which guidance falls before
SKIPPED = 3  # stages at most
LEFT_OUT = 3  # stages before the last one that are left out in combinations
MOST_LEFT_OUT = 5  # of which steps may leave out any


@dataclass(frozen=True)
class Space:
    """The settings that fit a model, as far as they are known."""

    stages: int
    guided: bool
    change: str = ""  # where SparseVAR measures change, and how it places anchors
    changes: tuple[str, ...] = ()  # how else it may, nearly as well
    rows: CfgBranch = "cond"  # that are kept where guidance is dropped
    peers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # other methods that came near the frontier, mild before bold
    apart: frozenset[str] = frozenset()  # of these, those that do not go with SparseVAR's budgets

    def late(self, number: int) -> range:
        return range(max(1, self.stages - number), self.stages)

    def before_last(self, number: int, skipped: int = 0) -> range:
        """So many stages before the last one, as far as some stage runs after them."""
        return range(max(1, self.stages - 1 - number), self.stages - 1 - skipped)

    def singles(self) -> Iterator[tuple[Candidate, bool]]:
        """One knob at a time, and whether it has to be timed: what costs as much as another knob needs its distance alone."""
        yield from ((Candidate(skipped=last), True) for last in range(1, min(SKIPPED, self.stages - 1) + 1))
        yield from ((Candidate(left_out=(stage,)), False) for stage in self.before_last(MOST_LEFT_OUT))
        if self.guided:
            for stage in self.late(UNGUIDED):
                yield from ((Candidate(unguided=stage, kept_rows=rows), rows == "cond") for rows in ("cond", "uncond"))
            yield from ((Candidate(unguided=stage, fade=1), False) for stage in self.late(2))
        for stage in self.late(LATE + 1):
            yield from ((Candidate(((stage, share),), change=self.change), stage in self.late(LATE)) for share in PROBED_SHARES)
        last = ((self.stages - 1, PROBED_SHARES[-1]),)
        yield from ((Candidate(last, alpha=alpha, change=self.change), False) for alpha in PROBED_ALPHAS)

    def combinations(self) -> Iterator[Candidate]:
        """What is predicted: all knobs together, in coarse steps."""
        starts = [None, *self.late(UNGUIDED)] if self.guided else [None]
        for unguided, skipped in itertools.product(starts, range(min(SKIPPED, self.stages - 1))):
            if unguided is not None and unguided >= self.stages - skipped:
                continue
            plain = Candidate(unguided=unguided, kept_rows="cond" if unguided is None else self.rows, skipped=skipped)
            yield plain
            yield from self._reduced(plain)
            between = self.before_last(LEFT_OUT, skipped)
            for left_out in (some for count in range(len(between)) for some in itertools.combinations(between, count + 1)):
                yield replace(plain, left_out=left_out)
                yield from self._reduced(replace(plain, left_out=left_out))
            yield from (replace(plain, peer=peer) for steps in self.peers.values() for peer in steps)

    def _reduced(self, plain: Candidate) -> Iterator[Candidate]:
        """The candidate with all shares of its late stages that never grow."""
        left = [stage for stage in self.late(LATE) if stage < self.stages - plain.skipped and stage not in plain.left_out]
        for shares in itertools.combinations_with_replacement(COARSE, len(left)):
            amounts = tuple((stage, share) for stage, share in zip(left, shares, strict=True) if share < 1)
            if amounts:
                yield replace(plain, amounts=amounts, change=self.change)

    def neighbours(self, origin: Candidate, fine: bool = False) -> Iterator[Candidate]:
        """Candidates that differ in one knob by one step; fine: by half a step of the shares."""
        yield from self._other_shares(origin, FINE if fine else SHARES)
        if origin.amounts:
            yield from (replace(origin, alpha=int(alpha)) for alpha in adjacent(ALPHAS, origin.alpha) if alpha is not None)
            yield from (replace(origin, change=change) for change in (self.change, *self.changes) if change != origin.change)
        if self.guided:
            yield from self._other_guidance(origin)
        for skipped in (origin.skipped - 1, origin.skipped + 1):
            if 0 <= skipped < self.stages - 1:
                yield origin.without_stages(skipped, origin.left_out, self.stages)
        for stage in self.before_last(MOST_LEFT_OUT, origin.skipped):
            yield origin.without_stages(origin.skipped, toggled(origin.left_out, stage), self.stages)
        yield from self._other_peers(origin)

    def _other_shares(self, origin: Candidate, scale: tuple[float, ...]) -> Iterator[Candidate]:
        amounts = dict(origin.amounts)
        changes = (origin.change,) if amounts else (self.change, *((LOGITS,) if origin.peer else ()))
        for stage in self.late(LATE + 1) if origin.peer_name not in self.apart else ():
            if stage >= self.stages - origin.skipped or stage in origin.left_out:
                continue
            for share in adjacent(scale, amounts.get(stage)):
                changed = {**amounts, stage: share} if share is not None else {k: v for k, v in amounts.items() if k != stage}
                yield from (replace(origin, change=change).with_amounts(changed) for change in changes)

    def _other_guidance(self, origin: Candidate) -> Iterator[Candidate]:
        first = self.stages if origin.unguided is None else origin.unguided
        for unguided in (first - 1, first + 1):
            if unguided == self.stages:
                yield replace(origin, unguided=None, kept_rows="cond", fade=0)
            elif 1 <= unguided < self.stages:
                rows = self.rows if origin.unguided is None else origin.kept_rows
                yield replace(origin, unguided=unguided, kept_rows=rows, fade=min(origin.fade, unguided))
        for fade in (origin.fade - 1, origin.fade + 1):
            if origin.unguided is not None and origin.kept_rows == "cond" and 0 <= fade <= min(FADED, origin.unguided):
                yield replace(origin, fade=fade)

    def _other_peers(self, origin: Candidate) -> Iterator[Candidate]:
        """A step up or down the ladder; the logits need no block that a peer might run its own way."""
        if origin.peer:
            steps = self.peers.get(origin.peer_name, (origin.peer,))
            place = steps.index(origin.peer)
            nearby: list[str] = ["", *steps][place : place + 1] + list(steps[place + 1 : place + 2])
        else:
            nearby = [steps[0] for name, steps in self.peers.items() if not origin.amounts or name not in self.apart]
        for peer in nearby:
            yield replace(origin, peer=peer)
            if origin.amounts and peer:
                yield replace(origin, peer=peer, change=LOGITS)


def toggled(stages: tuple[int, ...], stage: int) -> tuple[int, ...]:
    return tuple(sorted({*stages} ^ {stage}))


def adjacent(scale: tuple[float, ...], value: float | None) -> list[float | None]:
    """The steps before and after a value on its scale; None, which is "not at all", comes before the first.

    A value that is not on it, having been found in finer steps, lies between two.
    """
    steps: list[float | None] = [None, *scale]
    if value is None or value in scale:
        place = steps.index(value)
        return [steps[near] for near in (place - 1, place + 1) if 0 <= near < len(steps)]
    smaller, larger = [step for step in scale if step < value], [step for step in scale if step > value]
    return [min(larger, default=None), *([max(smaller)] if smaller else [])]
