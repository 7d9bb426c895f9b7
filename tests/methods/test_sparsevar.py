"""SparseVAR: which tokens are left out, which anchors propagate to them, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from math import sqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nextscale.cache import ComputedCells
from nextscale.errors import SettingError
from nextscale.generate import StageOutput, propagated
from nextscale.guidance import CfgBranches
from nextscale.loading.presets import ModelConfig, build_model
from nextscale.methods import DENSE, DropGuidance, Method, MethodRun, Plans, RunSetup, SkipStages, Span, StagePlan, StageVAR
from nextscale.methods.combine import Combined
from nextscale.methods.sparsevar import SparseRun, SparseVAR
from nextscale.methods.sparsevar_cells import (
    GridMap,
    anchor_cells,
    anchor_count,
    best_anchor,
    feature_change,
    image_change,
    in_steps,
    largest_cells,
    neighbor_similarity,
    share_above,
)
from nextscale.models import Hart, HartConfig, InfinityConfig, NextScaleModel, StarConfig, VarConfig
from nextscale.models.base import HeadInputs
from nextscale.models.blocks import Block
from nextscale.models.context import ForwardContext
from nextscale.pipeline import Output, Preview
from nextscale.sampling import ImageRng
from nextscale.schedules import FLEXVAR_512, HART_1024, INFINITY_SIZES, VAR_256, VAR_512
from nextscale.stage import Schedule, Stage, Tokens, repeat_tail
from nextscale.text import TextFeatures
from tests.helpers import tiny
from tests.helpers.toy_methods import counted, entered

# Settings that leave out something of every image of `tiny.prompts`, and of different images differently much, and with which some
# tokens resemble an anchor and others do not. Random weights change all cells about alike, hence so high a tau.
STRONG = {family: SparseVAR(tau=0.97, alpha=3, beta=0.98, blocks=0) for family in tiny.FAMILIES} | {"flexvar": SparseVAR(tau=0.9, blocks=0)}
INFINITY_SIDES = tuple(height for height, _ in INFINITY_SIZES[1.0])
PROGRAM = {"blocks": (0, 2), "as_released": True}
RESIDUAL_FAMILIES = tuple(family for family in tiny.FAMILIES if family != "flexvar")
ANY_SCHEDULE = tuple(family for family in tiny.FAMILIES if not family.startswith("var"))
NON_SQUARE = {family: Schedule(((1, 1), (2, 3), (3, 5), (4, 6))) for family in ANY_SCHEDULE}
NON_SQUARE["flexvar"] = Schedule(((1, 1), (2, 3), (3, 4), (3, 5), (4, 6)))  # torch normalizes no single 1x1 image, so none is decoded
WHOLE_CODES = {"hart": {"smooth": False}}  # mixtures of codes are equal to rounding only

# Over 10 seeds and 3 images per family, codes and cells of a batch and of its images alone were equal, latents within 1.2e-6 (FlexVAR and
# Infinity: bit for bit), HART's within 1.6e-5 (its diffusion amplifies rounding), pixels within 1e-5.
LATENT_TOLERANCE = dict.fromkeys(tiny.FAMILIES, 1e-5) | {"hart": 2e-4}
PIXEL_TOLERANCE = 1e-4  # of pixels with a standard deviation near 0.6


def start(method: Method, family: str = "var", schedule: Schedule | None = None, batch: int = 1) -> Any:
    model, schedule = tiny.shared_pipeline(family).model, schedule or tiny.schedule_of(family)
    plans = method.forecast(model, schedule)
    return method.start(RunSetup(model, schedule, batch, ImageRng([0] * batch, torch.device("cpu")), plans))


def plan_of(run: SparseRun, stage: Stage, canvas: Any = None) -> StagePlan:
    """What the stage will do once the host has read the counts, as generation finds it out."""
    return run.plan(stage, run.setup.plans[stage.index], counted(run, stage, canvas))


@dataclass(frozen=True)
class Watched(Method):
    """Hands out the method's runs, so that a test can see their state after every stage."""

    method: Method
    runs: list[Any] = field(default_factory=list, compare=False)

    exclusive = frozenset({"tokens"})

    @property
    def data_dependent(self) -> bool:
        return self.method.data_dependent

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        return self.method.forecast(model, schedule, guided, kept)

    def start(self, setup: RunSetup) -> MethodRun:
        self.runs.append(self.method.start(setup))
        return self.runs[-1]


@dataclass
class Seen:
    done: StageOutput
    excluded: Tensor | None  # [B, h, w]
    counts: list[int] | None  # of computed tokens, per image
    restored: Tokens | None  # those that have logits, their own or an anchor's


def watched(family: str, method: Method | None = None, images: int = 3, **options: Any) -> tuple[Output, list[Seen]]:
    watching, seen = Watched(method or STRONG[family]), []

    def look(preview: Preview) -> None:
        run = watching.runs[-1]
        cells = None if preview.done.skipped else run.cells
        size = preview.done.stage.size
        excluded = None if cells is None else cells.excluded.clone().unflatten(1, size)
        counts = None if cells is None else cells.kept.sum(dim=1).tolist()
        propagates = cells is not None and run.alpha is not None and preview.done.tokens.index is not None
        seen.append(Seen(preview.done, excluded, counts, preview.done.tokens if propagates else None))

    options = WHOLE_CODES.get(family, {}) | {"seed": 11} | options
    prompts = options.pop("prompts", tiny.prompts(family, images))
    return tiny.shared_pipeline(family)(prompts, method=watching, on_stage=look, **options), seen


def generated(family: str, images: int = 3, **options: Any) -> Output:
    options = {"seed": 11} | options
    return tiny.shared_pipeline(family)(options.pop("prompts", tiny.prompts(family, images)), **options)


def assert_same_bits(ours: Output, theirs: Output) -> None:
    assert len(ours.codes) == len(theirs.codes)
    assert all(torch.equal(a, b) for a, b in zip(ours.codes, theirs.codes, strict=True))
    assert torch.equal(ours.latent, theirs.latent)
    assert torch.equal(ours.pixels, theirs.pixels)


# --- the maths


def square(*rows: Sequence[float]) -> Tensor:
    """One image's values, row by row, [1, cells]."""
    return torch.tensor([value for row in rows for value in row], dtype=torch.float32)[None]


def test_the_change_is_the_mean_square_over_channels() -> None:
    before = torch.tensor([[[1.0, 2.0], [0.0, 0.0]]], dtype=torch.bfloat16)
    change = feature_change(before, torch.tensor([[[3.0, 2.0], [1.0, -3.0]]], dtype=torch.bfloat16))
    assert change.tolist() == [[2.0, 5.0]]
    assert change.dtype == torch.float32


def test_maps_are_resized_between_cell_centers() -> None:
    """Three cells to four: centers at 0, 0.625, 1.375 and 2 of the old cells; the nearest of them 0, 1, 1, 2."""
    three = GridMap(square([0, 0, 8], [0, 0, 8], [0, 0, 8])[..., None], (3, 3))
    assert three.at((4, 4)).view(4, 4).tolist() == [[0, 0, 3, 8]] * 4
    assert three.at((1, 4), "nearest-exact").flatten().tolist() == [0, 0, 0, 8]
    assert GridMap(square([0, 8, 0])[..., None], (1, 3)).at((1, 4), "nearest-exact").flatten().tolist() == [0, 8, 8, 0]
    assert three.at((3, 3)).data_ptr() != three.values.data_ptr()
    assert three.at((4, 4)).is_contiguous()


def low(detail: Tensor, tau: float, left_out: Tensor | None = None, **fields: Any) -> Tensor:
    run, none = start(SparseVAR(tau=tau, **fields)), torch.zeros_like(detail, dtype=torch.bool)
    return run.below_threshold(detail, none if left_out is None else left_out, tiny.schedule_of("var")[-1])


def test_low_is_below_a_share_of_the_images_own_peak() -> None:
    change = torch.tensor([[0.0, 3.9, 4.0, 8.0], [0.0, 1.0, 2.0, 2.0]])
    assert low(change, 0.5).tolist() == [[True, True, False, False], [True, False, False, False]]
    assert not low(change, 0.0).any()
    assert low(change, 1.0).tolist() == [[True, True, True, False], [True, True, False, False]]
    assert not low(torch.zeros(1, 4), 1.0).any()


def test_similar_is_above_a_share_of_the_images_own_peak() -> None:
    similarity = torch.tensor([[0.2, 0.4, 0.8, -0.5], [-0.4, -0.2, -0.1, -0.1]])
    assert low(-similarity, 0.5, metric="logits").tolist() == [[False, False, True, False], [False] * 4]
    assert not low(-similarity, 1.0, metric="logits").any()


def test_neighbors_are_the_cells_around_inside_the_grid() -> None:
    """One odd vector in the middle of 3x3: it is unlike all eight, a corner unlike one of three, an edge unlike one of five."""
    vectors = torch.tensor([[2.0, 0.0]] * 9)
    vectors[4] = torch.tensor([0.0, 3.0])
    corner, edge = 2 / 3, 4 / 5
    expected = square([corner, edge, corner], [edge, 0, edge], [corner, edge, corner])
    assert torch.allclose(neighbor_similarity(vectors[None], (3, 3)), expected)
    assert torch.allclose(
        neighbor_similarity(torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]]), (1, 3)), square([0, sqrt(0.125), sqrt(0.5)])
    )
    assert neighbor_similarity(torch.ones(1, 1, 2), (1, 1)).tolist() == [[0.0]]


def test_images_change_where_their_pixels_do() -> None:
    before, after = torch.zeros(1, 3, 4, 4), torch.zeros(1, 3, 4, 4)
    after[0, 0, 0, 0], after[0, :, 3, 3] = -3.0, 2.0
    assert image_change(before, after, (2, 2)).tolist() == [[0.25, 0.0, 0.0, 0.5]]
    assert torch.allclose(image_change(torch.ones(1, 3, 2, 2), torch.ones(1, 3, 4, 4), (2, 2)), torch.zeros(1, 4))


