"""Expected tensors of a case, each to be compared exactly once or used as an input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

NOISY_RUNS = 6


@dataclass(frozen=True)
class Tolerance:
    atol: float
    rtol: float = 0.0
    outliers: float = 0.0  # share of the entries that may differ by more


class Reading(NamedTuple):
    tensor: Tensor
    tolerance: Tolerance | None  # None: exact


Readings = dict[str, Reading]


@dataclass
class Expected:
    """The stored tensors of a case. `finish` fails if one was neither compared nor used."""

    tensors: dict[str, Tensor]
    used: set[str] = field(default_factory=set)
    compared: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path, left_out: Mapping[str, Tensor] | None = None) -> Expected:
        """Reads a file. `left_out` are tensors that are not in it but computed."""
        return cls({**(left_out or {}), **load_file(path)})

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def input(self, name: str) -> Tensor:
        self.used.add(name)
        tensor = self.tensors[name]
        return tensor.float() if tensor.is_floating_point() else tensor.long()

    def equal(self, name: str, actual: Tensor) -> None:
        """Fails unless all entries are the same: for codes, labels and positions."""
        expected = self._expected(name, actual)
        wrong = int((actual != expected).sum())
        assert wrong == 0, f"{name}: {wrong} of {expected.numel()} differ"

    def close(self, name: str, actual: Tensor, tolerance: Tolerance) -> None:
        excess = self.excess(name, actual, tolerance)
        assert excess <= tolerance.atol, f"{name}: off by {excess:.3g} beyond rtol {tolerance.rtol:g}; allowed {tolerance.atol:g}"

    def excess(self, name: str, actual: Tensor, tolerance: Tolerance) -> float:
        """Returns the largest difference beyond `rtol` times the expected value, without outliers; infinity and NaN must agree."""
        expected = self._expected(name, actual).float()
        actual = actual.float()
        finite = expected.isfinite()
        assert torch.equal(actual.isfinite(), finite), f"{name}: other entries are infinite or NaN"
        assert torch.equal(actual[~finite], expected[~finite]), f"{name}: other entries are infinite or NaN"
        beyond = ((actual - expected).abs() - tolerance.rtol * expected.abs())[finite]
        spared = int(tolerance.outliers * expected.numel())
        return float(beyond.topk(spared + 1).values[-1]) if beyond.numel() > spared else 0.0

    def compare(self, readings: Readings) -> None:
        """Compares those readings that are stored; the others are left alone."""
        for name, reading in readings.items():
            if name in self and reading.tolerance is None:
                self.equal(name, reading.tensor)
            elif name in self:
                self.close(name, reading.tensor, reading.tolerance)

    def compare_grown(self, run: Callable[..., Readings], noise: float) -> None:
        """Compares a smoothed run: its tensors may differ as far as they move when the guided logits differ by `noise`.

        Smoothing divides logits by a temperature down to 0.0135 and feeds the mixture back, so rounding grows from stage to stage:
        other orders of the same float32 sums move the image of var/shared by 2e-4 to 3e-3. A sampled code may differ where it also
        changes with such logits.
        """

        @cache
        def noisy_runs() -> list[Readings]:
            return [run(noise=noise, noise_seed=seed) for seed in range(NOISY_RUNS)]

        for name, reading in run().items():
            if name in self and not self._within(name, reading):
                reading = self._widened(name, reading, [other[name].tensor for other in noisy_runs()])
            self.compare({name: reading})

    def finish(self) -> int:
        left = sorted(set(self.tensors) - self.used - self.compared)
        assert not left, f"{len(left)} stored tensors were not compared: {left[:8]}"
        assert self.compared, "nothing was compared"
        return len(self.compared)

    def _within(self, name: str, reading: Reading) -> bool:
        if reading.tolerance is None:
            return torch.equal(reading.tensor, self.tensors[name].to(reading.tensor.dtype))
        return self.excess(name, reading.tensor, reading.tolerance) <= reading.tolerance.atol

    def _widened(self, name: str, reading: Reading, noisy: list[Tensor]) -> Reading:
        if reading.tolerance is None:
            unstable = torch.stack([other != reading.tensor for other in noisy]).any(dim=0)
            return Reading(torch.where(unstable, self.tensors[name], reading.tensor), None)
        growth = max(float((other - reading.tensor).abs().max()) for other in noisy)
        return Reading(reading.tensor, replace(reading.tolerance, atol=reading.tolerance.atol + growth))

    def _expected(self, name: str, actual: Tensor) -> Tensor:
        self.compared.add(name)
        expected = self.tensors[name]
        assert tuple(actual.shape) == tuple(expected.shape), f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        return expected
