"""Decoding within a bound of memory.

Group norm takes its mean and variance from a whole image, so an image cannot be cut into tiles that are decoded one by one: every tile
would be normalised by itself, and boundaries and shifts of colour would show. Instead the image is cut anew for every layer: a level of the
decoder runs in strips of rows, each convolution with the one row above and below that it reads, and a norm's statistics are collected
from all strips before the next layer starts. The result is that of decoding at once, to rounding: no overlap to blend, no tolerance to
choose.

Two maps of a level are kept, the residual stream and the inside of a block, and written in place; all else exists for one strip at a
time. The upsampled input of a level, four times as large as what it is made of, is never kept: it is computed twice, once for the
statistics of the first norm and once for the first convolution. That is an eighth more MACs with Infinity's decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from ..errors import OutOfMemory
from ..stage import to_double
from .autoencoder import Decoder, Level, PixelAttention, Upsample
from .layers import GroupNorm, convolve, fusable, to_channels_last, upsample_nearest

MEMORY = 4 * 2**30  # bytes for the activations of the decoder, where that is enough
# Pixels x channels of what the last level is given that keep a large GPU busy: one image of 1024 x 1024 with Infinity's 256 channels, 16 of
# 512 x 512 with nano's 64. Those took 0.70 ms each on an H200, 0.79 four at a time; more would only take more memory.
BUSY = 2**28
MIN_STRIP = 32  # rows: a strip of fewer saves little, since maps of the whole level remain, and its edges are computed twice

Rows = Callable[[int, int], Tensor]
"""The rows of a map from the first to before the second number, [B, C, rows, W]."""


@dataclass(frozen=True)
class Strips:
    """The last `levels` of the decoder run in strips of `rows` rows."""

    rows: int
    levels: int


def decode(decoder: Decoder, z: Tensor, max_memory: int | None = None) -> Tensor:
    """Images [B, 3, H, W] of latents [B, Z, h, w]: several images at a time, one by one, or in strips, as `max_memory` bytes allow.

    None: within 4 GiB where strips make that possible, which they do up to 2.4 thousand pixels square in bfloat16, else with the
    least that they need. A given bound that cannot be kept raises OutOfMemory.
    """
    together = images_at_a_time(decoder, z.shape, z.dtype, max_memory)
    strips = choose_strips(decoder, z.shape, z.dtype, max_memory)
    out: Tensor | None = None
    for first in range(0, len(z), together):
        part = z[first : first + together]
        pixels = decoder.at_once(part) if strips is None else decode_tiled(decoder, part, strips)
        if together >= len(z):
            return pixels
        out = pixels.new_empty(len(z), *pixels.shape[1:]) if out is None else out
        out[first : first + together] = pixels
    assert out is not None, "a batch has at least one image"
    return out


def images_at_a_time(decoder: Decoder, latent: Sequence[int], dtype: torch.dtype, max_memory: int | None) -> int:
    one = decode_bytes(decoder, latent[2:], dtype)
    largest = latent[2] * latent[3] * stride(decoder) ** 2 * decoder.stack[-1].stack[0].conv1.in_channels
    return max(1, min(latent[0], BUSY // largest, (max_memory or MEMORY) // one))


def choose_strips(decoder: Decoder, latent: Sequence[int], dtype: torch.dtype, max_memory: int | None) -> Strips | None:
    """Strips that keep one image within `max_memory`: in as few levels as possible, and as high as possible. None: no strips are needed."""
    bound = max_memory or MEMORY
    if decode_bytes(decoder, latent[2:], dtype) <= bound:
        return None
    height, width = (side * stride(decoder) for side in latent[2:])
    choices = [Strips(rows, levels) for levels in range(1, len(decoder.levels) + 1) for rows in halves(height)]
    needs = {strips: decode_bytes(decoder, latent[2:], dtype, strips) for strips in choices}
    least = min(choices, key=needs.__getitem__)
    if max_memory is not None and needs[least] > bound:
        raise OutOfMemory(
            f"decoding {width}x{height} pixels in {str(dtype).removeprefix('torch.')} takes {needs[least] / 2**30:.2f} GiB even in strips"
            f" of {least.rows} rows, more than the {bound / 2**30:.2f} GiB that it may take: allow more, or choose a smaller image"
        )
    return next((strips for strips in choices if needs[strips] <= bound), least)


def halves(height: int) -> Iterator[int]:
    """Heights of strips: a half, a quarter and so on, down to the smallest."""
    while height > MIN_STRIP:
        height = max(height // 2, MIN_STRIP)
        yield height


def stride(decoder: Decoder) -> int:
    return 2 ** sum(isinstance(level.resize, Upsample) for level in decoder.stack)


# --- memory


def decode_bytes(decoder: Decoder, latent: Sequence[int], dtype: torch.dtype, strips: Strips | None = None) -> int:
    """The most bytes that the activations of one image take, at once or in strips; without workspaces of the convolutions.

    With Infinity's decoder in bfloat16 1298 bytes per pixel at once, and 658 besides what belongs to a strip.
    """
    height, width = latent
    most = source = 0  # elements; the source is what a level is made from
    for number, level in enumerate(decoder.stack):
        conv = level.stack[0].conv1
        inner, outer = conv.in_channels, conv.out_channels
        if runs_whole(decoder, number, height, strips):
            # The input is upsampled: in plain torch in two steps, and never the most. Then it is held by the caller, and a block has three
            # maps at a time: input, normalised and output, or two to add up and their sum.
            made = source + 2 * inner * height * width if source else 0
            most = max(most, made, max(2 * inner + outer, inner + 3 * outer) * height * width)
        else:
            assert strips is not None
            most = max(most, source + 2 * outer * height * width + strip_elements(inner, outer, dtype) * (strips.rows + 4) * width)
        source = outer * height * width
        if isinstance(level.resize, Upsample):
            height, width = 2 * height, 2 * width
    return most * dtype.itemsize + 3 * height * width * (dtype.itemsize + 4)  # and the image, in float32 too


def merged_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the weights that upsampling on a GPU keeps besides its own: 4x4 for 3x3."""
    convs = [part.conv for part in module.modules() if isinstance(part, Upsample)]
    return sum(16 * conv.in_channels * conv.out_channels for conv in convs) * dtype.itemsize


