"""Random numbers at fixed addresses: a recorded request reads them, and every replay puts its own there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from ..sampling import Rng

Kind = Literal["exponential", "uniform", "normal"]


@dataclass(frozen=True, eq=False)
class NoiseBuffer:
    kind: Kind
    numbers: Tensor


class StaticRng:
    """Remembers what a request draws, in order. A second run of the same request gets the same buffers again."""

    def __init__(self) -> None:
        self._drawn: list[NoiseBuffer] = []
        self._next = 0
        self._ends: list[int] = []  # how often the request has drawn when each stage ends, where that was told

    @property
    def drawn(self) -> int:
        """How often the request has drawn so far."""
        return self._next

    def rewind(self, drawn: int = 0) -> None:
        """To where the request had drawn so often; the start of it by default."""
        self._next = drawn

    def end_stage(self) -> None:
        self._ends.append(self._next)

    def share_memory(self) -> None:
        """Between the stages that were told, each of which is to be refilled before it runs. Codes of 4096 kinds take as many numbers
        per token: 152 MB for all stages of an image of 1024 x 1024 pixels, of which the last stage has 67."""
        stages = [self._drawn[start:end] for start, end in pairwise([0, *self._ends])]
        room = max((sum(drawn.numbers.numel() for drawn in stage) for stage in stages), default=0)
        if not room:
            return
        shared = torch.full((room,), 0.5, device=self._drawn[0].numbers.device)
        self._drawn = [drawn for stage in stages for drawn in _placed(stage, shared)]

    @torch.inference_mode()
    def refill(self, draws: Rng, stage: int | None = None) -> None:
        """With the numbers that a request with these draws would get: those of one stage, or all."""
        start, end = (0, len(self._drawn)) if stage is None else (self._ends[stage - 1] if stage else 0, self._ends[stage])
        for drawn in self._drawn[start:end]:
            drawn.numbers.copy_(getattr(draws, drawn.kind)(drawn.numbers.shape, drawn.numbers.device))

    def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return self._fixed("exponential", shape, device)

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return self._fixed("uniform", shape, device)

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return self._fixed("normal", shape, device)

    def _fixed(self, kind: Kind, shape: Sequence[int], device: torch.device) -> Tensor:
        if self._next == len(self._drawn):
            if torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{kind} {list(shape)} is drawn by the recording and was not by the runs before it")
            self._drawn.append(NoiseBuffer(kind, torch.full(tuple(shape), 0.5, device=device)))
        drawn = self._drawn[self._next]
        if drawn.kind != kind or drawn.numbers.shape != torch.Size(shape):
            raise RuntimeError(f"a request drew {drawn.kind} {list(drawn.numbers.shape)} at first and {kind} {list(shape)} the second time")
        self._next += 1
        return drawn.numbers


def _placed(stage: Sequence[NoiseBuffer], shared: Tensor) -> Iterator[NoiseBuffer]:
    """The same draws one after the other in `shared`."""
    start = 0
    for drawn in stage:
        end = start + drawn.numbers.numel()
        yield NoiseBuffer(drawn.kind, shared[start:end].view(drawn.numbers.shape))
        start = end
