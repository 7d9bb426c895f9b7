"""The canvas: adds each stage's codes to the latent, and makes the next stage's input from it.

Residual canvases (VAR, STAR, HART, Infinity) keep a sum at the final size to which every stage adds. The replaced canvas (FlexVAR) keeps
the latest map only.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .stage import Schedule, Stage, Tokens, resize_area

# --- protocols of tokenizers


class LatentDecoder(Protocol):
    def decode(self, latent: Tensor) -> Tensor:
        """Decodes a latent [B, Z, h, w] to images [B, 3, H, W], float32."""
        ...


class CodebookTokenizer(LatentDecoder, Protocol):
    @property
    def codebook(self) -> Tensor:
        """Vectors of all codes, [V, Z]."""
        ...


class BlendingTokenizer(CodebookTokenizer, Protocol):
    def blend(self, grid: Tensor, stage: int, stages: int) -> Tensor:
        """Returns the addition of a stage's upsampled map [B, Z, H, W] to the latent."""
        ...


class BitTokenizer(LatentDecoder, Protocol):
    @property
    def bits(self) -> int:
        """Number of bits per latent cell."""
        ...

    @property
    def cells(self) -> int:
        """Number of latent cells along one side of a token."""
        ...

    @property
    def device(self) -> torch.device: ...

    def signs(self, bits: Tensor) -> Tensor:
        """Returns bits 0 and 1 as vectors of unit length per latent cell."""
        ...

    def spread_cells(self, tokens: Tensor) -> Tensor:
        """Returns maps of tokens [B, bits per token, h, w] as maps of latent cells [B, bits, cells * h, cells * w]."""
        ...

    def gather_cells(self, latent: Tensor) -> Tensor:
        """Reverses `spread_cells`."""
        ...


# --- canvases


class Canvas:
    """Base of all canvases, whose stages consist of codes only, unless a subclass adds more."""

    tokenizer: LatentDecoder
    latent: Tensor  # [B, Z, H, W], float32, the input of the decoder

    def input(self, stage: Stage) -> Tensor | None:
        """Returns the input of the transformer at `stage`, [B, cells, Z]; None at the first stage, which starts from the condition."""
        raise NotImplementedError

    def vectors(self, codes: Tensor) -> Tensor:
        """Returns the latent vectors [B, N, Z] of codes [B, N, ...]."""
        raise NotImplementedError

    def grid(self, codes: Tensor, tokens: Tokens) -> Tensor:
        """Returns codes of some tokens as the stage's map [B, Z, h, w]; an absent token has the value that contributes nothing."""
        return on_grid(self.vectors(codes), tokens)

    def write(self, grid: Tensor, stage: Stage) -> None:
        """Puts a stage's map on the canvas."""
        raise NotImplementedError

    def add(self, codes: Tensor, tokens: Tokens) -> None:
        """Puts a stage's codes on the canvas; tokens that are absent contribute nothing."""
        self.write(self.grid(codes, tokens), tokens.stage)

    def add_residual(self, values: Tensor, tokens: Tokens) -> None:
        """Adds continuous values [B, N, Z] to the last stage's codes; only where the model has any (HART)."""
        raise TypeError(f"{type(self).__name__} takes codes alone, no continuous values")

    def skip(self, stage: Stage) -> None:
        """Skips this stage: the latent stays as it is."""

    def decode(self) -> Tensor:
        """Returns the images [B, 3, H, W] as generated so far; FlexVAR's grow with the stage."""
        return self.tokenizer.decode(self.latent)


def to_map(rows: Tensor, stage: Stage) -> Tensor:
    """Returns values [B, cells, Z] as a map [B, Z, h, w]."""
    return rows.transpose(1, 2).unflatten(2, stage.size)


def to_rows(grid: Tensor) -> Tensor:
    """Returns a map [B, Z, h, w] as values [B, h * w, Z]."""
    return grid.flatten(2).transpose(1, 2)


def to_channels_last(grid: Tensor) -> Tensor:
    """Returns the memory format for resizing: channels last on a GPU, where torch then resizes with a thread per number instead of a thread
    per pixel.

    32 maps of 64 x 64 with 32 channels take 0.1 ms in this format on an H200.
    """
    return grid.contiguous(memory_format=torch.channels_last if grid.is_cuda else torch.contiguous_format)


def on_grid(rows: Tensor, tokens: Tokens) -> Tensor:
    """Returns values [B, N, Z] of some tokens as the stage's map [B, Z, h, w], zero if a token is absent."""
    if tokens.index is None:  # all cells are present; no zeros are needed
        return to_map(rows, tokens.stage)
    return to_map(tokens.scatter(rows, rows.new_zeros(rows.shape[0], tokens.stage.cells, rows.shape[2])), tokens.stage)


