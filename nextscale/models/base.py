"""What generation asks of a backbone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache import CacheSpec, Env
from ..checkpoints import Layout
from ..errors import SettingError, SizeError
from ..guidance import GuidedRows
from ..sampling import Sampling, choose
from ..stage import Schedule, Stage, Tokens
from .blocks import Block, BlockConfig, ModulatedBlock, Modulation, temperature
from .rope import Rope
from .text_context import TextBuffer, TextContext, TextInputs

if TYPE_CHECKING:
    from ..canvas import Canvas
    from ..request import Request


class HeadModulation(NamedTuple):
    """What the condition does to the hidden states before the head, [R, 1, C] each; the scale is stored with the 1 added."""

    scale: Tensor
    shift: Tensor

    def rows(self, rows: slice) -> HeadModulation:
        return HeadModulation(self.scale[rows], self.shift[rows])


@dataclass(frozen=True, eq=False)
class PromptInputs:
    """What the prompts give a model, on its device: of a condition, all that differs from request to request."""

    rows: tuple[Tensor, ...] = ()  # [R, ...] each: the prompts', then, if guided, those of what to steer away from
    text: TextInputs | TextBuffer | None = None


@dataclass(slots=True)
class Conditioning:
    """Everything that follows from the prompt or class, computed once per request."""

    start: Tensor  # [R, 1, C], the first stage's token before the level is added
    temperatures: list[Tensor | None]  # per layer, [H, 1]
    modulation: list[Modulation] = field(default_factory=list)  # per layer; empty where blocks are not modulated
    head: HeadModulation | None = None
    prefix: Tensor | None = None  # [R, S, C], text tokens that stand before it, without the level too
    text: TextContext | None = None
    rope: Rope | None = None
    refiner: Conditioning | None = None  # of a second, smaller stack of blocks (STAR)

    def copy(self) -> Conditioning:
        """With the same tensors; rows that leave the copy stay here."""
        return replace(self, refiner=None if self.refiner is None else self.refiner.copy())

    def keep_rows(self, rows: slice) -> None:
        self.start = self.start[rows]
        self.modulation = [modulation.rows(rows) for modulation in self.modulation]
        self.head = None if self.head is None else self.head.rows(rows)
        self.prefix = None if self.prefix is None else self.prefix[rows]
        self.text = None if self.text is None else self.text.rows(rows)
        self.rope = None if self.rope is None else self.rope.rows(rows)
        if self.refiner is not None:
            self.refiner.keep_rows(rows)


@dataclass(frozen=True, slots=True)
class Hidden:
    """A stage's last hidden states, the cells they stand for, and what is needed to turn them into codes."""

    x: Tensor  # [R, N, C]
    tokens: Tokens  # of one branch's rows
    canvas: Canvas
    env: Env
    request: Request
    finite: list[Tensor] = field(default_factory=list)  # whether what was computed after the logits is finite, one entry each

    @property
    def cfg_branches(self) -> int:
        return self.x.shape[0] // self.request.batch


