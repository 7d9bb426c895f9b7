"""Sampling of codes from logits: filters, sampling, smoothing, and the sources of random numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from . import kernels
from .errors import SettingError
from .stage import Schedule, Stage, Tokens
from .validation import is_fraction, is_int, is_number, require, require_flags

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6  # guided logits divided by it stay far from float32's overflow at 3e38


@dataclass(frozen=True)
class Sampling:
    """Settings for the choice of codes. The defaults change nothing: full distribution, temperature 1.

    top_k: keep the k most likely codes (0: all); a number, or one per stage.
    top_p: keep the most likely codes of this total probability (0: all).
    temperature: a number, or one per stage. greedy: always the most likely code; no random numbers are used.
    smooth: VAR's "more smooth": a mixture of codes, weighted with Gumbel noise, instead of a single one.
    sampled_sides, widest_sampled: FlexVAR's rule that only stages of these sides, up to this width, are sampled; the others are greedy.
    filter_first: apply top_k and top_p before the temperature (CoDe), not after.
    suppressed_codes: code numbers that are made very unlikely (logit -100).
    last_repeats: the last stage is smoothed like the one before it (HART).
    refine: rounds in which a model with a refiner samples its late stages (STAR); None: every stage at once.
    """

    top_k: int | tuple[int, ...] = 0
    top_p: float = 0.0
    temperature: float | tuple[float, ...] = 1.0
    greedy: bool = False
    smooth: bool = False
    sampled_sides: frozenset[int] | None = None
    widest_sampled: int | None = None
    suppressed_codes: tuple[int, ...] = ()
    last_repeats: bool = False
    refine: Refinement | None = None
    filter_first: bool = False

    def __post_init__(self) -> None:
        counts, temperatures = (one if isinstance(one, tuple) else (one,) for one in (self.top_k, self.temperature))
        require(all(map(is_int, counts)), "top_k", "0 (off) or a whole number of codes, or a tuple of one per stage", self.top_k)
        require(is_fraction(self.top_p), "top_p", "a probability from 0 (off) to 1", self.top_p)
        require_flags(self, "greedy", "smooth", "last_repeats", "filter_first")
        if self.sampled_sides is not None:
            given = self.sampled_sides
            good = isinstance(given, Iterable) and not isinstance(given, str) and all(map(is_int, given))
            require(good, "sampled_sides", "a set of whole numbers", given)
            object.__setattr__(self, "sampled_sides", frozenset(given))
        widest = self.widest_sampled
        require(widest is None or is_int(widest), "widest_sampled", "a whole number, or None", widest)
        require(isinstance(self.refine, Refinement | None), "refine", "a Refinement, or None (off)", self.refine)
        if self.greedy and self.smooth:
            raise SettingError("greedy takes the most likely code and smooth a random mixture of codes. Choose one of them.")
        good = all(is_number(one) and MIN_TEMPERATURE <= one <= MAX_TEMPERATURE for one in temperatures)
        expected = f"a number from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, or a tuple of one per stage"
        require(good, "temperature", f"{expected} (greedy=True takes the most likely code)", self.temperature)
        codes = self.suppressed_codes
        require(isinstance(codes, tuple) and all(map(is_int, codes)), "suppressed_codes", "a tuple of code numbers", codes)

    def changed(self, **settings: object) -> Sampling:
        """Returns a copy with some settings replaced. Raises SettingError for unknown names."""
        if not settings:
            return self
        known = set(self.__dataclass_fields__)
        unknown = sorted(set(settings) - known)
        if unknown:
            raise SettingError(f"unknown setting {', '.join(unknown)}; sampling takes {', '.join(sorted(known))}")
        settings = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
        if settings.get("greedy") and "smooth" not in settings:
            settings["smooth"] = False  # greedy=True overrides a published smooth=True
        return replace(self, **settings)  # type: ignore[arg-type]

    def check(self, schedule: Schedule) -> None:
        for name in ("temperature", "top_k"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) < len(schedule):
                raise SettingError(f"{name} must be one number, or one per stage ({len(schedule)}); got {len(value)} values.")

    def prepare(self, logits: Tensor, stage: Stage) -> Tensor:
        """Returns guided logits with this stage's temperature and the suppressed codes applied."""
        if not self.filter_first:
            logits = self.apply_temperature(logits, stage)
        if self.suppressed_codes:
            logits = logits.clone()
            for code in self.suppressed_codes:  # one by one: a captured graph cannot take a list of them from the host
                logits.select(-1, code).fill_(-100.0)
        return logits

    def apply_temperature(self, logits: Tensor, stage: Stage) -> Tensor:
        """Returns logits divided by this stage's temperature."""
        temperature = self.temperature[stage.index] if isinstance(self.temperature, tuple) else self.temperature
        return logits if temperature == 1 else logits / temperature

    def top_k_at(self, stage: Stage) -> int:
        sides = set(stage.size)
        too_wide = self.widest_sampled is not None and max(sides) > self.widest_sampled
        untrained = self.sampled_sides is not None and not sides <= self.sampled_sides
        if too_wide or untrained:
            return 1
        return self.top_k[stage.index] if isinstance(self.top_k, tuple) else self.top_k

    def progress(self, stage: Stage, stages: int) -> float:
        """Returns the sharpness of a stage's smoothing: 0 at the first, 1 at the last, with `last_repeats` there as at the one before."""
        last = stages - 1
        return min(stage.index, max(last - 1, 0) if self.last_repeats else last) / max(last, 1)


