"""Teacher forcing: the whole pyramid of an image in one pass. Each stage attends to the stages before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.cache.attention import attend
from nextscale.models.blocks import Block
from nextscale.models.context import Conditioning
from nextscale.models.infinity import Infinity
from nextscale.models.modulation import Modulation
from nextscale.stage import Schedule, Stage, Tokens
from nextscale.tokenizers import InfinityTokenizer

JOINED_STAGES = 5  # the small stages that are attended to in one call under a mask, which fast attention kernels do not take
MASK_MULTIPLE = 8


@dataclass(frozen=True)
class Pyramid:
    """Inputs of the model and target bits, with all stages concatenated."""

    seen: Tensor  # [B, tokens - 1, bits]: the canvas before every stage but the first
    bits: Tensor  # [B, tokens, bits], bool


@torch.no_grad()
def forced_pyramid(
    tokenizer: InfinityTokenizer, features: Tensor, schedule: Schedule, stages: int, most_flips: float, generator: torch.Generator
) -> Pyramid:
    """Returns the bits of encoder features [B, bits, h, w] for the first `stages` of a schedule.

    Bitwise self-correction: a random share of every picture's bits, up to `most_flips`, is flipped on the canvas, and the bits of later
    stages correct it, as they must when the model errs.
    """
    batch, device = features.shape[0], features.device
    canvas = tokenizer.canvas(schedule, batch)
    share = most_flips * torch.rand(batch, 1, 1, device=device, generator=generator)
    seen, bits = [], []
    for stage in schedule.stages[:stages]:
        shown = canvas.input(stage)
        if shown is not None:
            seen.append(shown)
        right = tokenizer.nearest(F.interpolate(features - canvas.latent, size=tokenizer.map_size(stage), mode="area"), stage).bool()
        bits.append(right)
        wrong = torch.rand(right.shape, device=device, generator=generator) < share
        canvas.add((right ^ wrong).to(features.dtype), Tokens(stage))
    return Pyramid(torch.cat(seen, dim=1), torch.cat(bits, dim=1))


@dataclass(frozen=True)
class Window:
    """Queries from `start` to `end`, which see all keys before `end` that the mask allows."""

    start: int
    end: int
    mask: Tensor | None


def stage_windows(stages: Sequence[Stage], device: torch.device) -> tuple[Window, ...]:
    """Splits block-causal attention into a few calls. A large stage attends to a prefix of the sequence, which needs no mask."""
    joined = stages[:JOINED_STAGES]
    alone = [Window(stage.start, stage.start + stage.cells, None) for stage in stages[len(joined) :]]
    if not joined:
        return tuple(alone)
    numbers = torch.cat([torch.full((stage.cells,), stage.index, device=device) for stage in joined])
    tokens = len(numbers)
    padded = math.ceil(tokens / MASK_MULTIPLE) * MASK_MULTIPLE  # fused attention wants aligned rows
    mask = torch.zeros(tokens, padded, dtype=torch.bool, device=device)[:, :tokens]
    mask.copy_(numbers[:, None] >= numbers)
    return (Window(0, tokens, mask), *alone)


def before_attention(
    block: Block, x: Tensor, modulation: Modulation, logit_scale: Tensor | None, cosines: Tensor, sines: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values. cosines, sines: [tokens, 1, 1, head_dim / 2]."""

    def turn(qk: Tensor) -> Tensor:
        first, second = qk.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([first * cosines - second * sines, first * sines + second * cosines], dim=-1).flatten(-2)

    normed = torch.addcmul(modulation.attention_shift, block.norm(x), modulation.attention_scale)
    q, k, v = block.attention.queries_keys_values(normed, logit_scale, turn)
    return q.to(x.dtype), k.to(x.dtype), v


def after_attention(block: Block, x: Tensor, attended: Tensor, modulation: Modulation) -> tuple[Tensor, Tensor]:
    """Adds the output of self-attention. Returns the sum and the queries of cross-attention."""
    x = torch.addcmul(x, modulation.attention_gate, block.attention.proj(attended))
    return x, block.text_attention.q(block.text_norm(x)).unflatten(-1, (block.text_attention.heads, -1))


def after_text(block: Block, x: Tensor, attended: Tensor, modulation: Modulation) -> Tensor:
    x = x + block.text_attention.proj(attended)
    y = torch.addcmul(modulation.feed_forward_shift, block.norm(x), modulation.feed_forward_scale)
    return torch.addcmul(x, modulation.feed_forward_gate, block.feed_forward(y))


