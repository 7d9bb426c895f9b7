"""Expected tensors of a case, each to be compared exactly once or used as an input."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    atol: float
    rtol: float


@dataclass
class Expected:
    """The stored tensors of a case. `finish` fails if one was neither compared nor used."""

    tensors: dict[str, Tensor]
    used: set[str] = field(default_factory=set)
    compared: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path) -> Expected:
        return cls(load_file(path))

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def input(self, name: str) -> Tensor:
        self.used.add(name)
        tensor = self.tensors[name]
        return tensor.float() if tensor.is_floating_point() else tensor.long()

    def equal(self, name: str, actual: Tensor) -> None:
        """Codes, labels, positions: exact."""
        expected = self._expected(name, actual)
        wrong = int((actual != expected).sum())
        assert wrong == 0, f"{name}: {wrong} of {expected.numel()} differ"

    def close(self, name: str, actual: Tensor, tolerance: Tolerance) -> None:
        excess = self.excess(name, actual, tolerance.rtol)
        assert excess <= tolerance.atol, f"{name}: off by {excess:.3g} beyond rtol {tolerance.rtol:g}; allowed {tolerance.atol:g}"

    def excess(self, name: str, actual: Tensor, rtol: float) -> float:
        """The largest difference beyond `rtol` times the expected value; infinite or NaN entries must agree."""
        expected = self._expected(name, actual).float()
        actual = actual.float()
        finite = expected.isfinite()
        assert torch.equal(actual.isfinite(), finite), f"{name}: other entries are infinite or NaN"
        assert torch.equal(actual[~finite], expected[~finite]), f"{name}: other entries are infinite or NaN"
        return float(((actual - expected).abs() - rtol * expected.abs())[finite].max()) if bool(finite.any()) else 0.0

    def finish(self) -> int:
        left = sorted(set(self.tensors) - self.used - self.compared)
        assert not left, f"{len(left)} stored tensors were not compared: {left[:8]}"
        assert self.compared, "nothing was compared"
        return len(self.compared)

    def _expected(self, name: str, actual: Tensor) -> Tensor:
        self.compared.add(name)
        expected = self.tensors[name]
        assert tuple(actual.shape) == tuple(expected.shape), f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        return expected