@dataclass(frozen=True)
class Refinement:
    """STAR's refinement of late stages: a stage is sampled in rounds, and every round sees the codes of earlier rounds.

    first_stage: the first that is refined. rounds: per refined stage, the last entry also for all later ones. drafted: number of first
    rounds of each that sample from the main model's logits instead of the refiner's. random: number of first rounds that settle random
    cells; later ones settle the cells with the most certain codes.
    """

    first_stage: int = 9
    rounds: tuple[int, ...] = (8, 8, 8, 8, 15)
    drafted: tuple[int, ...] = (5, 5, 5, 5, 0)
    random: int = 5

    def __post_init__(self) -> None:
        good = isinstance(self.rounds, tuple) and isinstance(self.drafted, tuple) and 0 < len(self.rounds) == len(self.drafted)
        good = good and all(map(is_int, (*self.rounds, *self.drafted, self.first_stage, self.random))) and 0 not in self.rounds
        require(good, "refine", "made of whole numbers, with as many rounds (at least 1) as drafted rounds (at least 0)", self)

    def at(self, stage: Stage) -> tuple[int, int]:
        """Returns the rounds of a stage, and the number of drafted ones."""
        entry = min(stage.index - self.first_stage, len(self.rounds) - 1)
        return self.rounds[entry], self.drafted[entry]


@runtime_checkable
class Rng(Protocol):
    """The source of random numbers of one request. Every cell of a stage has its own, even if its token does not run."""

    def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Returns unit exponential numbers; the first axis of `shape` is the image."""
        ...

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Returns numbers between 0 and 1."""
        ...

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Returns standard normal numbers."""
        ...


NoiseKind = Literal["exponential", "uniform", "normal"]
FILLS: dict[NoiseKind, Callable[..., Tensor]] = {
    "exponential": Tensor.exponential_,
    "uniform": Tensor.uniform_,
    "normal": Tensor.normal_,
}


class Streams(ABC):
    """Base of the sources of random numbers; subclasses draw them."""

    @abstractmethod
    def draw(self, kind: NoiseKind, shape: Sequence[int], device: torch.device) -> Tensor: ...

    def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return self.draw("exponential", shape, device)

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return self.draw("uniform", shape, device)

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return self.draw("normal", shape, device)


class ImageRng(Streams):
    """One generator per image, so that an image does not depend on its neighbors in the batch."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def draw(self, kind: NoiseKind, shape: Sequence[int], device: torch.device) -> Tensor:
        return self.fill(kind, torch.empty(tuple(shape), device=device))

    def fill(self, kind: NoiseKind, noise: Tensor) -> Tensor:
        """Writes the next numbers into `noise`, whose first axis is the image."""
        for image, generator in zip(noise.unbind(0), self.generators, strict=True):
            FILLS[kind](image, generator=generator)
        return noise


METHOD_STREAM = 0x6E657874_7363616C  # mixed into an image's seed for the noise of a method


def method_rng(seeds: Sequence[int], device: torch.device) -> ImageRng:
    """Returns the random numbers of an acceleration method for images with these seeds, separate from the images' own."""
    return ImageRng([seed ^ METHOD_STREAM for seed in seeds], device)


