"""How a stage's codes change the latent and what the next stage sees of it, on toys whose arithmetic can be done in the head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.errors import SizeError
from nextscale.pipeline import Pipeline, Preview
from nextscale.stage import Schedule, Stage, Tokens
from nextscale.tokenizers import (
    FlexVarTokenizer,
    FlexVarTokenizerConfig,
    InfinityTokenizer,
    InfinityTokenizerConfig,
    VarTokenizer,
    VarTokenizerConfig,
)
from nextscale.tokenizers.var import blend_index
from tests.helpers import tiny

# Bicubic interpolation with a = -0.75 of the two samples 0, 1 to four: the share of the second sample.
BICUBIC_STEP = [-0.10546875, 0.2265625, 0.7734375, 1.10546875]
BILINEAR_STEP = [0.0, 0.25, 0.75, 1.0]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def columns(*values: float) -> Tensor:
    """A [1, 1, n, n] map whose columns are constant."""
    return torch.tensor(values).expand(1, 1, len(values), len(values))


def var_toy(codebook: list[list[float]], weights: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0), bias: float = 0.0) -> VarTokenizer:
    tokenizer = VarTokenizer(VarTokenizerConfig(len(codebook), len(codebook[0]), channels=32, multipliers=(1,), blocks_per_level=1))
    return with_codes(tokenizer, codebook, weights, bias)


Residual = TypeVar("Residual", bound=VarTokenizer)


def with_codes(tokenizer: Residual, codebook: list[list[float]], weights: tuple[float, ...], bias: float) -> Residual:
    """Blend k multiplies by weights[k] and adds `bias`; half of it is mixed with half of its input."""
    tokenizer.codebook.copy_(torch.tensor(codebook))
    for blend, weight in zip(tokenizer.blends, weights, strict=True):
        blend.weight.zero_()
        blend.weight[:, :, 1, 1] = weight * torch.eye(len(codebook[0]))
        blend.bias.fill_(bias)
    return tokenizer


def flexvar_toy(codebook: list[list[float]]) -> FlexVarTokenizer:
    tokenizer = FlexVarTokenizer(
        FlexVarTokenizerConfig(len(codebook), len(codebook[0]), latent_channels=4, channels=32, multipliers=(1,), blocks_per_level=1)
    )
    tokenizer.codebook.copy_(torch.tensor(codebook))
    return tokenizer


def bit_toy(bits: int, patchify: bool = False) -> InfinityTokenizer:
    return InfinityTokenizer(InfinityTokenizerConfig(bits, channels=32, multipliers=(1,), blocks_per_level=1, patchify=patchify))


# --- VAR: residual codes


def test_var_adds_half_the_vector_and_half_its_blend() -> None:
    """Blend 0 of four multiplies by 3, so stage 0 adds 0.5 v + 0.5 * 3 v = 2 v; the last stage's blend adds 0.5 v alone."""
    schedule = Schedule((1, 2))
    canvas = var_toy([[0.0, 0.0], [1.0, 2.0], [10.0, 20.0]], weights=(3, 5, 7, 0)).canvas(schedule, batch=1)
    assert canvas.input(schedule[0]) is None
    assert canvas.latent.tolist() == torch.zeros(1, 2, 2, 2).tolist()
    canvas.add(torch.tensor([[1]]), Tokens(schedule[0]))
    assert canvas.latent[0].tolist() == [[[2, 2], [2, 2]], [[4, 4], [4, 4]]]
    assert canvas.input(schedule[1]).tolist() == [[[2, 4]] * 4]
    canvas.add(torch.tensor([[0, 2, 0, 1]]), Tokens(schedule[1]))
    assert canvas.latent[0].tolist() == [[[2, 7], [2, 2.5]], [[4, 14], [4, 5]]]


