"""Prompts to features: the text encoders and the form in which models take their output."""

from .features import TextFeatures
from .t5 import T5Encoder, with_positive_prompt

__all__ = ["T5Encoder", "TextFeatures", "with_positive_prompt"]
