"""StageVAR (arXiv 2512.16483): late stages only refine, so they run without the prompt and on a low-rank stand-in of their tokens."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import pairwise
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from ..cache import Env
from ..errors import SettingError
from ..models import Hart, Infinity, NextScaleModel, Star
from ..sampling import Noise, cell_noise
from ..stage import Schedule, Stage, Tokens
from .combine import Combined
from .lowrank import (
    Energy,
    Rank,
    Share,
    approximation,
    energy_ranks,
    factors,
    least_squares_weights,
    project,
    projection,
    repeat_tail,
    representatives,
    same_direction,
    singular_energies,
    squared_norms,
    zero_tail,
)
from .method import Method, RunSetup, StagePlan

if TYPE_CHECKING:
    from ..canvas import Canvas
    from ..models.blocks import Block
    from ..pipeline import Pipeline

Variant = Literal["vanilla", "svd_approximation", "svd", "svd_fixed", "least_squares", "representative"]
Alphas = tuple[tuple[int, float], ...]
StageRatios = tuple[tuple[int, tuple[float, ...]], ...]

PUBLISHED_ALPHA = 0.96
CONSTANT_RATIO = 0.177  # where no table fits: the share of its tokens that Infinity's 40 x 40 stage keeps at alpha 0.96
RELEASED_SIDES = {40: PUBLISHED_ALPHA, 48: 0.0, 64: 0.0}  # what the released program for Infinity goes by


# --- the groups of blocks of a stage


class RunState:
    """What the spans of one request share: where their random numbers come from, and which cells they ran."""

    def __init__(self, setup: RunSetup) -> None:
        self.setup = setup
        self.ran: Tensor | None = None  # [B, cells], in blocks
        self.widths: dict[tuple[int, int], int] = {}  # (stage, group): rows that the blocks computed, padding included

    def race(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Unit exponential numbers [R, N] for all tokens of x, the same for both branches of an image."""
        return self._noise(self.setup.draws.exponential, tokens, x)

    def normal(self, x: Tensor, tokens: Tokens, columns: int) -> Tensor:
        """Standard normal numbers [R, N, columns], likewise."""
        return self._noise(self.setup.draws.normal, tokens, x, columns)

    def _noise(self, noise: Noise, tokens: Tokens, x: Tensor, *columns: int) -> Tensor:
        batch = self.setup.batch
        drawn = cell_noise(noise, tokens.rows(slice(0, batch)), (batch, x.shape[1], *columns), x.device)
        return drawn.repeat(x.shape[0] // batch, *[1] * (drawn.ndim - 1))

    def record(self, tokens: Tokens, rows: Tensor, blocks: int, share: Tensor | None = None) -> None:
        """`blocks` blocks computed `rows` [R, n, C] for these tokens, in full or in the given share [R]; 0 elsewhere."""
        if not self.setup.track_kept:
            return
        whole = torch.ones(*rows.shape[:2], 1, device=rows.device)
        values = whole if share is None else whole * share[:, None, None]
        grid = tokens.scatter(values, values.new_zeros(rows.shape[0], tokens.stage.cells, 1))
        ran = blocks * grid.view(-1, self.setup.batch, tokens.stage.cells).mean(dim=0)  # over the branches
        self.ran = ran if self.ran is None else self.ran + ran

    def take(self) -> Tensor | None:
        """Share of the network per cell [B, cells] since the last call; None if no span ran."""
        ran, self.ran = self.ran, None
        return None if ran is None else ran / len(self.setup.model.blocks)


@dataclass(frozen=True)
class Remember:
    """Runs a group of blocks as it is and keeps its output for the next stage."""

    layers: range
    group: int

    @property
    def key(self) -> Hashable:
        return f"stagevar memory of group {self.group}"

    def width(self, tokens: int) -> int:
        return tokens

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        x = run(blocks, x, tokens, env)
        env.memory.store(memory_name(self.group), x, tokens)
        return x


@dataclass(frozen=True)
class LowRank:
    """Runs a group of blocks on few rows that stand for all tokens."""

    restores_from_memory: ClassVar[bool] = True

    layers: range
    stage: int
    group: int
    rank: Rank
    remember: bool = False  # the next stage is restored from this one
    first_positions: bool = False  # the rows take the first positions of the stage instead of their representatives'
    state: RunState | None = field(default=None, compare=False, repr=False)  # None: a forecast

    @property
    def key(self) -> Hashable:
        return f"stagevar {type(self).__name__} of group {self.group}, {self.rank}"

    def width(self, tokens: int) -> int:
        """Once it has run: what was run, which a measured rank does not know before."""
        known = {} if self.state is None else self.state.widths
        return known.get((self.stage, self.group), self.rank.rows(tokens))

    def own_work(self, tokens: int, channels: int) -> int:
        """Multiply-adds of the projection of one row; decompositions do not count."""
        return tokens * self.width(tokens) * channels

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        out = repeat_tail(self.replaced(blocks, x, tokens, env).to(x.dtype), tokens.count)
        if self.remember:
            env.memory.store(memory_name(self.group), out, tokens)
        return out

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        """The group's output [R, N, C] for its input; what lies beyond the count of a row does not matter."""
        raise NotImplementedError

    @property
    def run_state(self) -> RunState:
        assert self.state is not None, "a forecast cannot be run"
        return self.state

    def ranks(self, x: Tensor, tokens: Tokens) -> tuple[int, Tensor | None]:
        """Rows for x [R, N, C]: the padded number, and where rows of the batch differ, those of each [R]."""
        width, ranks = self.rank.of(x, tokens)
        self.run_state.widths[self.stage, self.group] = width
        return width, ranks

    def remembered(self, tokens: Tokens, env: Env) -> Tensor:
        """The same group's output at the previous stage that ran, resized to these tokens (equation 7)."""
        try:
            return env.memory.fill(memory_name(self.group), tokens)
        except KeyError:
            raise SettingError(
                f"stage {tokens.stage.index} cannot be restored: another method skipped the stage before it, whose outputs StageVAR"
                " needs. Skip stages with StageVAR's own alphas (0), which know what is skipped"
            ) from None

    def record_rows(self, x: Tensor, tokens: Tokens, width: int, ranks: Tensor | None) -> None:
        """Every token had the same part in the rows that ran."""
        rows = torch.full((x.shape[0],), width, device=x.device) if ranks is None else ranks
        self.run_state.record(tokens, x, len(self.layers), rows / (x.shape[1] if tokens.count is None else tokens.count))


class RepresentativeRows(LowRank):
    """Random projection, put back at representative tokens (equation 8): the method itself."""

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        width, ranks = self.ranks(x, tokens)
        noise = self.run_state.race(x, tokens)
        chosen = repeat_tail(representatives(squared_norms(x), noise, width, tokens.count), ranks)  # [R, r]
        normal = self.run_state.normal(x, tokens, self.rank.drawn(tokens.stage.cells))[..., :width]
        q = projection(normal, width if ranks is None else ranks)
        rows = repeat_tail(project(zero_tail(x, tokens.count), q), ranks)
        places = tokens.take(chosen, ranks)
        y = run(blocks, rows, first_tokens(tokens, rows, ranks) if self.first_positions else places, env)
        self.run_state.record(places, rows, len(self.layers))
        return self.remembered(tokens, env).scatter(1, chosen[..., None].expand_as(y), repeat_tail(y, ranks))


class LeastSquaresRows(LowRank):
    """Random projection, undone by least squares; what the blocks have changed is made up for with the previous stage's solution."""

    def own_work(self, tokens: int, channels: int) -> int:
        return 5 * super().own_work(tokens, channels)  # project and solve, for input and previous output; restore

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        width, ranks = self.ranks(x, tokens)
        normal = self.run_state.normal(x, tokens, self.rank.drawn(tokens.stage.cells))[..., :width]
        q = projection(normal, width if ranks is None else ranks)
        rows = zero_tail(project(zero_tail(x, tokens.count), q), ranks)
        previous = self.remembered(tokens, env)
        previous_rows = zero_tail(project(zero_tail(previous, tokens.count), q), ranks)
        y = run(blocks, repeat_tail(rows, ranks), first_tokens(tokens, rows, ranks), env)
        self.record_rows(x, tokens, width, ranks)
        weights = least_squares_weights(rows, x) + least_squares_weights(previous_rows, previous)
        return weights @ y.float()  # which are 0 beyond the ranks


class SingularRows(LowRank):
    """The leading singular directions; their left vectors and those of the previous stage's output restore the tokens."""

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        width, ranks = self.ranks(x, tokens)
        u, rows = factors(zero_tail(x, tokens.count), width)
        previous, _ = factors(zero_tail(self.remembered(tokens, env), tokens.count), width)
        y = run(blocks, repeat_tail(rows, ranks).to(x.dtype), first_tokens(tokens, rows, ranks), env)
        self.record_rows(x, tokens, width, ranks)
        return (u + same_direction(previous, u)) @ zero_tail(y.float(), ranks)


class ApproximatedRows(LowRank):
    """All tokens run, but their input is replaced by its nearest matrix of low rank."""

    restores_from_memory: ClassVar[bool] = False

    def width(self, tokens: int) -> int:
        return tokens

    def own_work(self, tokens: int, channels: int) -> int:
        return tokens * self.rank.rows(tokens) * channels

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        assert isinstance(self.rank, Energy)
        ranks = energy_ranks(singular_energies(x, tokens.count), self.rank.alpha)
        near = repeat_tail(approximation(zero_tail(x, tokens.count), ranks).to(x.dtype), tokens.count)
        self.run_state.record(tokens, x, len(self.layers))
        return run(blocks, near, tokens, env)


SPANS: dict[str, type[LowRank]] = {
    "svd_approximation": ApproximatedRows,
    "svd": SingularRows,
    "svd_fixed": SingularRows,
    "least_squares": LeastSquaresRows,
    "representative": RepresentativeRows,
}


def memory_name(group: int) -> Hashable:
    return "stagevar", group


def run(blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
    for block in blocks:
        x = block(x, tokens, env)
    return x


def first_tokens(tokens: Tokens, rows: Tensor, count: Tensor | None) -> Tokens:
    """The first of these tokens, as places of `rows` [R, r, C] that stand for no token in particular."""
    place = torch.arange(rows.shape[1], device=rows.device).expand(rows.shape[0], -1)
    return tokens.take(repeat_tail(place, count), count)


# --- the published settings


@dataclass(frozen=True)
class Published:
    """What the authors' program does for one backbone."""

    table: str  # in stagevar_ranks.json
    stages: int
    guidance_off: int
    alphas: Alphas
    blocks_per_group: int | None = None  # None: an eighth of the depth


PUBLISHED: dict[type[NextScaleModel], Published] = {
    Infinity: Published("infinity", 13, 10, ((10, PUBLISHED_ALPHA), (11, 0.0), (12, 0.0))),
    Star: Published("star", 14, 12, ((13, PUBLISHED_ALPHA),), blocks_per_group=1),
    Hart: Published("hart", 14, 12, ((13, PUBLISHED_ALPHA),), blocks_per_group=1),
}


def published_for(model: NextScaleModel) -> Published | None:
    return next((published for backbone, published in PUBLISHED.items() if isinstance(model, backbone)), None)


Table = dict[float, dict[int, tuple[float, ...]]]


@cache
def rank_tables() -> dict[str, Table]:
    """The published ratios: table, alpha, side of the stage, one per group."""
    text = files(__package__).joinpath("stagevar_ranks.json").read_text()
    return {
        name: {float(alpha): {int(side): tuple(ratios) for side, ratios in sides.items()} for alpha, sides in table.items()}
        for name, table in json.loads(text).items()
        if name != "note"
    }


def groups_in(table: Table) -> int:
    return len(next(iter(next(iter(table.values())).values())))


def table_for(model: NextScaleModel, groups: int) -> Table | None:
    """The published table of this kind of model, if it has as many groups."""
    published = published_for(model)
    table = None if published is None else rank_tables()[published.table]
    return table if table is not None and groups_in(table) == groups else None


def table_ratios(table: Table, alpha: float, stage: Stage) -> tuple[float, ...]:
    """Of the side whose square has nearly as many cells as the stage."""
    if alpha not in table:
        raise SettingError(
            f"alpha {alpha} at stage {stage.index} has no published ranks; there are {', '.join(str(known) for known in sorted(table))}."
            ' Choose one of them, or set ranks to a ratio or "measured"'
        )
    sides = table[alpha]
    return sides[min(sides, key=lambda side: abs(side * side - stage.cells))]


def no_table(model: NextScaleModel, groups: int) -> SettingError:
    known = []
    for backbone, published in PUBLISHED.items():
        table = rank_tables()[published.table]
        sides = ", ".join(str(side) for side in next(iter(table.values())))
        known.append(f"{backbone.__name__} with {groups_in(table)} groups (sides {sides})")
    return SettingError(
        f"there are no published ranks for {type(model).__name__} with {groups} groups of blocks, only for {'; '.join(known)}."
        ' Set ranks to a ratio such as 0.2, to one per group, to "measured", or to what measure_ranks returns'
    )


def counted_tokens(model: NextScaleModel) -> int | None:
    """What a ratio is a share of: all tokens on Infinity (None), elsewhere at most as many as the network has channels."""
    return None if isinstance(model, Infinity) else model.block_config.width


def group_layers(model: NextScaleModel, blocks_per_group: int | None) -> tuple[range, ...]:
    """Consecutive blocks; the last group may have fewer."""
    depth = len(model.blocks)
    published = published_for(model)
    size = blocks_per_group or (published and published.blocks_per_group) or max(1, depth // 8)
    if size > depth:
        raise SettingError(f"groups of {size} blocks: this model has {depth}; choose 1 to {depth}")
    return tuple(range(first, min(first + size, depth)) for first in range(0, depth, size))


# --- the method


@dataclass(frozen=True)
class StageVAR(Method):
    """Late stages run on the unconditional rows alone, on few projected rows per group of blocks, or not at all.

    Three savings, each with its own setting; `StageVAR()` is the published combination.

    guidance_off: from this stage on only the unconditional rows run. None: as published (Infinity stage 10 of 13, STAR and HART stage
        12 of 14), elsewhere the last two stages. The number of stages, or any larger number, is never. In a request without guidance
        there are no such rows, and those that there are go on.
    alphas: stage to alpha, as a mapping or pairs. 0 skips the stage; 1 runs it in full; between, the stage runs at the rank that holds
        this share of its energy. None: as published (Infinity {10: 0.96, 11: 0, 12: 0}, STAR and HART {13: 0.96}), elsewhere the last
        stage at 0.96. `StageVAR(guidance_off=99, alphas=())` is dense generation.
    ranks: where the rank of an alpha comes from. None: the published table ("table") where the model has as many groups, at the side
        with the nearest number of tokens; elsewhere alpha 0.96 stands for the constant ratio 0.177, which is ours. A number is the same
        ratio for all groups, a tuple one per group, a mapping has such a tuple per stage (`measure_ranks` returns them). "measured"
        finds the rank from singular values while drawing: every image has its own, and every group waits for the host.
        A ratio makes int(ratio * tokens) + 1 rows; on backbones other than Infinity min(tokens, width) takes the place of tokens.
    groups: blocks per group. None: as published (Infinity an eighth of the depth, STAR and HART 1), elsewhere an eighth of the depth.
    variant: how a stage runs at low rank, in the order of the paper's table 2. "vanilla" does not; "svd_approximation" runs all
        tokens of the best approximation; "svd" runs the leading singular directions, as many as the energy asks for, and "svd_fixed" as
        many as `ranks` says; "least_squares" runs random projections and solves for the tokens; "representative" is the method. The
        SVD variants are for study: they take longer than what they save.
    as_released: the released program for Infinity gives the projected rows the first positions of the stage, not those of their
        representative tokens, and goes by the sides 40 (low rank), 48 and 64 (skipped) of square images. On STAR and HART it does as we
        do.

    Every low-rank stage needs the whole grid of the stage before it: a method that reduces that stage is refused.

    All random numbers come from the request's draws for methods, per low-rank stage and group: first exponential [B, cells], whose
    smallest ratios to the squared norms of the tokens choose the representatives, in this order; then normal [B, cells, rank], which is
    Q times sqrt(rank). "least_squares" draws only the second. To replay stored draws give `seed=` an object with these two methods.
    """

    guidance_off: int | None = None
    alphas: Mapping[int, float] | Alphas | None = None
    ranks: Literal["table", "measured"] | float | tuple[float, ...] | Mapping[int, Sequence[float]] | StageRatios | None = None
    groups: int | None = None
    variant: Variant = "representative"
    as_released: bool = False

    def __post_init__(self) -> None:
        if self.guidance_off is not None and not is_count(self.guidance_off, least=0):
            raise SettingError(f"guidance_off is the first stage without guidance, a whole number from 0; got {self.guidance_off!r}")
        if self.groups is not None and not is_count(self.groups, least=1):
            raise SettingError(f"groups is a number of blocks per group, 1 or more; got {self.groups!r}")
        if self.variant not in get_args(Variant):
            raise SettingError(f"variant {self.variant!r}: choose one of {', '.join(get_args(Variant))}")
        if self.alphas is not None:
            object.__setattr__(self, "alphas", checked_alphas(self.alphas))
        if self.ranks is not None:
            object.__setattr__(self, "ranks", checked_ranks(self.ranks))
            self._check_ranks()
        if self.as_released and self.variant != "representative":
            raise SettingError(f'as_released: the released program knows the variant "representative" only, not {self.variant!r}')

    def _check_ranks(self) -> None:
        if self.variant == "vanilla":
            raise SettingError(f'ranks {self.ranks!r}: the variant "vanilla" runs all stages at full rank; leave ranks out')
        if self.variant in ("svd", "svd_approximation"):
            raise SettingError(f'ranks {self.ranks!r}: the variant {self.variant!r} finds ranks from alpha; leave them out, or "svd_fixed"')
        if self.variant == "svd_fixed" and self.ranks == "measured":
            raise SettingError('ranks "measured": that is the variant "svd"')

    def start(self, setup: RunSetup) -> Method:
        state = RunState(setup)
        return _Run(self._plans(setup.model, setup.schedule, setup.guided, state=state), state)

    def forecast(self, model: NextScaleModel, schedule: Schedule, kept: float = 1.0) -> tuple[StagePlan, ...]:
        """Of a guided request. `kept` matters for measured ranks only: the share of the largest possible rank."""
        return self._plans(model, schedule, guided=True, kept=kept)

    def _plans(
        self, model: NextScaleModel, schedule: Schedule, guided: bool, kept: float = 1.0, state: RunState | None = None
    ) -> tuple[StagePlan, ...]:
        if self.as_released:
            self._check_released(model, schedule)
        guidance_off = self.first_unguided(model, schedule)
        alphas = self.stage_alphas(model, schedule)
        layers = group_layers(model, self.groups)
        low = {} if self.variant == "vanilla" else {stage: alpha for stage, alpha in alphas.items() if 0 < alpha < 1}
        source = restored_from([stage for stage in schedule if alphas.get(stage.index) != 0], low)
        if low and not SPANS[self.variant].restores_from_memory:
            source = set()
        released = self.as_released and isinstance(model, Infinity)
        plans = []
        for stage in schedule:
            if alphas.get(stage.index) == 0:
                plans.append(StagePlan(skip=True))
                continue
            remember = stage.index in source
            spans: list[Any] = []  # the protocol's attributes can be set, those of a frozen dataclass cannot
            if stage.index in low:
                ranks = self._ranks(model, stage, low[stage.index], len(layers), kept)
                for group, (blocks, rank) in enumerate(zip(layers, ranks, strict=True)):
                    spans.append(SPANS[self.variant](blocks, stage.index, group, rank, remember, released, state))
            elif remember:
                spans += [Remember(blocks, group) for group, blocks in enumerate(layers)]
            branches: Literal["both", "uncond"] = "uncond" if guided and stage.index >= guidance_off else "both"
            plans.append(StagePlan(branches=branches, width=stage.cells if remember else None, spans=tuple(spans)))
        return tuple(plans)

    def first_unguided(self, model: NextScaleModel, schedule: Schedule) -> int:
        """The first stage of the unconditional rows alone."""
        if self.guidance_off is not None:
            return self.guidance_off
        if self.as_released and isinstance(model, Infinity):
            return next((stage.index for stage in schedule if stage.width in RELEASED_SIDES), len(schedule))
        published = published_for(model)
        if published is not None and published.stages == len(schedule):
            return published.guidance_off
        return max(1, len(schedule) - 2)

    def stage_alphas(self, model: NextScaleModel, schedule: Schedule) -> dict[int, float]:
        if self.alphas is not None:
            chosen = dict(self.alphas)
            beyond = [stage for stage in chosen if stage >= len(schedule)]
            if beyond:
                raise SettingError(f"alphas name stage {beyond[0]}; {schedule} has stages 0 to {len(schedule) - 1}")
            return chosen
        if self.as_released and isinstance(model, Infinity):
            return {stage.index: RELEASED_SIDES[stage.width] for stage in schedule if stage.width in RELEASED_SIDES}
        published = published_for(model)
        if published is not None and published.stages == len(schedule):
            return dict(published.alphas)
        return {len(schedule) - 1: PUBLISHED_ALPHA} if len(schedule) > 1 else {}

    def _check_released(self, model: NextScaleModel, schedule: Schedule) -> None:
        if published_for(model) is None:
            known = ", ".join(backbone.__name__ for backbone in PUBLISHED)
            raise SettingError(f"as_released: there are programs for {known} only, not for {type(model).__name__}; leave it out")
        if any(stage.height != stage.width for stage in schedule):
            raise SettingError(f"as_released: the released program draws square images only, not {schedule}; leave as_released out")
        if not isinstance(model, Infinity):
            return
        sides = ", ".join(str(side) for side in RELEASED_SIDES)
        if self.alphas is None and not any(stage.width in RELEASED_SIDES for stage in schedule):
            raise SettingError(f"as_released: the released program acts at sides {sides}; {schedule} has none of them")
        other = [schedule[stage] for stage, alpha in self.stage_alphas(model, schedule).items() if 0 < alpha < 1]
        for stage in other:
            if stage.width not in RELEASED_SIDES:
                raise SettingError(f"as_released: the released program runs sides {sides} at low rank, not {stage.width} of {schedule}")

    def _ranks(self, model: NextScaleModel, stage: Stage, alpha: float, groups: int, kept: float) -> list[Rank]:
        """One per group."""
        width = model.block_config.width
        if self.ranks == "measured" or self.variant in ("svd", "svd_approximation"):
            return [Energy(alpha, width, kept)] * groups
        most = width if self.variant == "svd_fixed" else None  # there are no more singular directions
        return [Share(ratio, counted_tokens(model), most) for ratio in self._ratios(model, stage, alpha, groups)]

    def _ratios(self, model: NextScaleModel, stage: Stage, alpha: float, groups: int) -> tuple[float, ...]:
        if self.ranks is None or self.ranks == "table":
            table = table_for(model, groups)
            if table is not None:
                return table_ratios(table, alpha, stage)
            if self.ranks is None and alpha == PUBLISHED_ALPHA:
                return (CONSTANT_RATIO,) * groups
            raise no_table(model, groups)
        ratios: Any = self.ranks
        if isinstance(ratios, float):
            return (ratios,) * groups
        if isinstance(ratios[0], tuple):
            by_stage = dict(ratios)
            if stage.index not in by_stage:
                known = ", ".join(str(index) for index in by_stage)
                raise SettingError(f"ranks has ratios for stages {known}; stage {stage.index} runs at low rank too")
            ratios = by_stage[stage.index]
        if len(ratios) != groups:
            raise SettingError(f"ranks has {len(ratios)} ratios for the {groups} groups of blocks at stage {stage.index}: give one each")
        return ratios


def restored_from(executed: Sequence[Stage], low: Mapping[int, float]) -> set[int]:
    """Stages whose outputs a later low-rank stage needs: each time the one that runs before it."""
    if executed and executed[0].index in low:
        raise SettingError(f"stage {executed[0].index} cannot run at low rank: no stage runs before it to restore its tokens from")
    return {before.index for before, stage in pairwise(executed) if stage.index in low}


@dataclass(frozen=True)
class _Run(Method):
    plans: tuple[StagePlan, ...]
    state: RunState

    def plan(self, stage: Stage, canvas: Canvas) -> StagePlan:
        return self.plans[stage.index]

    def kept(self, stage: Stage) -> Tensor | None:
        return self.state.take()


# --- settings as they are given


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def is_count(value: object, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def is_share(value: Any) -> bool:
    return is_number(value) and 0 < value <= 1


def checked_alphas(given: object) -> Alphas:
    pairs = pairs_of(given)
    if pairs is None or not all(is_count(stage, least=0) and is_number(alpha) and 0 <= alpha <= 1 for stage, alpha in pairs):
        raise SettingError(f"alphas is a mapping of stages to numbers from 0 (skip) to 1 (full rank), or such pairs; got {given!r}")
    if len({stage for stage, _ in pairs}) < len(pairs):
        raise SettingError(f"alphas names a stage twice: {given!r}")
    return tuple(sorted((int(stage), float(alpha)) for stage, alpha in pairs))


def checked_ranks(given: Any) -> str | float | tuple[float, ...] | StageRatios:
    if is_share(given):
        return float(given)
    if isinstance(given, str) and given in ("table", "measured"):
        return given
    if isinstance(given, Sequence) and given and all(is_share(ratio) for ratio in given):
        return tuple(float(ratio) for ratio in given)
    pairs = pairs_of(given)
    if not pairs or not all(
        is_count(stage, least=0) and isinstance(ratios, Sequence) and ratios and all(is_share(ratio) for ratio in ratios)
        for stage, ratios in pairs
    ):
        raise SettingError(
            'ranks is "table", "measured", a ratio above 0 and up to 1, a tuple of one per group, or a mapping of stages to such tuples;'
            f" got {given!r}"
        )
    return tuple(sorted((int(stage), tuple(float(ratio) for ratio in ratios)) for stage, ratios in pairs))


def pairs_of(given: object) -> list[tuple[Any, Any]] | None:
    """Of a mapping or a sequence of pairs; None if it is neither."""
    items = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(items, Sequence) or isinstance(items, str):
        return None
    pairs = [tuple(item) for item in items if isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2]
    return pairs if len(pairs) == len(items) else None  # type: ignore[return-value]


# --- measuring ranks


@dataclass
class RankProbe(Method):
    """Dense generation that notes, before each group of blocks, how many singular directions hold each alpha."""

    layers: tuple[range, ...]
    stages: frozenset[int]
    alphas: tuple[float, ...]
    found: dict[tuple[float, int, int], list[Tensor]] = field(default_factory=dict)  # (alpha, stage, group): one mean per request

    def plan(self, stage: Stage, canvas: Canvas) -> StagePlan:
        return StagePlan(taps=tuple(blocks.start for blocks in self.layers) if stage.index in self.stages else ())

    def observe(self, layer: int, before: Tensor, after: Tensor, tokens: Tokens) -> None:
        x, grid = tokens.on_grid(before)
        energies = singular_energies(x, grid.count)
        group = next(group for group, blocks in enumerate(self.layers) if blocks.start == layer)
        for alpha in self.alphas:
            rank = energy_ranks(energies, alpha).double().mean()
            self.found.setdefault((alpha, tokens.stage.index, group), []).append(rank)


def measure_ranks(
    pipe: Pipeline,
    prompts: Iterable[Any],
    alphas: Sequence[float] = (PUBLISHED_ALPHA,),
    method: StageVAR | None = None,
    stages: Sequence[int] | None = None,
    seed: int = 0,
    **request: Any,
) -> dict[float, dict[int, tuple[float, ...]]]:
    """Rank ratios of any model: {alpha: {stage: one ratio per group}}, mean over prompts, for `StageVAR(ranks=measured[alpha])`.

    Draws one image per prompt at full rank, the i-th with seed + i, guidance off where `method` (StageVAR()) says, and without its
    skips. Measured are `stages`, by default all those without guidance. `request`: size, guidance and so on, as for `pipe`.
    The authors took 553 prompts; the spread over prompts is a tenth of the mean.
    """
    method = StageVAR() if method is None else method
    schedule = pipe.settings.schedules.choose(request.get("size"), request.get("aspect"))
    first = method.first_unguided(pipe.model, schedule)
    measured = range(first, len(schedule)) if stages is None else stages
    unknown = [stage for stage in measured if not 0 <= stage < len(schedule)]
    if unknown or not len(measured):
        raise SettingError(f"no ranks to measure at stages {list(measured)}: {schedule} has stages 0 to {len(schedule) - 1}")
    if not all(is_share(alpha) for alpha in alphas) or not alphas:
        raise SettingError(f"alphas {alphas!r}: give one or more numbers above 0 and up to 1")
    layers = group_layers(pipe.model, method.groups)
    probe = RankProbe(layers, frozenset(measured), tuple(alphas))
    dense = replace(method, guidance_off=first, alphas=(), ranks=None, variant="vanilla", as_released=False)
    for image, prompt in enumerate(prompts):
        pipe(prompt, seed=seed + image, method=Combined((dense, probe)), **request)
    if not probe.found:
        raise SettingError("no ranks to measure: give at least one prompt")
    counted = counted_tokens(pipe.model)

    def ratio(alpha: float, stage: int, group: int) -> float:
        cells = schedule[stage].cells
        return float(torch.stack(probe.found[alpha, stage, group]).mean()) / (cells if counted is None else min(cells, counted))

    return {
        alpha: {stage: tuple(ratio(alpha, stage, group) for group in range(len(layers))) for stage in sorted(measured)} for alpha in alphas
    }
