"""Pipelines from a model's name and its published files."""

from ..pipeline import Pipeline
from .load import load
from .presets import MODELS, ModelSpec
from .saved import Pretrained

Pipeline.persistence = Pretrained()  # a pipeline knows that it can be saved, and not how

__all__ = ["MODELS", "ModelSpec", "load"]
