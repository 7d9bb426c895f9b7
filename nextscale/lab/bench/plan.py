"""How cases are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from ...errors import SettingError
from ...models.quantized import Quantize
from ...pipeline import Engine
from .energy import EnergyMeter
from .roofline import Rates


@dataclass(frozen=True)
class Plan:
    """Which engines are measured, how often, and what their rows are called."""

    device: torch.device
    engines: tuple[Engine, ...]
    repeats: int
    rates: Rates
    step: str | None = None  # name of the rows in the waterfall; None: the engine that was asked for, and whether kernels are off
    weights: str = "random"
    meter: EnergyMeter | None = None
    quantize: Quantize | None = None  # format of the weights of blocks

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise SettingError(f"repeats is the number of timed rounds, 1 or more; got {self.repeats}")
        if self.step is not None and len(self.engines) > 1:
            raise SettingError(f"step {self.step!r} names what one engine reaches: measure engines one by one")


def chosen_engines(name: str | None, device: torch.device) -> tuple[Engine, ...]:
    """The engines of `--engine`; None is graphs on a GPU and eager elsewhere."""
    if name is None:
        return ("graphs",) if device.type == "cuda" else ("eager",)
    if name == "both":
        return ("eager", "graphs")
    for engine in get_args(Engine):
        if engine == name:
            return (engine,)
    raise SettingError(f"--engine {name!r}: choose one of {', '.join(get_args(Engine))}, both")
