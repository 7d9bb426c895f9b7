"""Backbones: one file each, sharing blocks, rotary positions and the base class."""

from .base import NextScaleModel
from .flexvar import FlexVar, FlexVarConfig
from .hart import Hart, HartConfig
from .infinity import Infinity, InfinityConfig
from .star import Star, StarConfig
from .var import Var, VarConfig

__all__ = [
    "FlexVar",
    "FlexVarConfig",
    "Hart",
    "HartConfig",
    "Infinity",
    "InfinityConfig",
    "NextScaleModel",
    "Star",
    "StarConfig",
    "Var",
    "VarConfig",
]
