"""Backbones: one file each, sharing blocks, rotary positions and the base class."""

from .base import NextScaleModel
from .flexvar import FlexVar, FlexVarConfig
from .infinity import Infinity, InfinityConfig
from .var import Var, VarConfig

__all__ = ["FlexVar", "FlexVarConfig", "Infinity", "InfinityConfig", "NextScaleModel", "Var", "VarConfig"]
