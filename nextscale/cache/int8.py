"""int8 KV cache, half the size of bfloat16.

Keys and values have one scale per token and head. Every stage dequantizes the cache of a layer into the workspace that all layers share,
and attends to its own keys and values before they are quantized. For normally distributed values the rounding error is 0.6 % of their
standard deviation, a quarter of e4m3's, and no hardware support is needed.
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
    """Sizes of an int8 KV cache that all stages read through the workspace."""

    def workspace_entries(self, rows: int) -> int:
        """Returns the maximum number of entries that a stage reads over all of its rows; `rows` is ignored."""
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
    """KV cache of one layer in int8."""

    reads_workspace = True

    def _read(self, keys: Tensor, values: Tensor) -> Pair:
        restore = kernels.dequantize_tokens if kernels.available(keys) else dequantize_tokens_reference
        restore(Int8Tokens(*self._held()), *(target.narrow(1, 0, self.length) for target in (keys, values)))
        return keys, values

    def written(self, view: CacheView, new: int) -> None:
        if self._pair is None:  # the last stage's keys are not read again
            return
        store = kernels.quantize_tokens if kernels.available(view.keys) else quantize_tokens_reference
        store(view.keys, view.values, view.start, new, Int8Tokens(*self._pair))


def plain_cache(spec: CacheSpec, workspace: Workspace) -> LayerCache:
    """Returns the KV cache of a layer that keeps all tokens, in the format of `spec`."""
    return QuantizedLayerCache(spec, workspace) if isinstance(spec, QuantizedSpec) else LayerCache(spec, workspace)
