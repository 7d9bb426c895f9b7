"""The image while it is drawn: how a stage's codes change the latent, and what the next stage sees of it.

Residual canvases (VAR, STAR, HART, Infinity) keep a sum at the final size to which every stage adds; the replaced canvas (FlexVAR)
keeps the latest map only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .stage import Schedule, Stage, Tokens

if TYPE_CHECKING:
    from .tokenizers.base import Tokenizer
    from .tokenizers.flexvar import FlexVarTokenizer
    from .tokenizers.infinity import InfinityTokenizer
    from .tokenizers.var import VarTokenizer


class Canvas(Protocol):
    latent: Tensor  # [B, Z, H, W], float32: what the tokenizer decodes

    def input(self, stage: Stage) -> Tensor | None:
        """What the transformer reads at `stage`: [B, cells, Z], or None at the first stage, which starts from the condition."""
        ...

    def vectors(self, codes: Tensor) -> Tensor:
        """What codes [B, N, ...] stand for in the latent, [B, N, Z]."""
        ...

    def add(self, codes: Tensor, tokens: Tokens) -> None:
        """Draws a stage's codes; tokens that are absent contribute nothing."""
        ...

    def add_residual(self, values: Tensor, tokens: Tokens) -> None:
        """Adds continuous values [B, N, Z] to what the last stage's codes drew; only where the model has any (HART)."""
        ...

    def skip(self, stage: Stage) -> None:
        """The stage is not drawn."""
        ...

    def decode(self) -> Tensor:
        """The images [B, 3, H, W] of what is drawn so far; FlexVAR's grow with the stage."""
        ...


def to_map(rows: Tensor, stage: Stage) -> Tensor:
    """[B, cells, Z] to [B, Z, h, w]."""
    return rows.transpose(1, 2).unflatten(2, stage.size)


def to_rows(grid: Tensor) -> Tensor:
    """[B, Z, h, w] to [B, h * w, Z]."""
    return grid.flatten(2).transpose(1, 2)


def on_grid(rows: Tensor, tokens: Tokens) -> Tensor:
    """Values [B, N, Z] of some tokens as the stage's map [B, Z, h, w], zero where a token is absent."""
    return to_map(tokens.scatter(rows, rows.new_zeros(rows.shape[0], tokens.stage.cells, rows.shape[2])), tokens.stage)


class DiscreteCanvas:
    """Base of the canvases whose stages consist of codes alone."""

    tokenizer: Tokenizer
    latent: Tensor

    def add_residual(self, values: Tensor, tokens: Tokens) -> None:
        raise TypeError(f"{type(self).__name__} is drawn with codes alone")

    def decode(self) -> Tensor:
        return self.tokenizer.decode(self.latent)


class ResidualCanvas(DiscreteCanvas):
    """VAR, STAR: each stage's code vectors are upsampled, convolved and added."""

    tokenizer: VarTokenizer

    def __init__(self, tokenizer: VarTokenizer, schedule: Schedule, batch: int) -> None:
        self.tokenizer = tokenizer
        self.schedule = schedule
        codebook = tokenizer.codebook
        self.latent = torch.zeros(batch, codebook.shape[1], *schedule.grid, device=codebook.device)

    def input(self, stage: Stage) -> Tensor | None:
        return None if stage.index == 0 else to_rows(F.interpolate(self.latent, size=stage.size, mode="area"))

    def vectors(self, codes: Tensor) -> Tensor:
        """Code numbers [B, N], or mixtures over the codebook [B, N, V]."""
        return codes @ self.tokenizer.codebook if codes.is_floating_point() else self.tokenizer.codebook[codes]

    def add(self, codes: Tensor, tokens: Tokens) -> None:
        grid = on_grid(self.vectors(codes), tokens)
        if not tokens.stage.last:
            grid = F.interpolate(grid, size=self.schedule.grid, mode="bicubic")
        self.latent = self.latent + self.blended(grid, tokens.stage)

    def blended(self, grid: Tensor, stage: Stage) -> Tensor:
        return self.tokenizer.blend(grid, stage.index, len(self.schedule))

    def skip(self, stage: Stage) -> None:
        """What earlier stages drew stays as it is."""


class HybridCanvas(ResidualCanvas):
    """HART: the last stage's code vectors are added as they are, and continuous values on top of them."""

    def blended(self, grid: Tensor, stage: Stage) -> Tensor:
        return grid if stage.last else super().blended(grid, stage)

    def add_residual(self, values: Tensor, tokens: Tokens) -> None:
        self.latent = self.latent + on_grid(values, tokens)


class BitCanvas(DiscreteCanvas):
    """Infinity: each stage's bits are signs of equal size, upsampled and added; no codebook."""

    tokenizer: InfinityTokenizer

    def __init__(self, tokenizer: InfinityTokenizer, schedule: Schedule, batch: int) -> None:
        self.tokenizer = tokenizer
        height, width = schedule.grid
        self.latent = torch.zeros(batch, tokenizer.config.bits, tokenizer.cells * height, tokenizer.cells * width, device=tokenizer.device)

    def input(self, stage: Stage) -> Tensor | None:
        if stage.index == 0:
            return None
        size = (self.tokenizer.cells * stage.height, self.tokenizer.cells * stage.width)
        return to_rows(self.tokenizer.gather_cells(F.interpolate(self.latent, size=size, mode="bilinear")))

    def vectors(self, codes: Tensor) -> Tensor:
        """Bits [B, N, bits per token], 0 or 1; the cells of a token side by side."""
        return self.tokenizer.signs(codes)

    def add(self, codes: Tensor, tokens: Tokens) -> None:
        signs = self.tokenizer.spread_cells(on_grid(self.vectors(codes), tokens))
        if not tokens.stage.last:
            signs = F.interpolate(signs, size=self.latent.shape[2:], mode="bilinear")
        self.latent = self.latent + signs

    def skip(self, stage: Stage) -> None:
        """What earlier stages drew stays as it is."""


class ReplacedCanvas(DiscreteCanvas):
    """FlexVAR: each stage draws the whole image anew, so only the latest map counts."""

    def __init__(self, tokenizer: FlexVarTokenizer, schedule: Schedule, batch: int) -> None:
        self.tokenizer = tokenizer
        self.codebook = F.normalize(tokenizer.codebook, dim=-1)
        self.latent = torch.zeros(batch, self.codebook.shape[1], *schedule[0].size, device=self.codebook.device)

    def input(self, stage: Stage) -> Tensor | None:
        return None if stage.index == 0 else to_rows(self._resized(stage))

    def vectors(self, codes: Tensor) -> Tensor:
        """Code numbers [B, N]."""
        return self.codebook[codes]

    def add(self, codes: Tensor, tokens: Tokens) -> None:
        """Absent tokens keep the previous estimate."""
        previous = to_rows(self._resized(tokens.stage)) if tokens.index is not None else self.latent
        self.latent = to_map(tokens.scatter(self.vectors(codes), previous), tokens.stage)

    def skip(self, stage: Stage) -> None:
        self.latent = self._resized(stage)

    def _resized(self, stage: Stage) -> Tensor:
        if self.latent.shape[2:] == stage.size:
            return self.latent
        return F.interpolate(self.latent, size=stage.size, mode="bicubic")
