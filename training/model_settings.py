"""Training settings of the transformer, and checks that its parts fit together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from nextscale.errors import SettingError
from nextscale.loading.presets import NANO_MODEL
from nextscale.models import InfinityConfig
from nextscale.text.words import WordTextEncoder
from nextscale.tokenizers import InfinityTokenizer

from .data import Pictures
from .scenes import Mix
from .tokenizer_settings import square_schedule


@dataclass(frozen=True)
class Batch:
    """Batch of one step: a number of pictures of one side, up to a stage."""

    side: int
    stages: int
    pictures: int


@dataclass(frozen=True)
class Phase:
    """Part of a run in which steps cycle through some kinds of batches."""

    share: float
    batches: tuple[Batch, ...]

    @classmethod
    def of(cls, given: Phase | Sequence[Any]) -> Phase:
        """Returns a phase. Also takes plain numbers: [share, [[side, stages, pictures], ...]]."""
        if isinstance(given, Phase):
            return given
        expected = SettingError(f"phase {given!r}: expected [share, [[side, stages, pictures], ...]], the last three whole numbers")
        try:
            share, batches = given
            phase = cls(float(share), tuple(Batch(*batch) for batch in batches))
        except (TypeError, ValueError) as error:
            raise expected from error
        if any(type(number) is not int for batch in phase.batches for number in (batch.side, batch.stages, batch.pictures)):
            raise expected
        return phase


@dataclass(frozen=True)
class ModelTraining:
    """Model and training settings. The most important ones are phases, learning_rate and the length of the run.

    Phases go from coarse to fine, as in Infinity's own training: the first stages decide the content and cost a fifth of the others.
    flips: the largest share of bits that are flipped (bitwise self-correction). no_prompt: share of pictures without their prompt, which
    guidance needs. mix: shares of composed pictures.
    """

    model: InfinityConfig = NANO_MODEL
    phases: tuple[Phase, ...] = (
        Phase(0.2, (Batch(256, 7, 512),)),
        Phase(0.5, (Batch(256, 10, 128),)),
        Phase(0.3, (Batch(512, 13, 32), Batch(256, 10, 128))),
    )
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    longest_gradient: float = 1.0
    flips: float = 0.25
    no_prompt: float = 0.1
    mix: Mix = field(default_factory=Mix)
    average: float = 0.998
    compile: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", tuple(Phase.of(phase) for phase in self.phases))
        shares = [phase.share for phase in self.phases]
        if not shares or min(shares) <= 0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
            raise SettingError(f"phases are shares of a run, each above 0, that add up to 1; got {shares}")
        for phase in self.phases:
            if not phase.batches or any(batch.stages < 2 or batch.pictures < 1 for batch in phase.batches):
                raise SettingError(f"a phase has batches of 1 picture or more, up to stage 2 or later; got {phase}")
        for name in ("flips", "no_prompt", "average"):
            if not 0 <= getattr(self, name) < 1:
                raise SettingError(f"{name} is a share, from 0 to below 1; got {getattr(self, name)!r}")
        for name in ("learning_rate", "longest_gradient"):
            if not 0 < getattr(self, name) < math.inf:
                raise SettingError(f"{name} is a number above 0; got {getattr(self, name)!r}")
        if not 0 <= self.weight_decay < math.inf:
            raise SettingError(f"weight_decay is 0 or above; got {self.weight_decay!r}")
        check_model(self.model)

    @property
    def sides(self) -> list[int]:
        """Returns the sides of the pictures in all phases, from small to large."""
        return sorted({batch.side for phase in self.phases for batch in phase.batches})

    def batch_at(self, progress: float, step: int) -> Batch:
        ends = accumulate(phase.share for phase in self.phases)
        phase = next((phase for phase, end in zip(self.phases, ends, strict=True) if progress < end), self.phases[-1])
        return phase.batches[step % len(phase.batches)]


def check_model(config: InfinityConfig) -> None:
    """Raises SettingError for sizes that no model can have."""
    numbers = {name: value for name, value in asdict(config).items() if type(value) is int}
    if low := [name for name, value in numbers.items() if value < 1]:
        raise SettingError(f"model.{low[0]} is {numbers[low[0]]}; expected at least 1")
    if config.dim % (4 * config.heads):
        raise SettingError(f"a model of dim {config.dim} has {config.heads} heads; expected heads of a multiple of 4 channels each")
    if not config.pool_heads or config.dim % config.pool_heads:
        raise SettingError(
            f"a model of dim {config.dim} pools {config.text_channels} text channels with {config.pool_heads} heads; expected 128 "
            "channels or more, and a number of heads that divides the dim"
        )
    if config.depth % config.chunks:
        raise SettingError(f"a model of depth {config.depth} has {config.chunks} chunks; expected a divisor of the depth")
    if config.level_every_chunk:
        raise SettingError("model.level_every_chunk: training adds the level once, at the first block; leave it false")


def check_parts(model: InfinityConfig, tokenizer: InfinityTokenizer, words: WordTextEncoder) -> None:
    """Raises SettingError unless all three have the same bits and channels."""
    if words.channels != model.text_channels:
        raise SettingError(
            f"the word encoder has {words.channels} channels, the model reads {model.text_channels}: set model.text_channels to "
            f"{words.channels}, or choose another words file"
        )
    if tokenizer.config.bits_per_token != model.bits_per_token:
        raise SettingError(
            f"the tokenizer has {tokenizer.config.bits_per_token} bits per token, the model {model.bits_per_token}: set "
            f"model.bits_per_token to {tokenizer.config.bits_per_token}, or choose another tokenizer"
        )


def check_training(settings: ModelTraining, tokenizer: InfinityTokenizer, words: WordTextEncoder) -> None:
    """Checks all settings that do not depend on the pictures."""
    check_parts(settings.model, tokenizer, words)
    for batch in (batch for phase in settings.phases for batch in phase.batches):
        stages = len(square_schedule(batch.side, tokenizer.pixels_per_token))
        if batch.stages > stages:
            raise SettingError(f"a phase trains stage {batch.stages} of pictures of side {batch.side}, which have {stages} stages")
        if stages > settings.model.levels:
            raise SettingError(f"side {batch.side} has {stages} stages, model.levels is {settings.model.levels}: set model.levels higher")


def check_pictures(settings: ModelTraining, train: Mapping[int, Pictures], held_out: Mapping[int, Pictures]) -> None:
    """Raises SettingError unless every side of the phases has the same pictures."""
    for what, sets in (("training", train), ("held-out", held_out)):
        if sorted(sets) != settings.sides:
            raise SettingError(f"{what} pictures of sides {sorted(sets)}: the phases take {settings.sides}, expected just these")
        counts = {side: len(pictures) for side, pictures in sets.items()}
        if len(set(counts.values())) > 1 or not min(counts.values()):
            raise SettingError(f"{what} pictures: {counts} by side; expected the same ones at every side, at least one")
