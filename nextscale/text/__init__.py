"""Text encoders: convert prompts to features."""

from .clip import ClipEncoder
from .encoder import Encoder, TextEncoder
from .features import TextFeatures
from .qwen import SYSTEM_PROMPT, QwenEncoder
from .random_features import RandomEncoder
from .t5 import T5Encoder, with_positive_prompt
from .words import WordTextEncoder

__all__ = [
    "SYSTEM_PROMPT",
    "ClipEncoder",
    "Encoder",
    "QwenEncoder",
    "RandomEncoder",
    "T5Encoder",
    "TextEncoder",
    "TextFeatures",
    "WordTextEncoder",
    "with_positive_prompt",
]
