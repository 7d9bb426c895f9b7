"""What generation asks of a backbone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from ..cache import CacheSpec, QuantizedSpec
from ..canvas import Canvas
from ..checkpoints import Layout
from ..errors import SettingError, SizeError
from ..guidance import ResolvedGuidance
from ..sampling import Refinement, Rng, Sampling, choose, pass_noise
from ..stage import Schedule, Stage, Tokens
from .attention import logit_scale
from .blocks import Block, BlockConfig
from .context import Conditioning, ForwardContext
from .macs import macs_per_token
from .modulation import HeadModulation
from .quantization import Quantize
from .text_context import TextInputs


@dataclass(frozen=True, eq=False)
class PromptInputs:
    """What the prompts give a model, on its device: of a condition, all that differs from request to request."""

    rows: tuple[Tensor, ...] = ()  # [R, ...] each: the prompts', then, if guided, those of what to steer away from
    text: TextInputs | None = None


class ModelRequest(Protocol):
    """What models read of a request when they turn hidden states into codes."""

    @property
    def batch(self) -> int: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def guidance(self) -> ResolvedGuidance: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def rng(self) -> Rng: ...
    @property
    def method_rng(self) -> Rng: ...


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """A stage's last hidden states, the cells they stand for, and what is needed to turn them into codes."""

    x: Tensor  # [R, N, C], or packed
    tokens: Tokens  # of the rows of one cfg branch
    canvas: Canvas
    ctx: ForwardContext
    request: ModelRequest
    finite: list[Tensor] = field(default_factory=list)  # whether what was computed after the logits is finite, one entry each

    @property
    def cfg_branches(self) -> int:
        """How many cfg branches run."""
        return self.x.shape[0] // self.tokens.branch_size(self.request.batch)


KvDtype = Literal["int8"]


