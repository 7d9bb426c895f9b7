"""Stand-ins for prompts, random numbers and networks that a replay hands to the pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain, repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale import Guidance, Schedule, Stage, StageGuidance, TextFeatures
from nextscale.canvas import BitCanvas, to_rows
from nextscale.tokenizers import InfinityTokenizer
from nextscale.tokenizers.base import Tokenizer


class FeatureReader:
    """Reads prompts that are features already."""

    def read(self, prompt: TextFeatures) -> TextFeatures:
        return prompt

    def empty(self) -> None:
        return None


class StoredRng:
    """Stored random numbers in the order of their use. All codes get the same noise, so that the most likely one is sampled."""

    def __init__(
        self,
        smoothing: Iterable[Tensor] = (),
        uniform: Iterable[Tensor] = (),
        normal: Iterable[Tensor] = (),
        exponential: Iterable[Tensor] = (),
    ) -> None:
        """`exponential` is used first. `smoothing` has the numbers of every smoothed stage, used after those that sample its codes."""
        pairs = chain.from_iterable((None, noise) for noise in smoothing)
        self._exponential, self._uniform, self._normal = chain(exponential, pairs, repeat(None)), iter(uniform), iter(normal)

    def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
        noise = next(self._exponential)
        return torch.ones(tuple(shape)) if noise is None else shaped(noise, shape)

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return shaped(next(self._uniform), shape)

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return shaped(next(self._normal), shape)


def shaped(stored: Tensor, shape: Sequence[int]) -> Tensor:
    assert stored.numel() == math.prod(shape), f"random numbers {tuple(shape)} were requested; {tuple(stored.shape)} are stored"
    return stored.view(tuple(shape))


def with_both_cfg_branches(guidance: Guidance, schedule: Schedule) -> StageGuidance:
    """Returns the same guidance scales with an unconditional branch that always runs, as in the reference implementations."""
    return StageGuidance(values=(*guidance.scales(schedule), 0.0))


def images_with_features(tokenizer: Tokenizer, features: Tensor, schedule: Schedule) -> Tensor:
    """Images that the tokenizer takes to have these features: stands in for an encoder whose weights are left out."""
    tokenizer.features = lambda images: features
    return torch.zeros(features.shape[0], 3, *(side * tokenizer.pixels_per_token for side in schedule.grid))


def without_decoder(tokenizer: Tokenizer) -> None:
    """Images become black dots: spares the largest part of a replay whose decoder is left out."""
    tokenizer.decode = lambda latent: torch.zeros(latent.shape[0], 3, 1, 1)


class AreaCanvas(BitCanvas):
    """Shrinks the sum of codes to the next stage by averaging."""

    def input(self, stage: Stage) -> Tensor | None:
        return None if stage.index == 0 else to_rows(F.interpolate(self.latent, size=stage.size, mode="area"))


def with_area_inputs(tokenizer: InfinityTokenizer) -> None:
    """Makes a tokenizer's stages begin as in the public SparseVAR program, which averages where Infinity interpolates."""
    tokenizer.canvas = lambda schedule, batch: AreaCanvas(tokenizer, schedule, batch)
