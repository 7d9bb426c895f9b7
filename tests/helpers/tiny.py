"""Tiny random models of every family: a whole request takes a few hundredths of a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nextscale.cache import LayerCache, StageMemory, Workspace
from nextscale.canvas import to_rows
from nextscale.guidance import ConstantGuidance, RampGuidance
from nextscale.loading.load import random_pipeline
from nextscale.loading.presets import FLEXVAR_SAMPLED_SIDES, ModelSpec, Source, TextSource
from nextscale.methods.stagevar_ranks import RankRow, RankTable, identity
from nextscale.models import FlexVarConfig, HartConfig, InfinityConfig, NextScaleModel, StarConfig, VarConfig
from nextscale.models.context import Conditioning, ForwardContext
from nextscale.pipeline import Output, Pipeline, Settings
from nextscale.sampling import ImageRng, Refinement, Sampling
from nextscale.schedules import BUDGETS_BY_STRIDE, PIXELS_PER_TOKEN, AspectLike, SizeLike, SquareSchedules, infinity_stages
from nextscale.stage import Schedule, Tokens
from nextscale.text import ClipEncoder, QwenEncoder, T5Encoder, TextFeatures
from nextscale.tokenizers import FlexVarTokenizerConfig, HartTokenizer, HartTokenizerConfig, InfinityTokenizerConfig, VarTokenizerConfig

DEPTH, WIDTH, HEADS = 3, 64, 4
CLASSES, CODES, LATENT_CHANNELS = 10, 40, 8
TEXT_CHANNELS, LONGEST_TEXT = 256, 24
BITS = 6  # per latent cell
CELL_PIXELS = 2  # pixels along one side of a latent cell: the tiny autoencoders have two levels
UNPUBLISHED = Source("nobody/nothing", "nothing.pth")

VAR_SIDES = (1, 2, 3, 4)
HART_SIDES = (1, 2, 3, 4)
HART_TEXT = 12  # tokens of every prompt, padding included
HART_TOP_K = (30, 30, 20, 20)
REFINEMENT = Refinement(first_stage=2, rounds=(4, 5), drafted=(2, 0), random=2)
FLEXVAR_SIDES = (1, 2, 3, 5, 7)
FLEXVAR_WIDEST_DRAWN = 3  # so that stage 3 (side 5) is greedy for its width, and stage 4 (side 7) for both reasons
INFINITY_SCHEDULE = Schedule(((1, 1), (2, 2), (3, 2), (4, 3)), extent=(8, 6))


@dataclass(frozen=True)
class OneSchedule:
    """A book that offers a single schedule, and takes any other that is written out."""

    schedule: Schedule

    def choose(self, size: SizeLike, aspect: AspectLike) -> Schedule:
        return size if isinstance(size, Schedule) else self.schedule

    def offers(self) -> list[tuple[int, int]]:
        return [self.schedule.grid]


def var_spec(shared_modulation: bool = False) -> ModelSpec:
    return ModelSpec(
        "tiny-var-shared" if shared_modulation else "tiny-var",
        VarConfig(DEPTH, WIDTH, HEADS, VAR_SIDES, shared_modulation, classes=CLASSES, codes=CODES, latent_channels=LATENT_CHANNELS),
        VarTokenizerConfig(CODES, LATENT_CHANNELS, channels=32, multipliers=(1, 1), blocks_per_level=1),
        Settings(SquareSchedules((VAR_SIDES,)), RampGuidance(strength=4.0), Sampling(top_k=30, top_p=0.95)),
        UNPUBLISHED,
        UNPUBLISHED,
    )


def flexvar_spec() -> ModelSpec:
    return ModelSpec(
        "tiny-flexvar",
        FlexVarConfig(DEPTH, WIDTH, HEADS, classes=CLASSES, codes=CODES, latent_channels=LATENT_CHANNELS, table=(6, 6)),
        FlexVarTokenizerConfig(CODES, LATENT_CHANNELS, latent_channels=16, channels=32, multipliers=(1, 1), blocks_per_level=1),
        Settings(
            SquareSchedules((FLEXVAR_SIDES,)),
            RampGuidance(strength=2.5, longest_span=9, full_above=FLEXVAR_WIDEST_DRAWN),
            Sampling(top_k=30, top_p=0.95, sampled_sides=FLEXVAR_SAMPLED_SIDES, widest_sampled=FLEXVAR_WIDEST_DRAWN),
        ),
        UNPUBLISHED,
        UNPUBLISHED,
    )


def infinity_spec(patchify: bool = False) -> ModelSpec:
    tokenizer = InfinityTokenizerConfig(BITS, channels=32, multipliers=(1, 1), blocks_per_level=1, patchify=patchify)
    return ModelSpec(
        "tiny-infinity-patchify" if patchify else "tiny-infinity",
        InfinityConfig(
            DEPTH, WIDTH, HEADS, chunks=1, bits_per_token=tokenizer.bits_per_token, text_channels=TEXT_CHANNELS, longest_text=LONGEST_TEXT
        ),
        tokenizer,
        Settings(OneSchedule(INFINITY_SCHEDULE), ConstantGuidance(strength=3.0), Sampling(top_k=900, top_p=0.97, temperature=0.5)),
        UNPUBLISHED,
        UNPUBLISHED,
        text_encoder=TextSource("nobody/encoder", T5Encoder),
    )


def hart_spec() -> ModelSpec:
    return ModelSpec(
        "tiny-hart",
        HartConfig(
            DEPTH,
            WIDTH,
            HEADS,
            HART_SIDES,
            CODES,
            LATENT_CHANNELS,
            TEXT_CHANNELS,
            text_tokens=HART_TEXT,
            residual_dim=32,
            residual_depth=2,
            residual_steps=4,
        ),
        HartTokenizerConfig(CODES, LATENT_CHANNELS, channels=32, multipliers=(1, 1), blocks_per_level=1),
        Settings(
            SquareSchedules((HART_SIDES,)),
            RampGuidance(strength=4.5, last_repeats=True),
            Sampling(top_k=HART_TOP_K, smooth=True, last_repeats=True),
        ),
        UNPUBLISHED,
        UNPUBLISHED,
        text_encoder=TextSource("nobody/encoder", QwenEncoder),
    )


def star_spec(refined: bool = False) -> ModelSpec:
    sampling = Sampling(top_k=30, top_p=0.8, refine=REFINEMENT if refined else None)
    return ModelSpec(
        "tiny-star-refined" if refined else "tiny-star",
        StarConfig(DEPTH, WIDTH, HEADS, VAR_SIDES, CODES, LATENT_CHANNELS, TEXT_CHANNELS, refiner_blocks=2 if refined else 0),
        VarTokenizerConfig(CODES, LATENT_CHANNELS, channels=32, multipliers=(1, 1), blocks_per_level=1),
        Settings(SquareSchedules((VAR_SIDES,)), RampGuidance(strength=4.0), sampling),
        UNPUBLISHED,
        UNPUBLISHED,
        text_encoder=TextSource("nobody/encoder", ClipEncoder, reads_empty=True),
    )


SPECS = {
    "var": var_spec(),
    "var_shared": var_spec(shared_modulation=True),
    "flexvar": flexvar_spec(),
    "infinity": infinity_spec(),
    "infinity_patchify": infinity_spec(patchify=True),
    "hart": hart_spec(),
    "star": star_spec(),
    "star_refined": star_spec(refined=True),
}
FAMILIES = tuple(SPECS)
KINDS = ("var", "flexvar", "infinity", "hart", "star_refined")  # one of each kind: the others differ only in ways that no method sees
CLASS_FAMILIES = ("var", "var_shared", "flexvar")
TEXT_FAMILIES = tuple(family for family in FAMILIES if family not in CLASS_FAMILIES)
STAR_FAMILIES = ("star", "star_refined")
CROSS_ATTENTION_FAMILIES = tuple(family for family in TEXT_FAMILIES if family != "hart")  # HART's text stands before the image instead
NUMBERED_FAMILIES = tuple(family for family in FAMILIES if not family.startswith("infinity"))  # codes are numbers, not bits
CONSTANT_FAMILIES = ("infinity", "infinity_patchify")
NO_GUIDANCE = {family: 1.0 if family in CONSTANT_FAMILIES else 0.0 for family in FAMILIES}  # ramps add to 1, constants are the scale itself


def schedule_of(family: str) -> Schedule:
    """Returns the default schedule of a request."""
    return SPECS[family].settings.schedules.choose(None, None)


RATIO = 0.177  # of the ranks that tiny models have


def with_ranks(pipeline: Pipeline, groups: int = DEPTH) -> Pipeline:
    """Adds a rank table with one ratio for alpha 0.96 to the pipeline's model."""
    pipeline.model.rank_table = RankTable(*identity(pipeline.model), (RankRow(0.96, 1, (RATIO,) * groups),))
    return pipeline


