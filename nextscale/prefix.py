"""Stages with given codes: nothing is sampled, and the network reads them for the keys that later stages need.

All of them are read in one pass in which every stage sees itself and the stages before it. If that is not possible (text before the first
stage, guidance inside the network, a method with its own way to run blocks) they are read stage by stage, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .cache import LayerCache
from .errors import SettingError
from .models.blocks import run_in_order
from .models.rope import InterleavedRope
from .stage import Schedule, Stage, Tokens

if TYPE_CHECKING:
    from .models.base import NextScaleModel
    from .models.context import ForwardContext


def checked_prefix(given: Sequence[Tensor], model: NextScaleModel, schedule: Schedule, batch: int) -> tuple[Tensor, ...]:
    """Returns the codes of the first stages on the model's device. Raises SettingError if they do not fit."""
    if not isinstance(given, Sequence) or len(given) >= len(schedule):
        found = f"{len(given)} tensors" if isinstance(given, Sequence) else type(given).__name__
        raise SettingError(f"prefix_codes must be a list of codes, for the first {len(schedule) - 1} stages at most; got {found}")
    codes = tuple(
        checked_codes(f"prefix_codes[{stage.index}]", one, model, stage, batch) for one, stage in zip(given, schedule, strict=False)
    )
    require_known(codes, "prefix_codes", model)
    return codes


def checked_codes(name: str, codes: object, model: NextScaleModel, stage: Stage, batch: int) -> Tensor:
    """Returns the codes of a stage on the model's device, numbers as int64 and mixtures as float32. Raises SettingError for other shapes or
    types.

    Numbers are [batch, cells], for bits [batch, cells, bits]; residual canvases also take mixtures over the codebook, [batch, cells,
    numbers].
    """
    *bits, choices = model.logit_shape
    expected = [batch, stage.cells, *bits]
    mixture = [] if bits or model.replaces_codes else [*expected, choices]
    if isinstance(codes, Tensor) and not codes.is_complex():
        mixed = codes.is_floating_point()
        if list(codes.shape) == (mixture if mixed else expected):
            return codes.to(model.device, torch.float32 if mixed else torch.int64)
    found = f"{codes.dtype} {list(codes.shape)}" if isinstance(codes, Tensor) else type(codes).__name__
    or_mixture = f", or a mixture of them {mixture}" if mixture else ""
    raise SettingError(f"{name} must be an integer tensor {expected} of codes from 0 to {choices - 1}{or_mixture}; got {found}")


def require_known(codes: Sequence[Tensor], name: str, model: NextScaleModel) -> None:
    """Raises SettingError unless all numbers are codes of the model and all mixtures are finite. The host waits for the device once.

    On a GPU a number beyond the codebook fails inside a kernel, and the process cannot use the device after that.
    """
    choices = model.logit_shape[-1]
    known = [(one * 0 == 0 if one.is_floating_point() else (one >= 0) & (one < choices)).all() for one in codes]
    if known and not torch.stack(known).all():
        raise SettingError(f"{name} must have codes from 0 to {choices - 1}, and mixtures without NaN and infinity; got others")


def fits_one_pass(model: NextScaleModel, ctx: ForwardContext) -> bool:
    """Returns True if one pass can read several stages: their positions and levels, into caches that take them at once."""
    rope = ctx.cond.rope
    positions = ctx.cond.prefix is None and (rope is None or isinstance(rope, InterleavedRope))
    return (
        positions
        and not any(block.changes_input for block in model.stack)
        and all(type(cache).attend is LayerCache.attend for cache in ctx.cache)
    )


@torch.inference_mode()
def read_in_one_pass(model: NextScaleModel, ctx: ForwardContext, stages: Sequence[Stage], seen: Sequence[Tensor | None]) -> None:
    """Puts keys and values of the first stages into the caches; `seen` has the canvas's input of each stage."""
    x = torch.cat([model.embed(shown, stage, ctx) for stage, shown in zip(stages, seen, strict=True)], dim=1)
    joined = Stage(0, 1, x.shape[1], 0, False)
    number = torch.cat([torch.full((stage.cells,), stage.index, device=x.device) for stage in stages])
    mask = (number[:, None] >= number)[None, None]  # [1, 1, T, T]
    rope = ctx.cond.rope
    tables = InterleavedRope([torch.cat([rope.table(stage) for stage in stages])]) if isinstance(rope, InterleavedRope) else None
    part = replace(ctx, cond=replace(ctx.cond, rope=tables), attention_mask=mask, computed=None)
    run_in_order(model.stack, x, Tokens(joined), part)
