"""FlexVAR: class-conditional, one position table resized to any stage, so that any schedule works."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints import Layout, Rule
from ..stage import Stage
from .blocks import BlockConfig
from .var import CLASS_RULES, ClassConditioned


@dataclass(frozen=True)
class FlexVarConfig:
    depth: int
    width: int
    heads: int
    cosine: bool = True
    classes: int = 1000
    codes: int = 8912
    latent_channels: int = 32
    mlp_ratio: float = 4.0
    table: tuple[int, int] = (32, 32)

    @property
    def block(self) -> BlockConfig:
        return BlockConfig(self.width, self.heads, round(self.width * self.mlp_ratio), self.cosine)


class FlexVar(ClassConditioned):
    layout = Layout(
        rules=(Rule(r"pos_table", ("pos_1LC",), shape=lambda s: (1, *s)), *CLASS_RULES),
        wrappers=(("trainer", "var_wo_ddp"),),
        ignored=(r"attn_bias_for_masking",),
        zero_if_absent=(r".*\.zero_k_bias",),
    )

    def __init__(self, config: FlexVarConfig) -> None:
        super().__init__(config)
        self.pos_table = nn.Parameter(torch.empty(config.width, *config.table))

    def positions(self, stage: Stage) -> Tensor:
        return F.interpolate(self.pos_table[None], size=stage.size, mode="area")[0].flatten(1).T
