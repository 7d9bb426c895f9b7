"""The configuration of a HART checkpoint, from the config.json beside it. Strict loading compares it with the tensor shapes."""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from ..checkpoints import Layout, open_checkpoint
from ..checkpoints.files import read_object
from ..errors import CheckpointError
from ..models.blocks import NORM_EPS
from ..models.hart import Hart, HartConfig
from ..serialization import from_plain
from ..tokenizers.var import HartTokenizerConfig
from .presets import MAX_CHANNELS, ModelSpec, build_tokenizer, check_size, hart_settings

CONFIG_NAME = "config.json"
C = TypeVar("C", HartConfig, HartTokenizerConfig)


@dataclass(frozen=True)
class Format:
    """The config.json of one part of a release."""

    part: str
    evidence: str  # a tensor that every such part has
    fields: Mapping[str, str]  # entry -> our field
    fixed: Mapping[str, Any]  # entries with the only value that is implemented
    axes: Mapping[str, tuple[str, int]]  # field that config.json lacks -> tensor and axis of this size


MODEL = Format(
    "transformer of HART",
    "context_embed.weight",
    {
        "depth": "depth",
        "embed_dim": "dim",
        "num_heads": "heads",
        "patch_nums": "sides",
        "context_dim": "text_channels",
        "context_token": "text_tokens",
        "mlp_ratio": "mlp_ratio",
        "attn_l2_norm": "cosine",
        "use_context_norm": "text_norm",
        "use_timestep_embed": "level_table",  # the opposite
        "diff_width": "residual_dim",
        "diff_depth": "residual_depth",
        "num_sampling_steps": "residual_steps",
    },
    {
        "mlp_type": "llama",
        "attn_type": "llama",
        "disable_aln": True,
        "shared_aln": False,
        "use_cross_attn": False,
        "norm_eps": NORM_EPS,
    },
    {"codes": ("head.weight", 0), "latent_channels": ("word_embed.weight", 1)},
)
TOKENIZER = Format(
    "tokenizer of HART",
    "vae.quantize.embedding.weight",
    {
        "vocab_size": "codes",
        "z_channels": "latent_channels",
        "ch": "channels",
        "ch_mult": "multipliers",
        "num_res_blocks": "blocks_per_level",
        "share_quant_resi": "blends",
        "quant_resi": "blend_share",
    },
    {"quantizer_type": "var_hybrid", "using_znorm": False, "double_decoder": False},
    {},
)


def checkpoint_spec(spec: ModelSpec, weights: Path | None, tokenizer: Path | None) -> ModelSpec:
    """Returns the spec with the configuration of HART's checkpoints; None for a part that is not loaded."""
    model, images = spec.model, spec.tokenizer
    if not isinstance(model, HartConfig) or not isinstance(images, HartTokenizerConfig):
        return spec
    if weights is not None:
        model = read_config(MODEL, model, weights, Hart.layout)
    if tokenizer is not None:
        images = read_config(TOKENIZER, images, tokenizer, build_tokenizer(images).layout)
    return replace(spec, model=model, tokenizer=images, settings=hart_settings(model.sides))


def read_config(format: Format, preset: C, path: Path, layout: Layout) -> C:
    """Returns the configuration of a checkpoint. `preset` has the settings that no config.json gives.

    Returns `preset` for files of another kind: loading them raises the right error. Raises CheckpointError with all wrong entries.
    """
    checkpoint = open_checkpoint(path, layout)
    files = {entry.shard for entry in checkpoint.entries.values()}
    own: list[Path] = [own_config_file(file) for file in files] if len(files) == 1 else []
    file = next((file for file in (*own, (path if path.is_dir() else path.parent) / CONFIG_NAME) if os.path.lexists(file)), None)
    shapes = checkpoint.shapes
    if format.evidence not in shapes:
        return preset
    sizes = {field: shapes[key][axis] for field, (key, axis) in format.axes.items() if axis < len(shapes.get(key, ()))}
    fields: dict[str, Any] = {field: size for field, size in sizes.items() if 1 <= size <= MAX_CHANNELS}
    problems: list[str] = []
    for key, value in read_object(file).items() if file else ():
        try:
            if key in format.fixed and not same(value, format.fixed[key]):
                raise ValueError(f"only {format.fixed[key]!r} is implemented")
            if field := format.fields.get(key):
                fields[field] = read_entry(type(preset), field, value)
        except ValueError as error:
            problems.append(f"{CONFIG_NAME} says {key} {value!r:.80}: {error}")
    config = replace(preset, **fields)
    if isinstance(config, HartConfig) and config.dim % (4 * config.heads):  # rotation takes two coordinates of two channels each
        problems.append(f"embed_dim must be a multiple of 4 num_heads; got {config.dim} and {config.heads}")
    if isinstance(config, HartTokenizerConfig) and any(size % 32 and size % 24 for size in config.autoencoder.level_channels):
        problems.append(f"ch times ch_mult must be multiples of 32 or 24; got {config.autoencoder.level_channels}")
    if problems:
        raise CheckpointError("\n  ".join([f"{path} is not a {format.part} that can be loaded:", *problems]))
    return config


def read_entry(kind: type, field: str, value: Any) -> Any:
    if field == "residual_steps" and isinstance(value, str) and re.fullmatch("[0-9]{1,4}", value):
        value = int(value)  # the reference implementation writes the number as a string
    found: Any = from_plain(get_type_hints(kind)[field], value, field)
    check_size(field, found)
    if field == "sides" and found != tuple(sorted({1, *found})):
        raise ValueError("the sides must grow from 1")
    return not found if field == "level_table" else found


def same(value: object, expected: object) -> bool:
    if isinstance(value, float) and isinstance(expected, float):
        return math.isclose(value, expected, rel_tol=1e-6)  # may have been stored in float32
    return type(value) is type(expected) and value == expected


def own_config_file(weights: Path) -> Path:
    """Returns the configuration of a converted file; named after it, so that both parts of a release fit into one folder."""
    return weights.parent / f"{weights.stem}.{CONFIG_NAME}"


def dump_config(config: HartConfig | HartTokenizerConfig) -> str:
    """Returns a configuration in the form of the published config.json."""
    format = MODEL if isinstance(config, HartConfig) else TOKENIZER
    content = {key: getattr(config, field) for key, field in format.fields.items()}
    if isinstance(config, HartConfig):
        content["use_timestep_embed"] = not config.level_table
    return json.dumps(content | dict(format.fixed), indent=2)


def check_pair(model: HartConfig, tokenizer: HartTokenizerConfig) -> None:
    wanted, found = (f"{config.codes} codes of {config.latent_channels} channels" for config in (model, tokenizer))
    if wanted != found:
        raise CheckpointError(f"The transformer reads {wanted}, the tokenizer has {found}. Pass the two parts of one release.")
