"""Random numbers at fixed addresses: a recorded request reads them, and every replay puts its own there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..sampling import Draws

Kind = Literal["exponential", "uniform", "normal"]


@dataclass(frozen=True, eq=False)
class Drawn:
    kind: Kind
    numbers: Tensor


class FixedDraws:
    """Remembers what a request draws, in order. A second run of the same request gets the same buffers again."""

    def __init__(self) -> None:
        self._drawn: list[Drawn] = []
        self._next = 0

    @property
    def drawn(self) -> int:
        """How often the request has drawn so far."""
        return self._next

    def rewind(self, drawn: int = 0) -> None:
        """To where the request had drawn so often; the start of it by default."""
        self._next = drawn

    @torch.inference_mode()
    def refill(self, draws: Draws) -> None:
        """With the numbers that a request with these draws would get."""
        for drawn in self._drawn:
            drawn.numbers.copy_(getattr(draws, drawn.kind)(drawn.numbers.shape, drawn.numbers.device))

    def exponential(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return self._fixed("exponential", shape, device)

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return self._fixed("uniform", shape, device)

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return self._fixed("normal", shape, device)

    def _fixed(self, kind: Kind, shape: Sequence[int], device: torch.device) -> Tensor:
        if self._next == len(self._drawn):
            self._drawn.append(Drawn(kind, torch.full(tuple(shape), 0.5, device=device)))
        drawn = self._drawn[self._next]
        if drawn.kind != kind or drawn.numbers.shape != torch.Size(shape):
            raise RuntimeError(f"a request drew {drawn.kind} {list(drawn.numbers.shape)} at first and {kind} {list(shape)} the second time")
        self._next += 1
        return drawn.numbers