def test_values_that_differ_by_rounding_are_equal_in_steps() -> None:
    values = torch.tensor([[1.0, 1.0 - 1e-7, 0.5, 0.5 + 1e-7, 0.4999], [-2.0, -2.0 + 2e-7, -1.0, 0.0, -1.0]])
    assert in_steps(values).tolist() == [[100_000, 100_000, 50_000, 50_000, 49_990], [-100_000, -100_000, -50_000, 0, -50_000]]
    assert in_steps(1e30 * values).tolist() == in_steps(values).tolist()
    assert in_steps(torch.zeros(1, 3)).tolist() == [[0, 0, 0]]


def test_anchors_are_the_top_left_cells_of_windows() -> None:
    cpu = torch.device("cpu")
    assert anchor_cells((4, 4), 2, cpu).tolist() == [0, 2, 8, 10]
    assert anchor_cells((4, 5), 3, cpu).tolist() == [0, 3, 15, 18]
    assert anchor_cells((2, 3), 4, cpu).tolist() == [0]
    assert anchor_cells((2, 2), 1, cpu).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("settings", [{"alpha": 10**30}, {"tau": Fraction(9, 10)}, {"keep": Fraction(1, 2)}])
def test_numbers_of_any_size_and_kind(settings: dict[str, Any]) -> None:
    """A spacing beyond the grid leaves one anchor."""
    usual = {"alpha": 99, "tau": 0.9, "keep": 0.5}
    pipeline, prompts = tiny.shared_pipeline("infinity"), tiny.prompts("infinity", 2)
    given, same = ({"tau": 0.9, "first_stage": 2} | one for one in (settings, {key: usual[key] for key in settings}))
    tiny.assert_same_bits(*(pipeline(prompts, seed=3, method=SparseVAR(**one)) for one in (given, same)))


def test_anchors_of_the_last_row_and_column() -> None:
    cpu = torch.device("cpu")
    assert anchor_cells((4, 4), 2, cpu, edges=True).tolist() == [0, 2, 3, 8, 10, 11, 12, 14, 15]
    assert anchor_cells((4, 5), 3, cpu, edges=True).tolist() == [0, 3, 4, 15, 18, 19]  # the last row has some already
    for size, alpha in (((4, 5), 3), ((1, 1), 4), ((40, 40), 4), ((3, 7), 1), ((2, 9), 4)):
        for edges in (False, True):
            assert anchor_count(size, alpha, edges) == len(anchor_cells(size, alpha, cpu, edges))
    assert anchor_count((40, 40), 4, edges=True) == 121


def test_the_share_above_a_threshold_and_the_largest_cells() -> None:
    change = torch.tensor([[1.0, 2.0, 4.0, 2.1], [0.0, 1.0, 1.0, 1.0]])
    assert share_above(change, 0.5, change.amax(dim=1, keepdim=True)).tolist() == [0.5, 0.75]
    assert share_above(change, 0.5, change.amax().view(1, 1)).tolist() == [0.5, 0.0]  # 2 is not above 2
    kept = largest_cells(change, torch.tensor([1, 2]))
    assert kept.tolist() == [[False, False, True, False], [False, False, True, True]]  # of equals the later
    assert largest_cells(change, torch.tensor([0, 4])).sum(dim=1).tolist() == [0, 4]


def test_maps_are_enlarged_to_the_covering_cell() -> None:
    assert GridMap(square([1, 2, 3])[..., None], (1, 3)).at((1, 4), "nearest").flatten().tolist() == [1, 1, 2, 3]


def test_only_the_nearest_anchors_are_compared() -> None:
    """Cells of a row, anchors at 0, 2 and 5. Cell 1 resembles the last, which is not among the two nearest."""
    vectors = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]])
    anchors = torch.tensor([0, 2, 5])
    assert best_anchor(vectors, anchors, (1, 6))[1].tolist() == [[0, 5, 2, 5, 5, 5]]
    similarity, anchor = best_anchor(vectors, anchors, (1, 6), nearest=2)
    assert anchor.tolist() == [[0, 2, 2, 5, 5, 5]]
    assert torch.allclose(similarity[0, 1], torch.tensor(sqrt(0.5)))
    assert best_anchor(vectors, anchors, (1, 6), nearest=1)[1].tolist() == [[0, 0, 2, 2, 5, 5]]  # of equally near ones the first
    assert torch.equal(best_anchor(vectors, anchors, (1, 6), nearest=9)[1], best_anchor(vectors, anchors, (1, 6))[1])


def test_of_equally_similar_anchors_the_nearest_is_best() -> None:
    """Equal to rounding: the cells of a 2x6 grid all point the same way. Anchors at columns 0, 2 and 4 of the first row."""
    vectors = torch.rand(1, 12, 1, generator=torch.Generator().manual_seed(0)) + 0.1
    vectors = vectors * torch.rand(1, 1, 4096, generator=torch.Generator().manual_seed(1))
    similarity, anchor = best_anchor(vectors, torch.tensor([0, 2, 4]), (2, 6))
    assert torch.allclose(similarity, torch.ones(1, 12))
    assert anchor.view(2, 6).tolist() == [[0, 0, 2, 2, 4, 4]] * 2


def test_the_best_anchor_has_the_smallest_angle_whatever_the_length() -> None:
    vectors = torch.tensor([[[1.0, 0.0], [3.0, 4.0], [0.0, 9.0], [0.0, 0.0], [-1.0, 0.0]]])
    similarity, anchor = best_anchor(vectors, torch.tensor([0, 2]), (1, 5))
    assert torch.allclose(similarity, torch.tensor([[1.0, 0.8, 1.0, 0.0, 0.0]]))
    assert anchor[0, [0, 1, 2, 4]].tolist() == [0, 2, 2, 2]


# --- a toy whose arithmetic fits in the head: a 3x3 stage, then a 4x4 one

TOY = Schedule((1, 2, 3, 4, 6))
EAST = square([0, 0, 8], [0, 0, 8], [0, 0, 8])  # becomes columns 0, 0, 3, 8 at 4x4
LEFT, RIGHT = [1.0, 0.0], [0.0, 1.0]


def observed(run: Any, change: Tensor, stage: Stage, tokens: Tokens | None = None) -> None:
    """A block that changes one channel of two rows per image so that the conditional row has this change, the other ten times as much."""
    after = torch.cat([change.sqrt(), (10 * change).sqrt()])[..., None]
    run.observe(0, torch.zeros_like(after), after, tokens or Tokens(stage))


def toy(change: Tensor = EAST, family: str = "var", **fields: Any) -> tuple[Any, StagePlan]:
    """A run that has seen the 3x3 stage, with logits that point left in two columns and right in the third; the plan of the 4x4 stage."""
    run = start(SparseVAR(**{"tau": 0.5, "first_stage": 3, "blocks": 0} | fields), family, TOY, batch=change.shape[0])
    for stage in TOY.stages[:3]:
        assert plan_of(run, stage) == (StagePlan(observed=(0,)) if stage.index == 2 else DENSE)
        entered(run, torch.zeros(2 * len(change), stage.cells, 1), Tokens(stage))
        if stage.index == 2:
            observed(run, change, stage)
        out = torch.tensor([LEFT, LEFT, RIGHT] * 3)[: stage.cells].expand(len(change), -1, -1)
        assert run.restore(out, tokens := Tokens(stage))[1] is tokens
    return run, plan_of(run, TOY[3])


def compute_mask(x: Tensor, tokens: Tokens) -> Tensor:
    """What generation counts for a stage of one image whose blocks compute these tokens."""
    computed = ComputedCells(batch=1)
    computed.add(tokens, x, sublayers=1)
    return computed.take(sublayers=1)


def on_4x4(run: Any, rows: int = 2) -> Tokens:
    """The tokens that enter the 4x4 stage; every row of x numbers its cells."""
    x = torch.arange(16.0).expand(rows, 16)[..., None]
    x, tokens = entered(run, x, Tokens(TOY[3]))
    assert torch.equal(tokens.unpack(x)[..., 0].long(), tokens.index)
    return tokens


def test_cells_below_the_threshold_are_left_out_except_anchors() -> None:
    """Half of 8 is 4: the last column stays, and of the others the anchors 0, 2, 8 and 10."""
    run, plan = toy(alpha=2)
    assert plan == StagePlan(num_tokens=8, observed=(0,))
    tokens = on_4x4(run)
    assert tokens.index.tolist() == [[0, 2, 3, 7, 8, 10, 11, 15]] * 2
    assert tokens.count is None
    mask = compute_mask(torch.zeros(2, 8, 1), tokens)
    assert mask.view(4, 4).tolist() == [[1, 0, 1, 1], [0, 0, 0, 1], [1, 0, 1, 1], [0, 0, 0, 1]]


def test_a_lower_threshold_keeps_more() -> None:
    run, plan = toy(tau=0.3, alpha=4)  # 2.4 < 3
    assert on_4x4(run).index[0].tolist() == [0, 2, 3, 6, 7, 10, 11, 14, 15]
    assert plan.num_tokens == 9
    run, plan = toy(tau=0.0)
    assert plan == StagePlan(observed=(0,))
    x, tokens = entered(run, torch.zeros(2, 16, 1), whole := Tokens(TOY[3]))
    assert tokens is whole
    assert (compute_mask(x, tokens) == 1).all()


def test_without_anchors_only_what_is_above_the_threshold_is_computed() -> None:
    run, _ = toy(alpha=None)
    assert on_4x4(run).index[0].tolist() == [3, 7, 11, 15]
    out = torch.arange(8.0).view(1, 4, 2)
    left, tokens, _ = run.restore(out, run.kept_tokens(TOY[3]))
    assert left is out
    assert tokens.index.tolist() == [[3, 7, 11, 15]]


def test_images_of_a_batch_keep_their_own_numbers_of_tokens() -> None:
    north = square([8, 8, 8], [6, 6, 6], [0, 0, 0])  # becomes rows 8, 6.75, 3.75, 0: with alpha 4 the first two stay
    run, plan = toy(torch.cat([EAST, north]), alpha=4)
    tokens = on_4x4(run, rows=4)
    assert plan.num_tokens == 8
    assert tokens.count.tolist() == [5, 8, 5, 8]
    assert tokens.index.tolist() == [[0, 3, 7, 11, 15, 15, 15, 15], list(range(8))] * 2
    assert torch.equal(entered(run, torch.zeros(2, 16, 1), Tokens(TOY[3]))[1].index, tokens.index[:2])  # with one cfg branch gone


