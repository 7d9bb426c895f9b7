"""How a HART checkpoint is built: read from the config.json beside it and from its keys and shapes, which have to agree."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch

from ..checkpoints import open_checkpoint
from ..errors import CheckpointError
from ..models.blocks import NORM_EPS
from ..models.hart import Hart, HartConfig
from ..models.residual_head import TRAINED_STEPS
from ..tokenizers.hart import HartTokenizer, HartTokenizerConfig
from .config_file import (
    CONFIG_NAME,
    MOST_CHANNELS,
    MOST_LAYERS,
    Findings,
    Format,
    Setting,
    count,
    flag,
    negated,
    positive,
    whole,
    whole_numbers,
)

# No model comes near these either.
MOST_LEVELS = 16  # of the autoencoder, each of which halves the image
LARGEST_MLP_RATIO = 2.0**10

UNRELEASED = {
    r"blocks\.\d+\.ada_lin\..*": "adaptive norms in every block",
    r"blocks\.\d+\.scale_shift_table": "adaptive norms that the blocks share",
    r"blocks\.\d+\.cross_attn\..*": "cross-attention",
    r"blocks\.\d+\.ffn\.fc[12]\..*": 'feed-forward layers of the type "gpt2"',
    r"blocks\.\d+\.attn\.mat_qkv\..*": 'attention of the type "gpt2"',
}


# --- what config.json says


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
    """The reference implementation writes the number as a string."""
    number = int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,4}", value) else value
    return whole(TRAINED_STEPS, least=2)(number)


MODEL = Format(
    "transformer of HART",
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
    UNRELEASED,
)

TOKENIZER = Format(
    "tokenizer of HART",
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
    {},
)


# --- what the weights show


def hart_model_config(preset: HartConfig, path: Path) -> HartConfig:
    """The configuration of the transformer at `path`; what neither its config.json nor its keys say is taken from `preset`.

    `preset` itself for a file that is not HART's transformer: loading it says what does not fit.
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
    """Only some variants have a tensor with one entry per head; without config.json heads have as many channels as the preset's."""
    if "heads" in findings.settled:
        if config.dim % (4 * config.heads):  # two coordinates, two halves
            findings.problems.append(
                f"the dim {config.dim} cannot be divided among the {config.heads} heads of {findings.origin('heads')}: "
                "each takes a multiple of 4 channels"
            )
        return config.heads
    head_dim = preset.dim // preset.heads
    if config.dim % head_dim:
        findings.problems.append(
            f"the number of heads is unknown (num_heads in {CONFIG_NAME}), "
            f"and the dim {config.dim} is not a multiple of the usual {head_dim} per head"
        )
    return max(config.dim // head_dim, 1)


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
    """The configuration of the tokenizer at `path`, found like that of the transformer."""
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
    if odd := [channels for channels in config.autoencoder.level_channels if channels % 32 and channels % 24]:
        findings.problems.append(f"a level of the autoencoder has {odd[0]} channels, which is no multiple of 32 or 24")
    findings.raise_problems()
    return config


def see_levels(findings: Findings) -> None:
    levels = min(count(findings.shapes, r"vae\.encoder\.down\.(\d+)\."), MOST_LEVELS)
    channels = findings.size("vae.encoder.conv_in.weight", 0)
    of_levels = [findings.size(f"vae.encoder.down.{level}.block.0.conv1.weight", 0) for level in range(levels)]
    known = [size for size in of_levels if channels and size and size % channels == 0]
    if channels and levels and len(known) == levels:
        factors = tuple(size // channels for size in known)
        findings.see("multipliers", factors, f"levels of {' '.join(map(str, known))} channels in vae.encoder")


def check_pair(model: HartConfig, tokenizer: HartTokenizerConfig) -> None:
    wanted, found = (f"{config.codes} codes of {config.latent_channels} channels" for config in (model, tokenizer))
    if wanted != found:
        raise CheckpointError(f"The transformer reads {wanted}, the tokenizer has {found}. Pass the two parts of one release.")


def dump_config(config: HartConfig | HartTokenizerConfig) -> str:
    """A configuration in the form of the published config.json."""
    return (MODEL if isinstance(config, HartConfig) else TOKENIZER).dump(config)