def test_var_upsamples_bicubically_and_shows_averages() -> None:
    schedule = Schedule((1, 2, 4, 4))
    canvas = var_toy([[0.0], [2.0]]).canvas(schedule, batch=1)
    canvas.add(torch.tensor([[0, 1, 0, 1]]), Tokens(schedule[1]))
    assert torch.allclose(canvas.latent, columns(*BICUBIC_STEP), atol=1e-6)
    left, right = sum(BICUBIC_STEP[:2]) / 2, sum(BICUBIC_STEP[2:]) / 2
    assert torch.allclose(canvas.input(schedule[1]).flatten(), torch.tensor([left, right, left, right]), atol=1e-6)
    assert torch.allclose(canvas.input(schedule[3]).view(1, 1, 4, 4), canvas.latent)
    canvas.latent = columns(0.0, 0.0, 0.0, 8.0)
    assert canvas.input(Stage(1, 1, 1, 1, False)).item() == 2.0  # of all cells, not of the nearest ones
    assert canvas.input(Stage(1, 1, 3, 1, False)).flatten().tolist() == [0.0, 0.0, 4.0]  # windows overlap where sides do not divide


def test_var_blends_after_upsampling() -> None:
    """Upsampling first, the blend's zero padding dims the border of the final map and not of the single cell."""
    tokenizer = var_toy([[1.0]])
    for blend in tokenizer.blends:
        blend.weight.fill_(1.0)
    schedule = Schedule((1, 3))
    canvas = tokenizer.canvas(schedule, batch=1)
    canvas.add(torch.tensor([[0]]), Tokens(schedule[0]))
    assert torch.allclose(canvas.latent[0, 0], torch.tensor([[2.5, 3.5, 2.5], [3.5, 5.0, 3.5], [2.5, 3.5, 2.5]]), atol=1e-5)


def test_var_takes_mixtures_of_codes() -> None:
    schedule = Schedule((1, 1))
    canvas = var_toy([[0.0], [2.0], [8.0]]).canvas(schedule, batch=2)
    mixtures = torch.tensor([[[0.5, 0.25, 0.25]], [[0.0, 0.0, 1.0]]])
    assert canvas.vectors(mixtures).tolist() == [[[2.5]], [[8.0]]]
    assert canvas.vectors(torch.tensor([[1], [2]])).tolist() == [[[2.0]], [[8.0]]]
    canvas.add(mixtures, Tokens(schedule[0]))
    assert canvas.latent.flatten().tolist() == [1.25, 4.0]


def test_a_skipped_stage_leaves_a_residual_canvas_alone() -> None:
    schedule = Schedule((1, 2, 4))
    canvas = var_toy([[0.0], [2.0]], bias=1.0).canvas(schedule, batch=1)
    canvas.add(torch.tensor([[1]]), Tokens(schedule[0]))
    before = canvas.latent.clone()
    canvas.skip(schedule[1])
    assert torch.equal(canvas.latent, before)
    assert torch.equal(canvas.input(schedule[2]).flatten(), before.flatten())


def test_absent_tokens_of_var_count_as_zero_vectors() -> None:
    schedule = Schedule((1, 2, 4))
    part, whole = (var_toy([[0.0], [2.0]], weights=(1, 1, 3, 3)).canvas(schedule, batch=2) for _ in range(2))
    part.add(torch.tensor([[1], [1]]), Tokens(schedule[1], torch.tensor([[3], [0]])))
    whole.add(torch.tensor([[0, 0, 0, 1], [1, 0, 0, 0]]), Tokens(schedule[1]))
    assert torch.equal(part.latent, whole.latent)
    assert part.latent.abs().sum() > 0


# The table of the specification: which of the four convolutions serves each stage.
BLENDS = {
    3: "0 2 3",
    4: "0 1 2 3",
    5: "0 1 2 2 3",
    6: "0 0 1 2 3 3",
    7: "0 0 1 2 2 3 3",
    8: "0 0 1 1 2 2 3 3",
    9: "0 0 1 1 2 2 2 3 3",
    10: "0 0 1 1 1 2 2 3 3 3",
    14: "0 0 0 1 1 1 1 2 2 2 2 3 3 3",
}


