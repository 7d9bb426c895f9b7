"""The configuration of a HART checkpoint: the config.json beside it and its tensor shapes, which must agree."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch

from ..checkpoints import Checkpoint, Shape, open_checkpoint
from ..checkpoints.files import read_object
from ..errors import CheckpointError
from ..models.blocks import NORM_EPS
from ..models.hart import Hart, HartConfig
from ..serialization import from_plain, shortened
from ..tokenizers.hart import HartTokenizer, HartTokenizerConfig
from .presets import MAX_CHANNELS, MAX_COUNT, ModelSpec, check_size, hart_settings

CONFIG_NAME = "config.json"
COUNTED = -1
PRESENT = -2


class Setting(NamedTuple):
    """A field of ours, its entry in config.json, and the evidence in the weights."""

    key: str  # of config.json; empty if only the weights show it
    field: str
    evidence: str = ""  # a tensor, or a pattern of numbered modules; empty if only config.json shows it
    axis: int = 0  # of the tensor that has this size; COUNTED: the number of modules; PRESENT: true if the tensor is there


@dataclass(frozen=True)
class Format:
    part: str
    config: type
    settings: tuple[Setting, ...]
    fixed: Mapping[str, Any]  # entries with the only value that is implemented


MODEL = Format(
    "transformer of HART",
    HartConfig,
    (
        Setting("depth", "depth", r"blocks\.(\d+)\.", COUNTED),
        Setting("embed_dim", "dim", "word_embed.weight", 0),
        Setting("", "latent_channels", "word_embed.weight", 1),
        Setting("", "codes", "head.weight", 0),
        Setting("num_heads", "heads", "blocks.0.attn.scale_mul_1H11", 1),
        Setting("patch_nums", "sides"),
        Setting("context_dim", "text_channels", "context_embed.weight", 1),
        Setting("context_token", "text_tokens"),
        Setting("mlp_ratio", "mlp_ratio"),
        Setting("attn_l2_norm", "cosine", "blocks.0.attn.scale_mul_1H11", PRESENT),
        Setting("use_context_norm", "text_norm", "context_norm.weight", PRESENT),
        Setting("use_timestep_embed", "level_table", "lvl_embed.weight", PRESENT),  # the opposite
        Setting("diff_width", "residual_dim", "diffloss.net.input_proj.weight", 0),
        Setting("diff_depth", "residual_depth", r"diffloss\.net\.res_blocks\.(\d+)\.", COUNTED),
        Setting("num_sampling_steps", "residual_steps"),
    ),
    dict(mlp_type="llama", attn_type="llama", disable_aln=True, shared_aln=False, use_cross_attn=False, norm_eps=NORM_EPS),
)

TOKENIZER = Format(
    "tokenizer of HART",
    HartTokenizerConfig,
    (
        Setting("vocab_size", "codes", "vae.quantize.embedding.weight", 0),
        Setting("z_channels", "latent_channels", "vae.quantize.embedding.weight", 1),
        Setting("ch", "channels", "vae.encoder.conv_in.weight", 0),
        Setting("ch_mult", "multipliers"),
        Setting("num_res_blocks", "blocks_per_level", r"vae\.encoder\.down\.0\.block\.(\d+)\.", COUNTED),
        Setting("share_quant_resi", "blends", r"vae\.quantize\.quant_resi\.qresi_ls\.(\d+)\.", COUNTED),
        Setting("quant_resi", "blend_share"),
    ),
    dict(quantizer_type="var_hybrid", using_znorm=False, double_decoder=False),
)


def checkpoint_spec(spec: ModelSpec, weights: Path | None, tokenizer: Path | None) -> ModelSpec:
    """Returns the spec with the configuration of HART's checkpoints; None for a part that is not loaded."""
    if not isinstance(spec.model, HartConfig) or not isinstance(spec.tokenizer, HartTokenizerConfig):
        return spec
    model = spec.model if weights is None else hart_model_config(spec.model, weights)
    images = spec.tokenizer if tokenizer is None else hart_tokenizer_config(spec.tokenizer, tokenizer)
    return replace(spec, model=model, tokenizer=images, settings=hart_settings(model.sides))


