"""Per-request state: KV cache per layer, and outputs of earlier stages."""

from .attention import AttentionCall, CacheView, real_entries
from .compute_mask import ComputedCells
from .int8 import QuantizedLayerCache, QuantizedSpec, plain_cache
from .layer import LayerCache, NoCache, row_count
from .spec import CacheSpec, CompressedSpec, StageKeys
from .stage_memory import StageMemory
from .workspace import Workspace, copy_wide, in_widest

__all__ = [
    "AttentionCall",
    "CacheSpec",
    "CacheView",
    "CompressedSpec",
    "ComputedCells",
    "LayerCache",
    "NoCache",
    "QuantizedLayerCache",
    "QuantizedSpec",
    "StageKeys",
    "StageMemory",
    "Workspace",
    "copy_wide",
    "in_widest",
    "plain_cache",
    "real_entries",
    "row_count",
]