def test_which_rows_are_scored() -> None:
    """The toy's unconditional rows change ten times as much."""
    for as_released, factor in ((False, 1.0), (True, 5.5)):
        run, _ = toy(as_released=as_released)
        assert torch.allclose(run.change.values[..., 0], factor * EAST)
        run.observe(0, torch.zeros(1, 9, 1), EAST.sqrt()[..., None], Tokens(TOY[2]))  # with one cfg branch gone
        assert torch.allclose(run.change.values[..., 0], EAST)


def test_change_across_several_blocks() -> None:
    """From the input of the first to the output of the last; what lies between counts only by what it leaves."""
    run, plan = start(SparseVAR(first_stage=3, blocks=(0, 3)), schedule=TOY), None
    for stage in TOY.stages[:3]:
        plan = plan_of(run, stage)
    assert plan == StagePlan(observed=(0, 2))
    x = [torch.full((2, 9, 1), value) for value in (1.0, 7.0, 5.0, 4.0)]
    for layer, (before, after) in enumerate(pairwise(x)):
        run.observe(layer, before, after, Tokens(TOY[2]))
    assert torch.equal(run.change.values, torch.full((1, 9, 1), 9.0))
    assert run.entered is None
    one = start(SparseVAR(first_stage=3, blocks=(1, 2)), schedule=TOY)
    assert one.setup.plans == SparseVAR(first_stage=3, blocks=1).forecast(one.setup.model, TOY)


def test_a_share_counted_before_enlarging() -> None:
    """Three of nine cells are above half of the largest: of 16 cells 5 are kept, the last column and the last cell beside it."""
    run, plan = toy(alpha=None, as_released=True)
    assert plan.num_tokens == 5
    assert on_4x4(run).index[0].tolist() == [3, 7, 11, 14, 15]


def test_cells_that_did_not_run_have_no_change() -> None:
    run, _ = toy(alpha=None, as_released=True)
    tokens = on_4x4(run)
    observed(run, torch.tensor([[30.0, 70.0, 110.0, 130.0, 150.0]]), TOY[3], tokens)
    expected = 5.5 * square([0, 0, 0, 30], [0, 0, 0, 70], [0, 0, 0, 110], [0, 0, 130, 150]).view(4, 4)
    assert torch.allclose(run.change.values.view(4, 4), expected)


def test_anchors_at_the_edges_are_kept() -> None:
    run, plan = toy(alpha=3, as_released=True, tau=1.0, first_stage=3)
    run.change = GridMap(square([9, 0, 0], [0, 0, 0], [0, 0, 0])[..., None], (3, 3))
    plan = plan_of(run, TOY[3])
    assert run.cells.kept.view(4, 4).tolist() == [[1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1]]
    assert plan.num_tokens == 4
    forecast = SparseVAR(alpha=3, as_released=True, first_stage=3).forecast(run.setup.model, TOY, kept=0.0)
    assert [forecast[stage].num_tokens for stage in (3, 4)] == [4, 9]


def test_text_before_the_first_stage_is_not_scored() -> None:
    run = start(SparseVAR(first_stage=1, blocks=0), "hart")
    after = torch.tensor([9.0, 9.0, 2.0]).expand(2, 3)[..., None]
    run.observe(0, torch.zeros(2, 3, 1), after, Tokens(tiny.schedule_of("hart")[0], prefix=2))
    assert run.change.values.tolist() == [[[4.0]]]


def restored(run: Any, out: Tensor, channels: int = 2) -> Tensor:
    """The logits of the 4x4 stage, cell by cell; NaN where it has none. The tail repeats the last token."""
    values, tokens, _ = run.restore(out, run.kept_tokens(TOY[3]))
    assert tokens.index.shape == (1, 16)
    count = int(tokens.count)
    assert (tokens.index[0, count:] == tokens.index[0, count - 1]).all()
    assert tokens.index[0, :count].tolist() == sorted(set(tokens.index[0].tolist()))
    grid = torch.full((1, 16, channels), torch.nan)
    return tokens.scatter(values, grid).view(4, 4, channels)


def test_an_anchor_propagates_to_what_resembled_it() -> None:
    """Expected logits at 4x4: left in columns 0 and 1, (0.625, 0.375) in column 2, 31 degrees away, right in column 3."""
    run, _ = toy(alpha=4)
    on_4x4(run)
    fresh = torch.tensor([[[100.0, 1.0], [3.0, 3.0], [7.0, 7.0], [11.0, 11.0], [15.0, 15.0]]])  # of cells 0, 3, 7, 11, 15
    logits = restored(run, fresh)
    assert logits[:, :2].tolist() == [[[100.0, 1.0]] * 2] * 4
    assert logits[:, 2].isnan().all()
    assert logits[:, 3, 0].tolist() == [3.0, 7.0, 11.0, 15.0]
    carried = run.logits.values.view(4, 4, 2)
    assert torch.equal(carried[:, [0, 1, 3]], logits[:, [0, 1, 3]])
    assert carried[:, 2].tolist() == [[0.625, 0.375]] * 4  # no anchor propagates to these: what was expected stays


@pytest.mark.parametrize(("beta", "left_out"), [(0.857, 0), (0.858, 4), (1.0, 4), (-1.0, 0)])
def test_beta_is_the_least_similarity(beta: float, left_out: int) -> None:
    """Column 2 has a cosine of 0.625 / sqrt(0.625² + 0.375²) = 0.8575 to the anchor."""
    run, _ = toy(alpha=4, beta=beta)
    on_4x4(run)
    assert restored(run, torch.ones(1, 5, 2))[..., 0].isnan().sum() == left_out


def test_of_several_anchors_the_most_similar_propagates() -> None:
    """Anchors 0, 2, 8, 10. Columns 0 and 1 resemble those of column 0 alike, so that the nearest counts; column 2 its own ones."""
    run, _ = toy(alpha=2)
    on_4x4(run)
    fresh = torch.tensor([0.0, 2, 3, 7, 8, 10, 11, 15])[None, :, None].expand(-1, -1, 2)  # the logits of a cell are its number
    assert restored(run, fresh)[..., 0].tolist() == [[0, 0, 2, 3], [0, 0, 2, 7], [8, 8, 10, 11], [8, 8, 10, 15]]


def test_a_distant_anchor_propagates_if_it_is_more_similar() -> None:
    """The upper corners point right, all else left. Anchors are the corners 0, 3, 12, 15; cell 5 is nearest to 0, but resembles 12."""
    run, _ = toy(alpha=3)
    run.logits = GridMap(torch.tensor([RIGHT, LEFT, RIGHT, LEFT, LEFT, LEFT, LEFT, LEFT, LEFT])[None], (3, 3))
    on_4x4(run)
    numbers = torch.tensor([cell for cell in range(16) if run.cells.kept[0, cell]], dtype=torch.float32)
    assert restored(run, numbers[None, :, None].expand(-1, -1, 2))[1, 1, 0] == 12


def test_bits_are_compared_all_together() -> None:
    """Infinity's logits [B, N, bits, 2] are one vector per token."""
    run, _ = toy(alpha=4)
    on_4x4(run)
    values, _, _ = run.restore(torch.arange(10.0).view(1, 5, 1, 2), run.kept_tokens(TOY[3]))
    assert values.shape == (1, 16, 1, 2)
    assert values[0, :4, 0].tolist() == [[0, 1], [0, 1], [2, 3], [0, 1]]  # cells 0, 1, 3 and 4


def test_hidden_states_are_copied_from_the_anchor_and_no_others_are_added() -> None:
    run, _ = toy(alpha=4, family="hart")
    kept = on_4x4(run).rows(slice(0, 1))
    _, tokens, source = run.restore(torch.ones(1, 5, 2), kept)
    one = torch.tensor([[[5.0], [3.0], [7.0], [11.0], [15.0]]])
    rows = propagated(HeadInputs(torch.cat([one, -one]), kept, None, None, None), source)  # of both cfg branches
    assert torch.equal(rows[:1], -rows[1:])
    grid = tokens.scatter(rows[:1], torch.zeros(1, 16, 1)).view(4, 4)
    assert grid.tolist() == [[5, 5, 0, 3], [5, 5, 0, 7], [5, 5, 0, 11], [5, 5, 0, 15]]


def test_hidden_states_stay_where_no_anchor_propagates() -> None:
    for run in (toy(alpha=None)[0], toy(tau=0.0)[0]):
        assert run.restore(torch.ones(1, 16, 2), Tokens(TOY[3])).source is None


def test_cells_to_which_no_anchor_propagates_leave_the_canvas_as_it_was() -> None:
    schedule = Schedule((1, 2, 3, 4))
    run = start(SparseVAR(tau=0.5, alpha=4, first_stage=3, blocks=0), "infinity", schedule)
    canvas = tiny.shared_pipeline("infinity").tokenizer.canvas(schedule, 1)
    canvas.latent = torch.randn(canvas.latent.shape)
    plan_of(run, schedule[2], canvas)
    observed(run, EAST, schedule[2])
    run.restore(torch.tensor([LEFT, LEFT, RIGHT] * 3).repeat_interleave(tiny.BITS, 1).view(1, 9, tiny.BITS, 2), Tokens(schedule[2]))
    plan_of(run, schedule[3], canvas)
    out, tokens, _ = run.restore(torch.zeros(1, 5, tiny.BITS, 2), run.kept_tokens(schedule[3]))
    before = canvas.latent
    canvas.add(out.argmax(dim=-1), tokens)
    changed = (canvas.latent != before).any(dim=1)[0]
    assert changed.tolist() == [[True, True, False, True]] * 4


def test_changes_are_updated_where_tokens_were_computed_and_carried_elsewhere() -> None:
    """At 4x4 the cells 0, 3, 7, 11, 15 were computed; the others keep 0, 0, 3 of the map before."""
    run, _ = toy(alpha=4)
    tokens = on_4x4(run)
    observed(run, torch.tensor([[1.0, 30.0, 70.0, 110.0, 150.0]]), TOY[3], tokens)
    changes = run.change.values.view(4, 4)
    expected = square([1, 0, 3, 30], [0, 0, 3, 70], [0, 0, 3, 110], [0, 0, 3, 150]).view(4, 4)
    assert torch.allclose(changes, expected)
    assert run.change.size == (4, 4)


