"""What timing needs in every room: waiting for the device, and percentiles of times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch


def wait(device: torch.device) -> None:
    """Waits until the device has done what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile."""
    if len(values) == 1:
        return dict.fromkeys(("median", "p20", "p80"), round(values[0], 4))
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": round(statistics.median(values), 4), "p20": round(deciles[1], 4), "p80": round(deciles[7], 4)}


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """The same in milliseconds, and named so."""
    return {f"{name}_ms": round(value, 3) for name, value in percentiles([1000 * one for one in seconds]).items()}
