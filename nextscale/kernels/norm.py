"""Layer norm or RMS norm with modulation, optionally fused with the preceding residual addition."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .quantize import in_e4m3_range
from .reference import E4M3, to_e4m3
from .shapes import dense_channels, per_row, power_of_two, require_index, require_shape, warps_for

NORM_EPS = 1e-6

# For bfloat16 [2, 4096, 2048], memory traffic, minimum time at 4.3 TB/s and measured time on an H200:
#   norm_modulate            x in, y out                      67 MB   15.6 us, measured 22.8 (torch: 134 MB in two kernels, 86.6)
#   residual_norm_modulate   x and update in, sum and y out  134 MB   31.2 us, measured 39.3 (torch: 235 MB in three kernels, 143.5)
# One program per token. Scale, shift and gate of a row, 4 KB each, stay in the L1 cache.


@triton.jit(do_not_specialize=["tokens", "images"])
def norm_modulate_kernel(
    x_ptr, index_ptr, image_ptr, update_ptr, gate_ptr, scale_ptr, shift_ptr, sum_ptr, out_ptr,
    tokens, images, x_row, x_token, update_row, update_token, gate_row, scale_row, shift_row, eps, inverse,
    INDEXED: tl.constexpr, PACKED: tl.constexpr, UPDATED: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr,
    CENTERED: tl.constexpr, QUANTIZED: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    written = (row * tokens + token) * CHANNELS + channel
    owner = row  # row of the modulation
    if PACKED:
        owner = row * images + tl.load(image_ptr + token).to(tl.int64)
    source = token
    if INDEXED:
        source = tl.load(index_ptr + row * tokens + token).to(tl.int64)
    x = tl.load(x_ptr + row * x_row + source * x_token + channel, mask=inside, other=0.0).to(tl.float32)
    if UPDATED:
        update = tl.load(update_ptr + row * update_row + token * update_token + channel, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            update *= tl.load(gate_ptr + owner * gate_row + channel, mask=inside, other=0.0).to(tl.float32)
        rounded = (x + update).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + written, rounded, mask=inside)
        x = rounded.to(tl.float32)  # normalize the rounded sum, which later blocks read
    # Loaded before the reductions, to overlap with them.
    scale = 1.0
    shift = 0.0
    if SCALED:
        scale = tl.load(scale_ptr + owner * scale_row + channel, mask=inside, other=0.0).to(tl.float32)
    if SHIFTED:
        shift = tl.load(shift_ptr + owner * shift_row + channel, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        x = tl.where(inside, x - tl.sum(x, axis=0) / CHANNELS, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / CHANNELS + eps) * scale + shift
    if QUANTIZED:
        y = in_e4m3_range(y * inverse)
    tl.store(out_ptr + written, y.to(out_ptr.dtype.element_ty), mask=inside)


def norm_modulate(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None = None,
    *,
    centered: bool = True,
    image: Tensor | None = None,
    dtype: torch.dtype | None = None,
    e4m3_scale: float | None = None,
) -> Tensor:
    """Returns norm(x) * scale + shift for x [R, N, C], or for its tokens at `index` [R, K] only.

    Args:
        scale, shift: [R, 1, C], or [C] for all rows, or None for 1 and 0.
        centered: layer norm if True, RMS norm if False.
        image: [N], if every row of x holds the tokens of B rows. scale and shift are then [R * B, 1, C], and token n of row r uses row
            r * B + image[n].
        dtype: of the result; by default the dtype of x.
        e4m3_scale: divide the result by this and round it to e4m3.
    """
    return launch(x, index, None, None, scale, shift, centered, image, dtype, e4m3_scale)[1]


def residual_norm_modulate(
    x: Tensor,
    gate: Tensor | None,
    update: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    *,
    centered: bool = True,
    image: Tensor | None = None,
    e4m3_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns x + gate * update and its modulated norm, [R, N, C] each.

    gate, scale and shift are [R, 1, C] or [C]; a gate of None is 1. See `norm_modulate` for the other arguments.
    """
    require_shape("update", update, *x.shape)
    return launch(x, None, gate, dense_channels(update), scale, shift, centered, image, None, e4m3_scale)