def test_what_is_left_out_once_stays_out() -> None:
    """Columns 0 to 2 of the four were left out. Now all cells change alike, but of the six columns those nearest to them stay out."""
    run, _ = toy(alpha=4)
    tokens = on_4x4(run)
    run.change = GridMap(torch.full((1, 9, 1), 7.0), (3, 3))
    observed(run, torch.full((1, 5), 7.0), TOY[3], tokens)
    assert torch.allclose(run.change.values, torch.tensor(7.0))
    run.restore(torch.ones(1, 5, 2), tokens.rows(slice(0, 1)))
    plan = plan_of(run, TOY[4])
    assert run.cells.excluded.view(6, 6).tolist() == [[True, True, True, True, False, False]] * 6
    assert run.kept_tokens(TOY[4]).index[0].tolist() == [0, 4, 5, 10, 11, 16, 17, 22, 23, 24, 28, 29, 34, 35]
    assert plan == StagePlan(num_tokens=14)  # nothing needs the last stage's change


def test_a_peak_among_cells_that_were_left_out_does_not_decide() -> None:
    """The last column remains, and its largest change there is 11 / 6: of its six cells 1, 9/6, 11/6 and 7/6 are above half of that."""
    run, _ = toy(alpha=None)
    entered(run, torch.zeros(2, 16, 1), Tokens(TOY[3]))
    run.change = GridMap(square([9, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 1], [0, 0, 0, 0])[..., None], (4, 4))
    plan_of(run, TOY[4])
    kept = set(run.kept_tokens(TOY[4]).index[0].tolist())
    assert {5, 11, 17, 23} <= kept <= {5, 11, 17, 23, 16}  # of the column before it one cell lies on the threshold


@pytest.mark.parametrize("factor", [1.0, 0.6, 0.4, 0.25])
def test_changes_that_shrink_from_stage_to_stage_leave_as_much(factor: float) -> None:
    """What was left out keeps the larger changes of earlier stages, which must not be the measure of what remains."""
    pattern = torch.rand(1, 64, generator=torch.Generator().manual_seed(0))
    left_out = low(pattern, 0.6)
    later = torch.where(left_out, pattern, factor * pattern)
    assert torch.equal(low(later, 0.6, left_out) | left_out, left_out)
    assert not low(later, 0.6, left_out)[~left_out].any()


def test_flexvar_has_no_anchors() -> None:
    run, plan = toy(family="flexvar", alpha=2)
    assert plan.num_tokens == 4
    assert on_4x4(run).index[0].tolist() == [3, 7, 11, 15]
    assert run.logits is None  # nothing to compare with


def test_a_stage_about_whose_past_nothing_is_known_is_dense() -> None:
    """The stage before was skipped."""
    for metric in ("mse", "logits"):
        run = start(SparseVAR(metric=metric, first_stage=3, blocks=0, tau=0.5), schedule=TOY)
        for stage in TOY:
            assert plan_of(run, stage).num_tokens is None
            assert entered(run, torch.zeros(2, stage.cells, 1), tokens := Tokens(stage))[1] is tokens


def test_logits_as_the_metric() -> None:
    """Of the toy's expected logits, columns 0 and 1 resemble their neighbors most."""
    run, plan = toy(metric="mse")
    expected = neighbor_similarity(run.logits.at((4, 4)), (4, 4))
    run = start(SparseVAR(metric="logits", tau=0.9, alpha=4, first_stage=3), schedule=TOY)
    for stage in TOY.stages[:3]:
        assert plan_of(run, stage) == DENSE  # no block is tapped
        run.restore(torch.tensor([LEFT, LEFT, RIGHT] * 3)[None, : stage.cells], Tokens(stage))
    plan = plan_of(run, TOY[3])
    assert torch.equal(run.cells.excluded, expected > 0.9 * expected.max())
    assert run.cells.excluded.view(4, 4)[:, 0].all()
    assert not run.cells.excluded.view(4, 4)[:, 3].any()
    assert plan.observed == ()


def test_without_anchors_the_cell_least_like_its_neighbors_is_kept() -> None:
    """Everything resembles its neighbors somewhat; the right corners, with two of three neighbors in column 2, do so least."""
    run, _ = toy(metric="mse")
    run.settings, run.alpha = SparseVAR(metric="logits", tau=0.0, alpha=None, first_stage=3), None
    assert plan_of(run, TOY[3]).num_tokens == 1
    assert run.cells.kept[0].nonzero().item() in (3, 15)


class Film:
    """A canvas that shows one prepared image after the other."""

    def __init__(self, images: Sequence[Tensor]) -> None:
        self.images, self.decoded = list(images), 0

    def decode(self) -> Tensor:
        self.decoded += 1
        return self.images.pop(0)


def test_images_as_the_metric() -> None:
    """The last two images differ by 1 in the upper left and by 4 in the lower right quarter; so does the grid of the stage."""
    first, second = torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 8, 8)
    second[..., :4, :4], second[..., 4:, 4:] = 1.0, -4.0
    film = Film([first, second])
    run = start(SparseVAR(metric="image", tau=0.3, alpha=None, first_stage=3), schedule=TOY)
    plans = [plan_of(run, stage, film) for stage in TOY.stages[:4]]
    assert plans == [DENSE, DENSE, DENSE, StagePlan(num_tokens=4)]
    assert run.kept_tokens(TOY[3]).index.tolist() == [[10, 11, 14, 15]]
    film = Film([first, second])
    run = start(SparseVAR(metric="image", tau=0.2, alpha=None, first_stage=3), schedule=TOY)
    assert [plan_of(run, stage, film).num_tokens for stage in TOY.stages[2:4]] == [None, 8]
    assert film.decoded == 2


