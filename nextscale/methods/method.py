"""The interface of acceleration methods: a method's settings (`Method`) and its work on one request (`MethodRun`)."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ..cache import CacheSpec, LayerCache, Workspace, plain_cache
from ..errors import SettingError
from ..guidance import CfgBranches
from ..models.context import ForwardContext
from ..models.macs import SublayerTokens
from ..stage import Schedule, Stage, Tokens
from ..validation import is_fraction

if TYPE_CHECKING:
    from ..canvas import Canvas
    from ..models.base import NextScaleModel
    from ..models.blocks import Block
    from ..sampling import Rng

Plans = tuple["StagePlan", ...]
"""One plan per stage."""


@dataclass(frozen=True, slots=True)
class RunSetup:
    """The request of a run."""

    model: NextScaleModel
    schedule: Schedule
    batch: int
    rng: Rng  # random numbers for methods, separate from the image's own
    plans: Plans  # the request's forecast, with all methods that run together
    guided: bool = True  # unconditional rows run beside the conditional ones
    constants: list[object] = field(default_factory=list)  # tensors shared by requests; a run adds them so that captured graphs keep them


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Numbers of tokens that the images of a data-dependent stage keep: counts read by the host, or the size of a captured graph."""

    fewest: int  # of an image
    most: int
    total: int  # of all images


class Restored(NamedTuple):
    """Logits of all tokens, completed by a method."""

    logits: Tensor  # [B, N, ...]
    tokens: Tokens
    source: Tensor | None = None  # [B, N], the computed token whose logits each token copies; None: each has its own


class Span(Protocol):
    """Runs consecutive blocks at a lower cost. Subclass it as a frozen dataclass.

    A span is a value without state. The state of the request is in `ctx`: outputs of earlier stages (`memory`), random numbers
    (`method_rng`), and the counter of computed cells (`computed`) if the caller wants compute masks.
    """

    whole_stage: ClassVar[bool] = False  # True: it needs all cells of a stage

    layers: range

    @property
    def key(self) -> str:
        """Returns the name in messages."""
        return type(self).__name__

    def num_tokens(self, tokens: int) -> int:
        """Returns the number of tokens of a row that its blocks compute when `tokens` enter."""
        ...

    @property
    def stores(self) -> frozenset[Hashable]:
        """Returns the keys of the maps [rows, cells, dim] that it stores in `ctx.memory` for later stages."""
        return frozenset()

    @property
    def needs(self) -> frozenset[Hashable]:
        """Returns the keys that it reads from `ctx.memory`, each stored by a span of an earlier stage."""
        return frozenset()

    def sublayer_tokens(self, tokens: int) -> SublayerTokens:
        """Returns `num_tokens` by sublayer, for spans whose sublayers run different numbers of tokens."""
        return SublayerTokens.same(self.num_tokens(tokens))

    def own_macs(self, tokens: int, dim: int) -> int:
        """Returns the MACs of its own matrix products, such as a projection to fewer tokens, for a row of this number of tokens."""
        return 0

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor: ...


def shown(span: Span) -> str:
    """Returns the span's name and blocks for messages."""
    return f"{span.key} ({blocks_text(span.layers)})"