class NextScaleModel(nn.Module):
    """A backbone: turns a canvas into tokens, runs its blocks, turns hidden states into logits and logits into codes."""

    layout: Layout
    float32: ClassVar[tuple[str, ...]] = ()  # parameters that keep full precision whatever the dtype
    adds_residual: ClassVar[bool] = False  # `residual` has something to add to the last stage
    text_prefix: int = 0  # text tokens that enter together with the first stage, before its cell
    block_config: BlockConfig
    word_embed: nn.Linear
    blocks: nn.ModuleList
    head_norm: nn.Module
    head_ada: nn.Linear  # only where the condition modulates the head
    head: nn.Linear

    @property
    def stack(self) -> tuple[Block, ...]:
        """The blocks in order."""
        return tuple(self.blocks)  # type: ignore[arg-type]

    @property
    def modulated(self) -> tuple[ModulatedBlock, ...]:
        return tuple(block for block in self.stack if isinstance(block, ModulatedBlock))

    @property
    def dtype(self) -> torch.dtype:
        return self.word_embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.word_embed.weight.device

    def cache_spec(self, schedule: Schedule, rows: int) -> CacheSpec:
        config = self.block_config
        return CacheSpec(len(self.blocks), rows, config.heads, config.head_dim, schedule, self.dtype, self.device, self.text_prefix)

    def check_sampling(self, sampling: Sampling) -> None:
        """SettingError if the model cannot choose codes in this way."""
        if sampling.refine is not None:
            raise SettingError(f"refine: {type(self).__name__} has no refiner; leave it out")

    def check_schedule(self, schedule: Schedule) -> None:
        """SizeError if the model cannot draw these stages."""

    def condition(self, prompts: Any, guided: bool, schedule: Schedule, negative: Any = None) -> Conditioning:
        """Rows for the prompts, then, if guided, as many for what to steer away from."""
        return self.condition_from(self.prompt_inputs(prompts, guided, schedule, negative), self.schedule_tables(schedule))

    def prompt_inputs(self, prompts: Any, guided: bool, schedule: Schedule, negative: Any = None) -> PromptInputs:
        """The part of `condition` that looks at the prompts; what the model cannot draw is refused."""
        raise NotImplementedError

    def schedule_tables(self, schedule: Schedule) -> Any:
        """The part of `condition` that follows from the schedule alone, whatever the prompts and the weights."""
        return None

    def condition_from(self, given: PromptInputs, tables: Any) -> Conditioning:
        """The rest of `condition`: runs on the device alone, so that it can be recorded."""
        raise NotImplementedError

    def embed(self, seen: Tensor | None, stage: Stage, env: Env) -> Tensor:
        """The tokens of `stage` [R, cells, C] from what the canvas shows of it; both branches read the same canvas."""
        x = env.cond.start if seen is None else self.word_embed(seen.to(self.dtype))
        x = x + self.positions(stage)
        rows = env.cond.start.shape[0]
        return x if x.shape[0] == rows else x.repeat(rows // x.shape[0], 1, 1)

    def with_text(self, x: Tensor, tokens: Tokens, env: Env) -> tuple[Tensor, Tokens]:
        """At the first stage the text tokens, where the model has any, come before the grid's."""
        if tokens.stage.index > 0 or env.cond.prefix is None:
            return x, tokens
        text = env.cond.prefix + self.positions(tokens.stage)
        return torch.cat([text, x], dim=1), tokens.with_prefix(text.shape[1])

    def positions(self, stage: Stage) -> Tensor:
        """What tells the cells of `stage` apart from those of others, and from one another: [cells or 1, C]."""
        raise NotImplementedError

    def logits(self, x: Tensor, env: Env) -> Tensor:
        """Hidden states [R, N, C] to float32 logits over codes, [R, N, V]."""
        dtype = self.head.weight.dtype
        y = self.head_norm(x.to(dtype))
        if env.cond.head is not None:
            y = torch.addcmul(env.cond.head.shift.to(dtype), y, env.cond.head.scale.to(dtype))
        return self.head(y).float()

    def choose(self, hidden: Hidden, logits: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Guided logits [B, N, V] of `tokens` to the drawn code numbers and to what goes on the canvas."""
        request = hidden.request
        return choose(logits, tokens, len(request.schedule), request.sampling, request.rng)

    def residual_scale(self, guidance: GuidedRows, stage: Stage) -> float:
        """How strongly the residual is guided; 1 is the conditional branch alone."""
        return 1.0

    def residual(self, hidden: Hidden, ids: Tensor) -> Tensor:
        """What the last stage adds to its codes [B, N], both for the tokens of `hidden`: [B, N, Z]."""
        raise NotImplementedError

    def modulation_tables(self) -> Tensor:
        """What each block adds to a modulation that all share, [L, 1, 6, C]."""
        return torch.stack([block.modulation_table for block in self.modulated])[:, None]

    def head_modulation(self, condition: Tensor) -> HeadModulation:
        """Condition [R, C] to what it does before the head."""
        scale, shift = self.head_ada(F.silu(condition.to(self.head_ada.weight.dtype)))[:, None].chunk(2, dim=-1)
        return HeadModulation(1 + scale, shift)


def temperatures(blocks: tuple[Block, ...]) -> list[Tensor | None]:
    """What multiplies the queries of each head, [H, 1] per layer; the same for all stages."""
    logs: list[Tensor] = [log for block in blocks if (log := block.attention.log_temperature) is not None]
    return list(temperature(torch.stack(logs))) if logs else [None] * len(blocks)


def check_levels(schedule: Schedule, levels: int) -> None:
    if len(schedule) > levels:
        raise SizeError(f"{schedule} has {len(schedule)} stages; this model knows {levels} levels")