class NoReads(TorchDispatchMode):
    """Fails where a value would have to come back from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("metric", ["mse", "logits"])
def test_the_host_reads_the_counts_and_nothing_else(metric: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = toy(alpha=2)
    run.settings = replace(run.settings, metric=metric, tau=0.9)
    read, lists = Tensor.tolist, []
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: lists.append(read(tensor)) or lists[-1])
    with NoReads():
        plan = plan_of(run, TOY[3])
        _, tokens = entered(run, torch.zeros(2, 16, 1), Tokens(TOY[3]))
        run.observe(0, torch.zeros(2, plan.num_tokens, 1), torch.ones(2, plan.num_tokens, 1), tokens)
        run.restore(torch.ones(1, plan.num_tokens, 2), tokens.rows(slice(0, 1)))
    assert lists == [[plan.num_tokens]]


# --- budgets


def test_a_budget_keeps_the_most_changed_cells_and_all_anchors() -> None:
    """Of the twelve cells that are no anchors (0, 2, 8, 10) a quarter, 3: of the last column, whose cells differ by rounding at most."""
    run, plan = toy(alpha=2, keep=0.25)
    assert plan == StagePlan(num_tokens=7, observed=(0,))
    tokens = on_4x4(run)
    first, second = tokens.index.tolist()
    assert first == second == sorted(first)
    assert {0, 2, 8, 10} < set(first) < {0, 2, 8, 10, 3, 7, 11, 15}
    assert tokens.count is None
    assert run.cells.excluded.view(4, 4).sum() == 13  # no anchor changes as much as these


def test_without_anchors_a_budget_is_a_share_of_all_cells() -> None:
    run, plan = toy(alpha=None, keep=0.25)
    assert plan.num_tokens == 4
    assert on_4x4(run).index[0].tolist() == [3, 7, 11, 15]
    assert toy(alpha=None, keep=0)[1].num_tokens == 1
    assert toy(alpha=4, keep=0)[1].num_tokens == 1  # the anchor
    run, plan = toy(family="flexvar", alpha=2, keep=0.5)
    assert plan.num_tokens == 8


def test_cells_that_are_still_there_fill_a_budget_first() -> None:
    """The last column of four was kept: of six columns the last two are there, 12 cells, and 9 are asked for. Cell 0 changes most."""
    run, _ = toy(alpha=None, keep=0.25)
    tokens = on_4x4(run)
    run.change = GridMap(square([9, 0, 0], [0, 0, 0], [0, 0, 0])[..., None], (3, 3))
    observed(run, torch.tensor([[1.0, 2.0, 3.0, 4.0]]), TOY[3], tokens)
    assert plan_of(run, TOY[4]).num_tokens == 9
    kept = run.cells.kept.view(6, 6)
    assert not kept[:, :4].any()
    assert kept[:, 4:].sum() == 9


def test_where_too_few_are_left_the_most_changed_of_the_others_fill_a_budget() -> None:
    """Only the middle of 3x3 was kept, which the middle four cells of 4x4 lie nearest to; a fifth is asked for."""
    run, _ = toy(alpha=None, keep=0.3)
    run.excluded = GridMap((torch.arange(9) != 4).float().view(1, 9, 1), (3, 3))
    run.change = GridMap(square([0, 0, 8], [0, 1, 0], [0, 0, 0])[..., None], (3, 3))
    assert plan_of(run, TOY[3]).num_tokens == 5
    assert run.cells.kept[0].nonzero().flatten().tolist() == [3, 5, 6, 9, 10]


def test_budgets_do_not_grow_until_a_dense_stage() -> None:
    model, schedule = tiny.shared_pipeline("var").model, Schedule((1, 2, 4, 4, 4, 4))
    assert SparseVAR(keep={2: 0.5, 3: 0.75, 5: 0.75}, alpha=None).budgets(model, schedule) == {2: 8, 3: 8, 5: 12}
    assert SparseVAR(keep=((2, 0.5), (4, 1.0)), alpha=2).budgets(model, schedule) == {2: 10}
    assert SparseVAR(keep={3: 0.5}).first_reduced(model, schedule) == 3
    assert SparseVAR(keep={3: 0.5, 2: 1}) == SparseVAR(keep=((2, 1.0), (3, 0.5)))
    assert hash(SparseVAR(keep={3: 0.5})) == hash(SparseVAR(keep=((3, 0.5),)))


def test_all_cells_are_there_again_after_a_dense_stage() -> None:
    schedule = Schedule((1, 2, 4, 4, 4))
    run = start(SparseVAR(keep={2: 0.5, 4: 0.5}, blocks=0, alpha=None), schedule=schedule)
    for stage in schedule.stages[1:4]:
        plan_of(run, stage)
        x, tokens = entered(run, torch.zeros(2, stage.cells, 1), Tokens(stage))
        observed(run, torch.arange(float(x.shape[1]))[None], stage, tokens)
    assert run.excluded is None
    assert plan_of(run, schedule[4]).num_tokens == 8
    assert run.cells.kept[0].nonzero().flatten().tolist() == list(range(8, 16))


@pytest.mark.parametrize("metric", ["mse", "logits"])
def test_with_a_budget_the_host_reads_nothing(metric: Any) -> None:
    run, _ = toy(alpha=2, keep=0.25)
    run.settings = replace(run.settings, metric=metric)
    assert run.count(TOY[3], None) is None
    with NoReads():
        plan = plan_of(run, TOY[3])
        _, tokens = entered(run, torch.zeros(2, 16, 1), Tokens(TOY[3]))
        run.observe(0, torch.zeros(2, plan.num_tokens, 1), torch.ones(2, plan.num_tokens, 1), tokens)
        run.restore(torch.ones(1, plan.num_tokens, 2), tokens.rows(slice(0, 1)))


def test_a_budget_needs_a_stage_to_choose_by() -> None:
    @dataclass(frozen=True)
    class SkipSecond(Method):
        def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
            return tuple(StagePlan(skip=stage.index == 1) for stage in schedule)

    with pytest.raises(SettingError, match="stage 2 chooses"):
        generated("infinity", method=[SparseVAR(keep=0.5, first_stage=2), SkipSecond()])
    with pytest.raises(SettingError, match="stage 2 chooses"):  # before a request of a server waits
        tiny.shared_pipeline("infinity").accelerate([SparseVAR(keep=0.5, first_stage=2), SkipSecond()])
    generated("infinity", method=[SparseVAR(keep=0.5, first_stage=1), SkipSecond()])


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("metric", ["mse", "logits", "image"])
def test_the_forecast_of_a_budget_is_what_runs(family: str, metric: Any) -> None:
    method = SparseVAR(keep=0.4, alpha=3, metric=metric)
    model, schedule = tiny.shared_pipeline(family).model, tiny.schedule_of(family)
    plans = method.forecast(model, schedule)
    assert plans == method.forecast(model, schedule, kept=0.1)
    assert any(plan.num_tokens is not None for plan in plans)
    output, seen = watched(family, method, compute_mask=True)
    assert tuple(stage.done.plan for stage in seen) == plans
    for stage, plan in zip(seen, plans, strict=True):
        assert stage.done.counts is None
        if plan.num_tokens is not None:
            assert output.compute_mask[stage.done.stage.index].sum(dim=(1, 2)).tolist() == [plan.num_tokens] * 3


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_budget_without_guidance_in_late_stages(family: str) -> None:
    method = [SparseVAR(keep=0.4, alpha=3), StageVAR(alphas=(), guidance_off=len(tiny.schedule_of(family)) - 1)]
    output = generated(family, method=method)
    alone = generated(family, method=method[0])
    assert [stage.tokens for stage in output.report.stages] == [stage.tokens for stage in alone.report.stages]
    assert output.pixels.isfinite().all()


# --- settings


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tau": -0.1}, "tau.*from 0 to 1; got -0.1"),
        ({"tau": 1.5}, "tau"),
        ({"tau": "much"}, "tau.*'much'"),
        ({"tau": True}, "tau"),
        ({"tau": float("nan")}, "tau"),
        ({"beta": 1.01}, "beta.*got 1.01"),
        ({"beta": -1.01}, "beta"),
        ({"beta": None}, "beta"),
        ({"alpha": 0}, "alpha.*None for no anchors; got 0"),
        ({"alpha": 2.5}, "alpha"),
        ({"first_stage": 0}, "first_stage.*metric mse.*got 0"),
        ({"first_stage": 1, "metric": "image"}, "from 2.*metric image.*got 1"),
        ({"first_stage": 9.5}, "first_stage"),
        ({"blocks": -1}, "blocks.*got -1"),
        ({"blocks": "last"}, "blocks.*got 'last'"),
        ({"metric": "l2"}, "metric.*mse, logits, image; got 'l2'"),
        ({"as_released": True, "metric": "logits"}, "as_released.*metric"),
        ({"as_released": True, "anchors": "content"}, "as_released.*anchors"),
        ({"keep": 1.5}, "keep.*got 1.5"),
        ({"keep": True}, "keep"),
        ({"keep": {}}, "keep"),
        ({"keep": {0: 0.5}}, "indices from 1.*got {0: 0.5}"),
        ({"keep": {1: 0.5}, "metric": "image"}, "indices from 2"),
        ({"keep": ((3, 0.5), (3, 0.4))}, "each once"),
        ({"keep": {3: 0.5}, "first_stage": 3}, "keep=.*leave out first_stage"),
        ({"keep": 0.5, "as_released": True}, "as_released.*keep"),
        ({"as_released": 1}, "as_released.*got 1"),
        ({"blocks": (3, 3)}, r"blocks.*got \(3, 3\)"),
        ({"blocks": (-1, 3)}, "blocks"),
        ({"blocks": (1, 2, 3)}, "blocks"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        SparseVAR(**fields)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (SparseVAR(first_stage=4), "first_stage.*0 to 3.*got 4"),
        (SparseVAR(blocks=(1, 4)), r"blocks.*\(0, 3\).*got \(1, 4\)"),
        (SparseVAR(keep={2: 0.5, 4: 0.5}), "keep.*0 to 3.*got 4"),
        (SparseVAR(blocks=3), r"blocks.*\(0, 3\).*got \(3, 4\)"),
        (Combined((SparseVAR(), SparseVAR(tau=0.5))), "SparseVAR and SparseVAR changes tokens"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(method: Method, message: str) -> None:
    stages: list[Preview] = []
    with pytest.raises(SettingError, match=message):
        generated("var", method=method, on_stage=stages.append)
    with pytest.raises(SettingError, match=message):
        tiny.shared_pipeline("var").accelerate(method)
    assert stages == []


def test_stars_released_text_attention_takes_one_image_at_a_time() -> None:
    """There the tokens of the first row stand for those of all rows, which only fits where all rows have the same cells."""
    model = build_model(StarConfig(1, 64, 4, (1, 2), 8, 4, 8, as_released=True))
    setup = RunSetup(model, Schedule((1, 2)), 1, ImageRng([0], torch.device("cpu")), SparseVAR().forecast(model, Schedule((1, 2))))
    SparseVAR().start(setup)
    with pytest.raises(SettingError, match="one image at a time"):
        SparseVAR().start(replace(setup, batch=2))


@pytest.mark.parametrize(
    ("family", "sides", "first"),
    [
        ("infinity", INFINITY_SIDES, 10),
        ("infinity", INFINITY_SIDES[:10], 7),
        ("hart", HART_1024, 10),
        ("star", HART_1024, 12),
        ("var", VAR_256, 7),
        ("var", VAR_512, 8),
        ("flexvar", FLEXVAR_512, 13),
        ("var", (1, 2), 1),
        ("var", (1,), 1),
    ],
)
def test_the_first_reduced_stage_by_the_size_of_its_grid(family: str, sides: tuple[int, ...], first: int) -> None:
    assert SparseVAR().first_reduced(tiny.shared_pipeline(family).model, Schedule(sides)) == first


def test_all_of_infinitys_schedules_start_at_stage_10() -> None:
    model = tiny.shared_pipeline("infinity").model
    for sizes in INFINITY_SIZES.values():
        assert SparseVAR().first_reduced(model, Schedule(sizes)) == 10
    assert SparseVAR(metric="image").first_reduced(model, Schedule((1, 2, 3))) == 2
    assert SparseVAR(first_stage=5).first_reduced(model, Schedule((1,) * 13)) == 5


SMALL_HART = HartConfig(24, 64, 4, (1, 2), 8, 4, 8, text_tokens=2, residual_dim=8, residual_depth=1)


@pytest.mark.parametrize(
    ("config", "blocks"),
    [
        (InfinityConfig(32, 64, 4, 1, 8, text_channels=256, longest_text=4), range(12, 16)),
        (SMALL_HART, range(15, 16)),
        (InfinityConfig(40, 64, 4, 1, 8, text_channels=256, longest_text=4), range(15, 20)),
        (InfinityConfig(8, 64, 4, 1, 8, text_channels=256, longest_text=4), range(6, 7)),
        (VarConfig(16, 64, 4, (1, 2), False, classes=2, codes=8, latent_channels=4), range(12, 14)),
        (replace(SMALL_HART, depth=12), range(7, 8)),
        (VarConfig(1, 64, 4, (1, 2), False, classes=2, codes=8, latent_channels=4), range(1)),
    ],
)
def test_the_published_blocks_and_their_places_at_other_depths(config: ModelConfig, blocks: range) -> None:
    model = build_model(config)
    assert SparseVAR().observed_blocks(model) == blocks
    assert SparseVAR(blocks=0).observed_blocks(model) == range(1)


def test_the_forecast_of_a_stage() -> None:
    """Of 16 cells half, and half of the four anchors: 10. Stage 2 is only tapped."""
    model, schedule = tiny.shared_pipeline("var").model, Schedule((1, 2, 3, 4, 8))
    tap = StagePlan(observed=(1,))
    plans = SparseVAR(alpha=2, first_stage=3, blocks=1).forecast(model, schedule, kept=0.5)
    assert plans == (DENSE, DENSE, tap, replace(tap, num_tokens=10), StagePlan(num_tokens=40))
    assert SparseVAR(alpha=2, first_stage=3, blocks=1).forecast(model, schedule) == (
        *(DENSE, DENSE, tap),
        replace(tap, num_tokens=16),
        StagePlan(num_tokens=64),
    )
    assert SparseVAR(alpha=None, first_stage=4, metric="logits").forecast(model, schedule, kept=0.25)[2:] == (
        DENSE,
        DENSE,
        StagePlan(num_tokens=16),
    )
    assert SparseVAR(alpha=None, first_stage=4).forecast(model, schedule, kept=0.0)[4].num_tokens == 1
    flexvar = tiny.shared_pipeline("flexvar").model
    assert SparseVAR(alpha=2, first_stage=4).forecast(flexvar, schedule, kept=0.5)[4].num_tokens == 32


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("metric", ["mse", "logits", "image"])
def test_the_forecast_holds(family: str, metric: Any) -> None:
    method = replace(STRONG[family], metric=metric)
    pipeline = tiny.shared_pipeline(family)
    _, seen = watched(family, method, images=1)
    for stage, plan in zip(seen, method.forecast(pipeline.model, tiny.schedule_of(family)), strict=True):
        assert replace(stage.done.plan, num_tokens=None) == replace(plan, num_tokens=None)
        assert plan.num_tokens in (None, stage.done.stage.cells)
    first = method.first_reduced(tiny.shared_pipeline(family).model, tiny.schedule_of(family))
    assert all(stage.done.plan.num_tokens is None for stage in seen[:first])


# --- all families


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize(
    "method",
    [
        SparseVAR(tau=0.0),
        SparseVAR(tau=0.0, metric="image", alpha=None),
        SparseVAR(tau=1.0, metric="logits"),
        SparseVAR(tau=0.95, alpha=1),
        SparseVAR(keep=1),
        SparseVAR(keep=1, metric="logits", alpha=None),
        SparseVAR(tau=0.0, anchors="content"),
        SparseVAR(keep=1, anchors="content"),
        SparseVAR(**{**PROGRAM, "tau": 0.0}),
    ],
    ids=["mse", "image", "logits", "all anchors", "keep", "keep by logits", "content", "keep by content", "program"],
)
def test_zero_strength_is_dense_bit_for_bit(family: str, method: SparseVAR) -> None:
    if method.alpha == 1 and family == "flexvar":
        method = replace(method, tau=0.0)  # no anchors there
    ours = generated(family, method=method, compute_mask=True)
    assert_same_bits(ours, generated(family))
    assert all((mask == 1).all() for mask in ours.compute_mask)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_tokens_are_left_out_and_differently_many_of_each_image(family: str) -> None:
    output, seen = watched(family, compute_mask=True)
    dense = generated(family, **WHOLE_CODES.get(family, {}))
    reduced = [stage for stage in seen if stage.done.plan.num_tokens is not None]
    assert [stage.done.stage.index for stage in reduced] == [len(seen) - 2, len(seen) - 1]
    assert any(len(set(stage.counts)) > 1 for stage in reduced)
    for stage in reduced:
        assert stage.done.plan.num_tokens == max(stage.counts)
        assert stage.done.num_tokens == pytest.approx(sum(stage.counts) / 3)
        assert stage.done.plan.packed == sum(stage.counts) or len(set(stage.counts)) == 1
        assert min(stage.counts) < stage.done.stage.cells
        mask = output.compute_mask[stage.done.stage.index]
        assert mask.sum(dim=(1, 2)).tolist() == stage.counts
        assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert all(torch.equal(a, b) for a, b in zip(output.codes[: len(seen) - 2], dense.codes[: len(seen) - 2], strict=True))
    assert not torch.equal(output.latent, dense.latent)
    assert output.pixels.isfinite().all()


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("metric", ["mse", "image"])
def test_exclusion_never_shrinks_and_anchors_are_always_computed(family: str, metric: Any) -> None:
    first = len(tiny.schedule_of(family)) - 2
    method = replace(STRONG[family], metric=metric, first_stage=first, tau=0.7 if metric == "image" else STRONG[family].tau)
    output, seen = watched(family, method, compute_mask=True)
    chosen = [stage for stage in seen if stage.excluded is not None]
    assert len(chosen) == 2
    for earlier, later in pairwise(chosen):
        parents = GridMap(earlier.excluded.flatten(1)[..., None].float(), earlier.done.stage.size)
        parents = parents.at(later.done.stage.size, "nearest-exact")[..., 0].view_as(later.excluded) > 0.5
        assert parents.any()
        assert (later.excluded | ~parents).all()
    for stage in chosen:
        mask = output.compute_mask[stage.done.stage.index] == 1
        if family == "flexvar":
            assert torch.equal(mask, ~stage.excluded)
        else:
            anchors = torch.zeros_like(mask)
            anchors[:, :: method.alpha, :: method.alpha] = True
            assert torch.equal(mask, ~stage.excluded | anchors)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"alpha": None},
        {"metric": "image", "tau": 0.8},
        PROGRAM,
        {"keep": 0.4},
        {"keep": 0.4, "metric": "logits"},
        {"anchors": "content"},
        {"keep": 0.4, "anchors": "content"},
    ],
    ids=["mse", "no anchors", "image", "program", "keep", "keep by logits", "content", "keep by content"],
)
def test_a_batch_equals_its_images_alone(family: str, fields: dict[str, Any]) -> None:
    """Seeded codes and the cells they stand for are equal, all else to rounding."""
    method = replace(STRONG[family], **fields)
    together, seen = watched(family, method)
    assert method.keep is not None or any(len(set(stage.counts)) > 1 for stage in seen if stage.counts)
    for image in range(3):
        alone, seen_alone = watched(family, method, prompts=tiny.one_prompt(family, image), seed=11 + image)
        for ours, theirs, stage, stage_alone in zip(together.codes, alone.codes, seen, seen_alone, strict=True):
            if stage.counts:
                assert stage.counts[image] == stage_alone.counts[0]
            cells, cells_alone = in_order(stage.done.tokens, image), in_order(stage_alone.done.tokens, 0)
            assert cells == cells_alone
            assert torch.equal(ours[image, : len(cells)], theirs[0, : len(cells)])
        assert torch.allclose(together.latent[image], alone.latent[0], rtol=0, atol=LATENT_TOLERANCE[family])
        assert torch.allclose(together.pixels[image], alone.pixels[0], rtol=0, atol=PIXEL_TOLERANCE)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("metric", ["mse", "logits"])
@pytest.mark.parametrize("anchors", ["grid", "content"])
def test_budgets_choose_the_same_among_equal_cells_in_every_batch(family: str, metric: Any, anchors: Any) -> None:
    """A map of one cell makes four equal ones, and copies of one anchor's logits are equally like their neighbors, but for rounding."""
    method = SparseVAR(keep=0.3, first_stage=1, metric=metric, anchors=anchors)
    together = tiny.shared_pipeline(family)(tiny.prompts(family, 3), seed=[3, 4, 5], method=method, compute_mask=True)
    for image in range(3):
        alone = tiny.shared_pipeline(family)(tiny.one_prompt(family, image), seed=3 + image, method=method, compute_mask=True)
        assert all(torch.equal(a[image], b[0]) for a, b in zip(together.compute_mask, alone.compute_mask, strict=True))


