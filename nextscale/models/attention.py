"""Self-attention over the keys and values of all stages, and cross-attention to the prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from ..cache import DenseLayerCache, NoCache, Slot, real_entries
from ..cache.attending import AttendingCache, AttentionCall
from ..kernels.e4m3 import E4M3
from ..kernels.shapes import SMALLEST_SQUARE
from ..stage import Tokens
from ..varlen import VarlenLayout
from .block_config import BlockConfig, TextAttentionConfig
from .context import ForwardContext
from .quantized import input_scale_of, restored_input, restored_weight
from .rope import InterleavedRope

LARGEST_LOG_TEMPERATURE = math.log(100)
FEW_QUERIES = 512  # over all rows: torch's kernels are not made for them; ours costs the host more, which a captured graph does not pay
_FLAGS_LOCK = Lock()
_CHOSEN: ContextVar[Mapping[str, bool] | None] = ContextVar("flags of torch's attention kernels", default=None)


def unit_vectors(x: Tensor) -> Tensor:
    """Root-mean-square norm: vectors sqrt(D) times longer than 1, which `cosine_scale` makes up for on both sides of the product."""
    return F.rms_norm(x, x.shape[-1:], eps=SMALLEST_SQUARE)


def unit_queries(q: Tensor) -> Tensor:
    """`unit_vectors` in float32, rounded to what q was."""
    return unit_vectors(q.float()).to(q.dtype)


def cosine_scale(head_dim: int) -> float:
    return 1 / head_dim


def temperature(log: Tensor) -> Tensor:
    """Learned logarithms [...], one per head, to what multiplies queries [..., 1]."""
    return log.float().clamp(max=LARGEST_LOG_TEMPERATURE).exp()[..., None]


@contextmanager
def attention_backend(queries: int, device: torch.device, captured: bool) -> Iterator[None]:
    """Chooses among torch's attention kernels for a stage with this number of query tokens over all rows.

    On an H200 cuDNN's kernel, torch's own choice, is the fastest, 1.5 to 1.9 times as fast as flash (4096 queries, 10521 keys: 1.13 ms,
    flash 2.08, memory-efficient 4.14; measured at cf737eb). Small stages that are not captured wait for the host: 32 blocks take 23 ms
    with cuDNN's and 18 ms with flash, and a call of the memory-efficient kernel costs the host half of a call of flash.
    """
    if device.type != "cuda" or captured or queries > 2048:
        flags = None
    else:
        flags = {"cudnn": False, "flash": queries > 512, "mem_efficient": True, "math": True}
    token = _CHOSEN.set(flags)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


@contextmanager
def chosen_kernels(device: torch.device) -> Iterator[None]:
    """Sets torch's flags as `attention_backend` has chosen in this thread.

    The flags belong to the whole process. A lock keeps threads that use other GPUs from changing them during a call.
    """
    if device.type != "cuda":
        yield
        return
    with _FLAGS_LOCK:
        before = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _CHOSEN.get() or ()}
        try:
            set_flags(_CHOSEN.get() or {})
            yield
        finally:
            set_flags(before)


def set_flags(flags: Mapping[str, bool]) -> None:
    for name, enabled in flags.items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [R, N, H, D] over k, v [R, T, H, D] to [R, N, H * D]."""
    with chosen_kernels(q.device):
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    return out.transpose(1, 2).flatten(2)


def attend_slot(
    q: Tensor, slot: Slot, scale: float, captured: bool, packing: VarlenLayout | None = None, e4m3_scale: float | None = None
) -> Tensor:
    """Attention over all that a cache holds; rows of different length need no mask, which fast kernels do not take.

    e4m3_scale: the result may be e4m3, divided by this scale, where a kernel of ours computes it.
    """
    if packing is not None:
        keys, values = (store.narrow(1, 0, slot.end) for store in (slot.keys, slot.values))
        return attend_packed(q, keys, values, slot.lengths, scale, packing, captured, e4m3_scale=e4m3_scale)
    few = captured and q.shape[0] * q.shape[1] <= FEW_QUERIES
    if (slot.lengths is None and not few) or not reads_lengths(q):
        return attend(q, *slot.filled, scale)
    lengths = slot.end if slot.lengths is None else slot.lengths
    return kernels.attend_lengths(q, slot.keys, slot.values, lengths, scale, e4m3_scale=e4m3_scale)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    scale: float,
    packing: VarlenLayout,
    captured: bool,
    *,
    unit: bool = False,
    e4m3_scale: float | None = None,
) -> Tensor:
    """Packed queries q [F, T, H, D], each over the first lengths[r] of k, v [R, S, H, D] of its row, or over all: [F, T, H * D].

    unit: queries are made unit vectors first. e4m3_scale: see `attend_slot`.
    """
    if reads_lengths(q):
        known = k.shape[1] if lengths is None else lengths
        starts, longest = packing.starts, packing.width
        return kernels.attend_lengths(q, k, v, known, scale, unit=unit, starts=starts, longest=longest, e4m3_scale=e4m3_scale)
    q = unit_queries(q) if unit else q
    if q.device.type == "cpu" and not captured:
        return attend_one_by_one(q, k, v, lengths, scale, packing)
    mask = None if lengths is None else real_entries(lengths, k.shape[1])
    return packing.pack(attend(packing.unpack(q), k, v, mask, scale))


