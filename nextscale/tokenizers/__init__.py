"""Tokenizers: images to codes and back."""

from .flexvar import FlexVarTokenizer, FlexVarTokenizerConfig
from .infinity import InfinityTokenizer, InfinityTokenizerConfig
from .var import HartTokenizer, HartTokenizerConfig, VarTokenizer, VarTokenizerConfig

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
