"""Tokenizers: images to codes and back."""

from .flexvar import FlexVarTokenizer, FlexVarTokenizerConfig
from .hart import HartTokenizer, HartTokenizerConfig
from .infinity import InfinityTokenizer, InfinityTokenizerConfig
from .var import VarTokenizer, VarTokenizerConfig

__all__ = [
    "FlexVarTokenizer",
    "FlexVarTokenizerConfig",
    "HartTokenizer",
    "HartTokenizerConfig",
    "InfinityTokenizer",
    "InfinityTokenizerConfig",
    "VarTokenizer",
    "VarTokenizerConfig",
]
