"""Tiny random models of every family: a whole request takes a few hundredths of a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from nextscale.guidance import ConstantGuidance, RampGuidance
from nextscale.models import FlexVarConfig, HartConfig, InfinityConfig, StarConfig, VarConfig
from nextscale.pipeline import Pipeline
from nextscale.presets import FLEXVAR_DRAWN_SIDES, ModelSpec, Settings, Source, TextSource
from nextscale.random_weights import random_pipeline
from nextscale.sampling import Refinement, Sampling
from nextscale.schedules import AspectLike, SizeLike, SquareBook
from nextscale.stage import Schedule
from nextscale.text import ClipEncoder, QwenEncoder, T5Encoder, TextFeatures
from nextscale.tokenizers import FlexVarTokenizerConfig, HartTokenizerConfig, InfinityTokenizerConfig, VarTokenizerConfig

DEPTH, WIDTH, HEADS = 3, 64, 4
CLASSES, CODES, LATENT_CHANNELS = 10, 40, 8
TEXT_CHANNELS, LONGEST_TEXT = 256, 24
BITS = 6  # per latent cell
CELL_PIXELS = 2  # pixels along one side of a latent cell: the tiny autoencoders have two levels
UNPUBLISHED = Source("nobody/nothing", "nothing.pth")

VAR_SIDES = (1, 2, 3, 4)
HART_SIDES = (1, 2, 3, 4)
HART_TEXT = 12  # tokens of every prompt, padding included
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
        Settings(SquareBook((VAR_SIDES,)), RampGuidance(strength=4.0), Sampling(top_k=30, top_p=0.95)),
        UNPUBLISHED,
        UNPUBLISHED,
    )


def flexvar_spec() -> ModelSpec:
    return ModelSpec(
        "tiny-flexvar",
        FlexVarConfig(DEPTH, WIDTH, HEADS, classes=CLASSES, codes=CODES, latent_channels=LATENT_CHANNELS, table=(6, 6)),
        FlexVarTokenizerConfig(CODES, LATENT_CHANNELS, latent_channels=16, channels=32, multipliers=(1, 1), blocks_per_level=1),
        Settings(
            SquareBook((FLEXVAR_SIDES,)),
            RampGuidance(strength=2.5, longest_span=9, full_above=FLEXVAR_WIDEST_DRAWN),
            Sampling(top_k=30, top_p=0.95, drawn_sides=FLEXVAR_DRAWN_SIDES, widest_drawn=FLEXVAR_WIDEST_DRAWN),
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
            residual_width=32,
            residual_depth=2,
            residual_steps=4,
        ),
        HartTokenizerConfig(CODES, LATENT_CHANNELS, channels=32, multipliers=(1, 1), blocks_per_level=1),
        Settings(
            SquareBook((HART_SIDES,)),
            RampGuidance(strength=4.5, last_repeats=True),
            Sampling(top_k=(30, 30, 20, 20), smooth=True, last_repeats=True),
        ),
        UNPUBLISHED,
        UNPUBLISHED,
        text_encoder=TextSource("nobody/encoder", QwenEncoder),
    )


def star_spec(refined: bool = False) -> ModelSpec:
    refine = Refinement(first_stage=2, rounds=(4, 5), drafted=(2, 0), random=2)
    return ModelSpec(
        "tiny-star-refined" if refined else "tiny-star",
        StarConfig(DEPTH, WIDTH, HEADS, VAR_SIDES, CODES, LATENT_CHANNELS, TEXT_CHANNELS, refiner_blocks=2 if refined else 0),
        VarTokenizerConfig(CODES, LATENT_CHANNELS, channels=32, multipliers=(1, 1), blocks_per_level=1),
        Settings(SquareBook((VAR_SIDES,)), RampGuidance(strength=4.0), Sampling(top_k=30, top_p=0.8, refine=refine if refined else None)),
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
CLASS_FAMILIES = ("var", "var_shared", "flexvar")
TEXT_FAMILIES = tuple(family for family in FAMILIES if family not in CLASS_FAMILIES)
CONSTANT_FAMILIES = ("infinity", "infinity_patchify")
NO_GUIDANCE = {family: 1.0 if family in CONSTANT_FAMILIES else 0.0 for family in FAMILIES}  # ramps add to 1, constants are the scale itself


def schedule_of(family: str) -> Schedule:
    """The schedule that a request takes by default."""
    return SPECS[family].settings.schedules.choose(None, None)


@cache
def shared_pipeline(family: str, dtype: torch.dtype = torch.float32) -> Pipeline:
    """One pipeline for all tests that leave its weights alone."""
    return random_pipeline(SPECS[family], dtype=dtype)


def fresh_pipeline(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Pipeline:
    """A pipeline of the test's own, whose weights it may change; `settings` replace fields of the preset's."""
    spec = SPECS[family]
    return random_pipeline(replace(spec, settings=replace(spec.settings, **settings)), dtype=dtype)


def text_features(family: str, lengths: Sequence[int], seed: int = 0) -> TextFeatures:
    """One prompt per length, in the form that the family reads; the i-th depends on `seed`, i and its length only."""
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
    """Different prompts for a batch of up to three images."""
    if family in CLASS_FAMILIES:
        return [3, 7, 1][:images]
    return text_features(family, TEXT_LENGTHS[:images])


def one_prompt(family: str, position: int) -> Any:
    """The prompt of one image of `prompts`."""
    return [3, 7, 1][position] if family in CLASS_FAMILIES else text_features(family, TEXT_LENGTHS).one(position)
