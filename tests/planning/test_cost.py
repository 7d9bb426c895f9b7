"""MACs counted from plans equal those that torch's counter measures in real requests.

The counter sees mm, addmm and bmm. Attention runs with torch's math backend, whose two products are bmm, because the counter does not know
the fused CPU kernel. Not compared are convolutions (the canvas blends with them; decoding and the prompt are not counted), and mixtures of
codes, which the canvas multiplies with its codebook (codes are sampled here). SparseVAR has one product that is not counted; its size is
checked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nextscale.canvas import Canvas
from nextscale.engine import executor
from nextscale.generate import StageOutput
from nextscale.loading.load import random_pipeline
from nextscale.loading.presets import build_model, model_spec
from nextscale.methods import DENSE, DropGuidance, FastVAR, Method, SkipStages, SparseVAR, StagePlan, StageVAR
from nextscale.methods.method import Span
from nextscale.methods.registry import resolve_method
from nextscale.models import NextScaleModel
from nextscale.models.blocks import Block
from nextscale.models.context import ForwardContext
from nextscale.models.macs import SublayerTokens
from nextscale.pipeline import Pipeline, Preview
from nextscale.planning.cost import RequestCost, Workload, as_run, request_cost
from nextscale.report import Report
from nextscale.stage import Schedule, Stage, Tokens
from nextscale_research.methods import StageVARVariants, ToMe
from tests.helpers import tiny
from tests.helpers.toy_methods import KeepShare, Planned, first_tokens, keeping

OUTSIDE = ("aten.convolution",)
SELF_OR_TEXT_ATTENTION = re.compile(r"(?:(?:Modulated)?Block|ChunkStart)\.(?:text_)?attention|SelfAttention|CrossAttention")


# --- methods that cost less


@dataclass(frozen=True)
class Thin(Span):
    """Runs its blocks on a share of the tokens; the others stay as they are."""

    layers: range
    share: float = 0.5
    key: str = "thin"

    def num_tokens(self, tokens: int) -> int:
        return max(1, round(self.share * tokens))

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        on_grid, cells = tokens.on_grid(x)
        kept = first_tokens(on_grid, cells, self.num_tokens(cells.num_tokens))
        few = on_grid[:, : kept.num_tokens]
        few, kept = torch.cat([x[:, : tokens.prefix], few], dim=1), kept.with_prefix(tokens.prefix)
        for block in blocks:
            few = block(few, kept, ctx)
        return torch.cat([few, x[:, few.shape[1] :]], dim=1)


@dataclass(frozen=True)
class ThinAttention(Thin):
    """Only attention runs on fewer tokens."""

    def sublayer_tokens(self, tokens: int) -> SublayerTokens:
        return SublayerTokens(self.num_tokens(tokens), tokens, tokens)

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        for block in blocks:
            attention, *others = block.sublayers(ctx)
            kept = first_tokens(x, tokens, self.num_tokens(tokens.num_tokens))
            few = x[:, : kept.num_tokens]
            x = torch.cat([few + attention(few, kept, ctx), x[:, few.shape[1] :]], dim=1)
            for sublayer in others:
                x = x + sublayer(x, tokens, ctx)
        return x


@dataclass(frozen=True)
class Project(Thin):
    """Mixes all tokens into fewer, and runs its blocks on those."""

    def own_macs(self, tokens: int, dim: int) -> int:
        return tokens * self.num_tokens(tokens) * dim

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        kept = first_tokens(x, tokens, self.num_tokens(tokens.num_tokens))
        few = x[:, : kept.num_tokens]
        few = torch.bmm(torch.full((x.shape[0], few.shape[1], x.shape[1]), 1 / x.shape[1]), x)
        for block in blocks:
            few = block(few, kept, ctx)
        return torch.cat([few, x[:, few.shape[1] :]], dim=1)


def only(late: int, plan: StagePlan) -> Planned:
    return Planned(lambda stage: plan if stage.index >= late else DENSE)


def half(stage: Stage) -> int:
    return (stage.cells + 1) // 2


METHODS: dict[str, Method] = {
    "dense": Method(),
    "skip the last": SkipStages(1),
    "skip one in the middle": Planned(lambda stage: StagePlan(skip=stage.index == 1, cfg_branches="cond" if stage.index == 1 else "both")),
    "skip the first": Planned(lambda stage: StagePlan(skip=stage.index == 0)),
    "conditional rows": keeping("cond", 2),
    "unconditional rows": keeping("uncond", 2),
    "guidance faded, then dropped": DropGuidance(3, fade=2),
    "half of every stage": Planned(lambda stage: StagePlan(num_tokens=half(stage))),
    "other shares per image": KeepShare((0.3, 0.8)),
    "a span": only(1, StagePlan(spans=(Thin(range(1, 3)),))),
    "a span from the first stage on": only(0, StagePlan(spans=(Thin(range(2)),))),
    "a span of attention alone": only(1, StagePlan(spans=(ThinAttention(range(2)),))),
    "a span with a product of its own": only(1, StagePlan(spans=(Project(range(1)), Thin(range(2, 3), share=0.3)))),
    "a span in a reduced stage, rows dropped, the last skipped": resolve_method(
        [
            Planned(lambda stage: StagePlan(num_tokens=half(stage))),
            only(2, StagePlan(spans=(Thin(range(1, 3)),))),
            keeping("uncond", 2),
            SkipStages(1),
        ]
    ),
}


# --- what torch counts


@dataclass
class Counted:
    report: Report
    cost: RequestCost
    dense: RequestCost
    compute_mask: tuple[Tensor, ...] | None
    products: list[int] = field(default_factory=list)  # per stage, MACs
    attention: list[int] = field(default_factory=list)


def count(pipeline: Pipeline, prompts: Any, **settings: Any) -> Counted:
    """Runs a request and counts what happens between its condition and its decoding."""
    counter = FlopCounterMode(display=False, depth=2)
    seen: list[StageOutput] = []
    inside: dict[str, Any] = {}
    sums: list[tuple[int, int]] = [(0, 0)]

    def watch(preview: Preview) -> None:
        by_module = counter.get_flop_counts()
        everything = sum(flops for op, flops in by_module.get("Global", {}).items() if str(op) not in OUTSIDE)
        named = [flops for module, flops in by_module.items() if SELF_OR_TEXT_ATTENTION.fullmatch(module)]
        sums.append((everything, sum(ops.get(torch.ops.aten.bmm, 0) for ops in named)))
        seen.append(preview.done)

    begin = executor.begin

    def counted(model: NextScaleModel, cond: Any, canvas: Canvas, request: Any, *rest: Any) -> Any:
        text = 0 if cond.text is None else cond.text.keys_values[0][0].shape[1]
        inside.update(request=request, text=text)
        counting.enter_context(sdpa_kernel(SDPBackend.MATH))
        counting.enter_context(counter)  # until decoding has ended; `watch` reads it before
        return begin(model, cond, canvas, request, *rest)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as counting:
        patch.setattr(executor, "begin", counted)
        output = pipeline(prompts, seed=11, on_stage=watch, **{"smooth": False} | settings)
    request, model = inside["request"], pipeline.model
    workload = Workload(
        request.schedule,
        request.batch,
        request.guidance.needs_both,
        inside["text"],
        request.sampling.refine,
        residual_guided=request.guidance.scales[len(request.schedule) - 1] != 2,
    )
    plans = [as_run(model, done.stage, done.plan, done.num_tokens) for done in seen]
    counts = {done.stage.index: done.known_counts for done in seen if done.known_counts is not None}
    cost, dense = request_cost(model, workload, plans, counts), request_cost(model, workload)
    per_stage = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(sums)]
    assert all(flops % 2 == 0 for stage in per_stage for flops in stage)
    return Counted(
        output.report, cost, dense, output.compute_mask, *([flops // 2 for flops in kind] for kind in zip(*per_stage, strict=True))
    )


def count_tiny(family: str, **settings: Any) -> Counted:
    return count(tiny.shared_pipeline(family), tiny.prompts(family, 2), **settings)


@cache
def dense(family: str) -> Counted:
    return count_tiny(family)


def assert_exact(counted: Counted) -> None:
    assert [stage.total for stage in counted.cost.stages] == counted.products
    assert [stage.attention for stage in counted.cost.stages] == counted.attention
    assert counted.cost.total == sum(counted.products) == counted.cost.linear + counted.cost.attention + counted.cost.head


LIKE_OTHERS = ("var_shared", "infinity_patchify")  # in all that methods change


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in tiny.FAMILIES for name in METHODS if family not in LIKE_OTHERS or name == "dense"]
)
def test_every_product_is_counted(family: str, name: str) -> None:
    counted = count_tiny(family, method=METHODS[name])
    assert_exact(counted)
    everything = dense(family).products
    assert [stage.total for stage in counted.dense.stages] == everything
    assert counted.report.cost_share == pytest.approx(sum(counted.products) / sum(everything), rel=1e-12)
    shares = [stage / same for stage, same in zip(counted.products, everything, strict=True)]
    assert [stage.cost_share for stage in counted.report.stages] == pytest.approx(shares, rel=1e-12)
    assert (counted.report.cost_share == 1) == (name == "dense")
    assert counted.report.cost_share <= 1


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_one_cfg_branch_alone(family: str) -> None:
    counted = count_tiny(family, guidance=tiny.NO_GUIDANCE[family])
    assert_exact(counted)
    assert counted.report.cost_share == 1
    assert {stage.cfg_branches for stage in counted.report.stages} == {1}
    assert sum(counted.products) < 0.7 * sum(dense(family).products)


@pytest.mark.parametrize("family", tiny.TEXT_FAMILIES)
def test_longer_negative_texts(family: str) -> None:
    counted = count_tiny(family, negative=tiny.text_features(family, (17,)))
    assert_exact(counted)
    more = [stage.attention - same.attention for stage, same in zip(counted.cost.stages, dense(family).cost.stages, strict=True)]
    cells = [stage.cells for stage in tiny.schedule_of(family)]
    kept, padded = (0, 0) if family == "hart" else (16, 24)
    assert more == [2 * tiny.WIDTH * tiny.DEPTH * 4 * size * (padded - kept) for size in cells]


def test_other_schedules() -> None:
    assert_exact(count_tiny("flexvar", size=Schedule([(1, 1), (2, 3), (4, 6)]), method=SkipStages(1)))
    assert_exact(count_tiny("hart", size=Schedule([(1, 1), (2, 3), (4, 6)]), method=KeepShare((0.5, 0.5))))


# --- the published methods


FASTVAR, TOME = FastVAR({2: 0.3, 3: 0.5}, layers=(1, 3)), ToMe(stages=(2, 3))
MERGED_ATTENTION = replace(TOME, sublayers=("attention",))
STAGEVAR = StageVAR(guidance_off=2, alphas={2: 0.96, 3: 0.96}, ranks=0.3)
SPARSEVAR = SparseVAR(tau=0.95, alpha=2, first_stage=2)
SPANS = {"fastvar": FASTVAR, "stagevar": STAGEVAR, "tome": TOME, "tome for attention alone": MERGED_ATTENTION}


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if family not in LIKE_OTHERS])
@pytest.mark.parametrize("name", SPANS)
def test_the_products_of_published_methods_are_counted(family: str, name: str) -> None:
    counted = count_tiny(family, method=SPANS[name])
    assert_exact(counted)
    assert counted.report.cost_share == pytest.approx(sum(counted.products) / sum(dense(family).products), rel=1e-12)
    assert all(stage.computed < stage.height * stage.width for stage in counted.report.stages[2:4])


@pytest.mark.parametrize("family", ["var", "infinity"])
def test_an_approximation_of_low_rank_is_put_together_from_all_directions(family: str) -> None:
    """Whatever rank a forecast assumes: those beyond the rank are zeros."""
    assert_exact(count_tiny(family, method=StageVARVariants(guidance_off=2, alphas={2: 0.9, 3: 0.96}, variant="svd_approximation")))


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if family not in LIKE_OTHERS])
def test_all_of_sparsevar_but_its_search_for_anchors_is_counted(family: str) -> None:
    """The search multiplies expected logits of all cells with the anchors' logits, in reduced stages of every image.

    Texts are equally long, because packed rows read shorter ones only up to their length, which is not counted.
    """
    prompts, negative = tiny.prompts(family, 2), None
    if family in tiny.TEXT_FAMILIES and family != "hart":
        prompts, negative = (tiny.text_features(family, (7, 7), seed) for seed in (0, 1))
    counted = count(tiny.shared_pipeline(family), prompts, negative=negative, method=SPARSEVAR, compute_mask=True)
    assert counted.compute_mask is not None
    reduced = [bool((mask < 1).any()) for mask in counted.compute_mask]  # also where one image keeps every cell
    logits = tiny.shared_pipeline(family).model.head.out_features
    anchors = [-(-stage.height // 2) * -(-stage.width // 2) for stage in tiny.schedule_of(family)]
    searches = [0 if family == "flexvar" else 2 * stage.cells * anchors[stage.index] * logits for stage in tiny.schedule_of(family)]
    extra = [search if less else 0 for search, less in zip(searches, reduced, strict=True)]
    assert any(reduced)
    assert [stage.total + own for stage, own in zip(counted.cost.stages, extra, strict=True)] == counted.products
    assert [stage.attention for stage in counted.cost.stages] == counted.attention


@pytest.mark.parametrize("family", ["var", "infinity", "hart"])  # without text, with text as a sublayer of blocks, with text before cells
@pytest.mark.parametrize("name", ["dense", "fastvar", "stagevar", "tome", "tome for attention alone", "skip the last"])
def test_computed_tokens_are_those_of_the_compute_masks(family: str, name: str) -> None:
    counted = count_tiny(family, method=(METHODS | SPANS)[name], compute_mask=True)
    assert counted.compute_mask is not None
    shares = [mask.sum(dim=(1, 2)).tolist() for mask in counted.compute_mask]
    assert shares == [pytest.approx([stage.computed] * 2) for stage in counted.report.stages]
    assert [stage.computed for stage in counted.report.stages] == [stage.computed for stage in counted.cost.stages]
    cells = [stage.cells for stage in tiny.schedule_of(family)]
    assert [stage.computed for stage in counted.dense.stages] == cells
    if name == "dense":
        assert [stage.computed for stage in counted.report.stages] == cells


def test_computed_tokens_by_hand() -> None:
    """Stages of 9 and 16 cells, three blocks."""

    def computed(family: str, method: Method) -> list[float]:
        return [stage.computed for stage in count_tiny(family, method=method).report.stages]

    assert computed("var", FASTVAR) == pytest.approx([1, 4, (9 + 2 * 7) / 3, (16 + 2 * 8) / 3])
    assert computed("var", SkipStages(1)) == [1, 4, 9, 0]
    assert computed("var", only(3, StagePlan(spans=(ThinAttention(range(3)),)))) == [1, 4, 9, (8 + 16) / 2]
    assert computed("star", only(3, StagePlan(spans=(ThinAttention(range(3)),)))) == pytest.approx([1, 4, 9, (8 + 2 * 16) / 3])
    assert computed("hart", only(0, StagePlan(spans=(Thin(range(1, 3)),)))) == pytest.approx([1, 8 / 3, 17 / 3, 32 / 3])


def test_star_without_rounds_and_with_drafts_alone() -> None:
    refined = tiny.SPECS["star_refined"].settings.sampling.refine
    at_once = count_tiny("star_refined", refine=None)
    drafted = count_tiny("star_refined", refine=replace(refined, drafted=(4, 9)))
    assert_exact(at_once)
    assert_exact(drafted)
    assert drafted.products == at_once.products
    assert sum(at_once.products) < sum(dense("star_refined").products)


def test_star_as_released_reads_one_text_for_all_rows() -> None:
    spec = tiny.star_spec()
    counted = count(random_pipeline(replace(spec, model=replace(spec.model, as_released=True))), tiny.prompts("star", 2))
    assert_exact(counted)
    assert sum(counted.products) < sum(dense("star").products)


def test_hart_s_diffusion_at_the_scale_that_means_no_guidance() -> None:
    last = len(tiny.HART_SIDES) - 1
    plain, special = (count_tiny("hart", guidance=[3.0] * last + [scale]) for scale in (3.0, 2.0))
    assert_exact(plain)
    assert_exact(special)
    assert special.products[:-1] == plain.products[:-1]
    assert special.products[-1] < plain.products[-1]


def test_hart_with_a_table_of_levels() -> None:
    spec = tiny.hart_spec()
    assert_exact(count(random_pipeline(replace(spec, model=replace(spec.model, level_table=True))), tiny.prompts("hart", 2)))


def test_mixtures_of_codes_are_the_canvas_s_own() -> None:
    counted = count_tiny("hart", smooth=True)
    mixed = [2 * stage.cells * tiny.CODES * tiny.LATENT_CHANNELS for stage in tiny.schedule_of("hart")]
    assert [stage.total + own for stage, own in zip(counted.cost.stages, mixed, strict=True)] == counted.products


# --- by hand


class NoWork(Span):
    """A span that costs nothing."""

    layers, key = range(1), "nothing"

    def num_tokens(self, tokens: int) -> int:
        return 0

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        return x


def test_a_small_sum_by_hand() -> None:
    """VAR, one image, one row, stages of 1 and 4 cells. Dim 64: qkv, projection and a fourfold feed-forward are 12 * 64 * 64."""
    spec = tiny.var_spec()
    model = build_model(replace(spec.model, sides=(1, 2)))
    first, second = request_cost(model, Workload(Schedule((1, 2)), guided=False)).stages
    per_token, head = 3 * 12 * 64 * 64, 64 * tiny.CODES
    assert (first.linear, first.attention, first.head) == (per_token, 3 * 2 * 64, head)
    embedding = 4 * tiny.LATENT_CHANNELS * 64
    assert (second.linear, second.attention, second.head) == (4 * per_token + embedding, 3 * 2 * 64 * 4 * (1 + 4), 4 * head)
    assert (first.keys, first.held, second.keys, second.held) == (3, 3, 12, 3)
    guided = request_cost(model, Workload(Schedule((1, 2)), images=3)).stages
    assert guided[1].linear == 6 * 4 * per_token + 3 * embedding  # both rows of an image read the same canvas
    assert guided[1].attention == 6 * second.attention
    thin = request_cost(model, Workload(Schedule((1, 2)), guided=False), [StagePlan(spans=(NoWork(),)), DENSE]).stages
    assert (thin[0].linear, thin[0].keys) == (2 * per_token // 3, 2)
    assert thin[1].attention == 2 * 64 * 4 * (4 + 5 + 5)  # the first layer has no key of the first stage


def test_images_that_are_planned_alike_are_not_listed() -> None:
    """No list has this number of entries."""
    model, schedule, images = tiny.shared_pipeline("var").model, Schedule(tiny.VAR_SIDES), 10**30
    one, many = (request_cost(model, Workload(schedule, number)) for number in (1, images))
    assert many.total == images * one.total and many.stages[-1].rows == 2 * images and many.stages[-1].held == one.stages[-1].held


def test_keys_of_spans_and_skipped_stages_are_not_held() -> None:
    model = tiny.shared_pipeline("var").model
    workload = Workload(Schedule(tiny.VAR_SIDES))
    plans = [DENSE, StagePlan(skip=True), StagePlan(spans=(Thin(range(1, 3), 1 / 3),)), DENSE]
    cost = request_cost(model, workload, plans)
    assert [stage.keys for stage in cost.stages] == [3, 0, 9 + 3 + 3, 48]
    assert [stage.held for stage in cost.stages] == [3, 3, 18, 18]
    assert [stage.skipped for stage in cost.stages] == [False, True, False, False]
    assert (cost.held, request_cost(model, workload).held) == (2 * 18, 2 * 3 * (1 + 4 + 9))
    dropped = request_cost(model, workload, [DENSE, DENSE, StagePlan(cfg_branches="cond"), DENSE])
    assert [stage.rows for stage in dropped.stages] == [2, 2, 1, 1]
    assert dropped.held == 3 * 14  # one row at the end, two rows of 15 before


def test_as_many_plans_as_stages() -> None:
    with pytest.raises(ValueError, match="plans must have .* 4 stages.*got 2"):
        request_cost(tiny.shared_pipeline("var").model, Workload(Schedule(tiny.VAR_SIDES)), [DENSE, DENSE])


def test_a_published_model_without_weights() -> None:
    """Infinity-2B at one megapixel, one image with CFG: 115 TFLOP, including 36 TFLOP of attention."""
    spec = model_spec("infinity-2b")
    with torch.device("meta"):
        model = build_model(spec.model)
    schedule = spec.settings.schedules.choose(None, None)
    cost = request_cost(model, Workload(schedule, text_tokens=64))
    tokens, dim, depth = 10521, 2048, 32
    assert cost.linear == 2 * tokens * depth * (4 + 2 + 8) * dim**2 + (tokens - 1) * 32 * dim
    assert cost.attention == 2 * 2 * dim * depth * sum(stage.cells * (stage.start + stage.cells + 64) for stage in schedule)
    assert cost.head == 2 * tokens * dim * 64
    assert (round(2e-12 * cost.total), round(2e-12 * cost.attention)) == (115, 36)


# --- forecasts and reports


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_forecast_costs_what_the_run_does(family: str) -> None:
    method = resolve_method("skip:last=1")
    counted = count_tiny(family, method=method)
    model, schedule = tiny.shared_pipeline(family).model, tiny.schedule_of(family)
    forecast = [replace(plan, num_tokens=None) for plan in method.forecast(model, schedule)]
    plain = Workload(schedule, 2, text_tokens=16, refine=tiny.SPECS[family].settings.sampling.refine)
    assert request_cost(model, plain, forecast) == counted.cost
    assert counted.cost.share(counted.dense) == counted.report.cost_share


def test_the_report_has_skipped_stages_and_cfg_branches() -> None:
    method = Planned(lambda stage: StagePlan(skip=stage.index == 1, cfg_branches="cond" if stage.index > 1 else "both"))
    stages = tiny.shared_pipeline("var")([3, 7], seed=1, method=method).report.stages
    assert [stage.skipped for stage in stages] == [False, True, False, False]
    assert [stage.cfg_branches for stage in stages] == [2, 0, 1, 1]
    assert [stage.cost_share == 0 for stage in stages] == [False, True, False, False]


@dataclass(frozen=True)
class Named(Method):
    tau: float = 0.5
    stages: tuple[int, ...] = ()
    mode: str | None = None


@dataclass(frozen=True)
class Needing(Method):
    depth: int


@pytest.mark.parametrize(
    ("method", "label"),
    [
        (None, "dense"),
        ("dense", "dense"),
        (SkipStages(), "SkipStages"),
        ("skip:last=1", "SkipStages(last=1)"),
        (Named(), "Named"),
        (Named(tau=0.6, mode="mse"), "Named(tau=0.6, mode=mse)"),
        (Named(stages=(1, 2)), "Named(stages=(1, 2))"),
        (Needing(3), "Needing(depth=3)"),
        ([Named(tau=0.6), SkipStages(1)], "Named(tau=0.6) + SkipStages(last=1)"),
    ],
)
def test_methods_have_readable_names(method: Any, label: str) -> None:
    assert resolve_method(method).label == label
    assert isinstance(method, Needing) or tiny.shared_pipeline("var")(3, seed=1, method=method).report.method == label