class ResidualCanvas(Canvas):
    """VAR, STAR: each stage's code vectors are upsampled, convolved and added."""

    tokenizer: BlendingTokenizer

    def __init__(self, tokenizer: BlendingTokenizer, schedule: Schedule, batch: int) -> None:
        self.tokenizer = tokenizer
        self.schedule = schedule
        codebook = tokenizer.codebook
        self.latent = torch.zeros(batch, codebook.shape[1], *schedule.grid, device=codebook.device)

    def input(self, stage: Stage) -> Tensor | None:
        return None if stage.index == 0 else to_rows(resize_area(self.latent, stage.size))

    def vectors(self, codes: Tensor) -> Tensor:
        """Returns the vectors of code numbers [B, N], or of mixtures over the codebook [B, N, V]."""
        return codes @ self.tokenizer.codebook if codes.is_floating_point() else self.tokenizer.codebook[codes]

    def write(self, grid: Tensor, stage: Stage) -> None:
        if not stage.last:
            grid = F.interpolate(grid, size=self.schedule.grid, mode="bicubic")
        self.latent = self.latent + self.blended(grid, stage)

    def blended(self, grid: Tensor, stage: Stage) -> Tensor:
        return self.tokenizer.blend(grid, stage.index, len(self.schedule))


class HybridCanvas(ResidualCanvas):
    """HART: the last stage's code vectors are added as they are, and continuous values on top of them."""

    def blended(self, grid: Tensor, stage: Stage) -> Tensor:
        return grid if stage.last else super().blended(grid, stage)

    def add_residual(self, values: Tensor, tokens: Tokens) -> None:
        self.latent = self.latent + on_grid(values, tokens)


class BitCanvas(Canvas):
    """Infinity: each stage's bits are signs of equal size, upsampled and added; no codebook."""

    tokenizer: BitTokenizer

    def __init__(self, tokenizer: BitTokenizer, schedule: Schedule, batch: int) -> None:
        self.tokenizer = tokenizer
        height, width = schedule.grid
        size = (batch, tokenizer.bits, tokenizer.cells * height, tokenizer.cells * width)
        self.latent = to_channels_last(torch.zeros(size, device=tokenizer.device))

    def input(self, stage: Stage) -> Tensor | None:
        if stage.index == 0:
            return None
        size = (self.tokenizer.cells * stage.height, self.tokenizer.cells * stage.width)
        return to_rows(self.tokenizer.gather_cells(F.interpolate(self.latent, size=size, mode="bilinear")))

    def vectors(self, codes: Tensor) -> Tensor:
        """Returns the vectors of bits [B, N, bits per token], 0 or 1; the cells of a token are side by side."""
        return self.tokenizer.signs(codes)

    def write(self, grid: Tensor, stage: Stage) -> None:
        signs = to_channels_last(self.tokenizer.spread_cells(grid))
        if not stage.last:
            signs = F.interpolate(signs, size=self.latent.shape[2:], mode="bilinear")
        self.latent = self.latent + signs


class ReplacedCanvas(Canvas):
    """FlexVAR: each stage generates the whole image again, so only the latest map counts."""

    def __init__(self, tokenizer: CodebookTokenizer, schedule: Schedule, batch: int) -> None:
        self.tokenizer = tokenizer
        self.codebook = F.normalize(tokenizer.codebook, dim=-1)
        self.latent = torch.zeros(batch, self.codebook.shape[1], *schedule[0].size, device=self.codebook.device)

    def input(self, stage: Stage) -> Tensor | None:
        return None if stage.index == 0 else to_rows(self._resized(stage))

    def vectors(self, codes: Tensor) -> Tensor:
        """Returns the vectors of code numbers [B, N]."""
        return self.codebook[codes]

    def grid(self, codes: Tensor, tokens: Tokens) -> Tensor:
        """Puts the map on the canvas; absent tokens keep the previous estimate."""
        previous = to_rows(self._resized(tokens.stage)) if tokens.index is not None else self.latent
        return to_map(tokens.scatter(self.vectors(codes), previous), tokens.stage)

    def write(self, grid: Tensor, stage: Stage) -> None:
        self.latent = grid

    def skip(self, stage: Stage) -> None:
        self.latent = self._resized(stage)

    def _resized(self, stage: Stage) -> Tensor:
        if self.latent.shape[2:] == stage.size:
            return self.latent
        return F.interpolate(self.latent, size=stage.size, mode="bicubic")
