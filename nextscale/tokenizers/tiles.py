"""Decoding with limited memory.

Group norm takes its mean and variance from the whole image. Tiles that are decoded separately would be normalized separately, with visible
boundaries and color shifts. Instead, each layer of a level runs in strips of rows: a convolution reads one extra row above and below the
strip, and the statistics of a norm are collected from all strips before the next layer starts. Up to rounding, the result
equals decoding at once, without overlaps or blending.

Two feature maps of a level are stored and updated in place: the residual stream and the inside of a block. Everything else exists for one
strip at a time. The upsampled input of a level, four times as large as its source, is not stored but computed twice: for the statistics of
the first norm and for the first convolution. This adds an eighth of the MACs with Infinity's decoder.
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

DEFAULT_MEMORY = 4 * 2**30  # bytes for the activations of the decoder
# Input elements (pixels x channels) of the last level that keep a large GPU busy: one image of 1024 x 1024 with Infinity's 256 channels, 16
# of 512 x 512 with nano's 64. The latter took 0.70 ms each on an H200, and 0.79 ms four at a time; larger batches only need more memory.
MAX_ELEMENTS = 2**28
MIN_STRIP = 32  # rows; smaller strips save little, because the stored maps remain and their edges are computed twice

Rows = Callable[[int, int], Tensor]
"""Returns rows [start, stop) of a feature map, [B, C, rows, W]."""


@dataclass(frozen=True)
class Strips:
    """Configuration of strip decoding: the last `levels` of the decoder run in strips of `rows` rows."""

    rows: int
    levels: int


def decode(decoder: Decoder, z: Tensor, max_memory: int | None = None) -> Tensor:
    """Decodes latents [B, Z, h, w] to images [B, 3, H, W] in batches, one by one or in strips, as memory allows.

    Args:
        max_memory: limit of the activations in bytes; OutOfMemory is raised if strips cannot meet it. None: 4 GiB if strips can meet that
            (up to 2400 x 2400 pixels in bfloat16), otherwise the minimum that strips need.
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
    return max(1, min(latent[0], MAX_ELEMENTS // largest, (max_memory or DEFAULT_MEMORY) // one))


def choose_strips(decoder: Decoder, latent: Sequence[int], dtype: torch.dtype, max_memory: int | None) -> Strips | None:
    """Returns strips that keep one image within `max_memory`, in as few levels and as large as possible; None if none are needed."""
    bound = max_memory or DEFAULT_MEMORY
    if decode_bytes(decoder, latent[2:], dtype) <= bound:
        return None
    height, width = (side * stride(decoder) for side in latent[2:])
    choices = [Strips(rows, levels) for levels in range(1, len(decoder.levels) + 1) for rows in strip_heights(height)]
    needs = {strips: decode_bytes(decoder, latent[2:], dtype, strips) for strips in choices}
    least = min(choices, key=needs.__getitem__)
    if max_memory is not None and needs[least] > bound:
        raise OutOfMemory(
            f"max_memory must be at least {needs[least] / 2**30:.2f} GiB to decode {width}x{height} pixels in"
            f" {str(dtype).removeprefix('torch.')} in strips; got {bound / 2**30:.2f} GiB. Increase it or choose a smaller image."
        )
    return next((strips for strips in choices if needs[strips] <= bound), least)


def strip_heights(height: int) -> Iterator[int]:
    """Yields heights of strips: a half, a quarter and so on, down to MIN_STRIP."""
    while height > MIN_STRIP:
        height = max(height // 2, MIN_STRIP)
        yield height


def stride(decoder: Decoder) -> int:
    return 2 ** sum(isinstance(level.resize, Upsample) for level in decoder.stack)


# --- memory


def decode_bytes(decoder: Decoder, latent: Sequence[int], dtype: torch.dtype, strips: Strips | None = None) -> int:
    """Returns the peak size in bytes of the activations of one image, at once or in strips, without convolution workspaces.

    With Infinity's decoder in bfloat16: 1298 bytes per pixel at once; in strips, 658 bytes per pixel plus the size of a strip.
    """
    height, width = latent
    most = source = 0  # in elements; the source is the input of a level before upsampling
    for number, level in enumerate(decoder.stack):
        conv = level.stack[0].conv1
        inner, outer = conv.in_channels, conv.out_channels
        if runs_whole(decoder, number, height, strips):
            # Plain torch upsamples in two steps, which never dominates. Then the caller holds the input, and a block has three maps at a
            # time: input, normalized and output, or two summands and their sum.
            made = source + 2 * inner * height * width if source else 0
            most = max(most, made, max(2 * inner + outer, inner + 3 * outer) * height * width)
        else:
            assert strips is not None
            most = max(most, source + 2 * outer * height * width + strip_elements(inner, outer, dtype) * (strips.rows + 4) * width)
        source = outer * height * width
        if isinstance(level.resize, Upsample):
            height, width = 2 * height, 2 * width
    return most * dtype.itemsize + 3 * height * width * (dtype.itemsize + 4)  # plus the image, also in float32


def merged_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Returns the size in bytes of the merged 4x4 upsampling weights, which a GPU stores in addition to the 3x3 weights."""
    convs = [part.conv for part in module.modules() if isinstance(part, Upsample)]
    return sum(16 * conv.in_channels * conv.out_channels for conv in convs) * dtype.itemsize


def strip_elements(inner: int, outer: int, dtype: torch.dtype) -> int:
    """Returns the elements per pixel of a strip: the level's input upsampled, convolved and normalized, with statistics in float32."""
    wide = 1 + 4 // dtype.itemsize
    return max(2 * inner + max(wide * inner, inner + outer), (2 + wide) * outer)


def runs_whole(decoder: Decoder, number: int, height: int, strips: Strips | None) -> bool:
    """Returns True if a level runs without strips: early levels, small ones, and those with attention over all pixels."""
    if strips is None or height <= strips.rows or number < len(decoder.levels) - strips.levels:
        return True
    return any(isinstance(part, PixelAttention) for part in decoder.stack[number].attention)


# --- strips


def decode_tiled(decoder: Decoder, z: Tensor, strips: Strips) -> Tensor:
    """Decodes like `decoder.at_once`, but in strips."""
    x = decoder.middle(decoder.conv_in(to_channels_last(z)))
    resize: Upsample | None = None
    for number, level in enumerate(decoder.stack):
        if runs_whole(decoder, number, x.shape[2] * (1 if resize is None else 2), strips):
            x, _ = level.features_and_sums(x if resize is None else resize(x))
        else:
            x = level_in_strips(level, x, resize, strips.rows)
        resize = level.resize if isinstance(level.resize, Upsample) else None
    if fusable(x):
        return decoder.image(x)  # the kernel stores no intermediate map
    statistics = Statistics(decoder.norm_out)
    out = x.new_empty(len(x), 3, *x.shape[2:])
    for top, bottom in strip_bounds(x.shape[2], strips.rows):
        statistics.add(x[:, :, top:bottom])
    norm = statistics.norm()
    for top, bottom in strip_bounds(x.shape[2], strips.rows):
        out[:, :, top:bottom] = convolved(decoder.conv_out, normalize_rows(norm, x), top, bottom, x.shape[2])
    return out


def level_in_strips(level: Level, source: Tensor, resize: Upsample | None, rows: int) -> Tensor:
    blocks = level.stack
    given = upsampled(source, resize) if resize is not None else lambda top, bottom: source[:, :, top:bottom]
    factor = 1 if resize is None else 2
    height, width = factor * source.shape[2], factor * source.shape[3]
    parts = list(strip_bounds(height, rows))
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


def strip_bounds(height: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yields the first row of every strip and the row after its last."""
    return ((top, min(top + rows, height)) for top in range(0, height, rows))


def rows_around(rows: Rows, top: int, bottom: int, height: int) -> tuple[Tensor, int]:
    """Returns these rows with up to one more on either side, and the index of the first one."""
    above = max(top - 1, 0)
    return rows(above, min(bottom + 1, height)), above


def convolved(conv: nn.Conv2d, rows: Rows, top: int, bottom: int, height: int) -> Tensor:
    """Computes rows of a 3x3 convolution with zero padding."""
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
    """Returns the normalized rows of a map, or of a window of it that starts at row `first`."""
    return lambda top, bottom: norm(x[:, :, top - first : bottom - first])


class Norm(NamedTuple):
    """Group norm with given statistics, and SiLU."""

    mean: Tensor  # [B, C], float32
    scale: Tensor
    bias: Tensor  # [C]

    def __call__(self, x: Tensor) -> Tensor:
        if fusable(x):
            return kernels.centered_silu(x, self.mean, self.scale, self.bias)
        y = torch.sub(x, self.mean[:, :, None, None])  # promoted to float32
        y.mul_(self.scale[:, :, None, None]).add_(self.bias[:, None, None])
        return F.silu(y, inplace=True).to(x.dtype)


class Statistics:
    """Running mean and variance of the channels of a map, updated strip by strip, from which the group norm follows."""

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
