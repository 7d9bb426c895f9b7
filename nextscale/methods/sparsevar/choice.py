"""Which cells of a stage are computed, and from which of them the others take their output."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...stage import Stage, Tokens
from ..method import TokenCounts

UNKNOWN = TokenCounts(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which cells of a stage enter the network."""

    excluded: Tensor  # [B, cells], of low frequency; anchors among them are kept all the same
    kept: Tensor  # [B, cells]
    counts: Tensor  # [B], of kept cells
    known: TokenCounts = UNKNOWN  # what the host knows of them

    @property
    def num_tokens(self) -> int:
        """The largest count, or a bucket size above it."""
        return self.known.most

    @property
    def reduces(self) -> bool:
        """Whether any image leaves out a cell."""
        return self.known.fewest < self.kept.shape[1]

    @property
    def ragged(self) -> bool:
        """Whether images keep different numbers of tokens."""
        return self.known.fewest < self.known.most

    def tokens(self, stage: Stage) -> Tokens:
        """The kept tokens of every image, in raster order."""
        # Bucket sizes that are too small are captured too, from images that need more, and never replayed.
        keep = self.counts.clamp(max=self.num_tokens) if self.ragged else self.num_tokens
        _, tokens = Tokens(stage).top(self.kept.float(), keep, self.num_tokens)
        return tokens
