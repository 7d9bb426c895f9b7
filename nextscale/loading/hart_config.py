"""How a HART checkpoint is built: read from the config.json beside it and from its keys and shapes, which have to agree."""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import Checkpoint, Shape, open_checkpoint
from ..errors import CheckpointError
from ..models.blocks import NORM_EPS
from ..models.hart import Hart, HartConfig
from ..models.residual_head import TRAINED_STEPS
from ..tokenizers.hart import HartTokenizer, HartTokenizerConfig

CONFIG_NAME = "config.json"
LARGEST_CONFIG = 2**20  # bytes
# No model comes near these; they keep a hostile file from asking for a network that takes forever to build.
MOST_CHANNELS = 2**16
MOST_LAYERS = 2**10
MOST_LEVELS = 16  # of the autoencoder, each of which halves the image
LARGEST_MLP_RATIO = 2.0**10

SHOWN = reprlib.Repr()
SHOWN.maxlist = SHOWN.maxtuple = 20
SHOWN.maxstring = 60

UNRELEASED = {
    r"blocks\.\d+\.ada_lin\..*": "adaptive norms in every block",
    r"blocks\.\d+\.scale_shift_table": "adaptive norms that the blocks share",
    r"blocks\.\d+\.cross_attn\..*": "cross-attention",
    r"blocks\.\d+\.ffn\.fc[12]\..*": 'feed-forward layers of the type "gpt2"',
    r"blocks\.\d+\.attn\.mat_qkv\..*": 'attention of the type "gpt2"',
}


@dataclass(frozen=True)
class Setting:
    """One entry of config.json that says something about a field of our configuration."""

    key: str
    field: str
    read: Callable[[object], Any]  # raises ValueError, whose text tells what was expected
    write: Callable[[Any], Any] = lambda value: value  # back to what stands in config.json


@dataclass(frozen=True)
class Format:
    """What the config.json of one part says."""

    part: str
    settings: tuple[Setting, ...]
    fixed: Mapping[str, Any]  # entries with the only value that is implemented

    def dump(self, config: HartConfig | HartTokenizerConfig) -> str:
        own = {setting.key: setting.write(getattr(config, setting.field)) for setting in self.settings}
        return json.dumps(own | dict(self.fixed), indent=2)


def whole(most: int, least: int = 1) -> Callable[[object], int]:
    def read(value: object) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return value

    return read


def positive(most: float) -> Callable[[object], float]:
    def read(value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most:
            raise ValueError(f"a positive number up to {most:g}")
        return float(value)

    return read


def flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def negated(value: object) -> bool:
    return not flag(value)


def whole_numbers(value: object) -> tuple[int, ...]:
    """Empty for anything but a list of them."""
    if isinstance(value, list) and all(type(number) is int and 1 <= number <= MOST_LAYERS for number in value):
        return tuple(value)
    return ()


def growing_sides(value: object) -> tuple[int, ...]:
    sides = whole_numbers(value)
    if sides[:1] != (1,) or sides != tuple(sorted(set(sides))):
        raise ValueError(f"a list of growing whole numbers that starts with 1 and ends with {MOST_LAYERS} at most")
    return sides


def level_factors(value: object) -> tuple[int, ...]:
    factors = whole_numbers(value)
    if not 1 <= len(factors) <= MOST_LEVELS:
        raise ValueError(f"a list of 1 to {MOST_LEVELS} whole numbers from 1 to {MOST_LAYERS}")
    return factors


def step_count(value: object) -> int:
    """The authors' programs take the number as a text."""
    number = int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,4}", value) else value
    return whole(TRAINED_STEPS, least=2)(number)


MODEL = Format(
    "transformer",
    (
        Setting("depth", "depth", whole(MOST_LAYERS)),
        Setting("embed_dim", "dim", whole(MOST_CHANNELS)),
        Setting("num_heads", "heads", whole(MOST_CHANNELS)),
        Setting("patch_nums", "sides", growing_sides),
        Setting("context_dim", "text_channels", whole(MOST_CHANNELS)),
        Setting("context_token", "text_tokens", whole(MOST_CHANNELS)),
        Setting("mlp_ratio", "mlp_ratio", positive(LARGEST_MLP_RATIO)),
        Setting("attn_l2_norm", "cosine", flag),
        Setting("use_context_norm", "text_norm", flag),
        Setting("use_timestep_embed", "level_table", negated, negated),
        Setting("diff_width", "residual_dim", whole(MOST_CHANNELS)),
        Setting("diff_depth", "residual_depth", whole(MOST_LAYERS)),
        Setting("num_sampling_steps", "residual_steps", step_count),
    ),
    {
        "mlp_type": "llama",
        "attn_type": "llama",
        "disable_aln": True,
        "shared_aln": False,
        "use_cross_attn": False,
        "norm_eps": NORM_EPS,
    },
)