def attend_one_by_one(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: float, packing: VarlenLayout) -> Tensor:
    """The same row by row, where the host knows the lengths without waiting for them."""
    starts = packing.starts.tolist()
    known = [k.shape[1]] * k.shape[0] if lengths is None else lengths.tolist()
    out = torch.empty(*q.shape[:2], q.shape[2] * q.shape[3], dtype=q.dtype)
    for row, length in enumerate(known):
        branch, image = divmod(row, packing.images)
        queries = slice(starts[image], starts[image + 1])
        out[branch, queries] = attend(q[branch, None, queries], k[row, None, :length], v[row, None, :length], None, scale)[0]
    return out


def reads_lengths(x: Tensor) -> bool:
    """Whether attention for tensors like this one reads a row's keys and values up to its length, and nothing that lies beyond."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16, E4M3) and kernels.available(x)


class SelfAttention(nn.Module):
    def __init__(self, layer: int, config: BlockConfig) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.head_dim = config.heads, config.head_dim
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)
        self.log_temperature = nn.Parameter(torch.empty(config.heads)) if config.cosine else None
        self.scale = cosine_scale(config.head_dim) if config.cosine else 0.25 / math.sqrt(config.head_dim)

    @property
    def input_scale(self) -> float | None:
        """The scale at which it takes tokens as e4m3; None: as they are."""
        return input_scale_of(self.qkv)

    def forward(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        rope, cache, packing = ctx.cond.rope, ctx.cache[self.layer], tokens.packing
        turns_pairs = rope is None or (isinstance(rope, InterleavedRope) and not tokens.prefix)
        if turns_pairs and isinstance(cache, DenseLayerCache) and kernels.available(x):
            masked = not reads_lengths(x)
            # At the last stage it frees memory that the rest can use.
            slot = cache.reserve(tokens.rows_of(x), tokens.num_tokens, tokens, finite_tails=masked)
            qkv = self.qkv(x).view(*x.shape[:2], 3, self.heads, self.head_dim)
            rotation = rope.table(tokens.stage) if isinstance(rope, InterleavedRope) else None
            index, packed = tokens.index, None
            if packing is not None:
                index, packed = packing.cell[None], (packing.image, packing.place, packing.starts)
            stores = (slot.keys, slot.values, slot.start)
            q = kernels.rotate_into_cache(qkv, ctx.cond.temperatures[self.layer], rotation, index, *stores, packed=packed)
            cache.written(slot, tokens.num_tokens)
            del qkv  # three times the queries, which attention and what follows can use
            return self.proj(self._attend(x, q, slot, tokens, ctx))
        turn = None if rope is None else lambda qk: rope.turn(qk, tokens)
        q, k, v = self.queries_keys_values(x, ctx.cond.temperatures[self.layer], turn)
        if packing is not None and isinstance(cache, DenseLayerCache | NoCache):
            return self.proj(self._attend(x, q.to(v.dtype), cache.append_packed(k, v, tokens), tokens, ctx))
        if isinstance(cache, AttendingCache):
            return self.proj(self._attend(x, q.to(v.dtype), cache.put(k, v, tokens), tokens, ctx))
        q, k, v = (tokens.unpack(part) for part in (q, k, v))
        keys, values, mask = cache.append(q, k, v, tokens)
        return self.proj(tokens.pack(attend(q.to(v.dtype), keys, values, mask, self.scale)))

    def _attend(self, x: Tensor, q: Tensor, slot: Slot, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        """Queries [R, N, H, D] over what the cache holds, in the cache's own way if it has one: [R, N, H * D]; packed as they are."""
        cache = ctx.cache[self.layer]
        if not isinstance(cache, AttendingCache):
            return attend_slot(q, slot, self.scale, ctx.captured, tokens.packing, input_scale_of(self.proj))

        def projected() -> tuple[Tensor, Tensor]:
            return tokens.unpack(restored_input(self.qkv, x, q.dtype)), restored_weight(self.qkv, q.dtype)

        seen = AttentionCall(projected, tokens.unpack(q), slot, tokens.unpacked(), self.scale, ctx.captured, ctx.batch)
        return tokens.pack(cache.attend(seen))

    def queries_keys_values(
        self, x: Tensor, temperature: Tensor | None, turn: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[R, N, H, D] each; `turn` puts queries and keys [R, N, 2, H, D] to where their tokens are."""
        qkv = self.qkv(x).view(*x.shape[:2], 3, self.heads, self.head_dim)
        qk = qkv.narrow(2, 0, 2).float()  # normalised and rotated in float32, queries and keys at once
        if temperature is not None:
            qk = unit_vectors(qk)
        if turn is not None:
            qk = turn(qk)
        q, k = qk.unbind(2)
        if temperature is not None:
            q = scaled(q, temperature, qkv.dtype)
        return q, k, qkv.select(2, 2)


def scaled(x: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """The product in another dtype: in one pass, except where gradients are wanted, which know no `out`."""
    return (x * by).to(dtype) if torch.is_grad_enabled() else torch.mul(x, by, out=torch.empty_like(x, dtype=dtype))


class CrossAttention(nn.Module):
    """Attention to the prompt, whose keys and values do not depend on the stage and are computed once per request."""

    def __init__(self, layer: int, config: BlockConfig, text: TextAttentionConfig) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.head_dim = config.heads, config.head_dim
        self.q = nn.Linear(config.dim, config.dim)
        self.kv = nn.Linear(text.channels, 2 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)
        self.log_temperature = nn.Parameter(torch.empty(config.heads)) if text.cosine else None
        self.unit = text.cosine  # queries and keys are unit vectors
        self.scale = cosine_scale(config.head_dim) if text.cosine else text.sharpness / math.sqrt(config.head_dim)

    @property
    def input_scale(self) -> float | None:
        """The scale at which it takes tokens as e4m3; None: as they are."""
        return input_scale_of(self.q)

    def text_keys_values(self, text: Tensor) -> Tensor:
        """Text rows [rows, C] to [rows, 2, H, D]. The keys carry the temperature, so that no stage has to apply it."""
        kv = self.kv(text).unflatten(-1, (2, self.heads, -1))
        if self.log_temperature is None:
            return kv
        keys = unit_vectors(kv[:, 0].float()) * temperature(self.log_temperature)
        return torch.stack([keys.to(kv.dtype), kv[:, 1]], dim=1)

    def forward(self, x: Tensor, ctx: ForwardContext, packing: VarlenLayout | None = None) -> Tensor:
        text = ctx.cond.text
        assert text is not None
        rows, e4m3_scale = x.shape[0], input_scale_of(self.proj)
        keys, values = text.keys_values[self.layer]
        if packing is not None:
            attended = attend_packed(
                self.queries(x), keys, values, text.lengths, self.scale, packing, ctx.captured, unit=self.unit, e4m3_scale=e4m3_scale
            )
            return self.proj(attended)
        q = self.queries(x[: keys.shape[0]])  # a single row of text serves all rows: see TextContext
        if text.lengths is None or not reads_lengths(q):
            out = attend(unit_queries(q) if self.unit else q, keys, values, text.mask, self.scale)
        else:
            out = kernels.attend_lengths(q, keys, values, text.lengths, self.scale, unit=self.unit, e4m3_scale=e4m3_scale)
        return self.proj(out).expand(rows, -1, -1)

    def attend_text(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Cross-attention outside of a request, as in training."""
        q = self.queries(x)
        return self.proj(attend(unit_queries(q) if self.unit else q, keys, values, mask, self.scale))

    def queries(self, x: Tensor) -> Tensor:
        """[R, N, H, D]; whoever attends makes them unit vectors where that is asked for."""
        return self.q(x).view(*x.shape[:2], self.heads, self.head_dim)
