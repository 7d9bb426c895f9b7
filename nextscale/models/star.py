"""STAR: cross-attention to the text, rotary positions, and an optional refiner that samples late stages in several rounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..checkpoints import Layout, Rule
from ..errors import PromptError, SettingError
from ..sampling import Refinement, Sampling, choose, pass_noise, sample_codes
from ..stage import Schedule, Stage, Tokens
from ..text.features import TextFeatures
from .attention import TextAttentionConfig
from .base import HeadInputs, ModelRequest, NextScaleModel, PromptInputs, logit_scales
from .blocks import BlockConfig, build_blocks, plain_norm
from .context import Conditioning, ForwardContext
from .refiner import Refiner
from .rope import InterleavedRope, star_rotations
from .text_context import TextInputs, check_channels
from .weight_names import SHARED_RULES, block_rules


@dataclass(frozen=True)
class StarConfig:
    depth: int
    dim: int
    heads: int
    sides: tuple[int, ...]
    codes: int = 4096
    latent_channels: int = 32
    text_channels: int = 1024
    cosine: bool = True
    theta: float = 10000.0
    span: float = 64.0  # RoPE coordinate of the last row and column at every stage
    norm_before_head: bool = True
    refiner_blocks: int = 0
    as_released: bool = False  # all rows use the first row's text attention, as in the reference implementation

    @property
    def block(self) -> BlockConfig:
        text = TextAttentionConfig(self.text_channels, cosine=self.cosine, sharpness=0.25)
        return BlockConfig(self.dim, self.heads, 4 * self.dim, cosine=self.cosine, text=text)


class Star(NextScaleModel):
    family = "star"
    layout = Layout(
        rules=(
            Rule(r"text_proj\.(.*)", (r"encoder_proj.\1",)),
            Rule(r"head\.(.*)", (r"head_logits.\1",)),
            Rule(r"refiner\.text_proj\.(.*)", (r"encoder_proj2.\1",)),
            Rule(r"refiner\.pos_start", ("pos_start_last",), shape=lambda s: (1, 1, *s)),
            Rule(r"refiner\.level_embed\.weight", ("lvl_embed_2.weight",)),
            Rule(r"refiner\.word_embed\.(.*)", (r"word_embed_head.\1",)),
            Rule(r"refiner\.merge\.(.*)", (r"head_proj.\1",)),
            Rule(r"refiner\.head\.(.*)", (r"head_logits2.\1",)),
            Rule(r"blocks\.(\d+)\.text_attention\.q\.bias", (r"blocks.\1.cross_attn.q_bias",)),
            *SHARED_RULES,
            *block_rules(lambda i: f"blocks.{i}", text="cross_attn"),
            *block_rules(lambda i: f"feat_extract_blocks.{i}", blocks="refiner.blocks"),
        ),
        wrappers=(("trainer", "var_wo_ddp"),),
        ignored=(r"class_emb\.weight",),
        zero_if_absent=(r".*\.zero_k_bias",),
    )

    def __init__(self, config: StarConfig) -> None:
        super().__init__()
        self.config = config
        self.block_config, self.levels = config.block, len(config.sides)
        self.text_proj = nn.Linear(config.text_channels, config.dim)
        self.pos_start = nn.Parameter(torch.empty(config.dim))
        self.level_embed = nn.Embedding(len(config.sides), config.dim)
        self.word_embed = nn.Linear(config.latent_channels, config.dim)
        self.blocks = build_blocks(config.depth, config.block)
        self.head_norm = plain_norm(config.dim) if config.norm_before_head else nn.Identity()
        self.head = nn.Linear(config.dim, config.codes)
        self.refiner = self._refiner() if config.refiner_blocks else None

    def _refiner(self) -> Refiner:
        config, blocks = self.config, replace(self.config.block, text=None)
        return Refiner(blocks, config.refiner_blocks, len(config.sides), config.latent_channels, config.text_channels, config.codes)

    def prompt_inputs(self, prompts: TextFeatures, guided: bool, schedule: Schedule, negative: TextFeatures | None = None) -> PromptInputs:
        """Returns rows of the prompts, then, with CFG, of the negative prompts (empty prompts by default)."""
        self.check_schedule(schedule)
        if guided and negative is None:
            raise PromptError("STAR needs negative prompts for CFG. Pass the features of an empty prompt, or load a text encoder.")
        both = [self._checked(features) for features in (prompts, negative) if features is not None]
        pooled = torch.cat([features.pooled for features in both if features.pooled is not None]).to(self.dtype)
        rows = [row for features in both for row in features.rows][: 1 if self.rows_share_text else None]
        return PromptInputs((pooled,), TextInputs(torch.cat(rows).to(self.dtype), tuple(row.shape[0] for row in rows)))

    @property
    def rows_share_text(self) -> bool:
        return self.config.as_released

    def schedule_tables(self, schedule: Schedule) -> InterleavedRope:
        head_dim, span, theta = self.block_config.head_dim, self.config.span, self.config.theta
        return InterleavedRope(star_rotations(stage, head_dim, span, theta, self.device) for stage in schedule)

    def condition_from(self, inputs: PromptInputs, tables: InterleavedRope) -> Conditioning:
        (pooled,) = inputs.rows
        assert inputs.text is not None
        return Conditioning(
            start=self.text_proj(pooled)[:, None] + self.pos_start,
            logit_scales=logit_scales(self.stack),
            text=inputs.text.context().project(self.stack, inputs.text.rows),
            rope=tables,
            refiner=None if self.refiner is None else self.refiner.condition(pooled, tables),
        )

    def check_sampling(self, sampling: Sampling) -> None:
        if self.refiner is None:
            super().check_sampling(sampling)
        if sampling.refine is not None and sampling.smooth:
            raise SettingError("smooth and refine cannot be combined. Pass smooth=False or refine=None.")

    def _checked(self, text: TextFeatures) -> TextFeatures:
        check_channels(text, self.config.text_channels)
        if text.pooled is None or text.pooled.shape[1] != self.config.text_channels:
            found = "none" if text.pooled is None else f"{text.pooled.shape[1]} channels"
            raise PromptError(
                f"pooled must be a vector of {self.config.text_channels} channels for STAR; got {found}. "
                "Pass TextFeatures(rows, pooled=...), as ClipEncoder does."
            )
        return text.to(self.device).unpadded()

    def positions(self, stage: Stage) -> Tensor:
        return self.level_embed.weight[stage.index]

    def choose(self, hidden: HeadInputs, logits: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        request, sampling = hidden.request, hidden.request.sampling
        if not self._refines(tokens.stage, sampling):
            if sampling.smooth:  # STAR averages all codes, not only the top ones
                sampling = replace(sampling, top_k=0, top_p=0.0)
            return choose(logits, tokens, len(request.schedule), sampling, request.rng)
        assert self.refiner is not None
        ids = self.refiner.sample(hidden, tokens.move(logits, hidden.tokens))
        propagated = not hidden.tokens.whole and not tokens.aligned(hidden.tokens)  # a method provided logits of tokens that did not run
        if propagated or (hidden.ctx.data_dependent and request.method_rng is not request.rng):
            # Drawn even if no token is missing at this stage, so that an image uses the same random numbers in every batch and bucket.
            sampled, _ = sample_codes(logits, tokens, sampling, request.method_rng)
        if hidden.tokens.whole:
            ids = hidden.tokens.move(ids, tokens)
        elif propagated:  # tokens that did not run keep the codes sampled from their logits
            settled = hidden.tokens.move(ids + 1, tokens)
            ids = torch.where(settled > 0, settled - 1, sampled)
        return ids, ids

    def pass_noise(self, stage: Stage, ctx: ForwardContext, request: ModelRequest) -> None:
        refine, cells = request.sampling.refine, (request.batch, stage.cells)
        if refine is None or not self._refines(stage, request.sampling):
            return super().pass_noise(stage, ctx, request)
        for i in range(refine.at(stage)[0]):
            pass_noise((*cells, *self.logit_shape), request.sampling, request.rng, self.device)
            if i < refine.random:
                request.rng.uniform(cells, self.device)
        if ctx.data_dependent and request.method_rng is not request.rng:
            pass_noise((*cells, *self.logit_shape), request.sampling, request.method_rng, self.device)

    def _refines(self, stage: Stage, sampling: Sampling) -> bool:
        return self.refiner is not None and sampling.refine is not None and stage.index >= sampling.refine.first_stage

    def refinement_macs(self, refine: Refinement, stage: Stage, images: int, rows: int, num_tokens: int) -> int:
        if self.refiner is None or stage.index < refine.first_stage:
            return 0
        rounds, drafted = refine.at(stage)
        return max(rounds - drafted, 0) * self.refiner.macs(images, rows, num_tokens)
