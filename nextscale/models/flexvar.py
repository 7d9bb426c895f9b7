"""FlexVAR: class-conditional, with one position table that is resized to any stage, so that any schedule works."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor, nn

from ..checkpoints import Layout, Rule
from ..stage import Stage, resize_area
from .var import ClassConditioned, ClassConfig
from .weight_names import CLASS_RULES


@dataclass(frozen=True)
class FlexVarConfig(ClassConfig):
    _: KW_ONLY
    codes: int = 8912  # sic: the published number
    table: tuple[int, int] = (32, 32)


class FlexVar(ClassConditioned):
    family = "flexvar"
    replaces_codes = True
    layout = Layout(
        rules=(Rule(r"pos_table", ("pos_1LC",), shape=lambda s: (1, *s)), *CLASS_RULES),
        wrappers=(("trainer", "var_wo_ddp"),),
        ignored=(r"attn_bias_for_masking",),
        zero_if_absent=(r".*\.zero_k_bias",),
    )

    def __init__(self, config: FlexVarConfig) -> None:
        super().__init__(config)
        self.pos_table = nn.Parameter(torch.empty(config.dim, *config.table))

    def positions(self, stage: Stage) -> Tensor:
        return resize_area(self.pos_table[None], stage.size)[0].flatten(1).T