TOKENIZER = Format(
    "tokenizer",
    (
        Setting("vocab_size", "codes", whole(MOST_CHANNELS)),
        Setting("z_channels", "latent_channels", whole(MOST_CHANNELS)),
        Setting("ch", "channels", whole(MOST_CHANNELS)),
        Setting("ch_mult", "multipliers", level_factors),
        Setting("num_res_blocks", "blocks_per_level", whole(MOST_LAYERS)),
        Setting("share_quant_resi", "blends", whole(MOST_LAYERS)),
        Setting("quant_resi", "blend_share", positive(1)),
    ),
    {"quantizer_type": "var_hybrid", "using_znorm": False, "double_decoder": False},
)


def hart_model_config(preset: HartConfig, path: Path) -> HartConfig:
    """The configuration of the transformer at `path`; what neither its config.json nor its keys tell is taken from `preset`.

    `preset` itself for a file that is not HART's transformer: loading it tells what does not fit.
    """
    checkpoint = open_checkpoint(path, Hart.layout)
    if "context_embed.weight" not in checkpoint.shapes or not count(checkpoint.shapes, r"blocks\.(\d+)\."):
        return preset
    findings = Findings(checkpoint, MODEL)
    findings.refuse_unreleased()
    see_transformer(findings)
    see_stages(findings, findings.said.get("sides", preset.sides))
    config = replace(preset, **findings.settled)
    config = replace(config, heads=heads_of(config, preset, findings), mlp_ratio=mlp_ratio_of(config, findings))
    findings.raise_problems()
    return config


def see_transformer(findings: Findings) -> None:
    has = findings.shapes.keys()
    findings.see_count("depth", r"blocks\.(\d+)\.", "blocks")
    findings.see_size("dim", "word_embed.weight", 0)
    findings.see_size("latent_channels", "word_embed.weight", 1)
    findings.see_size("text_channels", "context_embed.weight", 1)
    findings.see_size("codes", "head.weight", 0)
    findings.see_presence("text_norm", "context_norm.weight")
    if "lvl_embed.weight" in has or "lvl_embed.mlp.0.weight" in has:
        findings.see_presence("level_table", "lvl_embed.weight")
    findings.see_presence("cosine", "blocks.0.attn.scale_mul_1H11")
    findings.see_size("heads", "blocks.0.attn.scale_mul_1H11", 1)
    findings.see_size("residual_dim", "diffloss.net.input_proj.weight", 0)
    findings.see_count("residual_depth", r"diffloss\.net\.res_blocks\.(\d+)\.", "blocks in diffloss.net")


def see_stages(findings: Findings, sides: tuple[int, ...]) -> None:
    stages = f"the sides {' '.join(map(str, sides))} of {findings.origin('sides')}"
    rows = findings.size("lvl_embed.weight", 0)
    if rows is not None and rows != len(sides):
        findings.problems.append(f"there is one level for each of {stages}, the weights have {findings.shown('lvl_embed.weight')}")
    positions = findings.size("lvl_1L", 1)
    if positions is None:
        return
    text = positions - sum(side * side for side in sides[1:])
    if text < 1:
        findings.problems.append(f"the weights have {findings.shown('lvl_1L')}, which leaves nothing for a text before {stages}")
    else:
        findings.see("text_tokens", text, f"{findings.shown('lvl_1L')}, which leaves {text} for the text before {stages}")