def strip_elements(inner: int, outer: int, dtype: torch.dtype) -> int:
    """Elements per pixel of a strip: the input of a level upsampled, convolved and normalised, with statistics in float32."""
    wide = 1 + 4 // dtype.itemsize
    return max(2 * inner + max(wide * inner, inner + outer), (2 + wide) * outer)


def runs_whole(decoder: Decoder, number: int, height: int, strips: Strips | None) -> bool:
    """Whether a level runs without strips: early levels do, small ones, and those with attention over all pixels, the coarsest."""
    if strips is None or height <= strips.rows or number < len(decoder.levels) - strips.levels:
        return True
    return any(isinstance(part, PixelAttention) for part in decoder.stack[number].attention)


# --- strips


def decode_tiled(decoder: Decoder, z: Tensor, strips: Strips) -> Tensor:
    """Decodes like `decoder.at_once`, in strips. One image at a time takes the least memory."""
    x = decoder.middle(decoder.conv_in(to_channels_last(z)))
    resize: Upsample | None = None
    for number, level in enumerate(decoder.stack):
        if runs_whole(decoder, number, x.shape[2] * (1 if resize is None else 2), strips):
            x, _ = level.features_and_sums(x if resize is None else resize(x))
        else:
            x = level_in_strips(level, x, resize, strips.rows)
        resize = level.resize if isinstance(level.resize, Upsample) else None
    if fusable(x):
        return decoder.image(x)  # the kernel makes no map
    statistics = Statistics(decoder.norm_out)
    out = x.new_empty(len(x), 3, *x.shape[2:])
    for top, bottom in places(x.shape[2], strips.rows):
        statistics.add(x[:, :, top:bottom])
    norm = statistics.norm()
    for top, bottom in places(x.shape[2], strips.rows):
        out[:, :, top:bottom] = convolved(decoder.conv_out, normalize_rows(norm, x), top, bottom, x.shape[2])
    return out


def level_in_strips(level: Level, source: Tensor, resize: Upsample | None, rows: int) -> Tensor:
    blocks = level.stack
    given = upsampled(source, resize) if resize is not None else lambda top, bottom: source[:, :, top:bottom]
    factor = 1 if resize is None else 2
    height, width = factor * source.shape[2], factor * source.shape[3]
    parts = list(places(height, rows))
    x, inside = (
        torch.empty(
            (len(source), blocks[0].conv2.out_channels, height, width),
            dtype=source.dtype,
            device=source.device,
            memory_format=torch.channels_last if source.is_cuda else torch.contiguous_format,
        )
        for _ in range(2)
    )
    statistics = Statistics(blocks[0].norm1)
    for part in parts:
        statistics.add(given(*part))
    for number, block in enumerate(blocks):
        norm, statistics = statistics.norm(), Statistics(block.norm2)
        for top, bottom in parts:
            if number == 0:
                window, above = rows_around(given, top, bottom, height)
                x[:, :, top:bottom] = block.shortcut(window[:, :, top - above : bottom - above])
                read = normalize_rows(norm, window, above)
            else:
                read = normalize_rows(norm, x)
            inside[:, :, top:bottom] = convolved(block.conv1, read, top, bottom, height)
            statistics.add(inside[:, :, top:bottom])
        norm = statistics.norm()
        statistics = Statistics(blocks[(number + 1) % len(blocks)].norm1)
        for top, bottom in parts:
            x[:, :, top:bottom] += convolved(block.conv2, normalize_rows(norm, inside), top, bottom, height)
            if block is not blocks[-1]:
                statistics.add(x[:, :, top:bottom])
    return x


