"""FlexVAR's tokenizer: quantizes every stage separately with normalized codes."""

from dataclasses import dataclass

from ..canvas import ReplacedCanvas
from ..checkpoints import Layout, Rule
from ..stage import Schedule
from .autoencoder import AutoencoderConfig
from .var import CodebookTokenizer
from .weight_names import by_execution


@dataclass(frozen=True)
class FlexVarTokenizerConfig:
    codes: int = 8912  # sic: the published number
    code_channels: int = 32
    latent_channels: int = 256
    channels: int = 128
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    blocks_per_level: int = 2

    @property
    def autoencoder(self) -> AutoencoderConfig:
        return AutoencoderConfig(self.channels, self.multipliers, self.latent_channels, self.blocks_per_level)


class FlexVarTokenizer(CodebookTokenizer):
    float32 = ("codebook",)
    accumulates = False
    unit_codes = True

    def __init__(self, config: FlexVarTokenizerConfig) -> None:
        super().__init__(config, config.latent_channels, config.code_channels, 1)
        self.layout = Layout(
            rules=(*by_execution(), Rule(r"codebook", ("quantize.embedding.weight",))),
            wrappers=(("model",),),
            ignored=(r"quantize\.codebook_used",),
        )

    def canvas(self, schedule: Schedule, batch: int) -> ReplacedCanvas:
        return ReplacedCanvas(self, schedule, batch)
