"""Tokenizers: convert images to codes and codes to images."""

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
