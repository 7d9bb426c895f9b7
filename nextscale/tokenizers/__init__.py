"""Tokenizers: images to codes and back."""

from .flexvar import FlexVarTokenizer, FlexVarTokenizerConfig
from .infinity import InfinityTokenizer, InfinityTokenizerConfig
from .var import VarTokenizer, VarTokenizerConfig

__all__ = [
    "FlexVarTokenizer",
    "FlexVarTokenizerConfig",
    "InfinityTokenizer",
    "InfinityTokenizerConfig",
    "VarTokenizer",
    "VarTokenizerConfig",
]
