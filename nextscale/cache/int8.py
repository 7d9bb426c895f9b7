"""Keys and values that are kept in 8 bits: half of what half precision takes.

Every stage reads what its layer holds, as it was computed but for the rounding, from the workspace that all layers share; so attention
is the same as ever, and a stage sees its own keys and values unrounded. A whole number from -127 to 127 per channel and one scale per
token and head: values of a head are about as large as one another, and where they are normally distributed the rounding is 0.6 % of
their spread, a quarter of that of an 8-bit float (e4m3). It needs no support of the hardware.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from .. import kernels
from ..kernels.reference import Int8Tokens, dequantize_tokens_reference, quantize_tokens_reference
from .attention import CacheView
from .layer import LayerCache
from .spec import CacheSpec
from .workspace import Pair, Workspace

SCALE = torch.float32


@dataclass(frozen=True)
class QuantizedSpec(CacheSpec):
    """Sizes where layers hold 8 bits of a channel and all stages read from the workspace."""

    def workspace_entries(self, rows: int) -> int:
        """Room for the stage that reads most over all of its rows, however many there are at first."""
        read = accumulate(max(stage.tokens) for stage in self.stages)
        return max((stage.rows * tokens for stage, tokens in zip(self.stages, read, strict=True)), default=0)

    def _workspace_bytes(self, stage: int) -> int:
        return self._pair_bytes(1, self.workspace_entries(self.rows))

    def _held_bytes(self, rows: int, tokens: int) -> int:
        return 2 * rows * self.heads * (self.head_dim + SCALE.itemsize) * tokens

    def allocate(self, tokens: int) -> Int8Tokens:
        shape = (self.rows, tokens, self.heads, self.head_dim)
        codes = (torch.empty(shape, dtype=torch.int8, device=self.device) for _ in range(2))
        return Int8Tokens(*codes, *(torch.empty(shape[:3], dtype=SCALE, device=self.device) for _ in range(2)))


class QuantizedLayerCache(LayerCache):
    """Every token of every stage, in 8 bits."""

    reads_workspace = True

    def _read(self, keys: Tensor, values: Tensor) -> Pair:
        restore = kernels.dequantize_tokens if kernels.available(keys) else dequantize_tokens_reference
        restore(Int8Tokens(*self._held()), *(target.narrow(1, 0, self.length) for target in (keys, values)))
        return keys, values

    def written(self, view: CacheView, new: int) -> None:
        if self._pair is None:  # the last stage, whose keys nothing reads again
            return
        store = kernels.quantize_tokens if kernels.available(view.keys) else quantize_tokens_reference
        store(view.keys, view.values, view.start, new, Int8Tokens(*self._pair))


def plain_cache(spec: CacheSpec, workspace: Workspace) -> LayerCache:
    """The cache of a layer that keeps all of its tokens, as the sizes say."""
    return QuantizedLayerCache(spec, workspace) if isinstance(spec, QuantizedSpec) else LayerCache(spec, workspace)
