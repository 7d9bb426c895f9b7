"""The transformer block that all backbones share: self-attention, text cross-attention where there is text, feed-forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import kernels
from ..cache import DenseLayerCache, Env, Slot
from ..stage import Tokens
from .rope import PairRope

NORM_EPS = 1e-6
SMALLEST_SQUARE = 1e-24  # only keeps a zero vector from dividing by zero
LARGEST_LOG_TEMPERATURE = math.log(100)
PIECE = 8192  # tokens that a feed-forward takes at a time, as many as the last stage of one guided image of 1024 x 1024 pixels has

FEW_QUERIES = 512  # over all rows: torch's kernels are not made for them, and our own costs the host more, which a recording does not pay

Sublayer = Callable[[Tensor, Tokens, Env], Tensor]
"""A residual branch: returns what the block adds to its input."""


@dataclass(frozen=True)
class TextAttentionConfig:
    """Cross-attention to a text."""

    channels: int  # of the text
    cosine: bool = False  # as in BlockConfig
    sharpness: float = 1.0  # of attention without cosine: factor of the usual scale
    learned_norm: bool = False  # the norm before it has a weight and a bias


@dataclass(frozen=True)
class BlockConfig:
    dim: int
    heads: int
    hidden_dim: int
    _: KW_ONLY
    cosine: bool = True  # queries and keys of unit length with a learned temperature per head
    modulation: Literal["own", "shared"] | None = None  # by the condition; "shared": one for all blocks, plus a table per block
    rms_norm: bool = False  # one learned root-mean-square norm for all branches, in place of plain layer norms
    gated: bool = False  # feed-forward with a SiLU gate and no biases
    text: TextAttentionConfig | None = None

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class Modulation(NamedTuple):
    """Condition-dependent gains, scales and shifts, [R, 1, C] each; scales are stored with the 1 added."""

    attention_gain: Tensor
    feed_forward_gain: Tensor
    attention_scale: Tensor
    feed_forward_scale: Tensor
    attention_shift: Tensor
    feed_forward_shift: Tensor

    @classmethod
    def of_layers(cls, six: Tensor, dtype: torch.dtype) -> list[Modulation]:
        """One per layer from [L, R, 6, C] in the published order: two gains, two scales, two shifts."""
        one = six.new_zeros(6, 1)
        one[2:4].fill_(1)  # on the device: what the host has made could not be recorded
        return [cls(*layer.unsqueeze(2).unbind(1)) for layer in (six + one).to(dtype)]

    def rows(self, rows: slice) -> Modulation:
        return Modulation(*(part[rows] for part in self))


def plain_norm(dim: int, learned: bool = False) -> nn.LayerNorm:
    return nn.LayerNorm(dim, eps=NORM_EPS, elementwise_affine=learned)


def rms_norm(dim: int) -> nn.RMSNorm:
    return nn.RMSNorm(dim, eps=NORM_EPS)


def unit_vectors(x: Tensor) -> Tensor:
    """Root-mean-square norm: vectors sqrt(D) times longer than 1, which `cosine_scale` makes up for on both sides of the product."""
    return F.rms_norm(x, x.shape[-1:], eps=SMALLEST_SQUARE)


def cosine_scale(head_dim: int) -> float:
    return 1 / head_dim


def temperature(log: Tensor) -> Tensor:
    """Learned logarithms [...], one per head, to what multiplies queries [..., 1]."""
    return log.float().clamp(max=LARGEST_LOG_TEMPERATURE).exp()[..., None]


def attention_backend(queries: int, device: torch.device, captured: bool) -> AbstractContextManager[None]:
    """Which of torch's attention kernels to use for a stage with so many query tokens over all rows.

    On an H200 cuDNN's kernel, torch's own choice, is the fastest, 1.5 to 1.9 times as fast as flash (4096 queries, 10521 keys: 1.13 ms,
    flash 2.08, memory-efficient 4.14; `benchmarks.attention`). Small stages that are not recorded wait for the host: 32 blocks take 23 ms
    with cuDNN's and 18 ms with flash, and a call of the memory-efficient kernel costs the host half of a call of flash.
    """
    if device.type != "cuda" or captured or queries > 2048:
        return nullcontext()
    if queries > 512:
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [R, N, H, D] over k, v [R, T, H, D] to [R, N, H * D]."""
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    return out.transpose(1, 2).flatten(2)