def hart_model_config(preset: HartConfig, path: Path) -> HartConfig:
    """Returns the configuration of a transformer. `preset` has the settings that neither config.json nor the weights show.

    Returns `preset` for files of another kind: loading them says what does not fit.
    """
    checkpoint = open_checkpoint(path, Hart.layout)
    if "context_embed.weight" not in checkpoint.shapes:
        return preset
    found = Findings(MODEL, checkpoint)
    sides = found.said.get("sides", preset.sides)
    positions, hidden = found.size("lvl_1L", 1), found.size("blocks.0.ffn.gate_proj.weight", 0)
    if positions is not None:
        found.seen["text_tokens"] = positions - sum(side * side for side in sides[1:])
        if found.seen["text_tokens"] < 1:
            found.problems.append(f"lvl_1L [1, {positions}] must have room for a text before the sides {' '.join(map(str, sides))}")
    config: HartConfig = found.config(preset)
    head_dim = preset.dim // preset.heads
    known_heads = "heads" in found.said | found.seen  # only some variants have a tensor with one entry per head
    if not known_heads:
        config = replace(config, heads=max(config.dim // head_dim, 1))
    if config.dim % (4 * config.heads if known_heads else head_dim):  # rotation takes two coordinates of two channels each
        found.problems.append(f"dim {config.dim} must be a multiple of 4 num_heads, which {CONFIG_NAME} says; got {config.heads} heads")
    if hidden is not None and config.block.hidden_dim != hidden:
        fitting = replace(config, mlp_ratio=1.5 * hidden / config.dim)
        if "mlp_ratio" in found.said or fitting.block.hidden_dim != hidden:
            found.problems.append(f"mlp_ratio {config.mlp_ratio:g} must give {hidden} channels; got {config.block.hidden_dim}")
        config = fitting
    found.raise_problems()
    return config


def hart_tokenizer_config(preset: HartTokenizerConfig, path: Path) -> HartTokenizerConfig:
    """Returns the configuration of a tokenizer, found like that of the transformer."""
    with torch.device("meta"):
        layout = HartTokenizer(preset).layout
    checkpoint = open_checkpoint(path, layout)
    if "vae.quantize.embedding.weight" not in checkpoint.shapes:
        return preset
    found = Findings(TOKENIZER, checkpoint)
    channels = found.size("vae.encoder.conv_in.weight", 0)
    levels = min(found.count(r"vae\.encoder\.down\.(\d+)\."), MAX_COUNT)
    sizes = [found.size(f"vae.encoder.down.{level}.block.0.conv1.weight", 0) for level in range(levels)]
    factors = tuple(size // channels for size in sizes if channels and size and size % channels == 0)
    if factors and len(factors) == levels:
        found.seen["multipliers"] = factors
    config: HartTokenizerConfig = found.config(preset)
    if odd := [channels for channels in config.autoencoder.level_channels if channels % 32 and channels % 24]:
        found.problems.append(f"channels of a level must be a multiple of 32 or 24; got {odd[0]}")
    found.raise_problems()
    return config


class Findings:
    """Fields that config.json sets (`said`) and that the weights show (`seen`), and what is wrong with them."""

    def __init__(self, format: Format, checkpoint: Checkpoint) -> None:
        self.format, self.path, self.shapes = format, checkpoint.path, checkpoint.shapes
        self.said: dict[str, Any] = {}
        self.seen: dict[str, Any] = {}
        self.problems: list[str] = []
        for setting in format.settings:
            found = self._evidence(setting)
            if setting.evidence and found is not None:
                self.seen[setting.field] = found
        if (file := config_file(checkpoint)) is not None:
            fields = {setting.key: setting.field for setting in format.settings}
            for key, value in read_object(file).items():
                try:
                    self._read(key, fields.get(key), value)
                except ValueError as error:
                    self.problems.append(f"{file.name} says {key} {shortened(value)}: {error}")

    def _evidence(self, setting: Setting) -> int | bool | None:
        if setting.axis == PRESENT:
            return setting.evidence in self.shapes
        if setting.axis == COUNTED:
            return min(self.count(setting.evidence), MAX_COUNT) or None
        return self.size(setting.evidence, setting.axis)

    def _read(self, key: str, field: str | None, value: Any) -> None:
        if key in self.format.fixed and not same(value, self.format.fixed[key]):
            raise ValueError(f"only {self.format.fixed[key]!r} is implemented")
        if field is None:
            return
        if field == "residual_steps" and isinstance(value, str) and re.fullmatch("[0-9]{1,4}", value):
            value = int(value)  # the reference implementation writes the number as a string
        said: Any = from_plain(get_type_hints(self.format.config)[field], value, field)
        check_size(field, said)
        if field == "sides" and said != tuple(sorted({1, *said})):
            raise ValueError("the sides must grow from 1")
        self.said[field] = not said if field == "level_table" else said

    def config(self, preset: Any) -> Any:
        """Returns the preset with everything that was found; contradictions become problems."""
        for setting in self.format.settings:
            said, seen = (found.get(setting.field) for found in (self.said, self.seen))
            if None not in (said, seen) and said != seen:
                self.problems.append(f"{CONFIG_NAME} says {setting.key}: {setting.field} {shortened(said)}; the weights have {seen}")
        return replace(preset, **(self.said | self.seen))

    def size(self, key: str, axis: int) -> int | None:
        """Returns the length of an axis; None if the tensor is absent or has an impossible size, which loading then refuses."""
        shape: Shape = self.shapes.get(key, ())
        return shape[axis] if axis < len(shape) and 1 <= shape[axis] <= MAX_CHANNELS else None

    def count(self, pattern: str) -> int:
        """Returns the number of different values of the pattern's group at the start of the keys."""
        return len({match[1] for key in self.shapes if (match := re.match(pattern, key))})

    def raise_problems(self) -> None:
        if self.problems:
            raise CheckpointError(
                "\n  ".join([f"{self.path} is not a {self.format.part} that can be loaded:", *self.problems])
                + f"\nPass the weights together with the {CONFIG_NAME} that was published beside them."
            )


def same(value: object, expected: object) -> bool:
    if isinstance(value, float) and isinstance(expected, float):
        return math.isclose(value, expected, rel_tol=1e-6)  # may have been stored in float32
    return type(value) is type(expected) and value == expected


def config_file(checkpoint: Checkpoint) -> Path | None:
    """Returns the configuration that conversion wrote for this file, or else the config.json of the folder."""
    path, files = checkpoint.path, {entry.shard for entry in checkpoint.entries.values()}
    own = [own_config_file(file) for file in files] if len(files) == 1 else []
    candidates = [*own, (path if path.is_dir() else path.parent) / CONFIG_NAME]
    return next((file for file in candidates if os.path.lexists(file)), None)


def own_config_file(weights: Path) -> Path:
    """Returns the configuration of a converted file; named after it, so that both parts of a release fit into one folder."""
    return weights.parent / f"{weights.stem}.{CONFIG_NAME}"


def dump_config(config: HartConfig | HartTokenizerConfig) -> str:
    """Returns a configuration in the form of the published config.json."""
    format = MODEL if isinstance(config, HartConfig) else TOKENIZER
    content = {setting.key: getattr(config, setting.field) for setting in format.settings if setting.key}
    if isinstance(config, HartConfig):
        content["use_timestep_embed"] = not config.level_table
    return json.dumps(content | dict(format.fixed), indent=2)


def check_pair(model: HartConfig, tokenizer: HartTokenizerConfig) -> None:
    wanted, found = (f"{config.codes} codes of {config.latent_channels} channels" for config in (model, tokenizer))
    if wanted != found:
        raise CheckpointError(f"The transformer reads {wanted}, the tokenizer has {found}. Pass the two parts of one release.")
