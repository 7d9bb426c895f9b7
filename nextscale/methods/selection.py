"""What a method that chooses among others is told: the request, as far as it is known, and what was measured on its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from ..stage import Schedule

if TYPE_CHECKING:
    from ..models.base import NextScaleModel
    from .method import Method


class MeasuredPoint(Protocol):
    """A method that was measured, with what it saves and costs."""

    @property
    def label(self) -> str: ...
    def as_method(self) -> Method: ...


class MeasuredProfile(Protocol):
    """Methods that were measured on one model, size, batch and machine. `nextscale.profiles.Profile` is one."""

    @property
    def described(self) -> str: ...
    @property
    def size(self) -> tuple[int, int]: ...
    @property
    def grids(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def batch(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def hardware(self) -> str: ...
    def fastest(self, lpips: float) -> MeasuredPoint: ...
    def nearest(self, speedup: float) -> MeasuredPoint: ...
    def within(self, ms: float) -> MeasuredPoint: ...


@dataclass(frozen=True, slots=True)
class SelectionContext:
    """What is known of a request before its method is."""

    name: str  # of the model
    model: NextScaleModel
    device: torch.device  # where it will run
    pixels_per_token: int
    profiles: Sequence[MeasuredProfile]  # of this model; of two that are as good the later one counts
    schedule: Schedule | None = None  # None: whatever a later call asks for
    batch: int = 1
    weights: Path | None = None  # where those of the model lie, if a command was told

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """The grids of all stages."""
        return () if self.schedule is None else self.schedule.sizes

    @property
    def size(self) -> str:
        """WIDTHxHEIGHT of the image; empty if unknown."""
        return "x".join(str(side * self.pixels_per_token) for side in reversed(self.sizes[-1])) if self.sizes else ""
