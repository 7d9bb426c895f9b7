"""StageVAR (arXiv 2512.16483): late stages only refine, so they run without the prompt and on a low-rank stand-in of their tokens."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

from torch import Tensor

from ...checks import is_whole
from ...errors import SettingError
from ...models.base import NextScaleModel
from ...models.blocks import Block, run_in_order
from ...models.env import Env
from ...stage import Schedule, Stage, Tokens, repeat_tail
from ..method import Method, MethodRun, Plans, RunSetup, Span, StagePlan
from ..select import require_own_text
from .groups import LowRank, first_tokens, memory_name, normal_noise, race_noise, sublayers_in
from .lowrank import Energy, Rank, Share, project, projection, representatives, squared_norms, zero_tail
from .ranks import CONSTANT_RATIO, counted_tokens, no_table, table_for, table_ratios
from .settings import (
    PUBLISHED,
    PUBLISHED_ALPHA,
    Alphas,
    StageRatios,
    checked_alphas,
    checked_ranks,
    group_layers,
    published_for,
    released_sides,
)
from .variants import ApproximatedRows, LeastSquaresRows, SingularRows

Variant = Literal["vanilla", "svd_approximation", "svd", "svd_fixed", "least_squares", "representative"]


@dataclass(frozen=True)
class StageVAR(Method):
    """Late stages run on the unconditional rows alone, on few projected rows per group of blocks, or not at all.

    Three savings, each with its own setting; `StageVAR()` is the published combination.

    guidance_off: from this stage on only the unconditional rows run. None: as published (Infinity stage 10 of 13, STAR and HART stage
        12 of 14), elsewhere the last two stages. The number of stages, or any larger number, is never. In a request without guidance
        there are no such rows, and those that there are go on. With a negative prompt the unconditional rows are its rows, and the late
        stages are drawn from it: use guidance_off with the empty prompt only.
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
        representative tokens, and goes by the sides 40 (low rank), 48 and 64 (skipped) of square images, with nothing after them. With
        fewer groups than the published table it takes the table's first ratios, though those were measured of other blocks. On STAR
        and HART it does as we do; other numbers of stages than their 14 need guidance_off and alphas.

    Every low-rank stage needs the whole grid of the stage before it: a method that reduces or skips that stage is refused.

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
        if self.guidance_off is not None and not is_whole(self.guidance_off):
            raise SettingError(f"guidance_off is the first stage without guidance, a whole number from 0; got {self.guidance_off!r}")
        if self.groups is not None and not is_whole(self.groups, least=1):
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

    def start(self, setup: RunSetup) -> MethodRun:
        if any(isinstance(span, LowRank) and span.restores_from_memory for plan in setup.plans for span in plan.spans):
            require_own_text(setup.model, setup.batch, "StageVAR runs other rows")
        return super().start(setup)

    @property
    def capturable(self) -> bool:
        """Measured ranks are read by the host, and solvers tell it whether they succeeded."""
        return self.variant in ("vanilla", "representative") and self.ranks != "measured"

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        """The plans of all stages. `kept` matters for measured ranks only: the share of the largest possible rank."""
        if self.as_released:
            self._check_released(model, schedule)
        guidance_off = self.first_unguided(model, schedule)
        alphas = self.stage_alphas(model, schedule)
        layers = group_layers(model, self.groups)
        low = {} if self.variant == "vanilla" else {stage: alpha for stage, alpha in alphas.items() if 0 < alpha < 1}
        source = restored_from([stage for stage in schedule if alphas.get(stage.index) != 0], low)
        if low and not SPANS[self.variant].restores_from_memory:
            source = set()
        first_positions = self.as_released and bool(released_sides(model))
        plans = []
        for stage in schedule:
            if alphas.get(stage.index) == 0:
                plans.append(StagePlan(skip=True))
                continue
            remember = stage.index in source
            spans: list[Span] = []
            if stage.index in low:
                ranks = self._ranks(model, stage, low[stage.index], len(layers), kept)
                for group, (blocks, rank) in enumerate(zip(layers, ranks, strict=True)):
                    spans.append(SPANS[self.variant](blocks, group, rank, remember, first_positions))
            elif remember:
                spans += [Remember(blocks, group) for group, blocks in enumerate(layers)]
            cfg_branches: Literal["both", "uncond"] = "uncond" if guided and stage.index >= guidance_off else "both"
            plans.append(StagePlan(cfg_branches=cfg_branches, spans=tuple(spans)))
        return tuple(plans)

    def first_unguided(self, model: NextScaleModel, schedule: Schedule) -> int:
        """The first stage of the unconditional rows alone."""
        if self.guidance_off is not None:
            return self.guidance_off
        if self.as_released and (sides := released_sides(model)):
            return next((stage.index for stage in schedule if stage.width in sides), len(schedule))
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
        if self.as_released and (sides := released_sides(model)):
            return {stage.index: sides[stage.width] for stage in schedule if stage.width in sides}
        published = published_for(model)
        if published is not None and published.stages == len(schedule):
            return dict(published.alphas)
        return {len(schedule) - 1: PUBLISHED_ALPHA} if len(schedule) > 1 else {}

    def _check_released(self, model: NextScaleModel, schedule: Schedule) -> None:
        published = published_for(model)
        if published is None:
            known = ", ".join(PUBLISHED)
            raise SettingError(f"as_released: there are programs for {known} only, not for {type(model).__name__}; leave it out")
        if any(stage.height != stage.width for stage in schedule):
            raise SettingError(f"as_released: the released program draws square images only, not {schedule}; leave as_released out")
        if published.sides is None and len(schedule) != published.stages and None in (self.alphas, self.guidance_off):
            raise SettingError(
                f"as_released: the released program for {type(model).__name__} has {published.stages} stages, and {schedule} has"
                f" {len(schedule)}: give both alphas and guidance_off, or leave as_released out"
            )
        alphas = self.stage_alphas(model, schedule)
        skipped = [stage.index for stage in schedule if alphas.get(stage.index) == 0]
        if skipped and skipped != list(range(skipped[0], len(schedule))):
            raise SettingError(
                f"as_released: stage {skipped[0]}, {schedule[skipped[0]].width} wide, is skipped and a later one is not, which the released"
                f" program does not do; got {schedule}: give other alphas, or leave as_released out"
            )
        if published.sides is None:
            return
        named = ", ".join(str(side) for side in published.sides)
        if self.alphas is None and not any(stage.width in published.sides for stage in schedule):
            raise SettingError(f"as_released: the released program acts at sides {named}; {schedule} has none of them")
        for stage in (schedule[index] for index, alpha in alphas.items() if 0 < alpha < 1):
            if stage.width not in published.sides:
                raise SettingError(f"as_released: the released program runs sides {named} at low rank, not {stage.width} of {schedule}")

    def _ranks(self, model: NextScaleModel, stage: Stage, alpha: float, groups: int, kept: float) -> list[Rank]:
        """One per group."""
        dim = model.block_config.dim
        if self.ranks == "measured" or self.variant in ("svd", "svd_approximation"):
            return [Energy(alpha, dim, kept)] * groups
        most = dim if self.variant == "svd_fixed" else None  # there are no more singular directions
        return [Share(ratio, counted_tokens(model), most) for ratio in self._ratios(model, stage, alpha, groups)]

    def _ratios(self, model: NextScaleModel, stage: Stage, alpha: float, groups: int) -> tuple[float, ...]:
        if self.ranks is None or self.ranks == "table":
            table = table_for(model, groups, self.as_released)
            if table is not None:
                return table_ratios(table, alpha, stage, groups)
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


