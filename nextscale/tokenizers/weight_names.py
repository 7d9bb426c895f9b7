"""Parameter names of the autoencoders in published files."""

import re
from collections.abc import Callable

from ..checkpoints import Rule


def renamed(*replacements: tuple[str, str | Callable[[re.Match[str]], str]]) -> Callable[[re.Match[str]], str]:
    """Returns a template that applies regex replacements to a parameter name in order."""

    def rename(match: re.Match[str]) -> str:
        name = match[0]
        for pattern, replacement in replacements:
            name = re.sub(pattern, replacement, name)
        return name

    return rename


SHARED = (
    (r"\.attention\.", ".attn."),
    (r"^(encoder.*)\.resize\.", r"\1.downsample."),
    (r"^(decoder.*)\.resize\.", r"\1.upsample."),
    (r"\.shortcut\.", ".nin_shortcut."),
    (r"\.proj\.", ".proj_out."),
)
WRAPPED = (
    (r"\.(\w*conv\w*|nin_shortcut)\.(weight|bias)$", r".\1.conv.\2"),
    (r"\.(norm\w*)\.(weight|bias)$", r".\1.norm.\2"),
)


def by_resolution(levels: int, attention: bool, wrapped: bool = False) -> tuple[Rule, ...]:
    """Returns the rules for VAR's and Infinity's files: `down.i` and `up.i` count from the finest level; Infinity nests convs and norms."""
    last = 2 if attention else 1
    middle = {"0": "block_1", str(last): "block_2"} | ({"1": "attn_1"} if attention else {})
    names = renamed(
        (r"^decoder\.levels\.(\d+)", lambda m: f"decoder.up.{levels - 1 - int(m[1])}"),
        (r"^encoder\.levels\.", "encoder.down."),
        (r"\.blocks\.", ".block."),
        (r"\.middle\.(\d)", lambda m: f".mid.{middle[m[1]]}"),
        *SHARED,
        *(WRAPPED if wrapped else ()),
    )
    return (Rule(r"(encoder|decoder)\..*", (names,)),)


def by_execution() -> tuple[Rule, ...]:
    """Returns the rules for FlexVAR's file: `conv_blocks.i` in execution order, and separate query, key and value convolutions."""
    common = (
        (r"\.levels\.", ".conv_blocks."),
        (r"\.blocks\.", ".res."),
        (r"\.middle\.", ".mid."),
        *SHARED,
    )
    split = tuple(renamed(*common, (r"\.qkv\.", f".{letter}.")) for letter in "qkv")
    return (Rule(r"(encoder|decoder)\..*\.qkv\..*", split), Rule(r"(encoder|decoder)\..*", (renamed(*common),)))