@pytest.mark.parametrize("stages", BLENDS)
def test_the_blend_of_every_stage(stages: int) -> None:
    assert [blend_index(stage, stages, 4) for stage in range(stages)] == [int(index) for index in BLENDS[stages].split()]


def test_other_numbers_of_blends_sit_in_the_middle_of_equal_shares() -> None:
    assert [blend_index(stage, 5, 2) for stage in (0, 1, 3, 4)] == [0, 0, 1, 1]  # ticks 1/4, 3/4
    assert [blend_index(stage, 11, 3) for stage in range(11)] == [0] * 4 + [1] * 3 + [2] * 4  # ticks 1/6, 1/2, 5/6
    assert blend_index(0, 1, 4) == 0


@pytest.mark.parametrize("stages", [4, 10, 14])
def test_the_canvas_uses_the_blend_of_its_stage(stages: int) -> None:
    weights = (1.0, 10.0, 100.0, 1000.0)
    schedule = Schedule((1,) * stages)
    canvas = var_toy([[2.0]], weights).canvas(schedule, batch=1)
    for stage, index in zip(schedule, BLENDS[stages].split(), strict=True):
        before = canvas.latent.item()
        canvas.add(torch.tensor([[0]]), Tokens(stage))
        assert canvas.latent.item() - before == 1 + weights[int(index)]


# --- Infinity: bits


def test_bits_become_signs_of_equal_size() -> None:
    """Four bits: plus or minus 1/2 each, a vector of length one."""
    schedule = Schedule((1, 2))
    canvas = bit_toy(4).canvas(schedule, batch=1)
    canvas.add(torch.tensor([[[0, 1, 1, 0]]]), Tokens(schedule[0]))
    assert canvas.latent[0, :, 0, 1].tolist() == [-0.5, 0.5, 0.5, -0.5]
    assert canvas.input(schedule[1]).tolist() == [[[-0.5, 0.5, 0.5, -0.5]] * 4]
    canvas.add(torch.tensor([[[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]]]), Tokens(schedule[1]))
    assert canvas.latent[0].permute(1, 2, 0).tolist() == [[[0, 1, 1, 0], [-1, 0, 0, -1]], [[0, 0, 0, -1], [-1, 0, 0, 0]]]


def test_infinity_resizes_bilinearly_both_ways() -> None:
    """One bit, so codes are -1 and 1. Shrinking looks at the two nearest cells only: no averaging over the whole window."""
    schedule = Schedule((1, 2, 4, 8))
    canvas = bit_toy(1).canvas(Schedule((1, 2, 4)), batch=1)
    canvas.add(torch.tensor([[[0], [1], [0], [1]]]), Tokens(schedule[1]))
    assert torch.equal(canvas.latent, columns(*(2 * share - 1 for share in BILINEAR_STEP)))
    wide = bit_toy(1).canvas(schedule, batch=1)
    wide.latent = columns(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 100.0)
    assert wide.input(schedule[1]).flatten().tolist() == [1.5, 5.5, 1.5, 5.5]


def test_absent_tokens_of_infinity_add_nothing() -> None:
    schedule = Schedule((1, (2, 1)))
    canvas = bit_toy(1).canvas(schedule, batch=2)
    canvas.add(torch.tensor([[[1]], [[0]]]), Tokens(schedule[1], torch.tensor([[1], [0]])))
    assert canvas.latent.flatten(1).tolist() == [[0, 1], [-1, 0]]


def test_a_stage_without_tokens_is_a_skipped_stage_for_infinity() -> None:
    schedule = Schedule((1, 2))
    canvas = bit_toy(4).canvas(schedule, batch=1)
    canvas.add(torch.tensor([[[0, 1, 1, 0]]]), Tokens(schedule[0]))
    before = canvas.latent.clone()
    canvas.add(torch.zeros(1, 0, 4), Tokens(schedule[1], torch.zeros(1, 0, dtype=torch.long)))
    canvas.skip(schedule[1])
    assert torch.equal(canvas.latent, before)


