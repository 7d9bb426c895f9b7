"""Configurations as plain values for JSON, and back. Only the classes named here can come back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from ..errors import CheckpointError, NextscaleError, SettingError
from ..guidance import ConstantGuidance, RampGuidance, StageGuidance
from ..models import FlexVarConfig, HartConfig, InfinityConfig, StarConfig, VarConfig
from ..pipeline import Settings
from ..sampling import Refinement, Sampling
from ..schedules import InfinityBook, SquareBook
from ..tokenizers import FlexVarTokenizerConfig, HartTokenizerConfig, InfinityTokenizerConfig, VarTokenizerConfig
from .config_file import MOST_CHANNELS, MOST_LAYERS, SHOWN

CLASSES: dict[str, type] = {
    known.__name__: known
    for known in (
        *(VarConfig, FlexVarConfig, InfinityConfig, HartConfig, StarConfig),
        *(VarTokenizerConfig, FlexVarTokenizerConfig, InfinityTokenizerConfig, HartTokenizerConfig),
        *(Settings, SquareBook, InfinityBook, ConstantGuidance, RampGuidance, StageGuidance, Sampling, Refinement),
    )
}
TYPE = "type"
SET = "set"
COUNTS = ("depth", "refiner_blocks", "residual_depth", "blocks_per_level", "blends", "levels", "chunks")  # of things that are built


def to_plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        if type(value).__name__ not in CLASSES:
            raise SettingError(f"a {type(value).__name__} cannot be saved: of such parts only those that come with nextscale can")
        return {TYPE: type(value).__name__} | {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, frozenset):
        return {TYPE: SET, "values": sorted(value)}
    if isinstance(value, tuple | list):
        return [to_plain(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise SettingError(f"{SHOWN.repr(value)} cannot be saved: it is no number, text or known configuration")


def from_plain(value: Any, where: str) -> Any:
    """`where` names the place in messages."""
    match value:
        case {"type": "set", "values": list(values)}:
            return frozenset(from_plain(one, where) for one in values)
        case {"type": str(name), **content}:
            return _built(name, {str(key): from_plain(one, f"{where}.{key}") for key, one in content.items()}, where)
        case dict():
            raise CheckpointError(f"{where} names no {TYPE!r}. Save the pipeline again")
        case list():
            return tuple(from_plain(one, where) for one in value)
        case int() if abs(value) > (MOST_LAYERS if where.endswith(COUNTS) else MOST_CHANNELS):
            raise CheckpointError(f"{where} is {value}: no model comes near that. Save the pipeline again")
    return value


def _built(name: str, content: Mapping[str, Any], where: str) -> Any:
    if name not in CLASSES:
        raise CheckpointError(f"{where} is a {name!r}, which is not known here. Expected one of {', '.join(CLASSES)}")
    try:
        return CLASSES[name](**content)
    except (TypeError, ValueError, NextscaleError) as error:
        raise CheckpointError(f"{where} is no {name}: {error}. Save the pipeline again with this version of nextscale") from error
