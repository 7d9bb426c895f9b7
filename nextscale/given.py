"""Stages whose codes are given: nothing is sampled there, and the network reads them for the keys that later stages need.

All of them are read in one pass in which every stage sees itself and those before it. Where that does not fit (text before the first
stage, guidance inside the network, a method that runs blocks its own way) they are read stage by stage, which computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .attending import AttendingCache
from .cache import LayerCache
from .errors import SettingError
from .models.blocks import run_in_order
from .models.rope import PairRope
from .stage import Rows, Schedule, Stage, Tokens

if TYPE_CHECKING:
    from .models.base import NextScaleModel
    from .models.env import Env


def checked_given(given: Sequence[Tensor], schedule: Schedule, batch: int, device: torch.device) -> tuple[Tensor, ...]:
    """The codes of the first stages, on the device; SettingError if they do not fit."""
    codes = tuple(given)
    expected = [[batch, stage.cells] for stage in schedule.stages[: len(codes)]]
    found = [list(one.shape[:2]) if isinstance(one, Tensor) else type(one).__name__ for one in codes]
    if len(codes) >= len(schedule) or found != expected:
        raise SettingError(
            f"given codes are [images, cells, ...] for each of the first stages, at most {len(schedule) - 1} of them; got {found}, expected"
            f" {expected}"
        )
    return tuple(one.to(device) for one in codes)


def fits_one_pass(model: NextScaleModel, env: Env) -> bool:
    """Whether several stages can stand side by side: their positions and levels, in caches that take them at once."""
    rope = env.cond.rope
    positions = env.cond.prefix is None and (rope is None or isinstance(rope, PairRope))
    return (
        positions
        and not any(block.changes_input for block in model.stack)
        and not any(isinstance(cache, AttendingCache) for cache in env.cache)
    )


@torch.inference_mode()
def read_in_one_pass(model: NextScaleModel, env: Env, stages: Sequence[Stage], seen: Sequence[Tensor | None]) -> None:
    """Puts keys and values of these stages, the first ones, into the caches; `seen` is what the canvas shows of each."""
    x = torch.cat([model.embed(shown, stage, env) for stage, shown in zip(stages, seen, strict=True)], dim=1)
    joined = Stage(0, 1, x.shape[1], 0, False)
    number = torch.cat([torch.full((stage.cells,), stage.index, device=x.device) for stage in stages])
    mask = (number[:, None] >= number)[None, None]  # [1, 1, T, T]
    rope = env.cond.rope
    tables = PairRope([torch.cat([rope.table(stage) for stage in stages])]) if isinstance(rope, PairRope) else None
    part = replace(env, cond=replace(env.cond, rope=tables), cache=[BlockCausal(cache, mask) for cache in env.cache], computed=None)
    run_in_order(model.stack, x, Tokens(joined), part)


@dataclass(frozen=True)
class BlockCausal:
    """A cache that is filled with several stages at once, of which each sees itself and those before it."""

    cache: LayerCache
    mask: Tensor  # [1, 1, T, T]

    def append(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
        keys, values, _ = self.cache.append(q, k, v, tokens)
        return keys, values, self.mask

    def keep_rows(self, rows: Rows) -> None:
        self.cache.keep_rows(rows)
