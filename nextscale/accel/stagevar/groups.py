"""A group of blocks on few rows in place of all tokens: what the ways of running StageVAR's groups have in common."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ...errors import SettingError
from ...models.env import Env
from ...sampling import Noise, cell_noise
from ...stage import Tokens
from ..method import RunSetup, Span
from .lowrank import Rank, repeat_tail

if TYPE_CHECKING:
    from ...models.blocks import Block


class RunState:
    """What the spans of one request share: where their random numbers come from, and which cells they ran."""

    def __init__(self, setup: RunSetup) -> None:
        self.setup = setup
        self.ran: Tensor | None = None  # [B, cells], in blocks
        self.widths: dict[tuple[int, int], int] = {}  # (stage, group): rows that the blocks computed, padding included

    def race(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Unit exponential numbers [R, N] for all tokens of x, the same for both branches of an image."""
        return self._noise(self.setup.rng.exponential, tokens, x)

    def normal(self, x: Tensor, tokens: Tokens, columns: int) -> Tensor:
        """Standard normal numbers [R, N, columns], likewise."""
        return self._noise(self.setup.rng.normal, tokens, x, columns)

    def _noise(self, noise: Noise, tokens: Tokens, x: Tensor, *columns: int) -> Tensor:
        batch = self.setup.batch
        drawn = cell_noise(noise, tokens.rows(slice(0, batch)), (batch, x.shape[1], *columns), x.device)
        return drawn.repeat(x.shape[0] // batch, *[1] * (drawn.ndim - 1))

    def record(self, tokens: Tokens, rows: Tensor, blocks: int, share: Tensor | None = None) -> None:
        """`blocks` blocks computed `rows` [R, n, C] for these tokens, in full or in the given share [R]; 0 elsewhere."""
        if not self.setup.compute_mask:
            return
        whole = torch.ones(*rows.shape[:2], 1, device=rows.device)
        values = whole if share is None else whole * share[:, None, None]
        grid = tokens.scatter(values, values.new_zeros(rows.shape[0], tokens.stage.cells, 1))
        ran = blocks * grid.view(-1, self.setup.batch, tokens.stage.cells).mean(dim=0)  # over the branches
        self.ran = ran if self.ran is None else self.ran + ran

    def take(self) -> Tensor | None:
        """Share of the network per cell [B, cells] since the last call; None if no span ran."""
        ran, self.ran = self.ran, None
        return None if ran is None else ran / len(self.setup.model.blocks)


@dataclass(frozen=True)
class LowRank(Span):
    """Runs a group of blocks on few rows that stand for all tokens."""

    restores_from_memory: ClassVar[bool] = True

    layers: range
    stage: int
    group: int
    rank: Rank
    remember: bool = False  # the next stage is restored from this one
    first_positions: bool = False  # the rows take the first positions of the stage instead of their representatives'
    state: RunState | None = field(default=None, compare=False, repr=False)  # None: a forecast

    @property
    def key(self) -> Hashable:  # type: ignore[override]
        return f"stagevar {type(self).__name__} of group {self.group}, {self.rank}"

    def num_tokens(self, tokens: int) -> int:
        """Once it has run: what was run, which a measured rank does not know before."""
        known = {} if self.state is None else self.state.widths
        return known.get((self.stage, self.group), self.rank.rows(tokens))

    @property
    def whole_stage(self) -> bool:  # type: ignore[override]
        return self.remember

    @property
    def stores(self) -> frozenset[Hashable]:
        return frozenset({memory_name(self.group)} if self.remember else ())

    @property
    def needs(self) -> frozenset[Hashable]:
        return frozenset({memory_name(self.group)} if self.restores_from_memory else ())

    def own_macs(self, tokens: int, dim: int) -> int:
        """MACs of the projection of one row; decompositions do not count."""
        return tokens * self.num_tokens(tokens) * dim

    def __call__(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        out = repeat_tail(self.replaced(blocks, x, tokens, env).to(x.dtype), tokens.count)
        if self.remember:
            env.memory.store(memory_name(self.group), out, tokens)
        return out

    def replaced(self, blocks: Sequence[Block], x: Tensor, tokens: Tokens, env: Env) -> Tensor:
        """The group's output [R, N, C] for its input; what lies beyond the count of a row does not matter."""
        raise NotImplementedError

    @property
    def run_state(self) -> RunState:
        assert self.state is not None, "a forecast cannot be run"
        return self.state

    def ranks(self, x: Tensor, tokens: Tokens) -> tuple[int, Tensor | None]:
        """Rows for x [R, N, C]: the padded number, and where rows of the batch differ, those of each [R]."""
        width, ranks = self.rank.of(x, tokens)
        self.run_state.widths[self.stage, self.group] = width
        return width, ranks

    def remembered(self, tokens: Tokens, env: Env) -> Tensor:
        """The same group's output at the previous stage that ran, resized to these tokens (equation 7)."""
        try:
            return env.memory.fill(memory_name(self.group), tokens)
        except KeyError:
            raise SettingError(
                f"stage {tokens.stage.index} cannot be restored: another method skipped the stage before it, whose outputs StageVAR"
                " needs. Skip stages with StageVAR's own alphas (0), which know what is skipped"
            ) from None

    def record_rows(self, x: Tensor, tokens: Tokens, width: int, ranks: Tensor | None) -> None:
        """Every token had the same part in the rows that ran."""
        rows = torch.full((x.shape[0],), width, device=x.device) if ranks is None else ranks
        self.run_state.record(tokens, x, len(self.layers), rows / (x.shape[1] if tokens.count is None else tokens.count))


def memory_name(group: int) -> Hashable:
    return "stagevar", group


def first_tokens(tokens: Tokens, rows: Tensor, count: Tensor | None) -> Tokens:
    """The first of these tokens, as places of `rows` [R, r, C] that stand for no token in particular."""
    place = torch.arange(rows.shape[1], device=rows.device).expand(rows.shape[0], -1)
    return tokens.take(repeat_tail(place, count), count)
