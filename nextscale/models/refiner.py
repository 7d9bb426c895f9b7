"""STAR's refiner: a smaller stack of blocks that samples a stage in several rounds, conditioned on the codes of earlier rounds."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..cache import NoCache, StageMemory
from ..cache.attention import attention_backend
from ..sampling import cell_noise, sample_codes
from ..stage import Tokens, to_double
from .base import HeadInputs, logit_scales
from .blocks import Block, BlockConfig, build_blocks, plain_norm, run_in_order
from .context import Conditioning, ForwardContext
from .macs import macs_per_token
from .rope import Rope


def cells_per_round(rounds: int, cells: Tensor) -> Tensor:
    """Returns the number of `cells` [...] to settle in each round, [rounds, ...]: increasing, and `cells` in total."""
    weights = [math.acos(1 - i / (rounds - 1)) if rounds > 1 else 1.0 for i in range(rounds)]
    *early, _ = [(weight / sum(weights) * to_double(cells)).round().clamp(min=1).long() for weight in weights]
    return torch.stack([*early, (cells - sum(early)).clamp(min=0)])


class Refiner(nn.Module):
    def __init__(self, config: BlockConfig, blocks: int, levels: int, latent_channels: int, text_channels: int, codes: int) -> None:
        super().__init__()
        self.text_proj = nn.Linear(text_channels, config.dim)
        self.pos_start = nn.Parameter(torch.empty(config.dim))
        self.level_embed = nn.Embedding(levels, config.dim)
        self.word_embed = nn.Linear(latent_channels, config.dim)
        self.merge = nn.Linear(2 * config.dim, config.dim)
        self.blocks = build_blocks(blocks, config)
        self.head_norm = plain_norm(config.dim)
        self.head = nn.Linear(config.dim, codes)

    @property
    def stack(self) -> tuple[Block, ...]:
        return tuple(self.blocks)  # type: ignore[arg-type]

    def condition(self, pooled: Tensor, rope: Rope) -> Conditioning:
        """Returns the condition of the refiner's blocks; one text token from `pooled` [R, channels] precedes the cells."""
        return Conditioning(start=self.text_proj(pooled)[:, None] + self.pos_start, logit_scales=logit_scales(self.stack), rope=rope)

    def forward(self, x: Tensor, known: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        """Computes logits [R, N, V] from the main model's hidden states x [R, N, C] and the settled code vectors `known` [B, N, Z].

        `known` is zero for cells that are not settled. `tokens` include the prefix token; if they are packed, so are x and `known`.
        """
        codes = self.word_embed(known.to(x.dtype)) + self.level_embed.weight[tokens.stage.index]
        codes = tokens.prepend(ctx.cond.start, codes.repeat(x.shape[0] // codes.shape[0], 1, 1))
        y = self.merge(torch.cat([codes, tokens.prepend(ctx.cond.start, x)], dim=-1))
        y = run_in_order(self.stack, y, tokens, ctx)
        return self.head(self.head_norm(tokens.on_grid(y)[0])).float()

    def sample(self, hidden: HeadInputs, logits: Tensor) -> Tensor:
        """Samples codes [B, N] for the tokens of `hidden`; `logits` are the main model's, after CFG."""
        request, tokens, sampling = hidden.request, hidden.tokens, hidden.request.sampling
        assert sampling.refine is not None and hidden.ctx.cond.refiner is not None
        rounds, drafted = sampling.refine.at(tokens.stage)
        ctx = replace(hidden.ctx, cond=hidden.ctx.cond.refiner, cache=[NoCache()] * len(self.blocks), memory=StageMemory())
        with_prompt = tokens.repeat(hidden.cfg_branches).with_prefix(1)
        state = RefinementState(tokens, request.batch, logits.device)
        for i, count in enumerate(cells_per_round(rounds, state.cells)):
            if i < drafted:
                out = logits
            else:
                known = hidden.canvas.vectors(state.numbers) * state.settled[..., None]
                with attention_backend(with_prompt.rows_of(hidden.x) * with_prompt.num_tokens, logits.device, hidden.ctx.captured):
                    raw = self(hidden.x, tokens.pack(tokens.gather(known)), with_prompt, ctx)
                guided = request.guidance.guide_as_last(raw, tokens.stage, tokens.branch_size(request.batch))
                out = sampling.prepare(tokens.unpack(guided), tokens.stage)
                hidden.finite.append(out.isfinite().all())
            codes, kept = sample_codes(out, tokens, sampling, request.rng)
            certainty = kept.softmax(dim=-1).gather(-1, codes[..., None]).squeeze(-1)
            if i < drafted:  # drafted rounds settle twice; the first time among all cells, including settled ones
                state.settle(certainty, count, codes)
            if i < sampling.refine.random:
                certainty = cell_noise(request.rng.uniform, tokens, certainty.shape, certainty.device)
            state.settle(certainty * ~state.at(state.settled), count, codes)
        return state.at(state.numbers)

    def macs(self, images: int, rows: int, num_tokens: int) -> int:
        """Returns the MACs of one round. One text token precedes the cells, and keys and values are not cached."""
        dim, entered = self.merge.out_features, num_tokens + 1
        per_token = macs_per_token(self.merge, *(part for block in self.stack for part in (block.attention, block.feed_forward)))
        products = 2 * dim * len(self.blocks) * entered * entered
        embedding, head = macs_per_token(self.word_embed), macs_per_token(self.head)
        return images * num_tokens * embedding + rows * (entered * per_token + products + num_tokens * head)


class RefinementState:
    """Settled codes of a stage on its grid, so that results do not depend on the order of the tokens."""

    def __init__(self, tokens: Tokens, batch: int, device: torch.device) -> None:
        self.tokens = tokens
        self.numbers = torch.zeros(batch, tokens.stage.cells, dtype=torch.long, device=device)
        self.settled = torch.zeros_like(self.numbers, dtype=torch.bool)
        self.cells = (
            torch.full((batch,), tokens.num_tokens, device=device) if tokens.count is None else tokens.count
        )  # [B], cells to settle

    def at(self, grid: Tensor) -> Tensor:
        """Gathers values [B, cells] of the tokens, [B, N]."""
        return self.tokens.gather(grid[..., None]).squeeze(-1)

    def settle(self, score: Tensor, count: Tensor, codes: Tensor) -> None:
        """Settles the `count` [B] cells of each image with the highest score [B, N] with their codes, unless they are settled already."""
        absent = torch.full_like(self.numbers, -1, dtype=score.dtype)
        order = self._on_grid(score, absent).argsort(dim=1, descending=True, stable=True)  # ties: lowest cell first
        best = torch.arange(order.shape[1], device=order.device) < count[:, None]
        new = torch.zeros_like(self.settled).scatter(1, order, best) & ~self.settled
        self.numbers = torch.where(new, self._on_grid(codes, self.numbers), self.numbers)
        self.settled = self.settled | new

    def _on_grid(self, values: Tensor, grid: Tensor) -> Tensor:
        return self.tokens.scatter(values[..., None], grid[..., None]).squeeze(-1)
