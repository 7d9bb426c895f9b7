"""The one interface between generation and whatever makes it cheaper."""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch import Tensor

from ..cache import CacheSpec, DenseLayerCache, LayerCache, Workspace
from ..guidance import CfgBranches
from ..models.env import Env
from ..models.macs import SublayerTokens
from ..stage import Schedule, Stage, Tokens

if TYPE_CHECKING:
    from ..canvas import Canvas
    from ..models.base import NextScaleModel
    from ..models.blocks import Block
    from ..sampling import Rng


@dataclass(frozen=True, slots=True)
class RunSetup:
    """What a method knows before a request starts."""

    model: NextScaleModel
    schedule: Schedule
    batch: int
    rng: Rng  # random numbers of the method's own: what it draws changes nothing of what the image draws
    compute_mask: bool = False  # the caller wants to see which cells were run (`Method.kept`)
    guided: bool = True  # unconditional rows run beside the conditional ones


class Span(Protocol):
    """Runs consecutive blocks more cheaply than one after the other on all tokens. Subclass it as a frozen dataclass."""

    whole_stage: ClassVar[bool] = False  # cannot run on some of a stage's cells only

    layers: range
    key: Hashable

    def num_tokens(self, tokens: int) -> int:
        """How many tokens of a row its blocks compute when so many enter."""
        ...

    @property
    def stores(self) -> frozenset[Hashable]:
        """Names of what it keeps in `env.memory` for later stages."""
        return frozenset()

    @property
    def needs(self) -> frozenset[Hashable]:
        """Names of what it reads there, each stored by a span of an earlier stage."""
        return frozenset()

    def sublayer_tokens(self, tokens: int) -> SublayerTokens:
        """`num_tokens` by sublayer, for spans that do not run all sublayers on the same number of tokens."""
        return SublayerTokens.same(self.num_tokens(tokens))

    def own_macs(self, tokens: int, dim: int) -> int:
        """MACs of its own matrix products for one row that this number of tokens enter, such as a projection to fewer tokens."""
        return 0

    def stored_maps(self, blocks: Sequence[Block]) -> dict[Hashable, int]:
        """Number of maps [rows, cells, dim] that it keeps under each name in `stores` when it runs `blocks`."""
        return dict.fromkeys(self.stores, 1)

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What a stage will do, as a hashable value that fixes all shapes."""

    skip: bool = False
    cfg_branches: CfgBranches = "both"
    num_tokens: int | None = None  # padded token count when the whole stage is reduced
    spans: tuple[Span, ...] = ()
    taps: tuple[int, ...] = ()  # blocks whose input and output `observe` wants to see

    def __post_init__(self) -> None:
        for span in self.spans:
            if span.layers.step != 1 or len(span.layers) == 0:
                raise ValueError(f"a span runs one or more consecutive blocks; {span.key} asks for {span.layers}")
        ordered = sorted(self.spans, key=lambda span: span.layers.start)
        for first, second in pairwise(ordered):
            if second.layers.start < first.layers.stop:
                raise ValueError(f"two spans run the same blocks: {first.layers} ({first.key}) and {second.layers} ({second.key})")
        for span in self.spans:
            inside = [layer for layer in self.taps if layer in span.layers]
            if getattr(span, "whole_stage", False) and self.num_tokens is not None:
                raise ValueError(
                    f"the span {span.layers} ({span.key}) needs every cell of the stage, of which only {self.num_tokens} are kept"
                )
            if inside:
                raise ValueError(f"block {inside[0]} cannot be observed: the span {span.layers} ({span.key}) runs it as a group")

    @property
    def stores(self) -> frozenset[Hashable]:
        """Names of what its spans keep for later stages."""
        return frozenset[Hashable]() if self.skip else frozenset(name for span in self.spans for name in getattr(span, "stores", ()))

    def check(self, depth: int, guided_layers: Collection[int]) -> None:
        """ValueError if the plan does not fit a model of this depth, or hides a block after which guidance must act.

        Where one branch runs alone there is nothing to guide.
        """
        guided_layers = guided_layers if self.cfg_branches == "both" else ()
        for span in self.spans:
            if span.layers.start < 0 or span.layers.stop > depth:
                raise ValueError(f"the span {span.layers} ({span.key}) does not fit a model with blocks 0 to {depth - 1}")
            hidden = [layer for layer in guided_layers if layer in span.layers[:-1]]
            if hidden:
                raise ValueError(f"guidance after block {hidden[0]} would be lost inside the span {span.layers} ({span.key})")
        absent = [layer for layer in self.taps if not 0 <= layer < depth]
        if absent:
            raise ValueError(f"block {absent[0]} cannot be observed: the model has blocks 0 to {depth - 1}")

    def check_num_tokens(self, tokens: Tokens) -> None:
        """ValueError if the method kept another number of tokens than it had said."""
        if self.num_tokens is not None and tokens.num_tokens != self.num_tokens:
            raise ValueError(f"stage {tokens.stage.index} was planned with {self.num_tokens} tokens, and {tokens.num_tokens} entered")

    def merge(self, other: StagePlan) -> StagePlan:
        """Both plans at once; ValueError names the conflict."""
        if None not in (self.num_tokens, other.num_tokens) and self.num_tokens != other.num_tokens:
            raise ValueError(f"two methods reduce the whole stage, to {self.num_tokens} and to {other.num_tokens} tokens")
        dropped = {self.cfg_branches, other.cfg_branches} - {"both"}
        if len(dropped) > 1:
            raise ValueError("one method keeps only the conditional rows, the other only the unconditional ones")
        return StagePlan(
            skip=self.skip or other.skip,
            cfg_branches=next(iter(dropped), "both"),
            num_tokens=self.num_tokens if other.num_tokens is None else other.num_tokens,
            spans=self.spans + other.spans,
            taps=tuple(sorted({*self.taps, *other.taps})),
        )


DENSE = StagePlan()


class Method:
    """Dense generation. Subclasses override what they change; see the architecture notes for how each paper fits.

    A method is a value: settings, nothing else. `start` returns what runs one request and owns its state.
    """

    own_hooks: ClassVar[frozenset[str]] = frozenset()  # of "enter" and "layer_cache", those that its runs override

    def __eq__(self, other: object) -> bool:
        """Dense generation is always the same; subclasses are dataclasses and compare their settings."""
        return type(other) is Method if type(self) is Method else self is other

    def __hash__(self) -> int:
        return hash(Method) if type(self) is Method else object.__hash__(self)

    @property
    def label(self) -> str:
        """A readable name: "dense", or the class with those settings that differ from its defaults."""
        settings: dict[str, object] = {field.name: field.default for field in fields(self)} if is_dataclass(self) else {}
        chosen = [f"{name}={getattr(self, name)}" for name, default in settings.items() if getattr(self, name) != default]
        name = "dense" if type(self) is Method else type(self).__name__
        return f"{name}({', '.join(chosen)})" if chosen else name

    def start(self, setup: RunSetup) -> Method:
        """A run of this method for one request. Settings that do not fit the model or the schedule raise SettingError here."""
        return self

    def forecast(self, model: NextScaleModel, schedule: Schedule, kept: float = 1.0) -> tuple[StagePlan, ...]:
        """The plans of all stages, as far as they are known without an image: for cost, memory and conflicts.

        `kept`: the share of cells that is assumed to be kept where that depends on the image.
        """
        return (DENSE,) * len(schedule)

    def changes(self, hook: str) -> bool:
        """Whether this method has its own way with `enter`, `layer_cache`, ...; settings answer for their runs."""
        return hook in self.own_hooks

    @property
    def data_dependent(self) -> bool:
        """Whether the number of tokens that a stage runs depends on what the stages before it have generated."""
        return False

    @property
    def capturable(self) -> bool:
        """Whether its runs leave the host out of it but for `look`: what reads from the device between stages cannot be recorded."""
        return True

    def fork(self) -> Method:
        """Of a run: another that goes on from here, with the same tensors."""
        return copy.copy(self)

    def plan(self, stage: Stage, canvas: Canvas) -> StagePlan:
        return DENSE

    def count_tokens(self, stage: Stage, canvas: Canvas) -> Tensor | None:
        """Where the image decides how many tokens are run: how many of each image, [B], on the device. None: nothing to look at.

        The first half of `plan`, for those who record a stage beforehand: what follows is `told` and `plan_from_counts`.
        """
        return None

    def set_counts(self, fewest: int, width: int) -> None:
        """The host has read what `look` returned: the smallest count, and at least the largest."""

    def plan_from_counts(self, stage: Stage, canvas: Canvas) -> StagePlan:
        return self.plan(stage, canvas)

    def state_tensors(self) -> list[Tensor]:
        """What a run remembers of the stages so far, where it depends on how many tokens were run; shapes do not."""
        return []

    def reduce(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        """Before the first block: may keep some of the tokens only."""
        return x, tokens

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        """Input and output of a tapped block."""

    def restore(self, out: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        """After guidance: may speak for tokens that were left out."""
        return out, tokens

    def restore_residual(self, residual: Tensor, tokens: Tokens) -> tuple[Tensor, Tokens]:
        """The last stage's continuous values (HART) of the tokens that were run: may speak for others too."""
        return residual, tokens

    def compute_mask(self, stage: Stage) -> Tensor | None:
        """Share of the network that was run for every cell of the stage that has just ended, [B, cells]; None: all of it."""
        return None

    def layer_cache(self, spec: CacheSpec, workspace: Workspace) -> LayerCache:
        return DenseLayerCache(spec, workspace)
