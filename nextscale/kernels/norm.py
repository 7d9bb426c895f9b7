"""Layer norm and modulation, with the residual addition before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .e4m3 import E4M3, to_e4m3
from .quantize import in_e4m3_range
from .shapes import dense_channels, per_row, power_of_two, require_index, require_shape, warps_for

NORM_EPS = 1e-6

# Bytes for bfloat16 [2, 4096, 2048], the least time at 4.3 TB/s, and what was measured on an H200:
#   norm_modulate            x in, y out                      67 MB   15.6 us, 22.8 measured (torch: 134 MB in two kernels, 86.6 measured)
#   residual_norm_modulate   x and update in, sum and y out  134 MB   31.2 us, 39.3 measured (torch: 235 MB in three, 143.5 measured)
# One program per token: what it reads of scale, shift and gain, 4 KB each, is the row's and stays in the multiprocessor's first cache.


@triton.jit(do_not_specialize=["tokens", "images"])
def norm_modulate_kernel(
    x_ptr, index_ptr, image_ptr, update_ptr, gain_ptr, scale_ptr, shift_ptr, sum_ptr, out_ptr,
    tokens, images, x_row, x_token, update_row, update_token, gain_row, scale_row, shift_row, eps, inverse,
    INDEXED: tl.constexpr, PACKED: tl.constexpr, UPDATED: tl.constexpr, GAINED: tl.constexpr, QUANTIZED: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    written = (row * tokens + token) * CHANNELS + channel
    owner = row  # of the modulation
    if PACKED:
        owner = row * images + tl.load(image_ptr + token).to(tl.int64)
    source = token
    if INDEXED:
        source = tl.load(index_ptr + row * tokens + token).to(tl.int64)
    x = tl.load(x_ptr + row * x_row + source * x_token + channel, mask=inside, other=0.0).to(tl.float32)
    if UPDATED:
        update = tl.load(update_ptr + row * update_row + token * update_token + channel, mask=inside, other=0.0).to(tl.float32)
        if GAINED:
            update *= tl.load(gain_ptr + owner * gain_row + channel, mask=inside, other=0.0).to(tl.float32)
        rounded = (x + update).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + written, rounded, mask=inside)
        x = rounded.to(tl.float32)  # the norm is that of what later blocks read
    scale = tl.load(scale_ptr + owner * scale_row + channel, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + owner * shift_row + channel, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / CHANNELS
    centred = tl.where(inside, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / CHANNELS
    y = centred * tl.rsqrt(variance + eps) * scale + shift
    if QUANTIZED:
        y = in_e4m3_range(y * inverse)
    tl.store(out_ptr + written, y.to(out_ptr.dtype.element_ty), mask=inside)


def norm_modulate(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    index: Tensor | None = None,
    *,
    image: Tensor | None = None,
    e4m3_scale: float | None = None,
    warps: int | None = None,
) -> Tensor:
    """layer_norm(x) * scale + shift for x [R, N, C], or for its tokens at `index` [R, K] only, which are then gathered on the way.

    scale and shift are [R, 1, C], or [C] for all rows (the weight and bias of a learned norm). With `image` [N] every row of x holds the
    tokens of B rows, and scale and shift are [R * B, 1, C]: token n of row r takes those of row r * B + image[n]. With `e4m3_scale` the
    result is divided by it and rounded to e4m3.
    """
    rows, tokens, channels = x.shape
    images = images_in(image, rows, scale, shift)
    x, scale, shift = dense_channels(x), per_row(scale, rows * images, channels), per_row(shift, rows * images, channels)
    if index is not None:
        index = require_index(index, rows)
        tokens = index.shape[1]
    if image is not None:
        require_shape("image", image, tokens)
    out = torch.empty(rows, tokens, channels, dtype=x.dtype if e4m3_scale is None else E4M3, device=x.device)
    block = power_of_two(channels)
    with torch.cuda.device_of(x):
        norm_modulate_kernel[tokens, rows](
            x, index, image, None, None, scale, shift, None, out,
            tokens, images, x.stride(0), x.stride(1), 0, 0, 0, scale.stride(0), shift.stride(0), NORM_EPS, 1 / (e4m3_scale or 1.0),
            INDEXED=index is not None, PACKED=image is not None, UPDATED=False, GAINED=False, QUANTIZED=e4m3_scale is not None,
            CHANNELS=channels, BLOCK=block, num_warps=warps or warps_for(block),
        )  # fmt: skip
    return out


def images_in(image: Tensor | None, rows: int, *modulations: Tensor | None) -> int:
    """How many rows of the modulations each of `rows` packed rows holds."""
    if image is None:
        return 1
    return max((one.shape[0] // rows for one in modulations if one is not None and one.ndim == 3), default=1) or 1


def of_tokens(modulation: Tensor, rows: int, image: Tensor | None) -> Tensor:
    """[R * B, 1, C] for every token of packed rows, [R, N, C]; all else as it is."""
    if image is None or modulation.ndim == 1 or modulation.shape[0] == 1:
        return modulation
    return modulation.unflatten(0, (rows, -1))[:, image.long(), 0]


def norm_modulate_reference(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    index: Tensor | None = None,
    *,
    image: Tensor | None = None,
    e4m3_scale: float | None = None,
) -> Tensor:
    if index is not None:
        x = x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]).long())
    scale, shift = (of_tokens(modulation, x.shape[0], image) for modulation in (scale, shift))
    y = torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=NORM_EPS), scale)
    return y if e4m3_scale is None else to_e4m3(y, e4m3_scale)


def residual_norm_modulate(
    x: Tensor,
    gain: Tensor | None,
    update: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    image: Tensor | None = None,
    e4m3_scale: float | None = None,
    warps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """x + gain * update, and its layer norm times scale plus shift: [R, N, C] each.

    gain, scale and shift are [R, 1, C] or [C]; no gain is a gain of 1. `image`, and `e4m3_scale` of the norm: see `norm_modulate`.
    """
    rows, tokens, channels = x.shape
    require_shape("update", update, rows, tokens, channels)
    images = images_in(image, rows, gain, scale, shift)
    x, update = dense_channels(x), dense_channels(update)
    scale, shift = per_row(scale, rows * images, channels), per_row(shift, rows * images, channels)
    if gain is not None:
        gain = per_row(gain, rows * images, channels)
    if image is not None:
        require_shape("image", image, tokens)
    total = torch.empty(rows, tokens, channels, dtype=x.dtype, device=x.device)
    out = torch.empty_like(total, dtype=x.dtype if e4m3_scale is None else E4M3)
    block = power_of_two(channels)
    with torch.cuda.device_of(x):
        norm_modulate_kernel[tokens, rows](
            x, None, image, update, gain, scale, shift, total, out,
            tokens, images, x.stride(0), x.stride(1), update.stride(0), update.stride(1), 0 if gain is None else gain.stride(0),
            scale.stride(0), shift.stride(0), NORM_EPS, 1 / (e4m3_scale or 1.0),
            INDEXED=False, PACKED=image is not None, UPDATED=True, GAINED=gain is not None, QUANTIZED=e4m3_scale is not None,
            CHANNELS=channels, BLOCK=block, num_warps=warps or warps_for(block),
        )  # fmt: skip
    return total, out


def residual_norm_modulate_reference(
    x: Tensor,
    gain: Tensor | None,
    update: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    image: Tensor | None = None,
    e4m3_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    total = x + update if gain is None else torch.addcmul(x, of_tokens(gain, x.shape[0], image), update)
    return total, norm_modulate_reference(total, scale, shift, image=image, e4m3_scale=e4m3_scale)
