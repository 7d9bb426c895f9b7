"""VAR: class-conditional, with learned positions per stage."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints import Layout, Rule
from ..errors import SizeError
from ..stage import Schedule, Stage
from ..text.prompts import Labels
from .base import NextScaleModel, PromptInputs, logit_scales
from .blocks import BlockConfig, build_blocks, plain_norm
from .context import Conditioning
from .modulation import Modulation
from .weight_names import CLASS_RULES


@dataclass(frozen=True)
class ClassConfig:
    """Configuration shared by VAR and FlexVAR."""

    depth: int
    dim: int
    heads: int
    _: KW_ONLY
    cosine: bool = True
    classes: int = 1000
    codes: int = 4096
    latent_channels: int = 32
    mlp_ratio: float = 4.0

    @property
    def block(self) -> BlockConfig:
        return BlockConfig(self.dim, self.heads, round(self.dim * self.mlp_ratio), cosine=self.cosine, modulation="own")


@dataclass(frozen=True)
class VarConfig(ClassConfig):
    sides: tuple[int, ...]
    shared_modulation: bool = False

    @property
    def block(self) -> BlockConfig:
        return replace(super().block, modulation="shared" if self.shared_modulation else "own")


class ClassConditioned(NextScaleModel):
    """Base class of VAR and FlexVAR: the class embedding is both the first token and the condition of all modulations."""

    def __init__(self, config: ClassConfig) -> None:
        super().__init__()
        self.config = config
        self.block_config = config.block
        self.class_embed = nn.Embedding(config.classes + 1, config.dim)  # the last row means "no class"
        self.pos_start = nn.Parameter(torch.empty(config.dim))
        self.word_embed = nn.Linear(config.latent_channels, config.dim)
        self.blocks = build_blocks(config.depth, config.block)
        self.head_norm = plain_norm(config.dim)
        self.head_ada = nn.Linear(config.dim, 2 * config.dim)
        self.head = nn.Linear(config.dim, config.codes)

    def prompt_inputs(self, prompts: Labels, guided: bool, schedule: Schedule, negative: Labels | None = None) -> PromptInputs:
        self.check_schedule(schedule)
        labels = prompts.numbers.to(self.device)
        if guided:
            against = torch.full_like(labels, self.config.classes) if negative is None else negative.numbers.to(self.device)
            labels = torch.cat([labels, against])
        return PromptInputs((labels,))

    def condition_from(self, inputs: PromptInputs, tables: None) -> Conditioning:
        (labels,) = inputs.rows
        condition = self.class_embed(labels)
        activated = F.silu(condition)
        return Conditioning(
            start=condition[:, None] + self.pos_start,
            logit_scales=logit_scales(self.stack),
            modulation=self._modulations(activated),
            head=self.head_modulation(condition),
        )

    def _modulations(self, activated: Tensor) -> list[Modulation]:
        six = torch.stack([block.modulation(activated) for block in self.stack]).unflatten(-1, (6, -1))
        return Modulation.of_layers(six, self.dtype)


class Var(ClassConditioned):
    family = "var"
    layout = Layout(
        rules=(
            Rule(r"pos_embed", ("pos_1LC",), shape=lambda s: (1, *s)),
            *CLASS_RULES,
        ),
        ignored=(r"lvl_1L", r"attn_bias_for_masking"),
        zero_if_absent=(r".*\.zero_k_bias",),
    )

    def __init__(self, config: VarConfig) -> None:
        super().__init__(config)
        self.shares_modulation = config.shared_modulation
        self.schedule = Schedule(config.sides)
        self.level_embed = nn.Embedding(len(config.sides), config.dim)
        self.pos_embed = nn.Parameter(torch.empty(self.schedule.tokens, config.dim))
        if config.shared_modulation:
            self.shared_modulation = nn.Linear(config.dim, 6 * config.dim)

    def check_schedule(self, schedule: Schedule) -> None:
        if schedule != self.schedule:
            raise SizeError(f"schedule must be {self.schedule} for VAR, whose positions are learned per stage; got {schedule}.")

    def positions(self, stage: Stage) -> Tensor:
        return self.level_embed.weight[stage.index] + self.pos_embed[stage.start : stage.start + stage.cells]

    def _modulations(self, activated: Tensor) -> list[Modulation]:
        if not self.shares_modulation:
            return super()._modulations(activated)
        shared = self.shared_modulation(activated).unflatten(-1, (6, -1))
        return Modulation.of_layers(shared + self.modulation_tables(), self.dtype)