@pytest.mark.parametrize("c", [0, 1, 2])
@pytest.mark.parametrize("dy", [0, 1])
@pytest.mark.parametrize("dx", [0, 1])
def test_patchify_puts_token_bit_4c_2dy_dx_into_cell_dy_dx(c: int, dy: int, dx: int) -> None:
    """Token (1, 0) of a 2 x 1 grid: latent rows 2 and 3. The size of a code follows the 3 bits of a cell, not the 12 of a token."""
    schedule = Schedule((1, (2, 1)))
    tokenizer = bit_toy(3, patchify=True)
    canvas = tokenizer.canvas(schedule, batch=1)
    assert canvas.latent.shape == (1, 3, 4, 2)
    bits = torch.zeros(1, 2, 12, dtype=torch.long)
    bits[0, 1, 4 * c + 2 * dy + dx] = 1
    canvas.add(bits, Tokens(schedule[1]))
    assert canvas.latent.max().item() == pytest.approx(3**-0.5)
    assert (canvas.latent > 0).nonzero().tolist() == [[0, c, 2 + dy, dx]]
    shown = canvas.input(schedule[1])
    assert shown.shape == (1, 2, 12)
    assert torch.equal(shown > 0, bits == 1)


def test_a_patchified_stage_starts_from_two_by_two_cells() -> None:
    schedule = Schedule((1, 2))
    canvas = bit_toy(1, patchify=True).canvas(schedule, batch=1)
    canvas.add(torch.tensor([[[0, 1, 0, 1]]]), Tokens(schedule[0]))  # left cells -1, right cells 1
    assert torch.equal(canvas.latent, columns(*(2 * share - 1 for share in BILINEAR_STEP)))
    assert canvas.input(schedule[1])[0, 0].tolist() == [-1.0, -0.5, -1.0, -0.5]
    assert canvas.input(schedule[1])[0, 1].tolist() == [0.5, 1.0, 0.5, 1.0]


# --- FlexVAR: each stage replaces the last


def test_flexvar_normalizes_codes_and_forgets_earlier_stages() -> None:
    schedule = Schedule((1, 2))
    canvas = flexvar_toy([[3.0, 4.0], [0.0, 10.0]]).canvas(schedule, batch=1)
    canvas.add(torch.tensor([[0]]), Tokens(schedule[0]))
    assert torch.allclose(canvas.latent.flatten(), torch.tensor([0.6, 0.8]))
    assert torch.allclose(canvas.input(schedule[1]), torch.tensor([0.6, 0.8]).expand(1, 4, 2))
    canvas.add(torch.tensor([[1, 1, 0, 1]]), Tokens(schedule[1]))
    assert torch.allclose(canvas.latent[0, 0], torch.tensor([[0.0, 0.0], [0.6, 0.0]]))
    assert torch.allclose(canvas.latent[0, 1], torch.tensor([[1.0, 1.0], [0.8, 1.0]]))


def test_flexvar_shows_the_last_stage_bicubically_at_the_next_size() -> None:
    schedule = Schedule((1, 2, 4, 8))
    canvas = flexvar_toy([[1.0], [-1.0]]).canvas(schedule, batch=1)
    canvas.add(torch.tensor([[1, 0, 1, 0]]), Tokens(schedule[1]))
    shown = canvas.input(schedule[2]).view(1, 1, 4, 4)
    assert torch.allclose(shown, columns(*(2 * share - 1 for share in BICUBIC_STEP)), atol=1e-6)
    assert canvas.latent.shape == (1, 1, 2, 2)  # looking does not draw


def test_skipping_a_stage_keeps_flexvars_estimate_at_that_stages_size() -> None:
    schedule = Schedule((1, 2, 4))
    canvas = flexvar_toy([[1.0], [-1.0]]).canvas(schedule, batch=1)
    canvas.add(torch.tensor([[1, 0, 1, 0]]), Tokens(schedule[1]))
    canvas.skip(schedule[2])
    assert torch.allclose(canvas.latent, columns(*(2 * share - 1 for share in BICUBIC_STEP)), atol=1e-6)


