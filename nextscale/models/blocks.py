"""The transformer block of all backbones: self-attention, optional cross-attention to the text, and feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .. import kernels
from ..stage import Tokens
from .attention import CrossAttention, SelfAttention, TextAttentionConfig
from .context import ForwardContext
from .feed_forward import FeedForward, GatedFeedForward
from .quantization import input_scale_of

NORM_EPS = 1e-6


@dataclass(frozen=True)
class BlockConfig:
    """Sizes and options of a transformer block."""

    dim: int
    heads: int
    hidden_dim: int
    _: KW_ONLY
    cosine: bool = True  # normalized queries and keys with a learned logit scale per head
    modulation: Literal["own", "shared"] | None = None  # AdaLN per block, or shared by all blocks plus a learned table per block
    rms_norm: bool = False  # one learned RMS norm for all sublayers instead of layer norms without weights
    gated: bool = False  # feed-forward with a SiLU gate and without biases
    text: TextAttentionConfig | None = None

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def plain_norm(dim: int, learned: bool = False) -> nn.LayerNorm:
    return nn.LayerNorm(dim, eps=NORM_EPS, elementwise_affine=learned)


def rms_norm(dim: int) -> nn.RMSNorm:
    return nn.RMSNorm(dim, eps=NORM_EPS)


class Sublayer(NamedTuple):
    """A residual sublayer. Calling it on x [R, N, C] returns the update gate * run(norm(x) * scale + shift)."""

    norm: nn.Module
    scale: Tensor | None  # [R, 1, C] each; None without modulation
    shift: Tensor | None
    gate: Tensor | None
    run: Callable[[Tensor, Tokens, ForwardContext], Tensor]
    input_scale: float | None  # of `run`'s e4m3 input; None: the input has the model's dtype

    def __call__(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        update, gate = self.update(x, tokens, ctx)
        return update if gate is None else tokens.of_rows(gate) * update

    def update(self, x: Tensor, tokens: Tokens, ctx: ForwardContext, index: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Runs the sublayer on x, or on the `tokens` at `index` [R, K] of x; returns the update and a gate that remains to be applied.

        In torch the update is already gated, and the gate is None. With kernels the addition applies the gate.
        """
        update = self.run(self.normed(x, tokens, index), tokens, ctx)
        if self.gate is None or kernels.available(x):
            return update, self.gate
        return tokens.of_rows(self.gate) * update, None

    def normed(self, x: Tensor, tokens: Tokens, index: Tensor | None = None) -> Tensor:
        """Returns the normalized and modulated input of `run`."""
        if kernels.available(x):
            return kernels.norm_modulate(x, *self._affine, index, **self._settings(tokens))
        y = self.norm(x if index is None else x.gather(1, index[..., None].expand(-1, -1, x.shape[-1])))
        return y if self.scale is None or self.shift is None else torch.addcmul(tokens.of_rows(self.shift), y, tokens.of_rows(self.scale))

    def add_and_norm(self, x: Tensor, before: Sublayer, update: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Adds `update` of the sublayer `before` to x and normalizes in one kernel; returns the sum and the input of `run`."""
        return kernels.residual_norm_modulate(x, before.gate, update, *self._affine, **self._settings(tokens))

    @property
    def _affine(self) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = getattr(self.norm, "weight", None), getattr(self.norm, "bias", None)
        return (weight, bias) if self.scale is None else (self.scale, self.shift)

    def _settings(self, tokens: Tokens) -> dict[str, Any]:
        image = None if tokens.packing is None else tokens.packing.image
        return {"centered": isinstance(self.norm, nn.LayerNorm), "image": image, "e4m3_scale": self.input_scale}


def run_sublayers(
    sublayers: Sequence[Sublayer], x: Tensor, tokens: Tokens, ctx: ForwardContext, store: Callable[[int, Tensor], None] | None = None
) -> Tensor:
    """Runs sublayers in order. With kernels, each addition is fused with the next norm.

    `store` receives the index and update of each sublayer: before the gate with kernels, after the gate in torch (see `Sublayer.update`).
    """
    if not kernels.available(x):
        for i, sublayer in enumerate(sublayers):
            update = sublayer(x, tokens, ctx)
            if store is not None:
                store(i, update)
            x = x + update
        return x
    y = sublayers[0].normed(x, tokens)
    for i, sublayer in enumerate(sublayers):
        update = sublayer.run(y, tokens, ctx)
        if store is not None:
            store(i, update)
        if i + 1 < len(sublayers):
            x, y = sublayers[i + 1].add_and_norm(x, sublayer, update, tokens)
    gate = sublayers[-1].gate
    return x + update if gate is None else torch.addcmul(x, tokens.of_rows(gate), update)


class Block(nn.Module):
    """A transformer block of residual sublayers with norms; a condition may scale, shift and gate attention and feed-forward."""

    changes_input: ClassVar[bool] = False  # True if `forward` does more than run the sublayers

    def __init__(self, layer: int, config: BlockConfig) -> None:
        super().__init__()
        self.layer = layer
        self.norm = rms_norm(config.dim) if config.rms_norm else plain_norm(config.dim)
        self.attention = SelfAttention(layer, config.dim, config.heads, config.cosine)
        self.feed_forward = (GatedFeedForward if config.gated else FeedForward)(config.dim, config.hidden_dim)
        if config.text:
            self.text_norm = plain_norm(config.dim, config.text.learned_norm)
            self.text_attention = CrossAttention(layer, config.dim, config.heads, config.text)
        if config.modulation == "shared":
            self.modulation_table = nn.Parameter(torch.empty(6, config.dim))
        elif config.modulation == "own":
            self.modulation = nn.Linear(config.dim, 6 * config.dim)
        self.has_text = config.text is not None
        self.num_sublayers = 3 if self.has_text else 2

    def sublayers(self, ctx: ForwardContext) -> tuple[Sublayer, ...]:
        """Returns the residual sublayers in order."""
        m = ctx.cond.modulation
        attention_gate, gate, attention_scale, scale, attention_shift, shift = m[self.layer] if m else (None,) * 6
        text = input_scale_of(self.text_attention.q) if self.has_text else None
        return (
            Sublayer(self.norm, attention_scale, attention_shift, attention_gate, self.attention, input_scale_of(self.attention.qkv)),
            *((Sublayer(self.text_norm, None, None, None, self.text_attention, text),) if self.has_text else ()),
            Sublayer(self.norm, scale, shift, gate, self._run_feed_forward, self.feed_forward.input_scale),
        )

    def forward(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        if kernels.available(x):
            return run_sublayers(self.sublayers(ctx), x, tokens, ctx)
        for sublayer in self.sublayers(ctx):
            update = sublayer.run(sublayer.normed(x, tokens), tokens, ctx)
            x = x + update if sublayer.gate is None else torch.addcmul(x, tokens.of_rows(sublayer.gate), update)
        return x

    def _run_feed_forward(self, y: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        return self.feed_forward(y)


def run_in_order(blocks: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
    """Runs blocks in order; with kernels, consecutive blocks run as one chain of sublayers, to fuse across block boundaries."""
    chain: list[Sublayer] = []
    for block in blocks:
        if kernels.available(x) and not block.changes_input:
            chain += block.sublayers(ctx)
        else:
            x, chain = block(run_sublayers(chain, x, tokens, ctx) if chain else x, tokens, ctx), []
    return run_sublayers(chain, x, tokens, ctx) if chain else x


def build_blocks(depth: int, config: BlockConfig) -> nn.ModuleList:
    return nn.ModuleList(Block(layer, config) for layer in range(depth))