class SharedRng(Streams):
    """One generator for the whole batch, as in the reference implementations."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def draw(self, kind: NoiseKind, shape: Sequence[int], device: torch.device) -> Tensor:
        return FILLS[kind](torch.empty(tuple(shape), device=device), generator=self.generator)


def filter_logits(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Returns logits [..., V] with everything outside the top k, then outside the top p of the rest, set to -inf. Ties stay."""
    if 0 < top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if top_p > 0:
        ascending, order = logits.sort(dim=-1, descending=False)
        drop = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        drop[..., -1] = False
        logits = logits.masked_fill(drop.scatter(-1, order, drop), float("-inf"))
    return logits


Noise = Callable[[Sequence[int], torch.device], Tensor]


def cell_noise(noise: Noise, tokens: Tokens, shape: Sequence[int], device: torch.device) -> Tensor:
    """Returns random numbers [B, N, ...] for some tokens, taken from numbers for all cells of the stage.

    So the noise of a token does not depend on the other tokens that run, and padding has the noise of the token that it repeats.
    """
    of_cells = noise((shape[0], tokens.stage.cells, *shape[2:]), device)
    return tokens.gather(of_cells.flatten(2) if of_cells.ndim > 2 else of_cells[..., None]).view(*shape)


def sample(logits: Tensor, noise: Tensor) -> Tensor:
    """Returns one code per position from filtered logits [..., V] and unit exponential noise of the same shape.

    The largest ratio of probability to noise is distributed like the softmax; torch.multinomial with one sample computes the same from the
    same generator state, so seeds give the codes of the reference implementations.
    """
    return (logits.softmax(dim=-1) / noise).argmax(dim=-1)


def gumbel_softmax(logits: Tensor, noise: Tensor, progress: float) -> Tensor:
    """VAR's smoothing: a Gumbel softmax over the codes, sharper with `progress` (0 at the first stage, 1 at the last)."""
    tau = max(0.27 * (1 - 0.95 * progress), 0.005)
    return ((logits * (1 + progress) - noise.log()) / tau).softmax(dim=-1)


def sample_codes(logits: Tensor, tokens: Tokens, sampling: Sampling, rng: Rng) -> tuple[Tensor, Tensor]:
    """Returns code numbers [B, N, ...] for prepared logits [B, N, ..., V], and the filtered logits from which they were sampled."""
    kept = filter_logits(logits, sampling.top_k_at(tokens.stage), sampling.top_p)
    if sampling.filter_first:
        kept = sampling.apply_temperature(kept, tokens.stage)
    if sampling.greedy:
        return kept.argmax(dim=-1), kept
    return sample(kept, cell_noise(rng.exponential, tokens, logits.shape, logits.device)), kept


def kernel_samples(logits: Tensor, sampling: Sampling, stage: Stage) -> bool:
    """Returns True if the kernel gives the results of `sample_codes`: one of two codes, with a top p that never decides between equals."""
    usual = not sampling.smooth and not sampling.filter_first
    two = logits.shape[-1] == 2 and logits.dtype == torch.float32 and sampling.top_k_at(stage) != 1 and usual
    return two and (sampling.top_p == 0 or sampling.top_p > 0.5) and kernels.available(logits)


def choose(logits: Tensor, tokens: Tokens, stages: int, sampling: Sampling, rng: Rng) -> tuple[Tensor, Tensor]:
    """Returns the codes for prepared logits [B, N, ..., V]: the sampled numbers, and the codes for the canvas (the numbers, or a mixture
    [..., V]).
    """
    if sampling.greedy:
        ids = logits.argmax(dim=-1)
        return ids, ids
    if kernel_samples(logits, sampling, tokens.stage):
        bits = kernels.sample_bits(logits, cell_noise(rng.exponential, tokens, logits.shape, logits.device), sampling.top_p)
        return bits, bits
    ids, kept = sample_codes(logits, tokens, sampling, rng)
    if not sampling.smooth:
        return ids, ids
    noise = cell_noise(rng.exponential, tokens, logits.shape, logits.device)
    return ids, gumbel_softmax(kept, noise, sampling.progress(tokens.stage, stages))


def pass_noise(shape: Sequence[int], sampling: Sampling, rng: Rng, device: torch.device) -> None:
    """Draws and discards the random numbers of `choose` for logits of this shape on all cells of a stage."""
    for _ in range(0 if sampling.greedy else 2 if sampling.smooth else 1):
        rng.exponential(shape, device)
