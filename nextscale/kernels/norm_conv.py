"""Group norm, SiLU and the final 3x3 convolution of a decoder to at most four channels, for channels-last images.

Three output channels are too few for tensor cores: on an H200, for 1024 x 1024 pixels of 128 channels, cuDNN's convolution takes 318 us
after 150 us for writing the normalized input. This kernel does not write it. It normalizes each pixel once, multiplies it by all nine
weights of every output channel, and adds the products to the neighboring pixels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .group_norm import Sums, group_norm_silu_reference, mean_and_scale
from .shapes import image_sizes, power_of_two, require_shape

# The input is read twice, once for mean and variance: 0.54 GB for 1024 x 1024 pixels of 128 channels in bfloat16, 0.13 ms at 4.3 TB/s.
TILE = 16384  # bytes of pixels per step
COLUMNS = 64  # maximum per tile: the size that a warp group's tensor cores process at once
ROWS = 32  # maximum per program, which reads two more
MIN_ROWS = 8
PROGRAMS = 1056  # eight per multiprocessor of an H200
STAGES = 3  # pipeline stages, in rows
WARPS = 4


@triton.jit(do_not_specialize=["height", "width", "rows"])
def group_norm_silu_conv_kernel(
    x_ptr, mean_ptr, scale_ptr, norm_bias_ptr, weight_ptr, bias_ptr, out_ptr, height, width, rows,
    weight_out, weight_in, weight_row, weight_column,
    CHANNELS: tl.constexpr, OUT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes a block of rows and columns of one image per program, reading a border of one pixel.

    Each input row contributes to three output rows: the one above, which is then complete, its own, and the one below.
    """
    image = tl.program_id(2).to(tl.int64)
    top = tl.program_id(1) * rows
    place = tl.arange(0, COLUMNS)
    column = tl.program_id(0) * (COLUMNS - 2) - 1 + place
    channel = tl.arange(0, BLOCK)
    there = channel < CHANNELS
    mean = tl.load(mean_ptr + image * CHANNELS + channel, mask=there, other=0.0)[None, :]
    scale = tl.load(scale_ptr + image * CHANNELS + channel, mask=there, other=0.0)[None, :]
    norm_bias = tl.load(norm_bias_ptr + channel, mask=there, other=0.0).to(tl.float32)[None, :]

    slot = tl.arange(0, 16)  # sums of a pixel: for its right neighbor, itself and its left neighbor, four output channels each
    side, out_channel = slot // 4, slot % 4
    used = there[:, None] & ((side < 3) & (out_channel < OUT))[None, :]
    weight_ptr += channel[:, None] * weight_in + (out_channel * weight_out + side * weight_column)[None, :]
    for_below = tl.load(weight_ptr, mask=used, other=0.0)
    for_own = tl.load(weight_ptr + weight_row, mask=used, other=0.0)
    for_above = tl.load(weight_ptr + 2 * weight_row, mask=used, other=0.0)
    source = tl.minimum(tl.maximum(place[:, None] + side[None, :] - 1, 0), COLUMNS - 1)  # pixel that computed the sum for this one
    final = tl.arange(0, 4)
    bias = tl.load(bias_ptr + final, mask=final < OUT, other=0.0).to(tl.float32)[None, :]
    own = (place > 0) & (place < COLUMNS - 1) & (column < width)

    in_image = (column >= 0) & (column < width)
    above = tl.zeros([COLUMNS, 16], dtype=tl.float32)
    here = tl.zeros([COLUMNS, 16], dtype=tl.float32)
    for step in tl.range(0, rows + 2, num_stages=STAGES):
        row = top + step - 1
        inside = (in_image & (row >= 0) & (row < height))[:, None]
        pixel = (image * height + row) * width + column
        x = tl.load(x_ptr + pixel[:, None] * CHANNELS + channel[None, :], mask=inside & there[None, :], other=0.0)
        y = (x.to(tl.float32) - mean) * scale + norm_bias
        y = tl.where(inside, y / (1.0 + tl.exp(-y)), 0.0).to(x.dtype)  # the convolution pads with zeros
        ended = tl.dot(y, for_above, above, input_precision="ieee")
        above = tl.dot(y, for_own, here, input_precision="ieee")
        here = tl.dot(y, for_below, input_precision="ieee")
        found = tl.sum(tl.reshape(tl.gather(ended, source, 0), [COLUMNS, 4, 4]), axis=1) + bias
        wanted = (own & (step > 1) & (row <= height))[:, None] & (final < OUT)[None, :]
        tl.store(out_ptr + (pixel - width)[:, None] * OUT + final[None, :], found, mask=wanted)


def group_norm_silu_conv(
    x: Tensor,
    groups: int,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor,
    sums: Sums | None = None,
) -> Tensor:
    """Returns conv2d(silu(group_norm(x)), weight, bias, padding=1) in float32 for channels-last x [B, C, H, W], also channels-last.

    The normalized input is rounded to the dtype of x.

    Args:
        weight: [O, C, 3, 3] with C at most 256 and O at most 4.
        sums: of x, if known, which saves a pass.
    """
    images, channels, _ = image_sizes(x)
    height, width = x.shape[2:]
    out_channels = weight.shape[0]
    require_shape("weight", weight, out_channels, channels, 3, 3)
    require_shape("bias", bias, out_channels)
    block = max(power_of_two(channels), 16)
    columns = max(min(COLUMNS, TILE // (block * x.element_size()), power_of_two(width + 2)), 16)
    segments = triton.cdiv(width, columns - 2)
    rows = max(min(ROWS, images * segments * height // PROGRAMS), MIN_ROWS)
    mean, scale = mean_and_scale(x, groups, norm_weight, eps, None, sums)
    out = torch.empty((images, out_channels, height, width), dtype=torch.float32, device=x.device, memory_format=torch.channels_last)
    with torch.cuda.device_of(x):
        group_norm_silu_conv_kernel[segments, triton.cdiv(height, rows), images](
            x, mean, scale, norm_bias, weight, bias, out, height, width, rows, *weight.stride(),
            CHANNELS=channels, OUT=out_channels, COLUMNS=columns, BLOCK=block, STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip
    return out


def group_norm_silu_conv_reference(
    x: Tensor, groups: int, norm_weight: Tensor, norm_bias: Tensor, eps: float, weight: Tensor, bias: Tensor
) -> Tensor:
    """Computes the same in torch, in the dtype of x up to the end."""
    y = F.conv2d(group_norm_silu_reference(x, groups, norm_weight, norm_bias, eps), weight, bias, padding=1)
    return y if x.dtype == torch.float64 else y.float()