def heads_of(config: HartConfig, preset: HartConfig, findings: Findings) -> int:
    """Only some variants have a tensor that tells; without config.json heads are taken to be as wide as the preset's."""
    if "heads" in findings.settled:
        if config.dim % (4 * config.heads):  # two coordinates, two halves
            findings.problems.append(
                f"the width {config.dim} cannot be shared out over the {config.heads} heads of {findings.origin('heads')}: "
                "each takes a multiple of 4 channels"
            )
        return config.heads
    head_width = preset.dim // preset.heads
    if config.dim % head_width:
        findings.problems.append(
            f"nothing tells the number of heads (num_heads in {CONFIG_NAME}), "
            f"and the width {config.dim} is not a multiple of the usual {head_width}"
        )
    return max(config.dim // head_width, 1)


def mlp_ratio_of(config: HartConfig, findings: Findings) -> float:
    key = "blocks.0.ffn.gate_proj.weight"
    hidden = findings.size(key, 0)
    if hidden is None or config.block.hidden_dim == hidden:
        return config.mlp_ratio
    ratio = 1.5 * hidden / config.dim
    if "mlp_ratio" in findings.said or replace(config, mlp_ratio=ratio).block.hidden_dim != hidden:
        findings.problems.append(
            f"the mlp_ratio {config.mlp_ratio:g} of {findings.origin('mlp_ratio')} makes feed-forward layers of {config.block.hidden_dim} "
            f"channels, the weights have {findings.shown(key)}"
        )
    return ratio


def hart_tokenizer_config(preset: HartTokenizerConfig, path: Path) -> HartTokenizerConfig:
    """As `hart_model_config`, for the tokenizer."""
    with torch.device("meta"):
        layout = HartTokenizer(preset).layout
    checkpoint = open_checkpoint(path, layout)
    if "vae.quantize.embedding.weight" not in checkpoint.shapes:
        return preset
    findings = Findings(checkpoint, TOKENIZER)
    findings.see_size("codes", "vae.quantize.embedding.weight", 0)
    findings.see_size("latent_channels", "vae.quantize.embedding.weight", 1)
    findings.see_size("channels", "vae.encoder.conv_in.weight", 0)
    findings.see_count("blocks_per_level", r"vae\.encoder\.down\.0\.block\.(\d+)\.", "blocks in vae.encoder.down.0")
    findings.see_count("blends", r"vae\.quantize\.quant_resi\.qresi_ls\.(\d+)\.", "convolutions in vae.quantize.quant_resi")
    see_levels(findings)
    config = replace(preset, **findings.settled)
    if odd := [width for width in config.autoencoder.widths if width % 32 and width % 24]:
        findings.problems.append(f"a level of the autoencoder has {odd[0]} channels, which is no multiple of 32 or 24")
    findings.raise_problems()
    return config


def see_levels(findings: Findings) -> None:
    levels = min(count(findings.shapes, r"vae\.encoder\.down\.(\d+)\."), MOST_LEVELS)
    channels = findings.size("vae.encoder.conv_in.weight", 0)
    widths = [findings.size(f"vae.encoder.down.{level}.block.0.conv1.weight", 0) for level in range(levels)]
    known = [width for width in widths if channels and width and width % channels == 0]
    if channels and levels and len(known) == levels:
        factors = tuple(width // channels for width in known)
        findings.see("multipliers", factors, f"levels of {' '.join(map(str, known))} channels in vae.encoder")


def check_pair(model: HartConfig, tokenizer: HartTokenizerConfig) -> None:
    wanted, found = (f"{config.codes} codes of {config.latent_channels} channels" for config in (model, tokenizer))
    if wanted != found:
        raise CheckpointError(f"The transformer reads {wanted}, the tokenizer has {found}. Pass the two parts of one release.")


def own_config_file(weights: Path) -> Path:
    """Where a converted file keeps its configuration, so that both parts can lie in one folder."""
    return weights.parent / f"{weights.stem}.{CONFIG_NAME}"


def dump_config(config: HartConfig | HartTokenizerConfig) -> str:
    """In the form of the published config.json."""
    return (MODEL if isinstance(config, HartConfig) else TOKENIZER).dump(config)


class Findings:
    """What config.json says and what the weights show, by the names of our fields; and everything that is wrong with them."""

    def __init__(self, checkpoint: Checkpoint, format: Format) -> None:
        self._path = checkpoint.path
        self._format = format
        self._config_file = config_file(checkpoint)
        self._content = read_config(self._config_file) if self._config_file else {}
        self.shapes = checkpoint.shapes
        self.said: dict[str, Any] = {}
        self.seen: dict[str, Any] = {}
        self.problems: list[str] = []
        self._read_fixed()
        self._read_settings()

    @property
    def settled(self) -> dict[str, Any]:
        return self.said | self.seen

    def _read_fixed(self) -> None:
        for key, only in self._format.fixed.items():
            if key in self._content and not same(self._content[key], only):
                self.problems.append(f"{self._entry(key)}, only {SHOWN.repr(only)} is implemented: no other checkpoint was released")

    def _read_settings(self) -> None:
        for setting in self._format.settings:
            if setting.key in self._content:
                try:
                    self.said[setting.field] = setting.read(self._content[setting.key])
                except ValueError as error:
                    self.problems.append(f"{self._entry(setting.key)}, expected {error}")

    def _entry(self, key: str) -> str:
        assert self._config_file is not None
        return f"{self._config_file.name} says {key} {SHOWN.repr(self._content[key])}"

    def origin(self, field: str) -> str:
        """Where the value of a field is from, for messages."""
        if field in self.seen:
            return "the weights"
        return self._config_file.name if field in self.said and self._config_file else "the preset"

    def size(self, key: str, axis: int) -> int | None:
        """None where the tensor is absent or cannot be meant so: then loading tells what does not fit."""
        shape = self.shapes.get(key, ())
        return shape[axis] if axis < len(shape) and 1 <= shape[axis] <= MOST_CHANNELS else None

    def shown(self, key: str) -> str:
        return f"{key} {list(self.shapes[key])}"

    def see(self, field: str, value: object, evidence: str) -> None:
        self.seen[field] = value
        if field in self.said and self.said[field] != value:
            key = next(setting.key for setting in self._format.settings if setting.field == field)
            self.problems.append(f"{self._entry(key)}, the weights have {evidence}")

    def see_size(self, field: str, key: str, axis: int) -> None:
        size = self.size(key, axis)
        if size is not None:
            self.see(field, size, self.shown(key))

    def see_count(self, field: str, pattern: str, what: str) -> None:
        found = count(self.shapes, pattern)
        if 1 <= found <= MOST_LAYERS:
            self.see(field, found, f"{found} {what}")

    def see_presence(self, field: str, key: str) -> None:
        there = key in self.shapes
        self.see(field, there, key if there else f"no {key}")

    def refuse_unreleased(self) -> None:
        for pattern, variant in UNRELEASED.items():
            if found := [key for key in self.shapes if re.fullmatch(pattern, key)]:
                self.problems.append(f"the weights have {found[0]} ({variant}), which is not implemented: no such checkpoint was released")

    def raise_problems(self) -> None:
        if self.problems:
            raise CheckpointError(
                "\n  ".join([f"{self._path} is not a {self._format.part} of HART that can be loaded:", *self.problems])
                + f"\nPass the weights together with the {CONFIG_NAME} that was published beside them."
            )


def count(shapes: Mapping[str, Shape], pattern: str) -> int:
    """How many different numbers stand at the group of `pattern`, which the keys start with."""
    return len({match[1] for key in shapes if (match := re.match(pattern, key))})


def same(value: object, expected: object) -> bool:
    if isinstance(value, float) and isinstance(expected, float):
        return math.isclose(value, expected, rel_tol=1e-6)  # may have been stored in float32
    return type(value) is type(expected) and value == expected


def config_file(checkpoint: Checkpoint) -> Path | None:
    """The file's own one, which conversion writes; otherwise the config.json of the folder."""
    path = checkpoint.path
    files = {entry.shard for entry in checkpoint.entries.values()}
    own = [own_config_file(file) for file in files] if len(files) == 1 else []
    candidates = [*own, (path if path.is_dir() else path.parent) / CONFIG_NAME]
    return next((file for file in candidates if os.path.lexists(file)), None)


def read_config(file: Path) -> dict[str, Any]:
    if not os.path.isfile(file):  # a pipe would never end
        raise CheckpointError(f"{file} is not a file. Fetch it again, or remove it to read the weights without it.")
    try:
        with file.open("rb") as opened:
            content = opened.read(LARGEST_CONFIG + 1)
        if len(content) > LARGEST_CONFIG:
            raise CheckpointError(f"{file} has more than {LARGEST_CONFIG} bytes: it is no configuration. Fetch it again.")
        config = json.loads(content)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}). Check its permissions.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON. Fetch it again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} holds a {type(config).__name__}; expected an object with the configuration. Fetch it again.")
    return config
