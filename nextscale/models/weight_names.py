"""Parameter names of the backbones in published files."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..checkpoints import Rule, Shape

SHARED_RULES = (
    Rule(r"pos_start", ("pos_start",), shape=lambda s: (1, 1, *s)),
    Rule(r"level_embed\.weight", ("lvl_embed.weight",)),
    Rule(r"head_ada\.(.*)", (r"head_nm.ada_lin.1.\1",)),
    Rule(r"shared_modulation\.(.*)", (r"shared_ada_lin.1.\1",)),
)


def block_rules(
    prefix: Callable[[int], str], attention: str = "attn", qkv: str = "mat_qkv", text: str = "ca", blocks: str = "blocks"
) -> tuple[Rule, ...]:
    """Returns the rules for blocks; `prefix(i)` is the published name of our block i."""

    def named(suffix: str) -> Callable[[re.Match[str]], str]:
        return lambda match: prefix(int(match[1])) + match.expand(suffix)

    def part(ours: str, *suffixes: str, shape: Callable[[Shape], Shape] | None = None) -> Rule:
        return Rule(rf"{re.escape(blocks)}\.(\d+)\." + ours, tuple(named(suffix) for suffix in suffixes), shape)

    return (
        part(r"norm\.weight", ".ln_wo_grad.weight"),
        part(r"attention\.qkv\.weight", f".{attention}.{qkv}.weight"),
        part(r"attention\.qkv\.bias", *(f".{attention}.{bias}" for bias in ("q_bias", "zero_k_bias", "v_bias"))),
        part(r"attention\.log_temperature", f".{attention}.scale_mul_1H11", shape=lambda s: (1, *s, 1, 1)),
        part(r"attention\.proj\.(\w+)", rf".{attention}.proj.\2"),
        part(r"text_norm\.(\w+)", r".ca_norm.\2"),
        part(r"text_attention\.kv\.bias", f".{text}.zero_k_bias", f".{text}.v_bias"),
        part(r"text_attention\.(q|kv)\.(\w+)", rf".{text}.mat_\2.\3"),
        part(r"text_attention\.proj\.(\w+)", rf".{text}.proj.\2"),
        part(r"text_attention\.log_temperature", f".{text}.scale_mul_1H11", shape=lambda s: (1, *s, 1, 1)),
        part(r"feed_forward\.gate_up\.(\w+)", r".ffn.gate_proj.\2", r".ffn.up_proj.\2"),
        part(r"feed_forward\.down\.(\w+)", r".ffn.down_proj.\2"),
        part(r"feed_forward\.(.*)", r".ffn.\2"),
        part(r"modulation_table", ".ada_gss", shape=lambda s: (1, 1, *s)),
        part(r"modulation\.(\w+)", r".ada_lin.1.\2"),
    )


CLASS_RULES = (*SHARED_RULES, Rule(r"class_embed\.weight", ("class_emb.weight",)), *block_rules(lambda i: f"blocks.{i}"))
