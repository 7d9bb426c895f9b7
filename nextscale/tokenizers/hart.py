"""HART's tokenizer: VAR's, except that the last stage's codes are completed by a continuous residual."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..canvas import HybridCanvas
from ..stage import Schedule
from .var import VarTokenizer, VarTokenizerConfig


@dataclass(frozen=True)
class HartTokenizerConfig(VarTokenizerConfig):
    """The same fields as VAR's; the type decides which tokenizer to build."""


class HartTokenizer(VarTokenizer):
    def __init__(self, config: HartTokenizerConfig) -> None:
        super().__init__(config)
        self.layout = replace(self.layout, prefix="vae.", ignored=(r"vae\.quantize\.ema_vocab_hit_SV", r"disc\..*"))

    def canvas(self, schedule: Schedule, batch: int) -> HybridCanvas:
        return HybridCanvas(self, schedule, batch)