def blocks_text(layers: range) -> str:
    return f"block {layers[0]}" if len(layers) == 1 else f"blocks {layers[0]} to {layers[-1]}"


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The plan of a stage: a hashable value that fixes all shapes."""

    skip: bool = False
    cfg_branches: CfgBranches = "both"
    num_tokens: int | None = None  # tokens of a row, padding included, if the whole stage is reduced
    spans: tuple[Span, ...] = ()
    observed: tuple[int, ...] = ()  # blocks whose input and output `observe` gets
    guidance_decay: float = 1.0  # factor of the guidance scale's excess above 1; read from the forecast
    propagates: int | None = None  # tokens of a row for which HART's diffusion runs at the last stage; None: as many as in the blocks
    packed: int | None = None  # tokens of all images of a cfg branch, padding included, if rows are packed
    kept_keys: tuple[int, ...] | None = None  # keys of a row that each layer keeps of all stages so far; None: all
    attended: tuple[float, ...] | None = None  # share of the query-key pairs that attention computes, per layer; None: all

    def __post_init__(self) -> None:
        if not is_fraction(self.guidance_decay):
            raise ValueError(f"guidance_decay must be a number from 0 to 1; got {self.guidance_decay!r}")
        for span in self.spans:
            if span.layers.step != 1 or len(span.layers) == 0:
                raise ValueError(f"a span runs one or more consecutive blocks; {span.key} asks for {span.layers}")
        ordered = sorted(self.spans, key=lambda span: span.layers.start)
        for first, second in pairwise(ordered):
            if second.layers.start < first.layers.stop:
                both = range(second.layers.start, min(first.layers.stop, second.layers.stop))
                raise ValueError(f"both change {blocks_text(both)}")
        for span in self.spans:
            inside = [layer for layer in self.observed if layer in span.layers]
            if span.whole_stage and self.num_tokens is not None:
                raise ValueError(f"the span {shown(span)} needs every cell of the stage, which another method reduces")
            if inside:
                raise ValueError(f"block {inside[0]} cannot be observed: the span {shown(span)} runs it as a group")

    @property
    def stores(self) -> frozenset[Hashable]:
        """The keys that its spans store for later stages."""
        return frozenset[Hashable]() if self.skip else frozenset(name for span in self.spans for name in span.stores)

    def check(self, depth: int, guided_layers: Collection[int]) -> None:
        """Raises ValueError if the plan does not fit a model of this depth, or hides a block after which guidance acts.

        A cfg branch that runs alone has no guidance.
        """
        guided_layers = guided_layers if self.cfg_branches == "both" else ()
        for span in self.spans:
            if span.layers.start < 0 or span.layers.stop > depth:
                raise ValueError(f"the span {shown(span)} does not fit a model with blocks 0 to {depth - 1}")
            hidden = [layer for layer in guided_layers if layer in span.layers[:-1]]
            if hidden:
                raise ValueError(f"guidance after block {hidden[0]} would be lost inside the span {shown(span)}")
        absent = [layer for layer in self.observed if not 0 <= layer < depth]
        if absent:
            raise ValueError(f"block {absent[0]} cannot be observed: the model has blocks 0 to {depth - 1}")

    def check_num_tokens(self, tokens: Tokens) -> None:
        """Raises ValueError if the method kept a number of tokens other than planned."""
        if self.num_tokens is not None and tokens.num_tokens != self.num_tokens:
            raise ValueError(f"stage {tokens.stage.index} was planned with {self.num_tokens} tokens, and {tokens.num_tokens} entered")
        packed = None if tokens.packing is None else tokens.packing.total
        if self.packed != packed:
            raise ValueError(f"stage {tokens.stage.index} was planned with {self.packed} packed tokens, and {packed} entered")

    def merge(self, other: StagePlan) -> StagePlan:
        """Returns the union of both plans; a conflict raises ValueError."""
        chosen: dict[str, Any] = {}
        for name in (one.name for one in fields(self) if one.name not in ("skip", "spans", "observed")):
            values = {getattr(plan, name) for plan in (self, other)} - {getattr(DENSE, name)}
            if len(values) > 1:
                raise ValueError(f"two methods set {name}, to {getattr(self, name)} and to {getattr(other, name)}")
            chosen[name] = next(iter(values), getattr(DENSE, name))
        observed = tuple(sorted({*self.observed, *other.observed}))
        return StagePlan(skip=self.skip or other.skip, spans=self.spans + other.spans, observed=observed, **chosen)


DENSE = StagePlan()


@dataclass(frozen=True, slots=True)
class SelectionContext:
    """The facts about a request by which a method is selected."""

    name: str  # name of the model
    model: NextScaleModel
    device: torch.device  # device of the request
    pixels_per_token: int
    profiles: Sequence[Any]  # `Profile`s of this model; of equally good ones the later wins
    schedule: Schedule | None = None  # None: not known yet
    batch: int = 1
    weights: Path | None = None  # location of the model's weights, if a command has it

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Grids of all stages."""
        return () if self.schedule is None else self.schedule.sizes

    @property
    def size(self) -> str:
        """WIDTHxHEIGHT of the image; empty if unknown."""
        return "x".join(str(side * self.pixels_per_token) for side in reversed(self.sizes[-1])) if self.sizes else ""


class Method:
    """Settings of a method. The base class is dense generation; subclasses are frozen dataclasses.

    `exclusive` names what only one method of a request may change: "tokens" (runs override `select_tokens`), "cache" (runs override
    `layer_cache`), or "alone" (combines with no other method).
    """

    exclusive: frozenset[str] = frozenset()

    def __eq__(self, other: object) -> bool:
        """All objects of this class are equal; subclasses are dataclasses and compare their settings."""
        return type(other) is Method if type(self) is Method else self is other

    def __hash__(self) -> int:
        return hash(Method) if type(self) is Method else object.__hash__(self)

    @property
    def label(self) -> str:
        """Readable name: "dense", or the name of the class with the settings that differ from its defaults."""
        settings: dict[str, object] = {one.name: one.default for one in fields(self) if one.init} if is_dataclass(self) else {}
        chosen = [f"{name}={getattr(self, name)}" for name, default in settings.items() if getattr(self, name) != default]
        name = "dense" if type(self) is Method else type(self).__name__
        return f"{name}({', '.join(chosen)})" if chosen else name

    @property
    def data_dependent(self) -> bool:
        """True if the number of tokens that a stage runs depends on the image."""
        return False

    @property
    def capturable(self) -> bool:
        """True if CUDA graphs can replay its runs: the host reads nothing but the results of `count`."""
        return True

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        """Returns the plans of all stages as far as they are known before a request. Raises SettingError if the settings do not fit.

        guided: unconditional rows run beside the conditional ones. kept: assumed share of computed cells, if that is data-dependent.
        """
        return (DENSE,) * len(schedule)

    def start(self, setup: RunSetup) -> MethodRun:
        """Begins one request. Raises SettingError if the method does not fit it."""
        return MethodRun()

    def resolve(self, context: SelectionContext) -> tuple[Method, str | None]:
        """Returns the method that runs such a request, and the reason if it was selected. Raises SettingError if there is none."""
        return self, None