def test_a_refined_image_that_keeps_everything_equals_itself_beside_one_that_does_not() -> None:
    family, method = "star_refined", replace(STRONG["star_refined"], tau=0.9)
    together, seen = watched(family, method)
    assert max(seen[-2].counts) == seen[-2].done.stage.cells > min(seen[-2].counts)
    for image in range(3):
        alone, _ = watched(family, method, prompts=tiny.one_prompt(family, image), seed=11 + image)
        assert torch.allclose(together.latent[image], alone.latent[0], rtol=0, atol=LATENT_TOLERANCE[family])


def in_order(tokens: Tokens, image: int) -> list[int]:
    """The real cells of an image."""
    if tokens.index is None:
        return list(range(tokens.stage.cells))
    count = tokens.num_tokens if tokens.count is None else int(tokens.count[image])
    return tokens.index[image, :count].tolist()


FORMS: dict[str, dict[str, Any]] = {"": {}, "keep": {"keep": 0.4}, "content": {"anchors": "content"}}
BY_FORM = pytest.mark.parametrize("form", FORMS)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@BY_FORM
def test_a_permuted_batch_permutes_the_images(family: str, form: str) -> None:
    method = replace(STRONG[family], **FORMS[form])
    order, seeds = [2, 0, 1], [5, 60, 700]
    permuted = [tiny.one_prompt(family, image) for image in order]
    prompts = permuted if family in tiny.CLASS_FAMILIES else TextFeatures.joined(permuted)
    straight, _ = watched(family, method, seed=seeds)
    shuffled, _ = watched(family, method, prompts=prompts, seed=[seeds[image] for image in order])
    assert all(torch.equal(a, b[order]) for a, b in zip(shuffled.codes, straight.codes, strict=True))
    assert torch.allclose(shuffled.pixels, straight.pixels[order], rtol=0, atol=PIXEL_TOLERANCE)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@BY_FORM
def test_a_seed_repeats_its_images_bit_for_bit(family: str, form: str) -> None:
    """And one method serves several requests: its state belongs to the run."""
    method = replace(STRONG[family], **FORMS[form])
    first = generated(family, method=method)
    generated(family, method=method, seed=99, images=1)
    assert_same_bits(generated(family, method=method), first)
    assert not torch.equal(generated(family, method=method, seed=12).latent, first.latent)


def keeping(branches: CfgBranches, first: int) -> Method:
    """Only the rows of these cfg branches from stage `first` on."""

    class Keeping(Method):
        def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
            return tuple(StagePlan(cfg_branches=branches if stage.index >= first else "both") for stage in schedule)

    return Keeping()


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("first", [1, -1], ids=["early", "last"])
def test_dropping_the_unconditional_rows_where_guidance_is_one_changes_nothing(family: str, first: int) -> None:
    stages = len(tiny.schedule_of(family))
    guidance = [2.5 if stage < first % stages else 1.0 for stage in range(stages)]
    options = WHOLE_CODES.get(family, {}) | {"guidance": guidance}
    both = generated(family, method=STRONG[family], **options)
    dropped = generated(family, method=[STRONG[family], keeping("cond", first % stages)], **options)
    assert [stage.rows for stage in dropped.report.stages][-1] == 3
    assert min(stage.tokens / (stage.height * stage.width) for stage in both.report.stages) < 1
    assert all(torch.equal(a, b) for a, b in zip(both.codes, dropped.codes, strict=True))
    assert torch.allclose(both.pixels, dropped.pixels, rtol=0, atol=PIXEL_TOLERANCE)


