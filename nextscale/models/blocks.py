"""The transformer block that all backbones share: self-attention, cross-attention where there is text, feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .. import kernels
from ..stage import Tokens
from ..varlen import VarlenLayout
from .attention import CrossAttention, SelfAttention
from .block_config import BlockConfig
from .context import ForwardContext
from .feed_forward import FeedForward, GatedFeedForward
from .modulation import Modulation

NORM_EPS = 1e-6

Sublayer = Callable[[Tensor, Tokens, ForwardContext], Tensor]
"""A residual sublayer: returns what the block adds to its input."""


def plain_norm(dim: int, learned: bool = False) -> nn.LayerNorm:
    return nn.LayerNorm(dim, eps=NORM_EPS, elementwise_affine=learned)


def rms_norm(dim: int) -> nn.RMSNorm:
    return nn.RMSNorm(dim, eps=NORM_EPS)


class Block(nn.Module):
    """Residual sublayers, each behind a norm."""

    changes_input: ClassVar[bool] = False  # before the first norm: running the sublayers one by one leaves that out

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
        self.centred = not config.rms_norm

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """The residual sublayers in order."""
        text = (self.text_sublayer,) if self.has_text else ()
        return (self.attention_sublayer, *text, self.feed_forward_sublayer)

    def attention_sublayer(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        return self.attention(self.norm(x), tokens, ctx)

    def text_sublayer(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        return self.text_attention(self.text_norm(x), ctx, tokens.packing)

    def feed_forward_sublayer(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        return self.feed_forward(self.norm(x))

    def forward(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        """Runs all sublayers in order; with kernels each addition fused with the next norm."""
        fused = self.fused_sublayers(x, ctx)
        return run_fused(fused, x, tokens, ctx) if fused else self.one_by_one(x, tokens, ctx)

    def one_by_one(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        for sublayer in self.sublayers:
            x = x + sublayer(x, tokens, ctx)
        return x

    def fused_sublayers(self, x: Tensor, ctx: ForwardContext) -> tuple[FusedSublayer, ...]:
        """The sublayers in the form that the kernels take; empty where those cannot be used."""
        if not kernels.available(x):
            return ()
        weight = self.norm.weight  # None of a norm that learns nothing
        attention = FusedSublayer(weight, None, None, self.attention, self.centred, self.attention.input_scale)
        feed_forward = FusedSublayer(weight, None, None, self._run_feed_forward, self.centred, self.feed_forward.input_scale)
        return self.with_text(attention, feed_forward)

    def with_text(self, attention: FusedSublayer, feed_forward: FusedSublayer) -> tuple[FusedSublayer, ...]:
        if not self.has_text:
            return attention, feed_forward
        norm, scale = self.text_norm, self.text_attention.input_scale
        return attention, FusedSublayer(norm.weight, norm.bias, None, self._run_text, input_scale=scale), feed_forward

    def _run_text(self, y: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        return self.text_attention(y, ctx, tokens.packing)

    def _run_feed_forward(self, y: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        return self.feed_forward(y)


class FusedSublayer(NamedTuple):
    """A residual sublayer taken apart: it adds gain * run(norm(x) * scale + shift)."""

    scale: Tensor | None  # [R, 1, C], or [C] of a learned norm; None is 1
    shift: Tensor | None
    gain: Tensor | None
    run: Sublayer  # takes what is normed
    centred: bool = True  # by a layer norm; else by a root-mean-square norm
    input_scale: float | None = None  # at which `run` takes its input as e4m3; None: as it is

    def normed(self, x: Tensor, index: Tensor | None = None, image: Tensor | None = None) -> Tensor:
        """The input of `run` from hidden states x [R, N, C], or from those at `index` [R, K]; `image` of packed tokens."""
        return kernels.norm_modulate(x, self.scale, self.shift, index, centred=self.centred, image=image, e4m3_scale=self.input_scale)

    def normed_sum(self, x: Tensor, before: FusedSublayer, update: Tensor, image: Tensor | None) -> tuple[Tensor, Tensor]:
        """Hidden states with the update of the sublayer before added, and the input of `run` from them."""
        return kernels.residual_norm_modulate(
            x, before.gain, update, self.scale, self.shift, centred=self.centred, image=image, e4m3_scale=self.input_scale
        )


def run_fused(sublayers: Sequence[FusedSublayer], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
    """Runs sublayers of one block or of several in order: an addition and the norm that follows are one pass."""
    last = sublayers[-1]
    image = None if tokens.packing is None else tokens.packing.image
    y = sublayers[0].normed(x, image=image)
    for sublayer, following in pairwise(sublayers):
        x, y = following.normed_sum(x, sublayer, sublayer.run(y, tokens, ctx), image)
    update = last.run(y, tokens, ctx)
    return x + update if last.gain is None else torch.addcmul(x, tokens.of_rows(last.gain), update)


class ModulatedBlock(Block):
    """A block whose attention and feed-forward a condition scales, shifts and weights."""

    def __init__(self, layer: int, config: BlockConfig) -> None:
        super().__init__(layer, config)
        if config.modulation == "shared":
            self.modulation_table = nn.Parameter(torch.empty(6, config.dim))
        else:
            self.modulation = nn.Linear(config.dim, 6 * config.dim)

    def fused_sublayers(self, x: Tensor, ctx: ForwardContext) -> tuple[FusedSublayer, ...]:
        if not self.centred or not kernels.available(x):
            return ()
        m = ctx.cond.modulation[self.layer]
        scale, shift, gain = m.attention_scale, m.attention_shift, m.attention_gain
        attention = FusedSublayer(scale, shift, gain, self.attention, input_scale=self.attention.input_scale)
        scale, shift, gain = m.feed_forward_scale, m.feed_forward_shift, m.feed_forward_gain
        feed_forward = FusedSublayer(scale, shift, gain, self._run_feed_forward, input_scale=self.feed_forward.input_scale)
        return self.with_text(attention, feed_forward)

    def attention_sublayer(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        return tokens.of_rows(ctx.cond.modulation[self.layer].attention_gain) * self._attention(x, tokens, ctx)

    def feed_forward_sublayer(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        return tokens.of_rows(ctx.cond.modulation[self.layer].feed_forward_gain) * self._feed_forward(x, tokens, ctx)

    def one_by_one(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        """Each gain is fused with the addition."""
        m = ctx.cond.modulation[self.layer]
        x = torch.addcmul(x, tokens.of_rows(m.attention_gain), self._attention(x, tokens, ctx))
        if self.has_text:
            x = x + self.text_sublayer(x, tokens, ctx)
        return torch.addcmul(x, tokens.of_rows(m.feed_forward_gain), self._feed_forward(x, tokens, ctx))

    def _attention(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        return self.attention(self.attention_input(x, ctx.cond.modulation[self.layer], tokens.packing), tokens, ctx)

    def _feed_forward(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        return self.feed_forward(self.feed_forward_input(x, ctx.cond.modulation[self.layer], tokens.packing))

    def attention_input(self, x: Tensor, m: Modulation, packing: VarlenLayout | None = None) -> Tensor:
        return self._modulated(x, m.attention_scale, m.attention_shift, packing, self.attention.input_scale)

    def feed_forward_input(self, x: Tensor, m: Modulation, packing: VarlenLayout | None = None) -> Tensor:
        return self._modulated(x, m.feed_forward_scale, m.feed_forward_shift, packing, self.feed_forward.input_scale)

    def _modulated(self, x: Tensor, scale: Tensor, shift: Tensor, packing: VarlenLayout | None, e4m3_scale: float | None) -> Tensor:
        if self.centred and kernels.available(x):
            return kernels.norm_modulate(x, scale, shift, image=None if packing is None else packing.image, e4m3_scale=e4m3_scale)
        if packing is not None:
            scale, shift = packing.of_rows(scale), packing.of_rows(shift)
        return torch.addcmul(shift, self.norm(x), scale)


def run_in_order(blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
    """Runs one block after another; with kernels, neighbours as one chain of sublayers."""
    chain: list[FusedSublayer] = []
    for block in blocks:
        fused = () if block.changes_input else block.fused_sublayers(x, ctx)
        if not fused:
            x = block(run_fused(chain, x, tokens, ctx) if chain else x, tokens, ctx)
            chain = []
        chain += fused
    return run_fused(chain, x, tokens, ctx) if chain else x


def build_blocks(depth: int, config: BlockConfig) -> nn.ModuleList:
    block = ModulatedBlock if config.modulation else Block
    return nn.ModuleList(block(layer, config) for layer in range(depth))
