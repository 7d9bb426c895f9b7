"""Training settings of the tokenizer, and the sizes of its pictures."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from nextscale.errors import SettingError
from nextscale.loading.presets import NANO_TOKENIZER
from nextscale.schedules import INFINITY_SIZES, infinity_stages
from nextscale.stage import Schedule
from nextscale.tokenizers import InfinityTokenizer, InfinityTokenizerConfig


@dataclass(frozen=True)
class TokenizerTraining:
    """Tokenizer and training settings. The most important ones are batch, learning_rate, lpips and the length of the run.

    The weights of the loss: L1 distance 1, `lpips`, `commitment`, `entropy`, and `adversarial` (0: no discriminator), which joins at
    the share `adversarial_from` of the run. L1 alone blurs; LPIPS brings texture; the discriminator sharpens and may invent.
    """

    tokenizer: InfinityTokenizerConfig = NANO_TOKENIZER
    batch: int = 64  # pictures of the smaller size; fewer of the larger one, as many pixels
    large_every: int = 4  # one of this many steps takes the larger pictures, if there are two sizes
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    longest_gradient: float = 1.0  # its norm is cut down to this
    lpips: float = 0.5
    lpips_share: float = 1.0  # share of a batch that LPIPS looks at
    commitment: float = 0.25
    entropy: float = 0.05
    entropy_scale: float = 4.0  # how soon a bit counts as certain, see `entropy_penalty`
    entropy_diversity: float = 1.0
    adversarial: float = 0.0
    adversarial_from: float = 0.5
    average: float = 0.999  # decay of the averaged weights, which are the ones kept
    compile: bool = False  # the residual blocks: about a minute before the first step, then much faster on a GPU
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "large_every"):
            self._require(name, isinstance(getattr(self, name), int) and getattr(self, name) >= 1, "a whole number, at least 1")
        for name in ("learning_rate", "longest_gradient", "entropy_scale"):
            self._require(name, 0 < getattr(self, name) < float("inf"), "above 0")
        for name in ("weight_decay", "lpips", "commitment", "entropy", "entropy_diversity", "adversarial"):
            self._require(name, 0 <= getattr(self, name) < float("inf"), "0 (off) or above")
        self._require("lpips_share", 0 < self.lpips_share <= 1, "above 0, at most 1")
        for name in ("adversarial_from", "average"):
            self._require(name, 0 <= getattr(self, name) < 1, "at least 0, below 1")
        try:
            with torch.device("meta"):
                InfinityTokenizer(self.tokenizer)
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError, IndexError) as error:
            raise SettingError(f"no tokenizer can be built of {self.tokenizer}: {error}") from error

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise SettingError(f"{name} {getattr(self, name)!r} of the tokenizer's training: expected {expected}")


def square_schedule(side: int, pixels_per_token: int) -> Schedule:
    """Returns the stages of Infinity's square list up to this side in pixels."""
    offers = [height * pixels_per_token for height, _ in INFINITY_SIZES[1.0]]
    if side not in offers:
        raise SettingError(f"pictures of side {side}: at {pixels_per_token} pixels per token choose one of {', '.join(map(str, offers))}")
    return infinity_stages(1.0, offers.index(side) + 1)


def schedule_of(template: float, side: int, pixels_per_token: int) -> Schedule:
    """Returns the stages of an aspect ratio (height / width) with about as many pixels as a square of this side."""
    return infinity_stages(template, len(square_schedule(side, pixels_per_token)))


def check_sides(config: InfinityTokenizerConfig, sides: Collection[int]) -> None:
    """Raises SettingError unless a tokenizer can be trained on pictures of these sides."""
    if not 1 <= len(sides) <= 2:
        raise SettingError(f"training at sides {sorted(sides)}: expected one or two sizes of pictures")
    with torch.device("meta"):
        stride = InfinityTokenizer(config).pixels_per_token
    for side in sides:
        square_schedule(side, stride)