def attend_slot(q: Tensor, slot: Slot, scale: float, captured: bool) -> Tensor:
    """Over all that a cache holds; rows of different length without a mask, which fast kernels do not take."""
    few = captured and q.shape[0] * q.shape[1] <= FEW_QUERIES
    if (slot.lengths is None and not few) or not reads_lengths(q):
        return attend(q, *slot.filled, scale)
    return kernels.attend_lengths(q, slot.keys, slot.values, slot.end if slot.lengths is None else slot.lengths, scale)


def reads_lengths(x: Tensor) -> bool:
    """Whether attention for tensors like this one reads a row's keys and values up to its length, and nothing that lies beyond."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and kernels.available(x)


class SelfAttention(nn.Module):
    def __init__(self, layer: int, config: BlockConfig) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.head_dim = config.heads, config.head_dim
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)
        self.log_temperature = nn.Parameter(torch.empty(config.heads)) if config.cosine else None
        self.scale = cosine_scale(config.head_dim) if config.cosine else 0.25 / math.sqrt(config.head_dim)

    def forward(self, x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        rope, cache = env.cond.rope, env.cache[self.layer]
        turns_pairs = rope is None or (isinstance(rope, PairRope) and not tokens.prefix)
        if turns_pairs and isinstance(cache, DenseLayerCache) and kernels.available(x):
            rows, width = x.shape[:2]
            masked = not reads_lengths(x)
            slot = cache.reserve(rows, width, tokens, finite_tails=masked)  # at the last stage it frees memory that the rest can use
            qkv = self.qkv(x).view(rows, width, 3, self.heads, self.head_dim)
            rotation = rope.table(tokens.stage) if isinstance(rope, PairRope) else None
            stores = (slot.keys, slot.values, slot.start)
            q = kernels.rotate_into_cache(qkv, env.cond.temperatures[self.layer], rotation, tokens.index, *stores)
            del qkv  # three times the queries, which attention and what follows can use
            return self.proj(attend_slot(q, slot, self.scale, env.captured))
        turn = None if rope is None else lambda qk: rope.turn(qk, tokens)
        q, k, v = self.queries_keys_values(x, env.cond.temperatures[self.layer], turn)
        keys, values, mask = env.cache[self.layer].append(q, k, v, tokens)
        return self.proj(attend(q.to(x.dtype), keys, values, mask, self.scale))

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
            q = scaled(q, temperature, x.dtype)
        return q, k, qkv.select(2, 2)


def scaled(x: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """The product in another type: in one pass, except where gradients are wanted, which know no `out`."""
    return (x * by).to(dtype) if torch.is_grad_enabled() else torch.mul(x, by, out=torch.empty_like(x, dtype=dtype))


class CrossAttention(nn.Module):
    """Attention to the text, whose keys and values do not depend on the stage and are computed once per request."""

    def __init__(self, layer: int, config: BlockConfig, text: TextAttentionConfig) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.head_dim = config.heads, config.head_dim
        self.q = nn.Linear(config.dim, config.dim)
        self.kv = nn.Linear(text.channels, 2 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)
        self.log_temperature = nn.Parameter(torch.empty(config.heads)) if text.cosine else None
        self.scale = cosine_scale(config.head_dim) if text.cosine else text.sharpness / math.sqrt(config.head_dim)

    def text_keys_values(self, text: Tensor) -> Tensor:
        """Text rows [rows, C] to [rows, 2, H, D]. The keys carry the temperature, so that no stage has to apply it."""
        kv = self.kv(text).unflatten(-1, (2, self.heads, -1))
        if self.log_temperature is None:
            return kv
        keys = unit_vectors(kv[:, 0].float()) * temperature(self.log_temperature)
        return torch.stack([keys.to(kv.dtype), kv[:, 1]], dim=1)

    def forward(self, x: Tensor, env: Env) -> Tensor:
        text = env.cond.text
        assert text is not None
        rows = x.shape[0]
        keys, values = text.keys_values[self.layer]
        q = self.queries(x[: keys.shape[0]])  # a single row of text speaks to all rows: see TextContext
        if text.lengths is None or not reads_lengths(q):
            out = attend(q, keys, values, text.mask, self.scale)
        else:
            out = kernels.attend_lengths(q, keys, values, text.lengths, self.scale)
        return self.proj(out).expand(rows, -1, -1)

    def attend_text(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Outside of a request, as in training."""
        return self.proj(attend(self.queries(x), keys, values, mask, self.scale))

    def queries(self, x: Tensor) -> Tensor:
        q = self.q(x).view(*x.shape[:2], self.heads, self.head_dim)
        return q if self.log_temperature is None else unit_vectors(q.float()).to(x.dtype)