@pytest.mark.parametrize("family", tiny.CLASS_FAMILIES)
def test_unconditional_rows_alone_are_the_class_minus_one(family: str) -> None:
    alone = generated(family, method=[STRONG[family], keeping("uncond", 0)])
    unconditional = generated(family, prompts=[-1, -1, -1], guidance=0, method=STRONG[family])
    assert all(torch.equal(a, b) for a, b in zip(alone.codes, unconditional.codes, strict=True))


@pytest.mark.parametrize("family", ANY_SCHEDULE)
@pytest.mark.parametrize(
    "fields",
    [{}, {"metric": "logits", "tau": 0.9}, {"metric": "image", "tau": 0.8}, *list(FORMS.values())[1:]],
    ids=["mse", "logits", "image", *list(FORMS)[1:]],
)
def test_non_square_images(family: str, fields: dict[str, Any]) -> None:
    method = replace(STRONG[family], **{"tau": 0.99} | fields)
    size = NON_SQUARE[family]
    output, seen = watched(family, method, size=size)
    assert [max(stage.counts) < stage.done.stage.cells for stage in seen[-2:]] == [True, True]
    assert output.pixels.shape[2] * 6 == output.pixels.shape[3] * 4
    alone, _ = watched(family, method, prompts=tiny.one_prompt(family, 1), seed=12, size=size)
    assert torch.allclose(output.latent[1], alone.latent[0], rtol=0, atol=LATENT_TOLERANCE[family])


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize(
    "fields",
    [
        {"as_released": True},
        {"alpha": None},
        {"alpha": 2},
        {"beta": -1.0},
        {"beta": 1.0},
        {"blocks": 2},
        {"first_stage": None},
        {"metric": "logits"},
        {"anchors": "content"},
    ],
    ids=str,
)
def test_every_setting_does_something(family: str, fields: dict[str, Any]) -> None:
    """Each changes the image, except where it has nothing to change: FlexVAR has no anchors."""
    if "first_stage" in fields:
        fields = {"first_stage": len(tiny.schedule_of(family)) - 1}
    plain, changed = generated(family, method=STRONG[family]), generated(family, method=replace(STRONG[family], **fields))
    without_effect = family == "flexvar" and {"alpha", "beta", "anchors"} & set(fields)
    assert torch.equal(plain.latent, changed.latent) == bool(without_effect)


# --- what the canvas gets


@pytest.mark.parametrize("family", RESIDUAL_FAMILIES)
def test_an_excluded_token_has_its_anchors_logits_or_none(family: str) -> None:
    """Every cell's logits are those of a computed cell: its own, or an anchor's."""
    _, seen = watched(family)
    alpha, matched, without = STRONG[family].alpha, 0, 0
    for stage in (stage for stage in seen if stage.restored is not None):
        done = stage.done
        assert done.tokens is stage.restored
        for image in range(3):
            cells = in_order(done.tokens, image)
            logits = dict(zip(cells, done.logits[image], strict=False))
            excluded = stage.excluded[image].flatten().tolist()
            anchors = anchor_cells(done.stage.size, alpha, torch.device("cpu")).tolist()
            assert set(anchors) <= set(cells)
            for cell in range(done.stage.cells):
                if not excluded[cell] or cell in anchors:
                    assert cell in cells
                elif cell in cells:
                    assert any(torch.equal(logits[cell], logits[anchor]) for anchor in anchors)
                    matched += 1
                else:
                    without += 1
    assert matched > 0 and without > 0


def test_copied_logits_are_sampled_from_cell_by_cell() -> None:
    """Two cells with the same logits may take different codes."""
    _, seen = watched("var", replace(STRONG["var"], beta=-1.0), temperature=4.0)
    done = seen[-1].done
    same = (done.logits[:, :, None] == done.logits[:, None]).all(dim=-1)
    different = done.codes[:, :, None] != done.codes[:, None]
    assert (same & different).any()


def test_flexvar_keeps_its_previous_estimate() -> None:
    latents: list[Tensor] = []
    pipeline = tiny.shared_pipeline("flexvar")
    output = pipeline(
        tiny.prompts("flexvar", 3),
        seed=11,
        method=STRONG["flexvar"],
        compute_mask=True,
        on_stage=lambda preview: latents.append(preview.latent),
    )
    for stage in (3, 4):
        size = output.compute_mask[stage].shape[1:]
        resized = torch.nn.functional.interpolate(latents[stage - 1], size=size, mode="bicubic")
        computed = output.compute_mask[stage][:, None] == 1
        assert not computed.all()
        assert torch.equal(latents[stage].where(~computed, resized), resized)
        assert (latents[stage] != resized).any(dim=1).sum() == computed.sum()


