"""HART: text and image tokens form one sequence; a diffusion head adds the residual between latent and codes of the last stage."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..checkpoints import Layout, Rule
from ..errors import PromptError
from ..guidance import ResolvedGuidance
from ..schedules import HART_1024
from ..stage import Schedule, Stage
from ..text.features import TextFeatures
from .base import HeadInputs, NextScaleModel, PromptInputs, logit_scales
from .blocks import BlockConfig, build_blocks, rms_norm
from .context import Conditioning
from .macs import macs_per_token
from .residual_head import ResidualHead, SinusoidEmbedding
from .rope import GridPlaces, RotateHalfRope
from .text_context import check_channels
from .weight_names import SHARED_RULES, block_rules

# In the diffusion, and only there, the reference implementation treats a guidance strength of 1 (a CFG scale of 2) as "no guidance".
UNGUIDED = 1.0


@dataclass(frozen=True)
class HartConfig:
    depth: int = 24
    dim: int = 1536
    heads: int = 24
    sides: tuple[int, ...] = HART_1024
    codes: int = 4096
    latent_channels: int = 32
    text_channels: int = 1536
    text_tokens: int = 300  # per prompt, including padding
    mlp_ratio: float = 4.0
    cosine: bool = False
    text_norm: bool = True
    level_table: bool = False  # a learned embedding per stage instead of a network applied to the stage's index
    residual_dim: int = 1024
    residual_depth: int = 6
    residual_steps: int = 8

    @property
    def block(self) -> BlockConfig:
        hidden = (int(2 * self.dim * self.mlp_ratio / 3) + 255) // 256 * 256
        return BlockConfig(self.dim, self.heads, hidden, cosine=self.cosine, rms_norm=True, gated=True)


class Hart(NextScaleModel):
    family = "hart"
    float32 = ("text_norm.", "head_norm.", "head_ada.", "head.")
    adds_residual = True
    rotates_in_float32 = True
    layout = Layout(
        rules=(
            Rule(r"text_norm\.(.*)", (r"context_norm.\1",)),
            Rule(r"text_embed\.(.*)", (r"context_embed.\1",)),
            Rule(r"level_embed\.fc1\.(.*)", (r"lvl_embed.mlp.0.\1",)),
            Rule(r"level_embed\.fc2\.(.*)", (r"lvl_embed.mlp.2.\1",)),
            Rule(r"head_norm\.weight", ("head_nm.ln_wo_grad.weight",)),
            Rule(r"residual_norm\.weight", ("decoder_norm.weight",)),
            Rule(r"residual_head\.time_embed\.fc1\.(.*)", (r"diffloss.net.time_embed.mlp.0.\1",)),
            Rule(r"residual_head\.time_embed\.fc2\.(.*)", (r"diffloss.net.time_embed.mlp.2.\1",)),
            Rule(r"residual_head\.condition_embed\.(.*)", (r"diffloss.net.cond_embed.\1",)),
            Rule(r"residual_head\.input_proj\.(.*)", (r"diffloss.net.input_proj.\1",)),
            Rule(r"residual_head\.blocks\.(\d+)\.norm\.(.*)", (r"diffloss.net.res_blocks.\1.in_ln.\2",)),
            Rule(r"residual_head\.blocks\.(\d+)\.modulation\.(.*)", (r"diffloss.net.res_blocks.\1.adaLN_modulation.1.\2",)),
            Rule(r"residual_head\.blocks\.(\d+)\.fc1\.(.*)", (r"diffloss.net.res_blocks.\1.mlp.0.\2",)),
            Rule(r"residual_head\.blocks\.(\d+)\.fc2\.(.*)", (r"diffloss.net.res_blocks.\1.mlp.2.\2",)),
            Rule(r"residual_head\.final_modulation\.(.*)", (r"diffloss.net.final_layer.adaLN_modulation.1.\1",)),
            Rule(r"residual_head\.final\.(.*)", (r"diffloss.net.final_layer.linear.\1",)),
            *SHARED_RULES,
            *block_rules(lambda i: f"blocks.{i}", qkv="qkv_proj"),
        ),
        ignored=(r"lvl_1L", r"attn_bias_for_masking"),
        zero_if_absent=(r".*\.zero_k_bias",),
        preferred_file="ema_model.bin",
    )

    def __init__(self, config: HartConfig) -> None:
        super().__init__()
        self.config = config
        self.block_config = config.block
        self.levels = len(config.sides) if config.level_table else None
        self.text_prefix = config.text_tokens - 1
        self.text_norm = rms_norm(config.text_channels) if config.text_norm else nn.Identity()
        self.text_embed = nn.Linear(config.text_channels, config.dim)
        self.level_embed = nn.Embedding(len(config.sides), config.dim) if config.level_table else SinusoidEmbedding(config.dim)
        self.word_embed = nn.Linear(config.latent_channels, config.dim)
        self.blocks = build_blocks(config.depth, config.block)
        self.head_norm = rms_norm(config.dim)
        self.head_ada = nn.Linear(config.dim, 2 * config.dim)
        self.head = nn.Linear(config.dim, config.codes)
        self.residual_norm = rms_norm(config.dim)
        self.residual_head = ResidualHead(
            config.latent_channels, config.dim, config.residual_dim, config.residual_depth, config.residual_steps
        )

    def prompt_inputs(self, prompts: TextFeatures, guided: bool, schedule: Schedule, negative: TextFeatures | None = None) -> PromptInputs:
        """Returns rows of the prompts, then, with CFG, of the negative prompts or zeros at position 0. Padding is not masked."""
        self.check_schedule(schedule)
        features, positions = self._read(prompts)
        if guided:
            rest, rest_positions = self._read(negative) if negative is not None else (features * 0, positions * 0)
            features, positions = torch.cat([features, rest]), torch.cat([positions, rest_positions])
        return PromptInputs((features, positions))

    def schedule_tables(self, schedule: Schedule) -> GridPlaces:
        return GridPlaces.of(schedule, self.device)

    def condition_from(self, inputs: PromptInputs, tables: GridPlaces) -> Conditioning:
        features, positions = inputs.rows
        text = self.text_embed(self.text_norm(features).to(self.dtype))  # [R, T, C]
        return Conditioning(
            start=text[:, -1:],
            prefix=text[:, :-1],
            logit_scales=logit_scales(self.stack),
            head=self.head_modulation(text.amax(dim=1)),
            rope=RotateHalfRope.over_text_and_grid(tables, self.block_config.head_dim, positions),
        )

    def _read(self, prompts: TextFeatures) -> tuple[Tensor, Tensor]:
        """Returns features [B, T, channels] and positions [B, T]: the number of real tokens up to and including each, minus one."""
        check_channels(prompts, self.config.text_channels)
        expected = self.config.text_tokens
        if set(prompts.lengths) != {expected}:
            found = " and ".join(map(str, sorted(set(prompts.lengths))))
            raise PromptError(
                f"text features must have {expected} tokens for this model, including padding; got {found}. "
                "Pass TextFeatures with a mask, as QwenEncoder does."
            )
        prompts = prompts.to(self.device)
        features = torch.stack(prompts.rows).float()
        mask = torch.ones(features.shape[:2], device=self.device) if prompts.mask is None else prompts.mask
        return features, (mask.long().cumsum(dim=1) - 1).float()

    def positions(self, stage: Stage) -> Tensor:
        return self.level_embed(torch.full((1,), stage.index, device=self.device))

    def residual(self, hidden: HeadInputs, ids: Tensor) -> Tensor:
        codes = self.word_embed(hidden.canvas.vectors(hidden.tokens.pack(ids)).to(self.dtype))
        condition = self.residual_norm(hidden.x + codes.repeat(hidden.cfg_branches, 1, 1))
        request = hidden.request
        scale = self.residual_scale(request.guidance, hidden.tokens.stage)
        return self.residual_head.sample(condition, hidden.tokens, scale, request.rng, request.batch)

    def residual_scale(self, guidance: ResolvedGuidance, stage: Stage) -> float:
        return 1.0 if guidance.excess[stage.index] == UNGUIDED else guidance.output_scale(stage)

    def embedding_macs(self, stage: Stage, images: int) -> int:
        levels = 2 if stage.index == 0 and self.text_prefix else 1  # text and image tokens embed the level separately
        return super().embedding_macs(stage, images) + levels * macs_per_token(self.level_embed)

    def residual_macs(self, images: int, rows: int, num_tokens: int) -> int:
        return images * num_tokens * macs_per_token(self.word_embed) + self.residual_head.macs(rows, num_tokens)
