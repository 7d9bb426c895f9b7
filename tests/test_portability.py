"""Apple GPUs have no 64-bit floats: generation makes none where `to_double` gives float32, as it does there."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nextscale
from nextscale.device import choose_device
from nextscale.errors import SettingError
from nextscale.stage import resize_area, to_double
from tests.helpers import tiny

METHODS = ("dense", "sparsevar:tau=0.9,first_stage=2", "fastvar:ratios={2:0.5,3:0.5}", "stagevar:guidance_off=2,alphas={3:0.96}")


class NoDoubles(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = [x.dtype for x in tree_leaves(out) if isinstance(x, Tensor) and x.dtype in (torch.float64, torch.complex128)]
        assert not found, f"{func} returns {found}"
        return out


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> NoDoubles:
    for name, module in list(sys.modules.items()):
        if name.startswith("nextscale") and getattr(module, "to_double", None) is to_double:
            monkeypatch.setattr(module, "to_double", Tensor.float)
    monkeypatch.setattr("nextscale.cache.workspace.in_widest", lambda x: False)
    return NoDoubles()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_generation_makes_no_doubles(family: str, apple: NoDoubles) -> None:
    pipe, prompts = tiny.fresh_pipeline(family), tiny.prompts(family, 2)
    with apple:
        for method in METHODS:
            assert pipe(prompts, seed=1, method=method, compute_mask=True).pixels.isfinite().all()


def test_nano_makes_no_doubles(apple: NoDoubles) -> None:
    pipe = nextscale.load("nano", device="cpu")
    with apple:
        assert pipe("a red apple", seed=1, size=128).pixels.isfinite().all()


def test_an_apple_gpu_is_refused_where_there_is_none() -> None:
    if not torch.backends.mps.is_available():
        with pytest.raises(SettingError, match="device mps"):
            choose_device("mps")


def test_maps_are_resized_by_area() -> None:
    grid = torch.arange(9.0).view(1, 1, 3, 3)
    assert resize_area(grid, (2, 2)).flatten().tolist() == [2, 3, 5, 6]
