"""What generation asks of a backbone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import CacheSpec, Env
from ..checkpoints import Layout
from ..stage import Schedule, Stage
from .blocks import LARGEST_LOG_TEMPERATURE, Block, BlockConfig, Modulation, modulated_norm
from .rope import RopeTable


@dataclass(slots=True)
class TextContext:
    """Text keys and values of every layer, [R, T, H, D] each, and which of the T entries are real."""

    keys_values: list[tuple[Tensor, Tensor]]
    mask: Tensor | None  # [R, 1, 1, T]; None when all rows are equally long

    def rows(self, rows: slice) -> TextContext:
        return TextContext([(k[rows], v[rows]) for k, v in self.keys_values], None if self.mask is None else self.mask[rows])


@dataclass(slots=True)
class Conditioning:
    """Everything that follows from the prompt or class, computed once per request."""

    start: Tensor  # [R, C], the first token before positions
    modulation: list[Modulation]  # per layer
    temperatures: list[Tensor | None]  # per layer, [H, 1]
    head_scale: Tensor  # [R, 1, C], with the 1 added
    head_shift: Tensor  # [R, 1, C]
    text: TextContext | None = None
    rope: RopeTable | None = None

    def keep_rows(self, rows: slice) -> None:
        self.start = self.start[rows]
        self.modulation = [modulation.rows(rows) for modulation in self.modulation]
        self.head_scale, self.head_shift = self.head_scale[rows], self.head_shift[rows]
        self.text = None if self.text is None else self.text.rows(rows)


class NextScaleModel(nn.Module):
    """A backbone: turns a canvas into tokens, runs its blocks, turns hidden states into logits."""

    layout: Layout
    float32: ClassVar[tuple[str, ...]] = ()  # parameters that keep full precision whatever the dtype
    block_config: BlockConfig
    blocks: nn.ModuleList
    pos_start: nn.Parameter
    word_embed: nn.Linear
    head_ada: nn.Linear
    head: nn.Linear

    @property
    def stack(self) -> tuple[Block, ...]:
        """The blocks in order."""
        return tuple(self.blocks)  # type: ignore[arg-type]

    @property
    def dtype(self) -> torch.dtype:
        return self.word_embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.word_embed.weight.device

    def cache_spec(self, schedule: Schedule, rows: int) -> CacheSpec:
        config = self.block_config
        return CacheSpec(len(self.blocks), rows, config.heads, config.head_dim, schedule, self.dtype, self.device)

    def condition(self, prompts: Any, guided: bool, schedule: Schedule, negative: Any = None) -> Conditioning:
        """Rows for the prompts, then, if guided, as many for what to steer away from."""
        raise NotImplementedError

    def request_bytes(self, schedule: Schedule, rows: int, text_tokens: int) -> int:
        """What a request keeps until it ends, besides the weights: known before it starts. `text_tokens`: of the longest prompt."""
        return self.cache_spec(schedule, rows).bytes

    def embed(self, seen: Tensor | None, stage: Stage, env: Env) -> Tensor:
        """The tokens of `stage` [R, cells, C] from what the canvas shows of it; both branches read the same canvas."""
        x = self.first_token(env) if seen is None else self.word_embed(seen.to(self.dtype))
        x = x + self.positions(stage)
        rows = env.cond.start.shape[0]
        return x if x.shape[0] == rows else x.repeat(rows // x.shape[0], 1, 1)

    def first_token(self, env: Env) -> Tensor:
        """The condition as a token, [R, 1, C]."""
        return env.cond.start[:, None].to(self.dtype) + self.pos_start

    def positions(self, stage: Stage) -> Tensor:
        """What tells the cells of `stage` apart, [cells or 1, C]."""
        raise NotImplementedError

    def logits(self, x: Tensor, env: Env) -> Tensor:
        """Hidden states [R, N, C] to float32 logits over codes, [R, N, V]."""
        weight = self.head.weight
        y = modulated_norm(x.to(weight.dtype), env.cond.head_scale.to(weight.dtype), env.cond.head_shift.to(weight.dtype))
        return self.head(y).float()

    def temperatures(self) -> list[Tensor | None]:
        """What multiplies the queries of each head, [H, 1] per layer; the same for all stages."""
        logs: list[Tensor] = [log for block in self.stack if (log := block.attention.log_temperature) is not None]
        if not logs:
            return [None] * len(self.blocks)
        return list(torch.stack(logs).float().clamp(max=LARGEST_LOG_TEMPERATURE).exp()[..., None])

    def modulation_tables(self) -> Tensor:
        """What each block adds to the shared modulation, [L, 1, 6, C]."""
        return torch.stack([block.modulation_table for block in self.stack])[:, None]

    def head_modulation(self, condition: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = self.head_ada(F.silu(condition.to(self.head_ada.weight.dtype)))[:, None].chunk(2, dim=-1)
        return 1 + scale, shift
