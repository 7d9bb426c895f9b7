"""Base class of the backbones: the interface that the stage loop uses."""

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
    """Model inputs derived from the prompts, on the model's device: the only part of the condition that differs between requests."""

    rows: tuple[Tensor, ...] = ()  # [R, ...] each: conditional rows, then, with CFG, unconditional or negative ones
    text: TextInputs | None = None


class ModelRequest(Protocol):
    """The attributes of a request that models read when they choose codes."""

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
    """Last hidden states of a stage, with the inputs that the head and the sampler need."""

    x: Tensor  # [R, N, C], or packed
    tokens: Tokens  # of one CFG branch
    canvas: Canvas
    ctx: ForwardContext
    request: ModelRequest
    finite: list[Tensor] = field(default_factory=list)  # [] bool each: results computed after the logits are finite

    @property
    def cfg_branches(self) -> int:
        """Returns the number of CFG branches that run."""
        return self.x.shape[0] // self.tokens.branch_size(self.request.batch)


KvDtype = Literal["int8"]


class NextScaleModel(nn.Module):
    """Base class of the backbones: embeds canvas cells as tokens, runs blocks, and computes logits and codes."""

    family: ClassVar[str]  # "var", "flexvar", "infinity", "hart" or "star"
    layout: Layout
    float32: ClassVar[tuple[str, ...]] = ()  # prefixes of parameters that stay in float32
    adds_residual: ClassVar[bool] = False  # `residual` adds to the codes of the last stage
    replaces_codes: ClassVar[bool] = False  # a stage replaces the output of earlier stages instead of adding to it
    rotates_in_float32: ClassVar[bool] = False  # RoPE runs in float32 in torch, not in a kernel
    rank_table: Any = None  # RankTable (StageVAR) stored next to the weights
    quantize: Quantize | None = None  # weight format of the blocks; None: the model's dtype
    fingerprint: str | None = None  # of the weights before quantization
    kv_dtype: KvDtype | None = None  # storage format of the KV cache; None: the model's dtype
    levels: int | None = None  # maximum number of stages; None: unlimited
    text_prefix: int = 0  # text tokens that precede the first stage's cell in the sequence
    block_config: BlockConfig
    word_embed: nn.Linear
    blocks: nn.ModuleList
    head_norm: nn.Module
    head_ada: nn.Linear  # only if the head is modulated
    head: nn.Linear

    @property
    def stack(self) -> tuple[Block, ...]:
        """Returns the blocks in order."""
        return tuple(self.blocks)  # type: ignore[arg-type]

    @property
    def rows_share_text(self) -> bool:
        """Returns True if all rows use the first row's text attention (STAR as released)."""
        return False

    @property
    def dtype(self) -> torch.dtype:
        return self.word_embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.word_embed.weight.device

    @property
    def logit_shape(self) -> tuple[int, ...]:
        """Returns the shape of one token's logits."""
        return (self.head.out_features,)

    def cache_spec(self, schedule: Schedule, rows: int) -> CacheSpec:
        config, sizes = self.block_config, CacheSpec if self.kv_dtype is None else QuantizedSpec
        return sizes(len(self.blocks), rows, config.heads, config.head_dim, schedule, self.dtype, self.device, self.text_prefix)

    def check_sampling(self, sampling: Sampling) -> None:
        """Raises SettingError if the model does not support this sampling."""
        if sampling.refine is not None:
            raise SettingError(f"refine must be None for {type(self).__name__}, which has no refiner; got {sampling.refine}")

    def check_schedule(self, schedule: Schedule) -> None:
        """Raises SizeError if the model cannot generate this schedule."""
        if self.levels is not None and len(schedule) > self.levels:
            raise SizeError(f"schedule must have at most {self.levels} stages for this model; got {len(schedule)}: {schedule}")

    def condition(self, prompts: Any, guided: bool, schedule: Schedule, negative: Any = None) -> Conditioning:
        """Returns the condition: rows of the prompts, then, with CFG, rows of the negative or empty prompts."""
        return self.condition_from(self.prompt_inputs(prompts, guided, schedule, negative), self.schedule_tables(schedule))

    def prompt_inputs(self, prompts: Any, guided: bool, schedule: Schedule, negative: Any = None) -> PromptInputs:
        """Returns the part of the condition that depends on the prompts; raises if the model cannot use them."""
        raise NotImplementedError

    def schedule_tables(self, schedule: Schedule) -> Any:
        """Returns the part of the condition that depends on the schedule only."""
        return None

    def condition_from(self, inputs: PromptInputs, tables: Any) -> Conditioning:
        """Computes the condition from its two parts. Runs on the device without host reads, so it can be captured."""
        raise NotImplementedError

    def embed(self, seen: Tensor | None, stage: Stage, ctx: ForwardContext) -> Tensor:
        """Embeds the canvas view `seen` of a stage as tokens [R, cells, C]; both CFG branches embed the same canvas."""
        x = ctx.cond.start if seen is None else self.word_embed(seen.to(self.dtype))
        x = x + self.positions(stage)
        rows = ctx.cond.start.shape[0]
        return x if x.shape[0] == rows else x.repeat(rows // x.shape[0], 1, 1)

    def with_text(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> tuple[Tensor, Tokens]:
        """Prepends the text tokens, if the model has any, to the first stage."""
        if tokens.stage.index > 0 or ctx.cond.prefix is None:
            return x, tokens
        text = ctx.cond.prefix + self.positions(tokens.stage)
        tokens = tokens.with_prefix(text.shape[1])
        return tokens.prepend(text, x), tokens

    def positions(self, stage: Stage) -> Tensor:
        """Returns position and level embeddings of the cells of `stage`, [cells or 1, C]."""
        raise NotImplementedError

    def logits(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        """Converts hidden states [R, N, C] to float32 logits [R, N, V]; packed inputs give packed logits."""
        return self.head(self.head_input(x, tokens, ctx)).float()

    def head_input(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        """Normalizes and modulates hidden states, in the head's dtype."""
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
        """Samples codes from guided logits [B, N, V]; returns code numbers and the values added to the canvas."""
        request = hidden.request
        return choose(logits, tokens, len(request.schedule), request.sampling, request.rng)

    def pass_noise(self, stage: Stage, ctx: ForwardContext, request: ModelRequest) -> None:
        """Draws and discards the random numbers that `choose` would use for all cells of a stage."""
        pass_noise((request.batch, stage.cells, *self.logit_shape), request.sampling, request.rng, self.device)

    def residual_scale(self, guidance: ResolvedGuidance, stage: Stage) -> float:
        """Returns the CFG scale of the residual; 1 uses the conditional rows only."""
        return 1.0

    def residual(self, hidden: HeadInputs, ids: Tensor) -> Tensor:
        """Returns the residual [B, N, Z] that the last stage adds to its codes `ids` [B, N]."""
        raise NotImplementedError

    def modulation_tables(self) -> Tensor:
        """Returns the offsets that each block adds to the shared modulation, [L, 1, 6, C]."""
        return torch.stack([block.modulation_table for block in self.stack])[:, None]

    def head_modulation(self, condition: Tensor) -> HeadModulation:
        """Computes the head's modulation from the condition [R, C]."""
        scale, shift = self.head_ada(F.silu(condition.to(self.head_ada.weight.dtype)))[:, None].chunk(2, dim=-1)
        return HeadModulation(1 + scale, shift)

    # --- MACs, for planning

    def embedding_macs(self, stage: Stage, images: int) -> int:
        """Returns the MACs of `embed` for all cells of a stage; CFG branches share them. The first stage has no embedding to compute."""
        return 0 if stage.index == 0 else images * stage.cells * macs_per_token(self.word_embed)

    def logits_macs(self, rows: int, num_tokens: int) -> int:
        """Returns the MACs of `logits`."""
        return rows * num_tokens * macs_per_token(self.head)

    def residual_macs(self, images: int, rows: int, num_tokens: int) -> int:
        """Returns the MACs of `residual`; `rows` equals `images` if the residual is not guided."""
        return 0

    def refinement_macs(self, refine: Refinement, stage: Stage, images: int, rows: int, num_tokens: int) -> int:
        """Returns the MACs of `choose` with a refiner."""
        return 0


def logit_scales(blocks: tuple[Block, ...]) -> list[Tensor | None]:
    """Returns the factor of each head's queries, [H, 1] per layer; None without cosine attention."""
    logs: list[Tensor] = [log for block in blocks if (log := block.attention.log_temperature) is not None]
    return list(logit_scale(torch.stack(logs))) if logs else [None] * len(blocks)
