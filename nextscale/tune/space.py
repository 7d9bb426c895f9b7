"""The knobs: single ones, all of them together in coarse steps, and the settings next to one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .candidate import Candidate

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.0)  # of the cells besides the anchors that SparseVAR runs
FINE = tuple(step / 20 for step in range(21))  # the same in steps of 0.05
COARSE = (1.0, 0.8, 0.6, 0.4, 0.25, 0.15)  # that are combined; the search then steps more finely
ALPHAS = (2, 3, 4, 5, 6, 8)
LOGITS = "metric=logits"  # a change for which no block is watched
CONTENT = "anchors=content"
PROBED_SHARES = (0.5, 0.2)  # of every late stage alone
PROBED_ALPHAS = (2, 8)
LATE = 4  # stages whose shares are combined; steps may reduce one more
UNGUIDED = 5  # stages that may be the first without guidance
MAX_SKIPPED = 3  # stages
LEFT_OUT = 3  # stages before the last one that are left out in combinations
MAX_LEFT_OUT = 5  # steps may leave out any of them

LADDERS: Mapping[str, tuple[str, ...]] = {
    "fastvar": ("ratios={LAST: 0.4}", "ratios={LAST: 0.6}", "ratios={BEFORE: 0.4, LAST: 0.6}", "ratios={BEFORE: 0.6, LAST: 0.75}"),
    "stagevar": (
        "alphas={LAST: 0.96},ranks=0.2,guidance_off=999",
        "alphas={LAST: 0.96},ranks=0.05,guidance_off=999",
        "alphas={LAST: 0.96},ranks=0.02,guidance_off=999",
        "alphas={LAST: 0.96},guidance_off=999",  # the model's own ranks, where it has a table
        "alphas={BEFORE: 0.96, LAST: 0.96},ranks=0.02,guidance_off=999",
    ),
}
"""Other methods that the search tries, mild settings before bold ones. LAST is the index of the last stage, BEFORE that of the one
before it. ScaleKV is not here: it saves memory and no time."""


def ladders(stages: int) -> dict[str, tuple[str, ...]]:
    """Returns the other methods by name, each as the command line takes them."""
    last, before = str(stages - 1), str(stages - 2)
    return {
        name: tuple(f"{name}:{settings.replace('LAST', last).replace('BEFORE', before)}" for settings in steps)
        for name, steps in LADDERS.items()
    }


@dataclass(frozen=True)
class Space:
    """The settings that fit a model, as far as they are known."""

    stages: int
    guided: bool
    change: str = ""  # where SparseVAR measures change, and how it places anchors
    changes: tuple[str, ...] = ()  # other choices, nearly as good
    peers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # other methods that came near the frontier, mild before bold

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
            yield from ((Candidate(unguided=stage), True) for stage in self.late(UNGUIDED))
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
            plain = Candidate(unguided=unguided, skipped=skipped)
            between = self.before_last(LEFT_OUT, skipped)
            for left_out in (some for count in range(len(between) + 1) for some in itertools.combinations(between, count)):
                yield from self._reduced(replace(plain, left_out=left_out))
            yield from (replace(plain, peer=peer) for steps in self.peers.values() for peer in steps)

    def _reduced(self, plain: Candidate) -> Iterator[Candidate]:
        """Yields the candidate with all shares of its late stages that never grow."""
        left = [stage for stage in self.late(LATE) if stage < self.stages - plain.skipped and stage not in plain.left_out]
        for shares in itertools.combinations_with_replacement(COARSE, len(left)):
            amounts = tuple((stage, share) for stage, share in zip(left, shares, strict=True) if share < 1)
            yield replace(plain, amounts=amounts, change=self.change if amounts else "")

    def neighbors(self, origin: Candidate, fine: bool = False) -> Iterator[Candidate]:
        """Yields candidates that differ in one knob by one step; fine: by half a step of the shares."""
        yield from self._other_shares(origin, FINE if fine else SHARES)
        if origin.amounts:
            yield from (replace(origin, alpha=int(alpha)) for alpha in adjacent(ALPHAS, origin.alpha))
            yield from (replace(origin, change=change) for change in (self.change, *self.changes) if change != origin.change)
        first = self.stages if origin.unguided is None else origin.unguided
        for unguided in (first - 1, first + 1):
            if self.guided and 1 <= unguided <= self.stages:
                yield replace(origin, unguided=None if unguided == self.stages else unguided)
        for skipped in (origin.skipped - 1, origin.skipped + 1):
            if 0 <= skipped < self.stages - 1:
                yield origin.without_stages(skipped, origin.left_out, self.stages)
        for stage in self.before_last(MAX_LEFT_OUT, origin.skipped):
            yield origin.without_stages(origin.skipped, tuple(sorted({*origin.left_out} ^ {stage})), self.stages)
        yield from self._other_peers(origin)

    def _other_shares(self, origin: Candidate, scale: tuple[float, ...]) -> Iterator[Candidate]:
        amounts = dict(origin.amounts)
        changes = (origin.change,) if amounts else (self.change, *((LOGITS,) if origin.peer else ()))
        for stage in self.late(LATE + 1):
            if stage >= self.stages - origin.skipped or stage in origin.left_out:
                continue
            for share in adjacent(scale, amounts.get(stage, 1.0)):
                changed = {known: kept for known, kept in {**amounts, stage: share}.items() if kept < 1}
                yield from (replace(origin, change=change).with_amounts(changed) for change in changes)

    def _other_peers(self, origin: Candidate) -> Iterator[Candidate]:
        """Yields a step up or down the ladder; the logits need no block that a peer might run its own way."""
        for steps in (["", *settings] for settings in self.peers.values()):
            place = steps.index(origin.peer) if origin.peer in steps else len(steps) + 1
            for peer in (*steps[max(0, place - 1) : place], *steps[place + 1 : place + 2]):
                yield replace(origin, peer=peer)
                if origin.amounts and peer:
                    yield replace(origin, peer=peer, change=LOGITS)


def adjacent(scale: Sequence[float], value: float) -> list[float]:
    """Returns the next larger and the next smaller step of a scale."""
    return [*sorted(step for step in scale if step > value)[:1], *sorted(step for step in scale if step < value)[-1:]]
