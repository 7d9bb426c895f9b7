"""What a request remembers: keys and values per layer, and outputs of earlier stages."""

from .compute_mask import ComputedCells
from .int8 import QuantizedLayerCache, QuantizedSpec, plain_cache
from .layer import DenseLayerCache, LayerCache, NoCache, Slot, real_entries, row_count
from .spec import CacheSpec, StageKeys
from .stage_memory import StageMemory
from .workspace import Workspace, copy_wide, in_widest

__all__ = [
    "CacheSpec",
    "ComputedCells",
    "DenseLayerCache",
    "LayerCache",
    "NoCache",
    "QuantizedLayerCache",
    "QuantizedSpec",
    "Slot",
    "StageKeys",
    "StageMemory",
    "Workspace",
    "copy_wide",
    "in_widest",
    "plain_cache",
    "real_entries",
    "row_count",
]