class MethodRun:
    """One request of a method, and the owner of its state. The base class runs every stage as it was forecast.

    At each stage generation calls, in this order: `count`, `plan`, `select_tokens`, `observe` after every observed block, and `restore`. A
    stage with given codes computes all cells: `select_tokens` is not called, and `restore` only for methods exclusive in "tokens". Captured
    graphs copy a run with `copy.copy`.
    """

    def count(self, stage: Stage, canvas: Canvas) -> Tensor | None:
        """Returns the number of tokens that each image keeps, [B] on the device; None if it is known. Called for skipped stages too."""
        return None

    def plan(self, stage: Stage, planned: StagePlan, counts: TokenCounts | None) -> StagePlan:
        """Returns the forecast `planned`, completed by `counts`: counts read by the host, or the size of a captured graph."""
        return planned

    def select_tokens(self, x: Tensor, tokens: Tokens) -> Tokens:
        """Returns the tokens of the images, or of all rows, that enter the first block. x [R, cells, C] has all cells."""
        return tokens

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        """Gets the input and the output of an observed block. `tokens.unpack` turns packed rows into padded rows [R, N, C]."""

    def restore(self, logits: Tensor, tokens: Tokens) -> Restored:
        """Adds logits of tokens that did not run, after guidance. HART's hidden states follow `source`."""
        return Restored(logits, tokens)

    def layer_cache(self, spec: CacheSpec, workspace: Workspace) -> LayerCache:
        """Returns the cache of one layer's keys and values."""
        return plain_cache(spec, workspace)

    def state(self) -> list[Tensor]:
        """Returns the tensors that a run carries from stage to stage. Their shapes must not depend on the number of computed tokens."""
        return []


# --- checks of methods that others write


@cache
def check_hooks(own: type, base: type) -> None:
    """Raises SettingError unless every hook of a class takes the arguments of the base class's."""
    for name, hook in vars(base).items():
        if inspect.isfunction(hook) and not name.startswith("_") and inspect.isfunction(written := getattr(own, name)):
            expected, given = inspect.signature(hook), inspect.signature(written)
            named = {one.name: None for one in expected.parameters.values() if one.default is not one.empty}
            try:
                given.bind(*[None] * (len(expected.parameters) - len(named)), **named)
            except TypeError:
                words = [f"({', '.join(signature.parameters)})" for signature in (expected, given)]
                raise SettingError(f"{own.__name__}.{name} must take {words[0]}; it takes {words[1]}.") from None


def forecast_of(method: Method, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
    """Returns the method's plans. Raises SettingError unless there is one for each stage."""
    check_hooks(type(method), Method)  # type: ignore[arg-type]
    plans = method.forecast(model, schedule, guided, kept)
    if not isinstance(plans, tuple | list) or [type(plan) for plan in plans] != [StagePlan] * len(schedule):
        got = f"{len(plans)} values" if isinstance(plans, tuple | list) else type(plans).__name__
        raise SettingError(
            f"{type(method).__name__}.forecast must return one StagePlan for each of the {len(schedule)} stages; got {got}. StagePlan() is"
            " a dense stage."
        )
    return tuple(plans)


def run_of(method: Method, setup: RunSetup) -> MethodRun:
    """Begins the method's work on a request. Raises SettingError unless `start` returns a run."""
    run = method.start(setup)
    if not isinstance(run, MethodRun):
        raise SettingError(f"{type(method).__name__}.start must return a MethodRun; got {type(run).__name__}. End it with `return`.")
    check_hooks(type(run), MethodRun)  # type: ignore[arg-type]
    return run


def selected_by(run: MethodRun, x: Tensor, tokens: Tokens) -> Tokens:
    """Returns the tokens that a run keeps. Raises SettingError for another type."""
    found = run.select_tokens(x, tokens)
    if not isinstance(found, Tokens):
        got = f"got {type(found).__name__}. `tokens.top(score, count)[1]` has them"
        raise SettingError(f"{type(run).__name__}.select_tokens must return Tokens; {got}.")
    return found


def restored_by(run: MethodRun, logits: Tensor, tokens: Tokens) -> Restored:
    """Returns the logits that a run restores. Raises SettingError for another type."""
    found = run.restore(logits, tokens)
    if not isinstance(found, Restored):
        raise SettingError(f"{type(run).__name__}.restore must return Restored(logits, tokens); got {type(found).__name__}.")
    return found