def test_absent_tokens_of_flexvar_keep_the_previous_estimate() -> None:
    schedule = Schedule((1, 2, 4))
    canvas = flexvar_toy([[1.0], [-1.0]]).canvas(schedule, batch=1)
    canvas.add(torch.tensor([[1, 0, 1, 0]]), Tokens(schedule[1]))
    canvas.add(torch.tensor([[0, 1]]), Tokens(schedule[2], torch.tensor([[0, 6]])))
    expected = columns(*(2 * share - 1 for share in BICUBIC_STEP)).clone()
    expected[0, 0, 0, 0], expected[0, 0, 1, 2] = 1.0, -1.0
    assert torch.allclose(canvas.latent, expected, atol=1e-6)


# --- raster order and batches, for all


def last_residual(previews: list[Preview]) -> Tensor | None:
    """What the last stage added to its codes; nothing before it has any."""
    *earlier, last = (preview.done.residual for preview in previews)
    assert all(residual is None for residual in earlier)
    return last


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_images_of_a_batch_stay_apart(family: str) -> None:
    previews: list[Preview] = []
    output = tiny.shared_pipeline(family)(tiny.prompts(family, 3), seed=1, on_stage=previews.append)
    tokenizer, schedule = tiny.shared_pipeline(family).tokenizer, tiny.schedule_of(family)
    residual = last_residual(previews)
    assert (residual is not None) == (family == "hart")
    for image in range(3):
        alone = tokenizer.canvas(schedule, 1)
        for stage, codes in zip(schedule, output.codes, strict=True):
            alone.add(codes[image : image + 1], Tokens(stage))
        if residual is not None:
            alone.add_residual(residual[image : image + 1], Tokens(schedule[-1]))
        assert torch.allclose(alone.latent[0], output.latent[image], atol=1e-5)


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if family != "hart"])
def test_a_canvas_of_codes_takes_no_residual(family: str) -> None:
    schedule = tiny.schedule_of(family)
    canvas = tiny.shared_pipeline(family).tokenizer.canvas(schedule, 1)
    with pytest.raises(TypeError, match=f"{type(canvas).__name__} takes codes alone"):
        canvas.add_residual(torch.zeros(1, schedule[-1].cells, canvas.latent.shape[1]), Tokens(schedule[-1]))


# --- encoding


def nearest_by_search(tokenizer: VarTokenizer, grid: Tensor) -> Tensor:
    return torch.cdist(grid.flatten(2).transpose(1, 2).double(), tokenizer.codebook.double()).argmin(-1)


def test_var_codes_what_earlier_stages_left_over() -> None:
    tokenizer = tiny.shared_pipeline("var").tokenizer
    schedule = Schedule(tiny.VAR_SIDES)
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(3)) * 2 - 1
    rest, drawn = tokenizer.features(images), torch.zeros(2, tiny.LATENT_CHANNELS, 4, 4)
    for stage, codes in zip(schedule, tokenizer.encode(images, schedule), strict=True):
        left_over = F.adaptive_avg_pool2d(rest - drawn, stage.size)
        assert torch.equal(codes, nearest_by_search(tokenizer, left_over))
        vectors = F.interpolate(tokenizer.codebook[codes].transpose(1, 2).unflatten(2, stage.size), size=(4, 4), mode="bicubic")
        drawn = drawn + tokenizer.blend(vectors, stage.index, len(schedule))


def test_flexvar_codes_every_stage_on_its_own() -> None:
    tokenizer = tiny.shared_pipeline("flexvar").tokenizer
    images = torch.rand(2, 3, 14, 14, generator=torch.Generator().manual_seed(3)) * 2 - 1
    features = tokenizer.features(images)
    schedule = Schedule(tiny.FLEXVAR_SIDES)
    for stage, codes in zip(schedule, tokenizer.encode(images, schedule), strict=True):
        pooled = F.adaptive_avg_pool2d(features, stage.size).flatten(2).transpose(1, 2)
        similarity = F.normalize(pooled, dim=-1) @ F.normalize(tokenizer.codebook, dim=-1).T
        assert torch.equal(codes, similarity.argmax(-1))