class NextScaleModel(nn.Module):
    """A backbone: turns a canvas into tokens, runs its blocks, turns hidden states into logits and logits into codes."""

    family: ClassVar[str]  # "var", "flexvar", "infinity", "hart" or "star"
    layout: Layout
    float32: ClassVar[tuple[str, ...]] = ()  # parameters that keep full precision whatever the dtype
    adds_residual: ClassVar[bool] = False  # `residual` has something to add to the last stage
    replaces_codes: ClassVar[bool] = False  # a stage replaces what earlier ones have generated, and is no residual to them
    rotates_in_float32: ClassVar[bool] = False  # queries and keys are rotated by torch in float32, not by a kernel
    rank_table: Any = None  # a RankTable (StageVAR) that was measured of these weights, if it lies beside them
    quantize: Quantize | None = None  # the format in which the blocks have their weights; None: the model's dtype
    fingerprint: str | None = None  # of the weights before they were quantised
    kv_dtype: KvDtype | None = None  # in which keys and values are kept for later stages; None: as they are computed
    levels: int | None = None  # the most stages of a schedule; None: any number
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
    def rows_share_text(self) -> bool:
        """Whether the first row's attention to the text is used for all rows (STAR as released)."""
        return False

    @property
    def dtype(self) -> torch.dtype:
        return self.word_embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.word_embed.weight.device

    @property
    def logit_shape(self) -> tuple[int, ...]:
        """Shape of the logits of one token."""
        return (self.head.out_features,)

    def cache_spec(self, schedule: Schedule, rows: int) -> CacheSpec:
        config, sizes = self.block_config, CacheSpec if self.kv_dtype is None else QuantizedSpec
        return sizes(len(self.blocks), rows, config.heads, config.head_dim, schedule, self.dtype, self.device, self.text_prefix)

    def check_sampling(self, sampling: Sampling) -> None:
        """SettingError if the model cannot choose codes in this way."""
        if sampling.refine is not None:
            raise SettingError(f"refine: {type(self).__name__} has no refiner; leave it out")

    def check_schedule(self, schedule: Schedule) -> None:
        """Raises SizeError if the model cannot generate these stages."""
        if self.levels is not None and len(schedule) > self.levels:
            raise SizeError(f"{schedule} has {len(schedule)} stages; this model knows {self.levels} levels")

    def condition(self, prompts: Any, guided: bool, schedule: Schedule, negative: Any = None) -> Conditioning:
        """Rows for the prompts, then, if guided, as many for what to steer away from."""
        return self.condition_from(self.prompt_inputs(prompts, guided, schedule, negative), self.schedule_tables(schedule))

    def prompt_inputs(self, prompts: Any, guided: bool, schedule: Schedule, negative: Any = None) -> PromptInputs:
        """The part of `condition` that looks at the prompts; what the model cannot generate is refused."""
        raise NotImplementedError

    def schedule_tables(self, schedule: Schedule) -> Any:
        """The part of `condition` that follows from the schedule alone, whatever the prompts and the weights."""
        return None

    def condition_from(self, inputs: PromptInputs, tables: Any) -> Conditioning:
        """The rest of `condition`: runs on the device alone, so that it can be captured."""
        raise NotImplementedError

    def embed(self, seen: Tensor | None, stage: Stage, ctx: ForwardContext) -> Tensor:
        """The tokens of `stage` [R, cells, C] from what the canvas shows of it; both cfg branches read the same canvas."""
        x = ctx.cond.start if seen is None else self.word_embed(seen.to(self.dtype))
        x = x + self.positions(stage)
        rows = ctx.cond.start.shape[0]
        return x if x.shape[0] == rows else x.repeat(rows // x.shape[0], 1, 1)

    def with_text(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> tuple[Tensor, Tokens]:
        """Puts the text tokens, where the model has any, before the cell of the first stage."""
        if tokens.stage.index > 0 or ctx.cond.prefix is None:
            return x, tokens
        text = ctx.cond.prefix + self.positions(tokens.stage)
        tokens = tokens.with_prefix(text.shape[1])
        return tokens.prepend(text, x), tokens

    def positions(self, stage: Stage) -> Tensor:
        """Position and level embeddings of the cells of `stage`: [cells or 1, C]."""
        raise NotImplementedError

    def logits(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        """Hidden states [R, N, C] of `tokens` to float32 logits over codes, [R, N, V]; packed ones to packed ones."""
        return self.head(self.head_input(x, tokens, ctx)).float()

    def head_input(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        """Hidden states as the head reads them: in its dtype, normed, and modulated where a condition does that."""
        dtype, modulation = self.head.weight.dtype, ctx.cond.head
        if isinstance(self.head_norm, nn.LayerNorm) and self.head_norm.weight is None and kernels.available(x):
            image = None if tokens.packing is None else tokens.packing.image
            return kernels.norm_modulate(x, *(modulation or (None, None)), image=image, dtype=dtype)
        y = self.head_norm(x.to(dtype))
        if modulation is not None:
            scale, shift = (tokens.of_rows(part.to(dtype)) for part in modulation)
            y = torch.addcmul(shift, y, scale)
        return y

    def choose(self, hidden: HeadInputs, logits: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Guided logits [B, N, V] of `tokens` to the sampled code numbers and to what goes on the canvas."""
        request = hidden.request
        return choose(logits, tokens, len(request.schedule), request.sampling, request.rng)

    def pass_noise(self, stage: Stage, ctx: ForwardContext, request: ModelRequest) -> None:
        """Draws and discards the random numbers that `choose` takes for all cells of a stage."""
        pass_noise((request.batch, stage.cells, *self.logit_shape), request.sampling, request.rng, self.device)

    def residual_scale(self, guidance: ResolvedGuidance, stage: Stage) -> float:
        """Guidance scale of the residual; 1 is the conditional rows alone."""
        return 1.0

    def residual(self, hidden: HeadInputs, ids: Tensor) -> Tensor:
        """What the last stage adds to its codes [B, N], both for the tokens of `hidden`: [B, N, Z]."""
        raise NotImplementedError

    def modulation_tables(self) -> Tensor:
        """What each block adds to a modulation that all share, [L, 1, 6, C]."""
        return torch.stack([block.modulation_table for block in self.stack])[:, None]

    def head_modulation(self, condition: Tensor) -> HeadModulation:
        """Condition [R, C] to what it does before the head."""
        scale, shift = self.head_ada(F.silu(condition.to(self.head_ada.weight.dtype)))[:, None].chunk(2, dim=-1)
        return HeadModulation(1 + scale, shift)

    # --- MACs, for planning

    def embedding_macs(self, stage: Stage, images: int) -> int:
        """MACs of `embed` for all cells of a stage, computed once for both cfg branches. The first stage starts from the condition."""
        return 0 if stage.index == 0 else images * stage.cells * macs_per_token(self.word_embed)

    def logits_macs(self, rows: int, num_tokens: int) -> int:
        """MACs of `logits` for this number of tokens per row."""
        return rows * num_tokens * macs_per_token(self.head)

    def residual_macs(self, images: int, rows: int, num_tokens: int) -> int:
        """MACs of `residual`; `rows` take part in it, one per image where it is not guided."""
        return 0

    def refinement_macs(self, refine: Refinement, stage: Stage, images: int, rows: int, num_tokens: int) -> int:
        """MACs of `choose` in rounds, where the model has a refiner."""
        return 0


def logit_scales(blocks: tuple[Block, ...]) -> list[Tensor | None]:
    """What multiplies the queries of each head, [H, 1] per layer; the same for all stages."""
    logs: list[Tensor] = [log for block in blocks if (log := block.attention.log_temperature) is not None]
    return list(logit_scale(torch.stack(logs))) if logs else [None] * len(blocks)
