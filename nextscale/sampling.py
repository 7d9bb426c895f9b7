"""From logits to codes: filters, draws, smoothing, and where the random numbers come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .errors import SettingError
from .stage import Schedule, Stage, Tokens


@dataclass(frozen=True)
class Sampling:
    """How codes are chosen. The defaults change nothing: full distribution, temperature 1.

    top_k: keep the k most likely codes (0: all). top_p: keep the most likely codes that make up this probability (0: all).
    temperature: a number, or one per stage. greedy: always the most likely code; no random numbers are used.
    smooth: VAR's "more smooth": a mixture of codes drawn with Gumbel noise instead of a single one.
    drawn_sides, widest_drawn: FlexVAR's rule that only stages of these sides, up to this width, are drawn; the others are greedy.
    forbidden: code numbers that are made very unlikely (logit -100).
    """

    top_k: int = 0
    top_p: float = 0.0
    temperature: float | tuple[float, ...] = 1.0
    greedy: bool = False
    smooth: bool = False
    drawn_sides: frozenset[int] | None = None
    widest_drawn: int | None = None
    forbidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.top_k, Integral) or self.top_k < 0:
            raise SettingError(f"top_k is 0 (off) or a whole number of codes; got {self.top_k!r}")
        if not isinstance(self.top_p, Real) or not 0 <= self.top_p <= 1:
            raise SettingError(f"top_p is a probability from 0 (off) to 1; got {self.top_p!r}")
        if self.greedy and self.smooth:
            raise SettingError("greedy takes the most likely code and smooth a random mixture of codes: choose one of them")
        temperatures = self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)
        if not all(isinstance(temperature, Real) and 0 < temperature < float("inf") for temperature in temperatures):
            raise SettingError(f"temperature is a number above 0, or a tuple of one per stage; got {self.temperature!r}")
        if not isinstance(self.forbidden, tuple) or not all(isinstance(code, Integral) and code >= 0 for code in self.forbidden):
            raise SettingError(f"forbidden is a tuple of code numbers; got {self.forbidden!r}")

    def changed(self, **settings: object) -> Sampling:
        """A copy with some settings replaced; unknown names are refused."""
        known = set(self.__dataclass_fields__)
        unknown = sorted(set(settings) - known)
        if unknown:
            raise SettingError(f"unknown setting {', '.join(unknown)}; sampling takes {', '.join(sorted(known))}")
        settings = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
        return replace(self, **settings)  # type: ignore[arg-type]

    def check(self, schedule: Schedule) -> None:
        if isinstance(self.temperature, tuple) and len(self.temperature) < len(schedule):
            raise SettingError(f"{len(self.temperature)} temperatures for {len(schedule)} stages: give one per stage, or a single number")

    def prepare(self, logits: Tensor, stage: Stage) -> Tensor:
        """Guided logits with this stage's temperature and the forbidden codes applied."""
        temperature = self.temperature[stage.index] if isinstance(self.temperature, tuple) else self.temperature
        if temperature != 1:
            logits = logits / temperature
        if self.forbidden:
            logits = logits.index_fill(-1, torch.tensor(self.forbidden, device=logits.device), -100.0)
        return logits

    def top_k_at(self, stage: Stage) -> int:
        sides = set(stage.size)
        too_wide = self.widest_drawn is not None and max(sides) > self.widest_drawn
        untrained = self.drawn_sides is not None and not sides <= self.drawn_sides
        return 1 if too_wide or untrained else self.top_k


@runtime_checkable
class Draws(Protocol):
    """The source of random numbers of one request. Every cell of a stage has its own, whether or not its token is run."""

    def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Unit exponential numbers; the first axis of `shape` is the image."""
        ...


class ImageDraws:
    """One generator per image, so that an image does not depend on its neighbours in the batch."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
        noise = torch.empty(tuple(shape), device=device)
        for image, generator in zip(noise, self.generators, strict=True):
            image.exponential_(generator=generator)
        return noise


class SharedDraws:
    """One generator for the whole batch, as in the authors' programs."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return torch.empty(tuple(shape), device=device).exponential_(generator=self.generator)


def filter_logits(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits [..., V] with everything outside the top k, then outside the top p of what is left, set to -inf. Ties with the k-th stay."""
    if 0 < top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if top_p > 0:
        ascending, order = logits.sort(dim=-1, descending=False)
        drop = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        drop[..., -1] = False
        logits = logits.masked_fill(drop.scatter(-1, order, drop), float("-inf"))
    return logits


def cell_noise(draws: Draws, logits: Tensor, tokens: Tokens) -> Tensor:
    """Unit exponential numbers for logits [B, N, ...] of some tokens: drawn for all cells of the stage, then taken where they are.

    So what a token draws does not depend on which others are run, and padding draws what the token that it repeats draws.
    """
    noise = draws.exponential((logits.shape[0], tokens.stage.cells, *logits.shape[2:]), logits.device)
    return tokens.gather(noise.flatten(2)).view(logits.shape)


def draw(logits: Tensor, noise: Tensor) -> Tensor:
    """One code per position from filtered logits [..., V] and unit exponential noise of the same shape.

    The largest ratio of probability to noise is distributed like the softmax; torch.multinomial with one sample computes the same from
    the same generator state, so seeds give the codes of the authors' programs.
    """
    return (logits.softmax(dim=-1) / noise).argmax(dim=-1)


def soften(logits: Tensor, noise: Tensor, progress: float) -> Tensor:
    """VAR's smoothing: a Gumbel softmax over the codes, sharper with `progress` (0 at the first stage, 1 at the last)."""
    tau = max(0.27 * (1 - 0.95 * progress), 0.005)
    return ((logits * (1 + progress) - noise.log()) / tau).softmax(dim=-1)


def choose(logits: Tensor, tokens: Tokens, stages: int, sampling: Sampling, draws: Draws) -> tuple[Tensor, Tensor]:
    """Codes for prepared logits [B, N, ..., V]: the drawn numbers, and what goes on the canvas (the numbers, or a mixture [..., V])."""
    if sampling.greedy:
        ids = logits.argmax(dim=-1)
        return ids, ids
    kept = filter_logits(logits, sampling.top_k_at(tokens.stage), sampling.top_p)
    ids = draw(kept, cell_noise(draws, logits, tokens))
    if not sampling.smooth:
        return ids, ids
    return ids, soften(kept, cell_noise(draws, logits, tokens), tokens.stage.index / max(stages - 1, 1))