def places(height: int, rows: int) -> Iterator[tuple[int, int]]:
    """First row of every strip, and the row after its last."""
    return ((top, min(top + rows, height)) for top in range(0, height, rows))


def rows_around(rows: Rows, top: int, bottom: int, height: int) -> tuple[Tensor, int]:
    """These rows with one more on either side, as far as there is one, and the number of the first."""
    above = max(top - 1, 0)
    return rows(above, min(bottom + 1, height)), above


def convolved(conv: nn.Conv2d, rows: Rows, top: int, bottom: int, height: int) -> Tensor:
    """Some rows of a 3x3 convolution of a map, which reads zeros beyond its edges."""
    window, above = rows_around(rows, top, bottom, height)
    below = above + window.shape[2]
    if above == top or below == bottom:
        window = F.pad(window, (0, 0, above - (top - 1), bottom + 1 - below))
    return convolve(conv, window, padding=(0, 1))


def upsampled(x: Tensor, resize: Upsample) -> Rows:
    def nearest(top: int, bottom: int) -> Tensor:
        first = top // 2
        return upsample_nearest(x[:, :, first : (bottom + 1) // 2])[:, :, top - 2 * first : bottom - 2 * first]

    return lambda top, bottom: convolved(resize.conv, nearest, top, bottom, 2 * x.shape[2])


def normalize_rows(norm: Norm, x: Tensor, first: int = 0) -> Rows:
    """The normalised rows of a map, or of a window of it that starts at its row `first`."""
    return lambda top, bottom: norm(x[:, :, top - first : bottom - first])


class Norm(NamedTuple):
    """Group norm with known statistics, and SiLU."""

    mean: Tensor  # [B, C], float32
    scale: Tensor
    bias: Tensor  # [C]

    def __call__(self, x: Tensor) -> Tensor:
        if fusable(x):
            return kernels.centered_silu(x, self.mean, self.scale, self.bias)
        y = torch.sub(x, self.mean[:, :, None, None])  # float32 whatever x is
        y.mul_(self.scale[:, :, None, None]).add_(self.bias[:, None, None])
        return F.silu(y, inplace=True).to(x.dtype)


class Statistics:
    """Mean and variance of the channels of a map, collected strip by strip; what they are for a group follows."""

    def __init__(self, norm: nn.Module) -> None:
        assert isinstance(norm, GroupNorm)
        self._of = norm
        self._pixels = 0
        self._mean: Tensor | None = None  # [B, C], float64
        self._squares: Tensor | None = None  # sums of squared distances from the mean

    def add(self, x: Tensor) -> None:
        pixels = x.shape[2] * x.shape[3]
        variance, mean = torch.var_mean(x.float(), dim=(2, 3), correction=0)
        mean, squares = to_double(mean), to_double(variance) * pixels
        if self._mean is not None and self._squares is not None:
            apart = mean - self._mean
            share = pixels / (self._pixels + pixels)
            mean = self._mean + apart * share
            squares = self._squares + squares + apart.square() * self._pixels * share
        self._mean, self._squares, self._pixels = mean, squares, self._pixels + pixels

    def norm(self) -> Norm:
        assert self._mean is not None and self._squares is not None
        groups = (self._of.num_groups, -1)
        means, variances = self._mean.unflatten(1, groups), (self._squares / self._pixels).unflatten(1, groups)
        mean = means.mean(dim=2, keepdim=True)
        variance = (variances + (means - mean).square()).mean(dim=2, keepdim=True)
        scale = (to_double(self._of.weight).unflatten(0, groups) * (variance + self._of.eps).rsqrt()).flatten(1)
        return Norm(mean.expand_as(means).flatten(1).float(), scale.float(), self._of.bias)
