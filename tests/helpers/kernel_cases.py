"""Inputs and tolerances of the kernel tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nextscale import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLACK = 2.0  # times the error of torch in the same dtype


@cache
def triton_interpreter() -> ModuleType:
    """Imports all kernels with Triton's interpreter if there is no GPU, once for all tests of a process.

    Triton reads this setting when it is imported, which torch may already have done.
    """
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
            own = [name for name, found in sys.modules.items() if name.startswith("nextscale") and hasattr(found, "triton")]
            theirs = [name for name in sys.modules if name.partition(".")[0] == "triton" and not name.startswith("triton._C")]
            for name in own + theirs:
                del sys.modules[name]
            for name in [one for names in kernels.FILES.values() for one in names]:
                vars(kernels).pop(name, None)  # the previous setting
        for module in iter_modules(kernels.__path__, "nextscale.kernels."):
            import_module(module.name)
        import_module("nextscale_research.methods.attend_lists_kernel")
        return import_module("triton.runtime.interpreter")


@contextmanager
def interpreted_as_on_a_gpu() -> Iterator[None]:
    """Makes kernels run and round as on a GPU, in the interpreter if there is none."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if DEVICE == "cpu":
            interpreter = triton_interpreter()
            patch.setenv("TRITON_INTERPRET", "1")
            round_to_bfloat16(interpreter, patch)
            round_to_eight_bits(interpreter, patch)
            multiply_bfloat16(interpreter, patch)
            loop_to_loaded_bounds(interpreter, patch)
        yield


class Maker:
    """Random inputs of one dtype on one device, the same for the same seed."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator, device=self.device) + mean).to(dtype or self.dtype)

    def image(self, *shape: int, mean: float = 0.0) -> Tensor:
        """Returns a channels-last image [B, C, H, W]."""
        return self.normal(*shape, mean=mean).contiguous(memory_format=torch.channels_last)

    def rows(self, rows: int, channels: int, mean: float = 0.0) -> Tensor:
        """Returns [R, 1, C] as a slice of a larger tensor, like the modulations of models."""
        return self.normal(rows, 6, channels, mean=mean)[:, 2:3]

    def wide(self, rows: int, tokens: int, channels: int) -> Tensor:
        """Returns [R, N, C] as a slice of a tensor that is larger in the first two dimensions."""
        return self.normal(rows + 1, tokens + 3, channels, mean=0.5)[1:, 2 : tokens + 2]

    def selection(self, rows: int, tokens: int, kept: int) -> Tensor:
        """Returns ascending positions [R, K] that differ between rows."""
        scores = torch.rand(rows, tokens, generator=self.generator, device=self.device)
        return scores.argsort(dim=1)[:, :kept].sort(dim=1).values

    def rotation(self, cells: int, head_dim: int) -> Tensor:
        angles = torch.randn(cells, head_dim // 2, generator=self.generator, device=self.device) * 3
        return torch.polar(torch.ones_like(angles), angles)


def exact(value: Any) -> Any:
    """Converts floating-point tensors to float64."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills new memory with NaN or the largest number, to reveal elements that are not written."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape, f"{list(found.shape)} where {list(expected.shape)} is expected"
    assert found.isfinite().all(), "not all of the result was written"
    return (found.double() - expected).abs().max().item() if found.numel() else 0.0


def require_close(found: Sequence[Tensor], torch_found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Requires errors against float64 of at most twice torch's in the same dtype, plus some float32 rounding if torch is exact."""
    for ours, theirs, truth in zip(found, torch_found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        spare = 4 * torch.finfo(torch.float32).eps * truth.abs().max().item() if truth.numel() else 0.0
        assert error(ours, truth) <= SLACK * error(theirs, truth) + spare


def compare(kernel: Callable[..., Any], reference: Callable[..., Any], *inputs: Any, **settings: Any) -> None:
    """Compares a kernel with its reference; inputs must not change."""
    before = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    with poisoned():
        found = kernel(*inputs, **settings)
    theirs = reference(*inputs, **settings)
    truth = reference(*map(exact, inputs), **{name: exact(value) for name, value in settings.items()})
    require_close(*([result] if isinstance(result, Tensor) else result for result in (found, theirs, truth)))
    for value, old in zip(inputs, before, strict=True):
        assert not isinstance(value, Tensor) or torch.equal(value, old)


def compare_rotation(
    kernels: tuple[Callable[..., Tensor], Callable[..., Tensor]], capacity: int, *inputs: Any, start: int | Tensor
) -> None:
    """Compares `rotate_into_cache` in caches of `capacity` tokens; other entries must not change."""
    kernel, reference = kernels
    qkv = inputs[0]
    shape = (qkv.shape[0], capacity, *qkv.shape[3:])

    def run(function: Callable[..., Tensor], given: Sequence[Any], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Caches that are slices of larger ones, filled with a number that no result is."""
        keys, values = (torch.full((shape[0] + 1, *shape[1:]), -77.0, device=qkv.device, dtype=dtype)[1:] for _ in range(2))
        return function(*given, keys, values, start), keys, values

    with poisoned():
        found = run(kernel, inputs, qkv.dtype)
    theirs = run(reference, inputs, qkv.dtype)
    truth = run(reference, [exact(value) for value in inputs], torch.float64)
    require_close(found, theirs, truth)
    assert torch.equal(found[2], theirs[2])  # values are only copied
    assert torch.equal(found[1] == -77, theirs[1] == -77)


def round_to_bfloat16(interpreter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter rounds to bfloat16 as a GPU does; of itself it cuts, which doubles the error."""
    convert = interpreter._convert_float

    def rounded(data: np.ndarray, source: object, target: object, mode: object) -> np.ndarray:
        if str(target) != "bf16" or str(source) != "fp32":
            return convert(data, source, target, mode)
        return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def round_to_eight_bits(interpreter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter rounds to e4m3 as a GPU does: to the nearest, to even where two are equally near. Of itself it does so only
    for some of them."""
    convert = interpreter._convert_float

    def rounded(data: np.ndarray, source: object, target: object, mode: object) -> np.ndarray:
        if str(target) != "fp8e4nv" or str(source) != "fp32":
            return convert(data, source, target, mode)
        return torch.from_numpy(np.ascontiguousarray(data)).to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def multiply_bfloat16(interpreter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies matrices of bfloat16; of itself it takes their bits for numbers."""
    dot = interpreter.InterpreterBuilder.create_dot

    def widened(one: Any) -> Any:
        if str(one.dtype.scalar) != "bf16":
            return one
        return interpreter.TensorHandle((one.data.astype(np.uint32) << 16).view(np.float32), interpreter.tl.float32)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *others: dot(self, widened(a), widened(b), *others)
    )


def loop_to_loaded_bounds(interpreter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets Triton's interpreter use loaded values as loop bounds, which fails with recent versions of numpy."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: object, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