@pytest.mark.parametrize("branches", [None, DropGuidance(2)], ids=["both rows", "conditional rows"])
def test_harts_residual_completes_the_code_that_each_cell_has_sampled(branches: Method | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that was left out has its anchor's hidden state, and a code, noise and a residual of its own."""
    latents: list[Tensor] = []
    seen: list[StageOutput] = []
    entered: list[tuple[HeadInputs, Tensor]] = []
    residual = Hart.residual

    def watched(model: Hart, hidden: HeadInputs, ids: Tensor) -> Tensor:
        entered.append((hidden, ids))
        return residual(model, hidden, ids)

    def look(preview: Preview) -> None:
        latents.append(preview.latent)
        seen.append(preview.done)

    monkeypatch.setattr(Hart, "residual", watched)
    pipeline, watching = tiny.shared_pipeline("hart"), Watched(STRONG["hart"])
    methods = [watching] if branches is None else [watching, branches]
    pipeline(tiny.prompts("hart", 3), seed=11, method=methods, on_stage=look, smooth=False)
    done, computed_cells, (hidden, ids) = seen[-1], watching.runs[-1].cells, entered[0]
    assert hidden.tokens.aligned(done.tokens) and torch.equal(ids, done.codes)  # what the residual is conditioned on is on the canvas
    added = (latents[-1] - latents[-2]).flatten(2).transpose(1, 2)  # [B, cells, Z]
    own = 0
    for image in range(3):
        computed = computed_cells.kept[image].nonzero().flatten().tolist()
        cells = in_order(done.tokens, image)
        for place, cell in enumerate(cells):
            expected = pipeline.tokenizer.codebook[done.codes[image, place]] + done.residual[image, place]
            assert torch.allclose(added[image, cell], expected, atol=1e-5)
            sources = [cells.index(other) for other in computed if torch.equal(logits_at(done, image, other), done.logits[image, place])]
            assert any(torch.equal(hidden.x[image, place], hidden.x[image, source]) for source in sources)
            own += not any(torch.equal(done.residual[image, place], done.residual[image, source]) for source in sources)
        without = sorted(set(range(16)) - set(cells))
        assert (added[image, without] == 0).all()
    assert own > 0


def logits_at(done: StageOutput, image: int, cell: int) -> Tensor:
    return done.logits[image, in_order(done.tokens, image).index(cell)]


def test_logits_that_were_shown_are_not_written_over() -> None:
    """Also where a stage has the size of the one before, so that nothing has to be resized."""
    shown: list[tuple[Tensor, Tensor]] = []
    schedule = Schedule(((1, 1), (2, 2), (3, 3), (3, 3), (3, 3)))
    method = replace(STRONG["infinity"], first_stage=2)
    _, seen = watched("infinity", method, size=schedule)
    assert [stage.done.plan.num_tokens is not None for stage in seen] == [False, False, True, True, True]
    tiny.shared_pipeline("infinity")(
        tiny.prompts("infinity", 3),
        seed=11,
        method=method,
        size=schedule,
        on_stage=lambda preview: shown.append((preview.done.logits, preview.done.logits.clone())),
    )
    assert all(torch.equal(logits, then) for logits, then in shown)


# --- together with others


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_with_skipped_last_stages(family: str) -> None:
    both = generated(family, method=[STRONG[family], SkipStages(1)])
    alone = generated(family, method=STRONG[family])
    assert [stage.tokens for stage in both.report.stages] == [stage.tokens for stage in alone.report.stages[:-1]] + [0]
    assert all(torch.equal(a, b) for a, b in zip(both.codes, alone.codes[:-1], strict=True))


@dataclass(frozen=True)
class SkipOne(Method):
    index: int

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        return tuple(StagePlan(skip=stage.index == self.index) for stage in schedule)


@pytest.mark.parametrize("metric", ["mse", "logits", "image"])
@pytest.mark.parametrize("family", ["infinity", "flexvar", "hart"])
def test_with_a_stage_skipped_on_the_way(family: str, metric: Any) -> None:
    """What is known of the last stage that ran is used; where nothing is known, the stage is dense."""
    stages = len(tiny.schedule_of(family))
    method = replace(STRONG[family], metric=metric, first_stage=stages - 2, tau=0.99 if metric == "mse" else 0.5)
    output = generated(family, method=[method, SkipOne(stages - 2)])
    assert output.report.stages[-2].tokens == 0
    if metric != "image":
        assert output.report.stages[-1].tokens < output.report.stages[-1].height * output.report.stages[-1].width
    before = generated(family, method=[replace(method, metric="mse"), SkipOne(stages - 3)])
    assert before.report.stages[-2].tokens == before.report.stages[-2].height * before.report.stages[-2].width


@dataclass(frozen=True)
class HalfTheTokens(Span):
    """A span like FastVAR's: every sublayer of its blocks computes half of each row's tokens only."""

    layers: range
    key: str = "half"

    def num_tokens(self, tokens: int) -> int:
        return (tokens + 1) // 2

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        score = x.square().mean(dim=-1)
        if tokens.count is None:
            selection, kept = tokens.top(score, self.num_tokens(x.shape[1]))
        else:
            selection, kept = tokens.top(score, (tokens.count + 1) // 2, self.num_tokens(x.shape[1]))
        where = selection[..., None].expand(-1, -1, x.shape[2])
        for block in blocks:
            for sublayer in block.sublayers(ctx):
                some = x.gather(1, where)
                x = x.scatter(1, where, some + sublayer(some, kept, ctx))
                if ctx.computed is not None:
                    ctx.computed.add(kept, some, sublayers=1)
        return repeat_tail(x, tokens.count)  # padding repeats the last token, as it came


@dataclass(frozen=True)
class Halving(Method):
    layers: range
    first: int

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        return tuple(StagePlan(spans=(HalfTheTokens(self.layers),)) if stage.index >= self.first else DENSE for stage in schedule)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_with_spans_inside_reduced_stages(family: str) -> None:
    """A ragged batch of both methods equals its images alone."""
    method = Combined((STRONG[family], Halving(range(1, 3), len(tiny.schedule_of(family)) - 2)))
    options = WHOLE_CODES.get(family, {})
    together = generated(family, method=method, **options)
    plain = generated(family, method=STRONG[family], **options)
    assert not torch.equal(together.latent, plain.latent)
    for image in range(3):
        alone = generated(family, prompts=tiny.one_prompt(family, image), seed=11 + image, method=method, **options)
        assert torch.allclose(together.latent[image], alone.latent[0], rtol=0, atol=LATENT_TOLERANCE[family])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_compute_mask_counts_spans_inside_reduced_stages(family: str) -> None:
    """One block of three computes every token that enters, two compute half of them, and rows of a guided pair may differ in which."""
    method = Watched(Combined((STRONG[family], Halving(range(1, 3), len(tiny.schedule_of(family)) - 2))))
    output = generated(family, method=method, compute_mask=True)
    mask, sparse = output.compute_mask[-1].flatten(1), method.runs[-1].runs[0].cells
    assert (mask[sparse.kept] >= 1 / 3 - 1e-6).all()
    assert (mask[~sparse.kept] == 0).all()
    expected = [(count + 2 * ((count + 1) // 2)) / 3 for count in sparse.kept.sum(dim=1).tolist()]
    assert mask.sum(dim=1).tolist() == pytest.approx(expected)
    assert all(torch.equal(a, b) for a, b in zip(output.codes, generated(family, method=method.method).codes, strict=True))


def test_a_span_over_the_tapped_block_is_refused() -> None:
    with pytest.raises(SettingError, match="at stage 2 block 2 cannot be observed"):
        generated("var", method=[SparseVAR(first_stage=3), Halving(range(3), 2)])
    generated("var", method=[SparseVAR(first_stage=3, metric="logits"), Halving(range(3), 2)])


# --- any map


@st.composite
def changes(draw: st.DrawFn, stages: int = 3) -> tuple[list[tuple[int, int]], list[Tensor]]:
    """Growing sizes, and a map of changes of two images for each."""
    height, width = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    sizes = [(height, width)]
    for _ in range(stages - 1):
        sizes.append((sizes[-1][0] + draw(st.integers(0, 3)), sizes[-1][1] + draw(st.integers(0, 3))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    power = draw(st.sampled_from([0.2, 1.0, 5.0]))
    return sizes, [torch.rand(2, h * w, generator=generator) ** power for h, w in sizes]


@settings(max_examples=40, deadline=None)
@given(
    changes(),
    st.floats(0, 1),
    st.sampled_from([None, 1, 2, 3, 4]),
    st.sampled_from(["mse", "logits"]),
    st.floats(-1, 1),
)
def test_any_map_keeps_the_promises(
    sizes_and_maps: tuple[list[tuple[int, int]], list[Tensor]], tau: float, alpha: int | None, metric: Any, beta: float
) -> None:
    """Counts, numbers of tokens and raster order fit; anchors are computed; what is out stays out; computed tokens keep their logits."""
    sizes, maps = sizes_and_maps
    schedule = Schedule(((1, 1), *sizes))
    run = start(SparseVAR(tau=tau, beta=beta, alpha=alpha, first_stage=2, blocks=0, metric=metric), schedule=schedule, batch=2)
    out_before: GridMap | None = None
    for stage, change in zip(schedule.stages[1:], maps, strict=True):
        plan = plan_of(run, stage)
        x = torch.arange(float(stage.cells)).expand(4, -1)[..., None]
        x, tokens = entered(run, x, Tokens(stage))
        plan.check_num_tokens(tokens)
        if plan.num_tokens is None:
            assert tokens.index is None
        else:
            counts = run.cells.kept.sum(dim=1).tolist()
            assert plan.num_tokens == max(counts) and 1 <= min(counts) < stage.cells
            assert (tokens.count is None) <= (min(counts) == max(counts))
            assert torch.equal(tokens.unpack(x)[..., 0].long(), tokens.index)
            assert torch.equal(tokens.index[:2], tokens.index[2:])
            for image in range(2):
                cells = in_order(tokens, image)
                assert cells == sorted(set(cells)) and len(cells) == counts[image]
                assert cells == run.cells.kept[image].nonzero().flatten().tolist()
                if alpha is not None:
                    assert set(anchor_cells(stage.size, alpha, torch.device("cpu")).tolist()) <= set(cells)
        if run.cells is not None:
            if out_before is not None:
                parents = out_before.at(stage.size, "nearest-exact")[..., 0] > 0.5
                assert (run.cells.excluded | ~parents).all()
            out_before = GridMap(run.cells.excluded[..., None].float(), stage.size)
        values = change[:, :, None] if tokens.index is None else tokens.rows(slice(0, 2)).gather(change[:, :, None])
        after = values.sqrt().repeat(2, 1, 1)
        run.observe(0, tokens.pack(torch.zeros_like(after)), tokens.pack(after), tokens)
        logits = torch.cat([values, 1 - values, values.square()], dim=-1)
        out, restored_tokens, _ = run.restore(logits, tokens.rows(slice(0, 2)))
        for image in range(2):
            cells = in_order(restored_tokens, image)
            assert set(in_order(tokens, image)) <= set(cells)
            if beta <= -1 and alpha is not None:
                assert len(cells) == stage.cells
            for place, cell in enumerate(cells):
                if cell in in_order(tokens, image):
                    assert torch.equal(out[image, place], logits[image, in_order(tokens, image).index(cell)])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 7), st.integers(0, 2**31))
def test_any_best_anchor_is_the_one_that_a_loop_finds(height: int, width: int, alpha: int, seed: int) -> None:
    vectors = torch.randn(2, height * width, 5, generator=torch.Generator().manual_seed(seed))
    anchors = anchor_cells((height, width), alpha, vectors.device)
    expected = [row * width + column for row in range(height) for column in range(width) if row % alpha == 0 and column % alpha == 0]
    assert anchors.tolist() == expected
    similarity, best = best_anchor(vectors, anchors, (height, width))
    for image in range(2):
        for cell in range(height * width):
            each = {anchor: float(torch.cosine_similarity(vectors[image, cell], vectors[image, anchor], dim=0)) for anchor in expected}
            assert abs(float(similarity[image, cell]) - max(each.values())) < 1e-5
            assert each[int(best[image, cell])] > max(each.values()) - 1e-5


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**31))
def test_any_neighbor_similarity_is_the_one_that_a_loop_finds(height: int, width: int, seed: int) -> None:
    vectors = torch.randn(1, height * width, 4, generator=torch.Generator().manual_seed(seed))
    ours = neighbor_similarity(vectors, (height, width)).view(height, width)
    for row in range(height):
        for column in range(width):
            around = [
                (y, x)
                for y in range(max(0, row - 1), min(height, row + 2))
                for x in range(max(0, column - 1), min(width, column + 2))
                if (y, x) != (row, column)
            ]
            here = vectors[0, row * width + column]
            each = [float(torch.cosine_similarity(here, vectors[0, y * width + x], dim=0)) for y, x in around]
            assert abs(float(ours[row, column]) - (sum(each) / len(each) if each else 0.0)) < 1e-5


# --- the canvas's images


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_canvas_shows_what_is_generated_so_far(family: str) -> None:
    shown: list[tuple[Tensor, Tensor]] = []
    pipeline = tiny.shared_pipeline(family)

    def look(preview: Preview) -> None:
        shown.append((preview.canvas.decode(), pipeline.tokenizer.decode(preview.latent)))

    output = generated(family, images=2, on_stage=look)
    assert len(shown) == len(tiny.schedule_of(family))
    assert all(torch.equal(ours, theirs) for ours, theirs in shown)
    assert torch.equal(shown[-1][0], output.pixels)


@pytest.mark.parametrize(
    "changes", [{"keep": 0.3, "alpha": 2}, {"tau": 0.97}, {"metric": "logits", "keep": 0.5}, {"metric": "image", "tau": 0.97}], ids=str
)
@pytest.mark.parametrize("family", tiny.KINDS)
def test_stages_that_are_given_are_observed(family: str, changes: dict[str, Any]) -> None:
    stages = len(tiny.schedule_of(family))
    method, prompts = SparseVAR(first_stage=stages - 1, blocks=0, **changes), tiny.prompts(family, 2)
    generate = partial(tiny.shared_pipeline(family), prompts, seed=1, method=method, compute_mask=True)
    full = generate()
    assert full.compute_mask[-1].mean() < 1
    for number in range(1, stages):
        again = generate(prefix_codes=full.codes[:number])
        tiny.assert_close(family, again, full)
        assert all(map(torch.equal, again.compute_mask, full.compute_mask))


@pytest.mark.parametrize("changes", [{"keep": 0.3}, {"tau": 0.97}], ids=str)
@pytest.mark.parametrize("family", tiny.KINDS)
def test_a_reduced_stage_that_is_given_computes_all_its_cells(family: str, changes: dict[str, Any]) -> None:
    pipeline, prompts, stages = tiny.shared_pipeline(family), tiny.prompts(family, 2), len(tiny.schedule_of(family))
    method, codes = SparseVAR(first_stage=2, blocks=0, alpha=None, **changes), pipeline(prompts, seed=1).codes[: stages - 1]
    masks = pipeline(prompts, seed=1, method=method, prefix_codes=codes, compute_mask=True).compute_mask
    assert all(mask.eq(1).all() for mask in masks[:-1]) and masks[-1].mean() < 1