def launch(
    x: Tensor, index: Tensor | None, gate: Tensor | None, update: Tensor | None, scale: Tensor | None, shift: Tensor | None,
    centered: bool, image: Tensor | None, dtype: torch.dtype | None, e4m3_scale: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the sum, or x without an update, and the modulated norm."""
    rows, tokens, channels = x.shape
    images = images_in(image, rows, gate, scale, shift)
    x, given = dense_channels(x), (gate, scale, shift)
    gate, scale, shift = (None if one is None else per_row(one, rows * images, channels) for one in given)
    if index is not None:
        index = require_index(index, rows)
        tokens = index.shape[1]
    if image is not None:
        require_shape("image", image, tokens)
    total = None if update is None else torch.empty(rows, tokens, channels, dtype=x.dtype, device=x.device)
    out = torch.empty(rows, tokens, channels, dtype=(dtype or x.dtype) if e4m3_scale is None else E4M3, device=x.device)
    block = power_of_two(channels)
    with torch.cuda.device_of(x):
        norm_modulate_kernel[tokens, rows](
            x, index, image, update, gate, scale, shift, total, out,
            tokens, images, *x.stride()[:2], *((0, 0) if update is None else update.stride()[:2]),
            *(0 if one is None else one.stride(0) for one in (gate, scale, shift)),
            NORM_EPS, 1 / (e4m3_scale or 1.0),
            INDEXED=index is not None, PACKED=image is not None, UPDATED=update is not None, GATED=gate is not None,
            SCALED=scale is not None, SHIFTED=shift is not None, CENTERED=centered, QUANTIZED=e4m3_scale is not None,
            CHANNELS=channels, BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
    return x if total is None else total, out


def images_in(image: Tensor | None, rows: int, *modulations: Tensor | None) -> int:
    """Returns the number of rows in each packed row."""
    if image is None:
        return 1
    return max((one.shape[0] // rows for one in modulations if one is not None and one.ndim == 3), default=1) or 1


def of_tokens(modulation: Tensor | None, rows: int, image: Tensor | None) -> Tensor | None:
    """Expands [R * B, 1, C] to the tokens of packed rows, [R, N, C]; returns other modulations unchanged."""
    if modulation is None or image is None or modulation.ndim == 1 or modulation.shape[0] == 1:
        return modulation
    return modulation.unflatten(0, (rows, -1))[:, image.long(), 0]


def norm_modulate_reference(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    index: Tensor | None = None,
    *,
    centered: bool = True,
    image: Tensor | None = None,
    dtype: torch.dtype | None = None,
    e4m3_scale: float | None = None,
) -> Tensor:
    if index is not None:
        x = x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]).long())
    x = x if dtype is None else x.to(torch.promote_types(x.dtype, dtype))
    scale, shift = (of_tokens(modulation, x.shape[0], image) for modulation in (scale, shift))
    y = F.layer_norm(x, x.shape[-1:], eps=NORM_EPS) if centered else F.rms_norm(x, x.shape[-1:], eps=NORM_EPS)
    if scale is not None:
        y = y * scale if shift is None else torch.addcmul(shift, y, scale)
    elif shift is not None:
        y = y + shift
    return y if e4m3_scale is None else to_e4m3(y, e4m3_scale)


def residual_norm_modulate_reference(
    x: Tensor, gate: Tensor | None, update: Tensor, scale: Tensor | None, shift: Tensor | None, **settings: Any
) -> tuple[Tensor, Tensor]:
    gate = of_tokens(gate, x.shape[0], settings.get("image"))
    total = x + update if gate is None else torch.addcmul(x, gate, update)
    return total, norm_modulate_reference(total, scale, shift, **settings)