def test_infinity_codes_the_signs_of_what_is_left() -> None:
    tokenizer, schedule = tiny.shared_pipeline("infinity").tokenizer, tiny.INFINITY_SCHEDULE
    images = torch.rand(2, 3, 8, 6, generator=torch.Generator().manual_seed(3)) * 2 - 1
    rest = tokenizer.features(images)
    for stage, bits in zip(schedule, tokenizer.encode(images, schedule), strict=True):
        grid = F.adaptive_avg_pool2d(rest, stage.size)
        assert torch.equal(bits, (grid > 0).long().flatten(2).transpose(1, 2))
        rest = rest - F.interpolate(grid.sign() / tiny.BITS**0.5, size=schedule.grid, mode="bilinear")


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_zero_counts_as_bit_zero(value: float) -> None:
    assert bit_toy(2).nearest(torch.full((1, 2, 1, 1), value), Stage(0, 1, 1, 0, True)).tolist() == [[[0, 0]]]


def encoded_images(pipeline: Pipeline, schedule: Schedule, images: int) -> tuple[Tensor, list[Tensor]]:
    height, width = (side * pipeline.tokenizer.pixels_per_token for side in schedule.grid)
    pixels = torch.rand(images, 3, height, width, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return pixels, pipeline.tokenizer.encode(pixels, schedule)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_codes_of_an_image_replayed_through_a_request_draw_that_image(family: str) -> None:
    """Teacher forcing: every stage sees what the codes of the stages before it show."""
    pipeline = tiny.shared_pipeline(family)
    schedule = tiny.schedule_of(family)
    _, codes = encoded_images(pipeline, schedule, images=2)
    canvas = pipeline.tokenizer.canvas(schedule, 2)
    seen, expected = [], []
    previews: list[Preview] = []
    embed = pipeline.model.embed

    def watched_embed(shown: Tensor | None, *rest: object) -> Tensor:
        seen.append(shown)
        return embed(shown, *rest)

    pipeline.model.embed = watched_embed
    try:
        output = pipeline(tiny.prompts(family, 2), seed=0, revise=lambda stage, drawn: codes[stage.index], on_stage=previews.append)
    finally:
        del pipeline.model.embed
    for stage in schedule:
        expected.append(canvas.input(stage))
        canvas.add(codes[stage.index], Tokens(stage))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(output.codes, codes, strict=True))
    assert seen[0] is None and expected[0] is None
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(seen[1:], expected[1:], strict=True))
    residual = last_residual(previews)
    if residual is not None:
        canvas.add_residual(residual, Tokens(schedule[-1]))
    assert torch.equal(output.latent, canvas.latent)
    assert len({codes_of_stage.float().mean().item() for codes_of_stage in codes}) > 1


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_encoding_is_the_same_alone_and_in_a_batch(family: str) -> None:
    pipeline = tiny.shared_pipeline(family)
    schedule = tiny.schedule_of(family)
    pixels, together = encoded_images(pipeline, schedule, images=3)
    for image in range(3):
        alone = pipeline.tokenizer.encode(pixels[image : image + 1], schedule)
        assert all(torch.equal(codes[0], batch[image]) for codes, batch in zip(alone, together, strict=True))


@pytest.mark.parametrize("shape", [(1, 3, 8, 6), (3, 8, 8), (1, 1, 8, 8), (1, 3, 16, 16)])
def test_images_of_another_size_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SizeError, match=r"\[B, 3, 8, 8\].*got"):
        tiny.shared_pipeline("var").tokenizer.encode(torch.zeros(shape), Schedule(tiny.VAR_SIDES))