@cache
def shared_pipeline(family: str, dtype: torch.dtype = torch.float32) -> Pipeline:
    """Returns a pipeline for all tests that do not change its weights."""
    return with_ranks(random_pipeline(SPECS[family], dtype=dtype))


def fresh_pipeline(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Pipeline:
    """Returns a pipeline whose weights a test may change; `settings` replace fields of the preset's."""
    spec = SPECS[family]
    return with_ranks(random_pipeline(replace(spec, settings=replace(spec.settings, **settings)), dtype=dtype))


def text_features(family: str, lengths: Sequence[int], seed: int = 0) -> TextFeatures:
    """Returns one prompt per length in the family's format; prompt i depends only on `seed`, i and its length."""
    rows, pooled = [], []
    for position, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(1000 * seed + position)
        rows.append(torch.randn(HART_TEXT if family == "hart" else length, TEXT_CHANNELS, generator=generator))
        pooled.append(torch.randn(TEXT_CHANNELS, generator=generator))
    if family == "hart":
        return TextFeatures(tuple(rows), mask=torch.arange(HART_TEXT) < torch.tensor(lengths)[:, None])
    return TextFeatures(tuple(rows), pooled=torch.stack(pooled) if family.startswith("star") else None)


TEXT_LENGTHS = (5, 9, 3)


def prompts(family: str, images: int) -> Any:
    """Returns different prompts for a batch of up to three images."""
    if family in CLASS_FAMILIES:
        return [3, 7, 1][:images]
    return text_features(family, TEXT_LENGTHS[:images])


def one_prompt(family: str, position: int) -> Any:
    """Returns the prompt of one image of `prompts`."""
    return [3, 7, 1][position] if family in CLASS_FAMILIES else text_features(family, TEXT_LENGTHS).one(position)


def infinity_schedule(template: float, budget: str) -> Schedule:
    """Returns the schedule of a published Infinity model for an aspect ratio (height / width) and a pixel budget."""
    return infinity_stages(template, BUDGETS_BY_STRIDE[PIXELS_PER_TOKEN][budget])


def encode_hybrid(tokenizer: HartTokenizer, images: Tensor, schedule: Schedule) -> tuple[list[Tensor], Tensor]:
    """HART's codes of every stage, and the residual [B, cells, Z] that completes the last one to the continuous features."""
    codes = tokenizer.encode(images, schedule)
    canvas = tokenizer.canvas(schedule, images.shape[0])
    for stage, numbers in zip(schedule, codes, strict=True):
        canvas.add(numbers, Tokens(stage))
    return codes, to_rows(tokenizer.features(images) - canvas.latent)


def dense_env(model: NextScaleModel, cond: Conditioning, schedule: Schedule, batch: int) -> ForwardContext:
    """Returns the forward context of a dense request."""
    rows = cond.start.shape[0]
    spec = model.cache_spec(schedule, rows)
    workspace = Workspace(spec)
    caches = [LayerCache(spec.layer(number), workspace) for number in range(len(model.blocks))]
    return ForwardContext(batch, cond, caches, StageMemory(), "both" if rows > batch else "cond", ImageRng([0] * batch, model.device))


# --- comparing outputs


class Rounding(NamedTuple):
    """Allowed differences of an image from the same image in another batch. Codes and bits must be equal."""

    mixtures: float
    latents: float
    pixels: float  # with a standard deviation near 0.6


# Matrix products of a batch and of a single image round differently. Measured on a CPU over 40 seeds and 3 images per family, with 1 and 2
# threads: codes are equal, and so are latents that follow from codes (FlexVAR, Infinity); other latents are within 1e-6 (convolutions of
# VAR and STAR), pixels within 5.3e-6 (FlexVAR 2.2e-5). Permuting a batch permutes the pixels, bit for bit if vectors are wide; repeating a
# request repeats them bit for bit. HART's first diffusion step multiplies rounding by 2e4 and then clamps, so a few elements move much
# farther than the others. Over 250 seeds and 3 images its latents moved by 6e-6 (median image), 2e-5 (99 % of the images) and 1.2e-2 (worst
# image), its pixels by at most 3e-3. Mixtures of codes, which divide rounding by a temperature down to 0.1, moved by at most 1.9e-3, the
# latents then by 1.6e-5, 1.6e-3 and 8.6e-3. With narrow vectors and merged tokens, pixels of one image moved by 3e-2. Pixels of different
# images differ by more than 1.
EXACT_LATENTS = Rounding(0, 0, 1e-4)
ROUNDING = {family: EXACT_LATENTS if family.startswith(("flexvar", "infinity")) else Rounding(1e-2, 1e-5, 1e-4) for family in FAMILIES}
ROUNDING["hart"] = Rounding(1e-2, 2e-1, 1e-1)


def same_codes(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Returns True if codes are equal bit for bit."""
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def close_codes(family: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Numbers and bits equal, mixtures to rounding."""

    def close(a: Tensor, b: Tensor) -> bool:
        if not a.is_floating_point():
            return torch.equal(a, b)
        return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=ROUNDING[family].mixtures)

    return len(ours) == len(theirs) and all(close(a, b) for a, b in zip(ours, theirs, strict=True))


def assert_same_bits(ours: Output, theirs: Output) -> None:
    assert same_codes(ours.codes, theirs.codes)
    assert torch.equal(ours.latent, theirs.latent)
    assert torch.equal(ours.pixels, theirs.pixels)


def assert_close(family: str, ours: Output, theirs: Output) -> None:
    """Requires equal images up to rounding."""
    assert close_codes(family, ours.codes, theirs.codes)
    assert torch.allclose(ours.latent, theirs.latent, rtol=0, atol=ROUNDING[family].latents)
    assert_close_pixels(family, ours.pixels, theirs.pixels)


def assert_close_pixels(family: str, ours: Tensor, theirs: Tensor) -> None:
    assert torch.allclose(ours, theirs, rtol=0, atol=ROUNDING[family].pixels)


def one_image(output: Output, image: int) -> Output:
    """Returns one image of a batch as a batch."""
    only = slice(image, image + 1)
    return replace(output, pixels=output.pixels[only], latent=output.latent[only], codes=tuple(codes[only] for codes in output.codes))
