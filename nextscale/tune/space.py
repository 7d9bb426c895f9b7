"""The knobs: single ones, all of them together in coarse steps, and the settings next to one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..guidance import CfgBranch
from ..methods.registry import method_class, method_names
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
MAX_FADE = 2  # stages over which guidance falls before
MAX_SKIPPED = 3  # stages
LEFT_OUT = 3  # stages before the last one that are left out in combinations
MAX_LEFT_OUT = 5  # of which steps may leave out any
PROBED_RUNGS = 3  # settings of another method that are tried alone


def ladders(stages: int) -> dict[str, tuple[str, ...]]:
    """Returns the settings of other methods that the search tries, by name, each as the command line takes them."""
    last, before = str(stages - 1), str(stages - 2)
    steps = {name: method_class(name).tune_steps for name in method_names()}
    return {
        name: tuple(f"{name}:{settings.replace('LAST', last).replace('BEFORE', before)}" for settings in chosen)
        for name, chosen in steps.items()
        if chosen
    }


def probed(steps: Sequence[str]) -> list[str]:
    """Returns the settings that are tried alone: the mildest, the boldest, and those in the middle."""
    numbers = {round(step * (len(steps) - 1) / (PROBED_RUNGS - 1)) for step in range(PROBED_RUNGS)}
    return [steps[number] for number in sorted(numbers)]


@dataclass(frozen=True)
class Space:
    """The settings that fit a model, as far as they are known."""

    stages: int
    guided: bool
    change: str = ""  # where SparseVAR measures change, and how it places anchors
    changes: tuple[str, ...] = ()  # other choices, nearly as good
    rows: CfgBranch = "cond"  # that are kept where guidance is dropped
    peers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # other methods that came near the frontier, mild before bold
    apart: frozenset[str] = frozenset()  # of these, those that do not combine with SparseVAR's budgets

    def late(self, number: int) -> range:
        return range(max(1, self.stages - number), self.stages)

    def before_last(self, number: int, skipped: int = 0) -> range:
        """Returns stages before the last one after which some stage runs."""
        return range(max(1, self.stages - 1 - number), self.stages - 1 - skipped)

    def singles(self) -> Iterator[tuple[Candidate, bool]]:
        """Yields one knob at a time, and whether it must be timed: if it costs as much as another knob, its distance suffices."""
        yield from ((Candidate(skipped=last), True) for last in range(1, min(MAX_SKIPPED, self.stages - 1) + 1))
        yield from ((Candidate(left_out=(stage,)), False) for stage in self.before_last(MAX_LEFT_OUT))
        if self.guided:
            for stage in self.late(UNGUIDED):
                yield from ((Candidate(unguided=stage, kept_rows=rows), rows == "cond") for rows in ("cond", "uncond"))
            yield from ((Candidate(unguided=stage, fade=1), False) for stage in self.late(2))
        for stage in self.late(LATE + 1):
            yield from ((Candidate(((stage, share),), change=self.change), stage in self.late(LATE)) for share in PROBED_SHARES)
        last = ((self.stages - 1, PROBED_SHARES[-1]),)
        yield from ((Candidate(last, alpha=alpha, change=self.change), False) for alpha in PROBED_ALPHAS)

    def combinations(self) -> Iterator[Candidate]:
        """Yields all knobs together in coarse steps, which are predicted."""
        starts = [None, *self.late(UNGUIDED)] if self.guided else [None]
        for unguided, skipped in itertools.product(starts, range(min(MAX_SKIPPED, self.stages - 1))):
            if unguided is not None and unguided >= self.stages - skipped:
                continue
            plain = Candidate(unguided=unguided, kept_rows="cond" if unguided is None else self.rows, skipped=skipped)
            between = self.before_last(LEFT_OUT, skipped)
            for left_out in (some for count in range(len(between) + 1) for some in itertools.combinations(between, count)):
                yield replace(plain, left_out=left_out)
                yield from self._reduced(replace(plain, left_out=left_out))
            yield from (replace(plain, peer=peer) for steps in self.peers.values() for peer in steps)

    def _reduced(self, plain: Candidate) -> Iterator[Candidate]:
        """Yields the candidate with all shares of its late stages that never grow."""
        left = [stage for stage in self.late(LATE) if stage < self.stages - plain.skipped and stage not in plain.left_out]
        for shares in itertools.combinations_with_replacement(COARSE, len(left)):
            amounts = tuple((stage, share) for stage, share in zip(left, shares, strict=True) if share < 1)
            if amounts:
                yield replace(plain, amounts=amounts, change=self.change)

    def neighbours(self, origin: Candidate, fine: bool = False) -> Iterator[Candidate]:
        """Yields candidates that differ in one knob by one step; fine: by half a step of the shares."""
        yield from self._other_shares(origin, FINE if fine else SHARES)
        if origin.amounts:
            yield from (replace(origin, alpha=int(alpha)) for alpha in adjacent(ALPHAS, origin.alpha) if alpha is not None)
            yield from (replace(origin, change=change) for change in (self.change, *self.changes) if change != origin.change)
        if self.guided:
            yield from self._other_guidance(origin)
        for skipped in (origin.skipped - 1, origin.skipped + 1):
            if 0 <= skipped < self.stages - 1:
                yield origin.without_stages(skipped, origin.left_out, self.stages)
        for stage in self.before_last(MAX_LEFT_OUT, origin.skipped):
            yield origin.without_stages(origin.skipped, tuple(sorted({*origin.left_out} ^ {stage})), self.stages)
        yield from self._other_peers(origin)

    def _other_shares(self, origin: Candidate, scale: tuple[float, ...]) -> Iterator[Candidate]:
        amounts = dict(origin.amounts)
        changes = (origin.change,) if amounts else (self.change, *((LOGITS,) if origin.peer else ()))
        for stage in self.late(LATE + 1) if origin.peer_name not in self.apart else ():
            if stage >= self.stages - origin.skipped or stage in origin.left_out:
                continue
            for share in adjacent(scale, amounts.get(stage)):
                changed = {known: kept for known, kept in {**amounts, stage: share}.items() if kept is not None}
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
            if origin.unguided is not None and origin.kept_rows == "cond" and 0 <= fade <= min(MAX_FADE, origin.unguided):
                yield replace(origin, fade=fade)

    def _other_peers(self, origin: Candidate) -> Iterator[Candidate]:
        """Yields a step up or down the ladder; the logits need no block that a peer might run its own way."""
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


def adjacent(scale: tuple[float, ...], value: float | None) -> list[float | None]:
    """Returns the steps before and after a value; None, which is "not at all", comes before the first. A finer value is between two."""
    steps: list[float | None] = [None, *scale]
    if value is None or value in scale:
        place = steps.index(value)
        return [steps[near] for near in (place - 1, place + 1) if 0 <= near < len(steps)]
    smaller, larger = [step for step in scale if step < value], [step for step in scale if step > value]
    return [min(larger, default=None), *([max(smaller)] if smaller else [])]
