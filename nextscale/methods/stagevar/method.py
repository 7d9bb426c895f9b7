"""StageVAR (arXiv 2512.16483): late stages only refine, so they run without the prompt and on a low-rank stand-in of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

from ...errors import SettingError
from ...guidance import CfgBranch, CfgBranches
from ...methods.rank_table import RankTable
from ...models.base import NextScaleModel
from ...stage import Schedule, Stage
from ...validation import is_int, is_one_of, require_flags
from ..drop_guidance import check_kept_rows
from ..method import Method, MethodRun, Plans, RunSetup, Span, StagePlan
from ..token_ops import require_own_text
from .groups import LowRank, Remember
from .lowrank import Energy, Rank, Share
from .ranks import counted_tokens, given_table, table_for
from .released import released_alphas, released_sides, require_released
from .settings import PUBLISHED_ALPHA, Alphas, StageRatios, Variant, checked_alphas, checked_ranks, group_layers, published_for
from .variants import SPANS


@dataclass(frozen=True)
class StageVAR(Method):
    """Late stages run on the rows of one cfg branch alone, on few projected rows per group of blocks, or not at all.

    There are three savings, each with its own setting; `StageVAR()` is the published combination.

    The knobs that matter:
    guidance_off: from this stage on only the rows of one cfg branch run. None is the published stage (Infinity 10 of 13, STAR and HART 12
        of 14), elsewhere the last but one. The number of stages, or any larger number, is never. A request without guidance has no
        unconditional rows, and its conditional ones go on.
    kept_rows: the branch that goes on. "uncond" is as published: the unconditional rows, and a negative prompt, which is what those read,
        is what the late stages are generated from: use it with the empty prompt only. "cond" keeps the conditional rows, which is a
        guidance scale of 1: a negative prompt has its say before and does no harm after. It costs the same, and on nano it is nearer to
        dense generation (LPIPS 0.032 against 0.044 from stage 11 on).
    alphas: stage index to alpha, as a mapping or as pairs. 0 skips the stage, 1 runs it in full, and in between it runs at the rank that
        holds this share of its energy. None is as published (Infinity {10: 0.96, 11: 0, 12: 0}, STAR and HART {13: 0.96}), elsewhere
        the last stage at 0.96. `StageVAR(guidance_off=99, alphas=())` is dense generation.

    To tinker with:
    ranks: where the rank of an alpha comes from. None is the table of the model: the one that lies beside its weights, measured by
        `nextscale observe ranks`, or the published one (Infinity-2B, STAR-1024, HART), at the stage with the nearest number of cells. No
        model takes that of another: without one it is refused. A file name is such a table too. A number is the same ratio for all
        groups, a tuple has one per group, and a mapping has such a tuple per stage (`measure_ranks` returns them). "measured" finds the
        rank from singular values during generation: every image has its own, and every group waits for the host. A ratio makes
        int(ratio * tokens) + 1 rows; on backbones other than Infinity min(tokens, dim) takes the place of tokens.
    groups: blocks per group. None is as published (Infinity an eighth of the depth, STAR and HART 1), elsewhere an eighth of the depth.
    variant: how a stage runs at low rank, in the order of the paper's table 2. "vanilla" does not; "svd_approximation" runs all
        tokens of the best approximation; "svd" runs the leading singular directions, as many as the energy asks for, and "svd_fixed" as
        many as `ranks` says; "least_squares" runs random projections and solves for the tokens; "representative" is the method. The
        SVD variants are for study: they take longer than what they save.
    as_released: does what the reference implementation does. For Infinity that gives the projected rows the first positions of the
        stage, not those of their representative tokens, and finds stages by the sides 40 (low rank), 48 and 64 (skipped) of square
        images, with nothing after them. Every model of a family has the published table, and with fewer groups its first ratios, though
        those were measured of other blocks. On STAR and HART it does as we do; other numbers of stages than their 14 need guidance_off and
        alphas.

    Every low-rank stage needs the whole grid of the stage before it: a method that reduces or skips that stage is refused.

    All noise comes from the request's rng for methods. Every group of a low-rank stage takes first exponential noise [B, cells], whose
    smallest ratios to the squared norms of the tokens choose the representatives, in this order; then normal noise [B, cells, rank],
    which is Q times sqrt(rank). "least_squares" takes only the second. To replay stored noise give `seed=` an object with these two
    methods.
    """

    guidance_off: int | None = None
    alphas: Mapping[int, float] | Alphas | None = None
    ranks: Literal["measured"] | float | tuple[float, ...] | Mapping[int, Sequence[float]] | StageRatios | RankTable | str | None = None
    groups: int | None = None
    variant: Variant = "representative"
    as_released: bool = False
    kept_rows: CfgBranch = "uncond"

    def __post_init__(self) -> None:
        require_flags(self, "as_released")
        if self.guidance_off is not None and not is_int(self.guidance_off):
            raise SettingError(f"guidance_off is the first stage without guidance, a whole number from 0; got {self.guidance_off!r}")
        if self.groups is not None and not is_int(self.groups, least=1):
            raise SettingError(f"groups is a number of blocks per group, 1 or more; got {self.groups!r}")
        if not is_one_of(self.variant, get_args(Variant)):
            raise SettingError(f"variant {self.variant!r}: choose one of {', '.join(get_args(Variant))}")
        if self.alphas is not None:
            object.__setattr__(self, "alphas", checked_alphas(self.alphas))
        if self.ranks is not None:
            object.__setattr__(self, "ranks", checked_ranks(self.ranks))
            self._check_ranks()
        check_kept_rows(self.kept_rows)
        if self.as_released and self.kept_rows != "uncond":
            raise SettingError(f'as_released: the reference implementation keeps the rows "uncond", not {self.kept_rows!r}')
        if self.as_released and self.variant != "representative":
            raise SettingError(f'as_released: the reference implementation has the variant "representative" only, not {self.variant!r}')

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
        """Measured ranks are read by the host, and solvers report to it whether they succeeded."""
        return self.variant in ("vanilla", "representative") and self.ranks != "measured"

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        """The plans of all stages. `kept` matters for measured ranks only, as the assumed share of the largest possible rank."""
        if self.as_released:
            require_released(self, model, schedule)
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
            cfg_branches: CfgBranches = self.kept_rows if guided and stage.index >= guidance_off else "both"
            plans.append(StagePlan(cfg_branches=cfg_branches, spans=tuple(spans)))
        return tuple(plans)

    def first_unguided(self, model: NextScaleModel, schedule: Schedule) -> int:
        """Index of the first stage that runs the rows of one cfg branch alone."""
        if self.guidance_off is not None:
            return self.guidance_off
        if self.as_released and released_sides(model):
            return min(released_alphas(model, schedule), default=len(schedule))
        published = published_for(model)
        if published is not None and published.stages == len(schedule):
            return published.guidance_off
        return max(1, len(schedule) - 2)

    def stage_alphas(self, model: NextScaleModel, schedule: Schedule) -> dict[int, float]:
        """Alphas by stage index; stages without one run in full."""
        if self.alphas is not None:
            chosen = dict(self.alphas)
            beyond = [stage for stage in chosen if stage >= len(schedule)]
            if beyond:
                raise SettingError(f"alphas name stage {beyond[0]}; {schedule} has stages 0 to {len(schedule) - 1}")
            return chosen
        if self.as_released and released_sides(model):
            return released_alphas(model, schedule)
        published = published_for(model)
        if published is not None and published.stages == len(schedule):
            return dict(published.alphas)
        return {len(schedule) - 1: PUBLISHED_ALPHA} if len(schedule) > 1 else {}

    def _ranks(self, model: NextScaleModel, stage: Stage, alpha: float, groups: int, kept: float) -> list[Rank]:
        """The rank of each group at a low-rank stage."""
        dim = model.block_config.dim
        if self.ranks == "measured" or self.variant in ("svd", "svd_approximation"):
            return [Energy(alpha, dim, kept)] * groups
        most = dim if self.variant == "svd_fixed" else None  # there are no more singular directions
        return [Share(ratio, counted_tokens(model), most) for ratio in self._ratios(model, stage, alpha, groups)]

    def _ratios(self, model: NextScaleModel, stage: Stage, alpha: float, groups: int) -> tuple[float, ...]:
        """The ratio of each group, from a table or as given."""
        if self.ranks is None:
            return table_for(model, groups, self.as_released).ratios(alpha, stage.cells)[:groups]
        if isinstance(self.ranks, RankTable):
            return given_table(self.ranks, model, groups).ratios(alpha, stage.cells)
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
    """Stages whose outputs a low-rank stage is restored from: always the one that runs before it."""
    if executed and executed[0].index in low:
        raise SettingError(f"stage {executed[0].index} cannot run at low rank: no stage runs before it to restore its tokens from")
    return {before.index for before, stage in pairwise(executed) if stage.index in low}
