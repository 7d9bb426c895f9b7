"""Infinity: text-conditional; predicts the bits of a code instead of its index."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cache.attention import attend
from ..checkpoints import Layout, Rule
from ..errors import PromptError
from ..stage import Schedule, Stage, Tokens
from ..text.features import TextFeatures
from .attention import TextAttentionConfig
from .base import NextScaleModel, PromptInputs, logit_scales
from .blocks import Block, BlockConfig, plain_norm, rms_norm
from .context import Conditioning, ForwardContext
from .modulation import Modulation
from .rope import InterleavedRope, RopeMode, infinity_rotations
from .text_context import TextContext, TextInputs, check_channels
from .weight_names import SHARED_RULES, block_rules


@dataclass(frozen=True)
class InfinityConfig:
    depth: int
    dim: int
    heads: int
    chunks: int  # groups of blocks in published files
    bits_per_token: int = 32
    text_channels: int = 2048
    longest_text: int = 512
    levels: int = 15
    rope: RopeMode = "normalized"
    level_every_chunk: bool = False

    @property
    def block(self) -> BlockConfig:
        # Rounded half to even, like the published sizes: 32.5 * 256 gives 8192. For the smallest models this is 0, and dim is used.
        hidden = round(4 * self.dim / 256) * 256 or self.dim
        text = TextAttentionConfig(self.dim, learned_norm=True)
        return BlockConfig(self.dim, self.heads, hidden, modulation="shared", text=text)

    @property
    def pool_heads(self) -> int:
        return self.text_channels // (128 if self.dim <= 4096 else 64)


class TextPool(nn.Module):
    """Attention pooling of a prompt to one vector, with a learned query per head."""

    def __init__(self, text_channels: int, dim: int, heads: int) -> None:
        super().__init__()
        self.scale = 1 / math.sqrt(dim // heads)
        self.query = nn.Parameter(torch.empty(heads, dim // heads))
        self.kv = nn.Linear(text_channels, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, text: Tensor, context: TextContext) -> Tensor:
        """Pools text rows [rows, Ct] of all prompts to [R, C]."""
        keys, values = context.pad(self.kv(text).unflatten(-1, (2, *self.query.shape))).unbind(2)
        query = self.query.expand(keys.shape[0], 1, -1, -1)
        return self.proj(attend(query, keys, values, context.mask, self.scale).squeeze(1))


class ChunkStart(Block):
    """A block that first adds the level embedding again. This is a training option that no released model uses."""

    changes_input = True

    def __init__(self, layer: int, config: BlockConfig, level_embed: nn.Embedding) -> None:
        super().__init__(layer, config)
        self._level_embed = [level_embed]  # in a list, so that it is not registered: the model owns the parameter

    def forward(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        return super().forward(x + self._level_embed[0].weight[tokens.stage.index], tokens, ctx)


class Infinity(NextScaleModel):
    family = "infinity"
    float32 = ("text_norm.", "shared_modulation.", "head_ada.", "head.")

    def __init__(self, config: InfinityConfig) -> None:
        super().__init__()
        self.config = config
        self.block_config, self.levels = config.block, config.levels
        self.no_text = nn.Parameter(torch.empty(config.longest_text, config.text_channels))  # features of an empty prompt
        self.text_norm = rms_norm(config.text_channels)
        self.text_pool = TextPool(config.text_channels, config.dim, config.pool_heads)
        self.text_proj = nn.Sequential(
            nn.Linear(config.text_channels, config.dim), nn.GELU(approximate="tanh"), nn.Linear(config.dim, config.dim)
        )
        self.pos_start = nn.Parameter(torch.empty(config.dim))
        self.level_embed = nn.Embedding(config.levels, config.dim)
        self.word_embed = nn.Linear(config.bits_per_token, config.dim)
        self.shared_modulation = nn.Linear(config.dim, 6 * config.dim)
        self.blocks = nn.ModuleList(self._block(layer) for layer in range(config.depth))
        self.head_norm = plain_norm(config.dim)
        self.head_ada = nn.Linear(config.dim, 2 * config.dim)
        self.head = nn.Linear(config.dim, 2 * config.bits_per_token)
        self.layout = self._published_names(config.depth // config.chunks)

    def _block(self, layer: int) -> Block:
        starts_chunk = layer > 0 and layer % (self.config.depth // self.config.chunks) == 0
        if self.config.level_every_chunk and starts_chunk:
            return ChunkStart(layer, self.config.block, self.level_embed)
        return Block(layer, self.config.block)

    def _published_names(self, per_chunk: int) -> Layout:
        return Layout(
            rules=(
                Rule(r"no_text", ("cfg_uncond",)),
                Rule(r"text_pool\.query", ("text_proj_for_sos.ca.mat_q",), shape=lambda s: (1, *s)),
                Rule(r"text_pool\.kv\.weight", ("text_proj_for_sos.ca.mat_kv.weight",)),
                Rule(r"text_pool\.kv\.bias", ("text_proj_for_sos.ca.zero_k_bias", "text_proj_for_sos.ca.v_bias")),
                Rule(r"text_pool\.(.*)", (r"text_proj_for_sos.ca.\1",)),
                Rule(r"text_proj\.(.*)", (r"text_proj_for_ca.\1",)),
                *SHARED_RULES,
                *block_rules(lambda i: f"block_chunks.{i // per_chunk}.module.{i % per_chunk}", "sa"),
            ),
            wrappers=(("trainer", "gpt_fsdp"),),
            ignored=(r"lvl_1L", r"attn_bias_for_masking", r"Infinity_visible_kvlen", r"Infinity_invisible_qlen"),
            zero_if_absent=(r".*\.zero_k_bias",),
            cut_rows=(r"cfg_uncond",),
        )

    def prompt_inputs(self, prompts: TextFeatures, guided: bool, schedule: Schedule, negative: TextFeatures | None = None) -> PromptInputs:
        """Returns rows of the prompts, then, with CFG, of the negative prompts or of learned empty prompts of equal length."""
        self.check_schedule(schedule)
        prompts = self._checked(prompts)
        rows, lengths = prompts.compact()
        if guided:
            rest, rest_lengths = self._unconditional(prompts, negative)
            rows, lengths = torch.cat([rows, rest.to(rows.dtype)]), lengths + rest_lengths
        return PromptInputs(text=TextInputs(rows.float(), lengths))

    def schedule_tables(self, schedule: Schedule) -> InterleavedRope:
        return InterleavedRope(self.rotations(schedule))

    def condition_from(self, inputs: PromptInputs, tables: InterleavedRope) -> Conditioning:
        assert inputs.text is not None
        conditioning = self.read(inputs.text.rows, inputs.text.context())
        conditioning.rope = tables
        return conditioning

    def read(self, rows: Tensor, context: TextContext) -> Conditioning:
        """Computes the condition, except RoPE, from the concatenated text rows [sum of lengths, Ct]."""
        text = self.text_norm(rows.float()).to(self.dtype)
        condition = self.text_pool(text, context)
        six = self.shared_modulation(F.silu(condition.float())).unflatten(-1, (6, -1)) + self.modulation_tables()
        return Conditioning(
            start=condition[:, None] + self.pos_start,
            logit_scales=logit_scales(self.stack),
            modulation=Modulation.of_layers(six, self.dtype),
            head=self.head_modulation(condition),
            text=context.project(self.stack, self.text_proj(text)),
        )

    def rotations(self, schedule: Schedule) -> list[Tensor]:
        """Returns the RoPE rotations of every stage, [cells, head_dim / 2] each."""
        head_dim = self.block_config.head_dim
        return [infinity_rotations(stage, schedule.extent, head_dim, self.config.rope, self.device) for stage in schedule]

    def _unconditional(self, prompts: TextFeatures, negative: TextFeatures | None) -> tuple[Tensor, tuple[int, ...]]:
        if negative is None:
            return torch.cat([self.no_text[:length] for length in prompts.lengths]).float(), prompts.lengths
        return self._checked(negative).compact()

    def _checked(self, features: TextFeatures) -> TextFeatures:
        check_channels(features, self.config.text_channels)
        features = features.to(self.device).unpadded()
        if features.longest > self.config.longest_text:
            raise PromptError(
                f"a prompt must have at most {self.config.longest_text} tokens for this model; got {features.longest}. Shorten the prompt."
            )
        return features

    def positions(self, stage: Stage) -> Tensor:
        return self.level_embed.weight[stage.index]

    @property
    def logit_shape(self) -> tuple[int, ...]:
        return self.head.out_features // 2, 2

    def logits(self, x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Tensor:
        """Returns logits of 0 and 1 for every bit, [R, N, bits, 2]."""
        return super().logits(x, tokens, ctx).unflatten(-1, (-1, 2))