class BlockParts(NamedTuple):
    """A block without its attention calls. No part has a fixed number of tokens, so one compiled graph serves all blocks, batches
    and aspect ratios."""

    before_attention: Callable[..., tuple[Tensor, Tensor, Tensor]] = before_attention
    after_attention: Callable[..., tuple[Tensor, Tensor]] = after_attention
    after_text: Callable[..., Tensor] = after_text

    @classmethod
    def compiled(cls) -> BlockParts:
        return cls(
            torch.compile(before_attention, dynamic=True),
            torch.compile(after_attention, dynamic=True),
            torch.compile(after_text, dynamic=True),
        )


PLAIN = BlockParts()


def forced_block(
    block: Block,
    x: Tensor,
    modulation: Modulation,
    text: tuple[Tensor, Tensor],
    text_mask: Tensor | None,
    logit_scale: Tensor | None,
    rotation: tuple[Tensor, Tensor],
    windows: tuple[Window, ...],
    parts: BlockParts = PLAIN,
) -> Tensor:
    """Computes `Block.forward` over a whole pyramid."""
    q, k, v = parts.before_attention(block, x, modulation, logit_scale, *rotation)
    seen = [attend(q[:, w.start : w.end], k[:, : w.end], v[:, : w.end], w.mask, block.attention.scale) for w in windows]
    x, queries = parts.after_attention(block, x, torch.cat(seen, dim=1), modulation)
    return parts.after_text(block, x, attend(queries, *text, text_mask, block.text_attention.scale), modulation)


def stage_weights(stages: Sequence[Stage]) -> Tensor:
    """Returns the weights of the mean losses of the stages, [stages]. They are proportional to the side of the stage: a compromise between
    equal stages and equal tokens."""
    sides = torch.tensor([math.sqrt(stage.cells) for stage in stages])
    return sides / sides.sum()


class ForcedPass:
    """Runs Infinity on the first stages of a schedule at once. Computes the same as the stage loop."""

    def __init__(self, model: Infinity, schedule: Schedule, stages: int, run_block: Callable[..., Tensor] = forced_block) -> None:
        self.model, self.run_block = model, run_block
        self.stages = schedule.stages[:stages]
        self.windows = stage_windows(self.stages, model.device)
        self.weights = stage_weights(self.stages).to(model.device)
        turns = torch.cat(model.rotations(schedule)[:stages])[:, None, None]
        self.rotation = (turns.real.contiguous(), turns.imag.contiguous())
        self.levels = torch.cat([torch.full((stage.cells,), stage.index, device=model.device) for stage in self.stages])

    def logits(self, seen: Tensor, condition: Conditioning) -> Tensor:
        """Returns the log-odds of every bit, [B, tokens, bits], in float32."""
        model = self.model
        x = torch.cat([condition.start, model.word_embed(seen.to(model.dtype))], dim=1) + model.level_embed(self.levels)
        assert condition.text is not None and condition.head is not None
        for layer, block in enumerate(model.stack):
            logit_scale = condition.logit_scales[layer]
            text, mask = condition.text.keys_values[layer], condition.text.mask
            x = self.run_block(block, x, condition.modulation[layer], text, mask, logit_scale, self.rotation, self.windows)
        dtype = model.head.weight.dtype
        hidden = torch.addcmul(condition.head.shift.to(dtype), model.head_norm(x.to(dtype)), condition.head.scale.to(dtype))
        zero, one = model.head(hidden).float().unflatten(-1, (-1, 2)).unbind(-1)
        return one - zero

    def bit_losses(self, pyramid: Pyramid, condition: Conditioning) -> tuple[Tensor, Tensor]:
        """Returns mean cross-entropy per bit and bit accuracy of every stage, [stages] each."""
        logits = self.logits(pyramid.seen, condition)
        losses = F.binary_cross_entropy_with_logits(logits, pyramid.bits.float(), reduction="none")
        right = ((logits.detach() > 0) == pyramid.bits).float()
        return self._by_stage(losses), self._by_stage(right)

    def _by_stage(self, values: Tensor) -> Tensor:
        by_token = values.mean(dim=(0, 2))
        return torch.stack([part.mean() for part in by_token.split([stage.cells for stage in self.stages])])
