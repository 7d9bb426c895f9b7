"""Attention to cached keys and values, with torch's SDPA or our kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import kernels
from ..kernels.reference import E4M3
from ..kernels.shapes import MIN_SQUARE
from ..stage import Tokens
from ..varlen import VarlenLayout

MAX_FEW_QUERIES = 512  # over all rows; up to here our kernel is faster than torch's inside a CUDA graph (eagerly its launch costs more)
_FLAGS_LOCK = Lock()
_FLAGS: ContextVar[Mapping[str, bool]] = ContextVar("flags of torch's attention kernels", default={})  # noqa: B039


@contextmanager
def attention_backend(queries: int, device: torch.device, captured: bool) -> Iterator[None]:
    """Selects SDPA backends for a stage with this number of query tokens over all rows.

    On an H200, cuDNN, which torch selects by default, is the fastest: 1.13 ms for 4096 queries and 10521 keys, against 2.08 ms with flash
    and 4.14 ms with the memory-efficient backend (measured at cf737eb). Small stages outside CUDA graphs are limited by the host: 32 blocks
    take 23 ms with cuDNN and 18 ms with flash, and the memory-efficient backend needs half of flash's host time.
    """
    default = device.type != "cuda" or captured or queries > 2048
    token = _FLAGS.set({} if default else {"cudnn": False, "flash": queries > 512, "mem_efficient": True, "math": True})
    try:
        yield
    finally:
        _FLAGS.reset(token)


@contextmanager
def sdpa_backends(device: torch.device) -> Iterator[None]:
    """Applies the backends that `attention_backend` selected in this thread.

    Torch's flags are global to the process. A lock prevents threads that use other GPUs from changing them during a call.
    """
    if device.type != "cuda":
        yield
        return
    with _FLAGS_LOCK:
        before = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _FLAGS.get()}
        try:
            set_flags(_FLAGS.get())
            yield
        finally:
            set_flags(before)


def set_flags(flags: Mapping[str, bool]) -> None:
    for name, enabled in flags.items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)


def unit_vectors(x: Tensor) -> Tensor:
    """Normalizes vectors to a root mean square of 1, that is, to length sqrt(D)."""
    return F.rms_norm(x, x.shape[-1:], eps=MIN_SQUARE)


def unit_queries(q: Tensor) -> Tensor:
    """Returns `unit_vectors` computed in float32, in the dtype of q."""
    return unit_vectors(q.float()).to(q.dtype)


def real_entries(lengths: Tensor, entries: int) -> Tensor:
    """Returns a mask [R, 1, 1, entries] of the entries below each row's length [R]."""
    return (torch.arange(entries, device=lengths.device) < lengths[:, None])[:, None, None]


def reads_lengths(x: Tensor) -> bool:
    """Returns True if attention to such tensors reads keys and values only up to each row's length."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16, E4M3) and kernels.available(x)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Returns the attention of q [R, N, H, D] to k, v [R, T, H, D]: [R, N, H * D]."""
    with sdpa_backends(q.device):
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    return out.transpose(1, 2).flatten(2)


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    scale: float,
    *,
    mask: Tensor | None = None,
    packing: VarlenLayout | None = None,
    captured: bool = False,
    few: bool = False,
    unit: bool = False,
    e4m3_scale: float | None = None,
) -> Tensor:
    """Returns the attention of q [R, N, H, D], or packed q [F, T, H, D], to the first lengths[r] entries of k, v [R, S, H, D].

    Args:
        lengths: [R]; None: all entries.
        mask: `real_entries` of the lengths, if already computed.
        few: prefer our kernel even if rows have equal lengths.
        unit: normalize the queries first.
        e4m3_scale: if a kernel runs, it divides the result by this and returns e4m3.
    """
    if reads_lengths(q) and (few or packing is not None or lengths is not None):
        known = k.shape[1] if lengths is None else lengths
        cu_seqlens, longest = (None, None) if packing is None else (packing.cu_seqlens, packing.width)
        return kernels.attend_lengths(q, k, v, known, scale, unit=unit, cu_seqlens=cu_seqlens, longest=longest, e4m3_scale=e4m3_scale)
    q = unit_queries(q) if unit else q
    if packing is not None and q.device.type == "cpu" and not captured:
        return attend_one_by_one(q, k, v, lengths, scale, packing)
    if mask is None and lengths is not None:
        mask = real_entries(lengths, k.shape[1])
    return attend(q, k, v, mask, scale) if packing is None else packing.pack(attend(packing.unpack(q), k, v, mask, scale))


def attend_one_by_one(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: float, packing: VarlenLayout) -> Tensor:
    """Returns the attention row by row, on the CPU, where lengths are available without synchronization."""
    cu_seqlens = packing.cu_seqlens.tolist()
    known = [k.shape[1]] * k.shape[0] if lengths is None else lengths.tolist()
    out = torch.empty(*q.shape[:2], q.shape[2] * q.shape[3], dtype=q.dtype)
    for row, length in enumerate(known):
        branch, image = divmod(row, packing.images)
        queries = slice(cu_seqlens[image], cu_seqlens[image + 1])
        out[branch, queries] = attend(q[branch, None, queries], k[row, None, :length], v[row, None, :length], None, scale)[0]
    return out


class CacheView(NamedTuple):
    """Memory for the new keys and values of a stage, which follow the entries of earlier stages."""

    keys: Tensor  # [R, T, H, D]
    values: Tensor
    start: int | Tensor  # first new entry; [R] once rows have different lengths
    end: int
    lengths: Tensor | None = None  # [R], int32, once rows have different lengths; includes the new entries

    @property
    def filled(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values up to `end`, and a mask [R, 1, 1, end] if rows have different lengths."""
        mask = None if self.lengths is None else real_entries(self.lengths, self.end)
        return self.keys.narrow(1, 0, self.end), self.values.narrow(1, 0, self.end), mask


class AttentionCall(NamedTuple):
    """Arguments of one layer's attention; its keys and values are in the cache already."""

    q: Tensor  # [R, N, H, D]; [F, T, H, D] if packed
    view: CacheView
    tokens: Tokens
    scale: float
    projected: Callable[[], tuple[Tensor, Tensor]]  # returns the layer's input [R, N, C] and its qkv weights [3 * C, C]
    batch: int = 1  # images; conditional rows come first
    captured: bool = False  # True inside CUDA graph capture
    e4m3_scale: float | None = None  # the result may be e4m3, divided by this scale
    mask: Tensor | None = None  # [1, 1, N, T], if several stages run in one pass