# --- the groups of blocks of a stage


@dataclass(frozen=True)
class Remember(Span):
    """Runs a group of blocks as it is and keeps its output for the next stage."""

    whole_stage = True

    layers: range
    group: int

    @property
    def key(self) -> Hashable:  # type: ignore[override]
        return f"stagevar memory of group {self.group}"

    @property
    def stores(self) -> frozenset[Hashable]:
        return frozenset({memory_name(self.group)})

    def num_tokens(self, tokens: int) -> int:
        return tokens

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        x = run_in_order(blocks, x, tokens, env)
        env.memory.store(memory_name(self.group), x, tokens)
        return x


class RepresentativeRows(LowRank):
    """Random projection, put back at representative tokens (equation 8): the method itself."""

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        rank, ranks = self.ranks(x, tokens, env)
        chosen = repeat_tail(representatives(squared_norms(x), race_noise(x, tokens, env), rank, tokens.count), ranks)  # [R, r]
        normal = normal_noise(x, tokens, env, self.rank.columns(tokens.stage.cells))[..., :rank]
        q = projection(normal, rank if ranks is None else ranks)
        rows = repeat_tail(project(zero_tail(x, tokens.count), q), ranks)
        places = tokens.take(chosen, ranks)
        y = run_in_order(blocks, rows, first_tokens(tokens, rows, ranks) if self.first_positions else places, env)
        if env.computed is not None:
            env.computed.add(places, rows, sublayers_in(blocks))
        return self.remembered(tokens, env).scatter(1, chosen[..., None].expand_as(y), repeat_tail(y, ranks))


SPANS: dict[str, type[LowRank]] = {
    "svd_approximation": ApproximatedRows,
    "svd": SingularRows,
    "svd_fixed": SingularRows,
    "least_squares": LeastSquaresRows,
    "representative": RepresentativeRows,
}