def in_pieces(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`run` of tokens [R, N, C], which treats each by itself, for a number at a time that bounds what it holds on the way."""
    if torch.is_grad_enabled() or x.shape[0] * x.shape[1] <= PIECE:
        return run(x)
    tokens = x.flatten(0, 1)
    out = torch.empty_like(tokens)
    for piece, target in zip(tokens.split(PIECE), out.split(PIECE), strict=True):
        target.copy_(run(piece))
    return out.view_as(x)


def linear_gelu(x: Tensor, linear: nn.Linear) -> Tensor:
    """gelu(linear(x)), by its tanh formula. Hidden states are the largest tensors of a stage: on a GPU the product's own kernel applies it
    before it writes them, elsewhere it is applied in place, except where gradients are wanted."""
    if torch.is_grad_enabled():
        return F.gelu(linear(x), approximate="tanh")
    if x.is_cuda and linear.bias is not None and x.dtype == linear.weight.dtype:
        flat = torch._addmm_activation(linear.bias, x.flatten(0, -2), linear.weight.t(), use_gelu=True)
        return flat.view(*x.shape[:-1], linear.out_features)
    return torch._C._nn.gelu_(linear(x), approximate="tanh")  # type: ignore[attr-defined]


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return in_pieces(self.run, x)

    def run(self, x: Tensor) -> Tensor:
        return self.fc2(linear_gelu(x, self.fc1))


class GatedFeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return in_pieces(self.run, x)

    def run(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        opened = F.silu(gate)
        return self.down(opened * up if torch.is_grad_enabled() else opened.mul_(up))


class Block(nn.Module):
    """Sublayers, each a residual branch behind a norm."""

    changes_input: ClassVar[bool] = False  # True: it changes the hidden states before the first norm

    def __init__(self, layer: int, config: BlockConfig) -> None:
        super().__init__()
        self.layer = layer
        self.norm = rms_norm(config.dim) if config.rms_norm else plain_norm(config.dim)
        self.attention = SelfAttention(layer, config)
        self.feed_forward = (GatedFeedForward if config.gated else FeedForward)(config.dim, config.hidden_dim)
        if config.text:
            self.text_norm = plain_norm(config.dim, config.text.learned_norm)
            self.text_attention = CrossAttention(layer, config, config.text)
        self.has_text = config.text is not None

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """The residual branches in order."""
        text = (self.text_sublayer,) if self.has_text else ()
        return (self.attention_sublayer, *text, self.feed_forward_sublayer)

    def attention_sublayer(self, x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        return self.attention(self.norm(x), tokens, env)

    def text_sublayer(self, x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        return self.text_attention(self.text_norm(x), env)

    def feed_forward_sublayer(self, x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        return self.feed_forward(self.norm(x))

    def forward(self, x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        for part in self.sublayers:
            x = x + part(x, tokens, env)
        return x


class FusedSublayer(NamedTuple):
    """A residual branch in pieces: adds gain * run(layer_norm(x) * scale + shift)."""

    scale: Tensor  # [R, 1, C], or [C] of a learned norm
    shift: Tensor
    gain: Tensor | None
    run: Sublayer  # of what is normed


def run_fused(parts: Sequence[FusedSublayer], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
    """All parts in order, of one block or of several: an addition and the norm that follows are one pass."""
    y = kernels.norm_modulate(x, parts[0].scale, parts[0].shift)
    for part, following in pairwise(parts):
        update = part.run(y, tokens, env)
        x, y = kernels.residual_norm_modulate(x, part.gain, update, following.scale, following.shift)
    gain = parts[-1].gain
    assert gain is not None
    return torch.addcmul(x, gain, parts[-1].run(y, tokens, env))


class ModulatedBlock(Block):
    """A block whose attention and feed-forward a condition scales, shifts and weights."""

    def __init__(self, layer: int, config: BlockConfig) -> None:
        super().__init__(layer, config)
        if config.modulation == "shared":
            self.modulation_table = nn.Parameter(torch.empty(6, config.dim))
        else:
            self.modulation = nn.Linear(config.dim, 6 * config.dim)
        self.fusable = not config.rms_norm and (config.text is None or config.text.learned_norm)

    def fused_sublayers(self, x: Tensor, env: Env) -> tuple[FusedSublayer, ...]:
        """`parts` for the kernels; empty where they cannot be used."""
        if not self.fusable or not kernels.available(x):
            return ()
        m = env.cond.modulation[self.layer]
        attention = FusedSublayer(m.attention_scale, m.attention_shift, m.attention_gain, self.attention)
        feed_forward = FusedSublayer(m.feed_forward_scale, m.feed_forward_shift, m.feed_forward_gain, lambda y, *_: self.feed_forward(y))
        if not self.has_text:
            return attention, feed_forward
        text = FusedSublayer(self.text_norm.weight, self.text_norm.bias, None, lambda y, _, env: self.text_attention(y, env))
        return attention, text, feed_forward

    def attention_sublayer(self, x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        return env.cond.modulation[self.layer].attention_gain * self._attention(x, tokens, env)

    def feed_forward_sublayer(self, x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        return env.cond.modulation[self.layer].feed_forward_gain * self._feed_forward(x, env)

    def forward(self, x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        """All parts in order, each gain fused with the addition; with kernels also with the next norm."""
        fused = self.fused_sublayers(x, env)
        if fused:
            return run_fused(fused, x, tokens, env)
        m = env.cond.modulation[self.layer]
        x = torch.addcmul(x, m.attention_gain, self._attention(x, tokens, env))
        if self.has_text:
            x = x + self.text_sublayer(x, tokens, env)
        return torch.addcmul(x, m.feed_forward_gain, self._feed_forward(x, env))

    def _attention(self, x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        return self.attention(self.attention_input(x, env.cond.modulation[self.layer]), tokens, env)

    def _feed_forward(self, x: Tensor, env: Env) -> Tensor:
        return self.feed_forward(self.feed_forward_input(x, env.cond.modulation[self.layer]))

    def attention_input(self, x: Tensor, m: Modulation) -> Tensor:
        return self._modulated(x, m.attention_scale, m.attention_shift)

    def feed_forward_input(self, x: Tensor, m: Modulation) -> Tensor:
        return self._modulated(x, m.feed_forward_scale, m.feed_forward_shift)

    def _modulated(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        if self.fusable and kernels.available(x):
            return kernels.norm_modulate(x, scale, shift)
        return torch.addcmul(shift, self.norm(x), scale)


def run_in_order(blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
    """One block after another; with kernels, neighbours as one chain of parts."""
    chain: list[FusedSublayer] = []
    for block in blocks:
        parts = block.fused_sublayers(x, env) if isinstance(block, ModulatedBlock) and not block.changes_input else ()
        if not parts:
            x = block(run_fused(chain, x, tokens, env) if chain else x, tokens, env)
            chain = []
        chain += parts
    return run_fused(chain, x, tokens, env) if chain else x


def build_blocks(depth: int, config: BlockConfig) -> nn.ModuleList:
    block = ModulatedBlock if config.modulation else Block
    return nn.ModuleList(block(layer, config) for layer in range(depth))
