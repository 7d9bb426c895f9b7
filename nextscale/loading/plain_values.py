"""Configurations as plain values for JSON, and back. Only the classes named here can come back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from inspect import formatannotation
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..errors import CheckpointError, NextscaleError, SettingError
from ..guidance import ConstantGuidance, RampGuidance, StageGuidance
from ..pipeline import Settings
from ..sampling import Refinement, Sampling
from ..schedules import InfinitySchedules, Schedules, SquareSchedules
from ..validation import is_finite, is_int
from .config_file import MOST_CHANNELS, SHOWN
from .presets import ModelConfig, TokenizerConfig

SIZES: tuple[type, ...] = (*get_args(ModelConfig), *get_args(TokenizerConfig), SquareSchedules)  # whose numbers are all sizes of something
CLASSES: dict[str, type] = {
    known.__name__: known
    for known in (*SIZES, Settings, InfinitySchedules, ConstantGuidance, RampGuidance, StageGuidance, Sampling, Refinement)
}
TYPE = "type"
SET = "set"
COUNTS = ("depth", "refiner_blocks", "residual_depth", "blocks_per_level", "blends", "levels", "chunks", "multipliers")
MOST_COUNT = 2**7  # of parts that are built, in 2 s on a CPU core; the largest published model has 58 blocks


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
    return value


def _built(name: str, content: Mapping[str, Any], where: str) -> Any:
    if name not in CLASSES:
        raise CheckpointError(f"{where} is a {name!r}, which is not known here. Expected one of {', '.join(CLASSES)}")
    for field, kind in get_type_hints(CLASSES[name]).items():
        most = MOST_COUNT if field in COUNTS else MOST_CHANNELS
        above = -most if CLASSES[name] not in SIZES else -1 if field == "refiner_blocks" else 0
        if field in content and not _fits(content[field], kind, above, most):
            limits = f" with numbers above {above} and up to {most}" if kind not in (bool, str) else ""
            raise CheckpointError(
                f"{where}.{field} must be {formatannotation(kind)}{limits}; got {SHOWN.repr(content[field])}. Save the pipeline again"
            )
    try:
        return CLASSES[name](**content)
    except (TypeError, ValueError, NextscaleError) as error:
        raise CheckpointError(f"{where} is no {name}: {error}. Save the pipeline again with this version of nextscale") from error


def _fits(value: Any, kind: Any, above: int, most: int) -> bool:
    """Returns True if a value has the type of a field and its numbers are in range. Lists of sizes have entries."""
    inner = get_args(kind)
    if get_origin(kind) is UnionType:
        return any(_fits(value, one, above, most) for one in inner)
    if get_origin(kind) is Literal:
        return value in inner
    if get_origin(kind) in (tuple, frozenset):
        if not isinstance(value, get_origin(kind)) or len(value) > most or (above >= -1 and not value):
            return False
        kinds = inner if inner[-1] is not ... and isinstance(value, tuple) else inner[:1] * len(value)
        return len(value) == len(kinds) and all(_fits(one, own, above, most) for one, own in zip(value, kinds, strict=True))
    if kind in (int, float):
        return (is_int(value, above) if kind is int else is_finite(value)) and above < value <= most
    return isinstance(value, SquareSchedules | InfinitySchedules if kind is Schedules else kind)
