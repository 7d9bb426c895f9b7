"""Self-attention over the keys and values of all stages, and cross-attention to the text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import kernels
from ..cache import AttentionCall, NoCache
from ..cache.attention import attend_rows, reads_lengths, unit_vectors
from ..stage import Tokens
from .context import ForwardContext
from .quantization import QuantizedLinear, input_scale_of
from .rope import InterleavedRope

MAX_LOG_SCALE = math.log(100)


def logit_scale(log: Tensor) -> Tensor:
    """Converts learned log scales [...], one per head, to factors [..., 1] of normalized queries."""
    return log.float().clamp(max=MAX_LOG_SCALE).exp()[..., None]


def cosine_scale(head_dim: int) -> float:
    """Returns the attention scale for `unit_vectors`, whose length is sqrt(head_dim)."""
    return 1 / head_dim


class SelfAttention(nn.Module):
    def __init__(self, layer: int, dim: int, heads: int, cosine: bool) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.head_dim = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.log_temperature = nn.Parameter(torch.empty(heads)) if cosine else None
        self.scale = cosine_scale(self.head_dim) if cosine else 0.25 / math.sqrt(self.head_dim)

    def forward(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        rope, cache, factor, packing = ctx.cond.rope, ctx.cache[self.layer], ctx.cond.logit_scales[self.layer], tokens.packing
        interleaved = rope is None or (isinstance(rope, InterleavedRope) and not tokens.prefix)
        if interleaved and kernels.available(x) and not isinstance(cache, NoCache):
            # Reserve before the projection: at the last stage this frees memory that the projection can use.
            view = cache.reserve(tokens.rows_of(x), tokens.num_tokens, tokens, finite_tails=not reads_lengths(x))
            qkv = self.qkv(x).view(*x.shape[:2], 3, self.heads, self.head_dim)
            rotation = rope.table(tokens.stage) if isinstance(rope, InterleavedRope) else None
            index, packed = tokens.index, None
            if packing is not None:
                index, packed = packing.cell[None], (packing.image, packing.place, packing.cu_seqlens)
            stores = (view.keys, view.values, view.start)
            q = kernels.rotate_into_cache(qkv, factor, rotation, index, *stores, packed=packed)
            cache.written(view, tokens.num_tokens)
            del qkv  # frees its memory before attention
        else:
            rotate = None if rope is None else lambda qk: rope.apply_rotary(qk, tokens)
            q, k, v = self.queries_keys_values(x, factor, rotate)
            q, view = q.to(v.dtype), cache.append(k, v, tokens)
            del k, v

        def projected() -> tuple[Tensor, Tensor]:
            if isinstance(self.qkv, QuantizedLinear):
                return self.qkv.restored_input(x, q.dtype), self.qkv.restored_weight(q.dtype)
            return x, self.qkv.weight

        e4m3_scale = input_scale_of(self.proj)
        call = AttentionCall(q, view, tokens, self.scale, projected, ctx.batch, ctx.captured, e4m3_scale, ctx.attention_mask)
        return self.proj(cache.attend(call))

    def queries_keys_values(
        self, x: Tensor, factor: Tensor | None, rotate: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values [R, N, H, D] each; `rotate` applies RoPE to queries and keys [R, N, 2, H, D]."""
        qkv = self.qkv(x).view(*x.shape[:2], 3, self.heads, self.head_dim)
        qk = qkv.narrow(2, 0, 2).float()  # normalized and rotated in float32
        if factor is not None:
            qk = unit_vectors(qk)
        if rotate is not None:
            qk = rotate(qk)
        q, k = qk.unbind(2)
        if factor is not None:  # one pass, except with gradients, which `out` does not support
            grad = torch.is_grad_enabled()
            q = (q * factor).to(qkv.dtype) if grad else torch.mul(q, factor, out=torch.empty_like(q, dtype=qkv.dtype))
        return q, k, qkv.select(2, 2)


@dataclass(frozen=True)
class TextAttentionConfig:
    """Options of cross-attention to the text."""

    channels: int  # of the text features
    cosine: bool = False  # as in BlockConfig
    sharpness: float = 1.0  # multiplies 1/sqrt(head_dim) without cosine attention
    learned_norm: bool = False  # the preceding norm has a weight and a bias


class CrossAttention(nn.Module):
    """Cross-attention to the text. Its keys and values do not depend on the stage and are computed once per request."""

    def __init__(self, layer: int, dim: int, heads: int, text: TextAttentionConfig) -> None:
        super().__init__()
        self.layer, self.heads = layer, heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(text.channels, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.log_temperature = nn.Parameter(torch.empty(heads)) if text.cosine else None
        self.unit = text.cosine  # queries and keys are unit vectors
        self.scale = cosine_scale(dim // heads) if text.cosine else text.sharpness / math.sqrt(dim // heads)

    def text_keys_values(self, text: Tensor) -> Tensor:
        """Projects text rows [rows, C] to keys and values [rows, 2, H, D]. The keys include the logit scale."""
        kv = self.kv(text).unflatten(-1, (2, self.heads, -1))
        if self.log_temperature is None:
            return kv
        keys = unit_vectors(kv[:, 0].float()) * logit_scale(self.log_temperature)
        return torch.stack([keys.to(kv.dtype), kv[:, 1]], dim=1)

    def forward(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        text = ctx.cond.text
        assert text is not None
        keys, values = text.keys_values[self.layer]
        q = self.q(x[: keys.shape[0]]).unflatten(-1, (self.heads, -1))  # one row of text may serve all rows: see TextContext
        out = attend_rows(
            q, keys, values, text.lengths, self.scale,
            mask=text.mask, packing=tokens.packing, captured=ctx.captured, unit=self.unit, e4m3_scale=input_scale_of(self.proj),
        )  # fmt: skip
        return self.proj(out).expand(x.shape[0], -1, -1)
