"""nextscale: fast, exact inference for next-scale image generators."""

from .accel import Method, SkipStages, StagePlan
from .errors import NextscaleError
from .guidance import ConstantGuidance, Guidance, RampGuidance, StageGuidance
from .loading import load
from .pipeline import Output, Pipeline, Preview
from .presets import MODELS, ModelSpec
from .report import Report
from .sampling import Sampling
from .stage import Schedule, Stage, Tokens
from .text import T5Encoder, TextFeatures

__all__ = [
    "MODELS",
    "ConstantGuidance",
    "Guidance",
    "Method",
    "ModelSpec",
    "NextscaleError",
    "Output",
    "Pipeline",
    "Preview",
    "RampGuidance",
    "Report",
    "Sampling",
    "Schedule",
    "SkipStages",
    "Stage",
    "StageGuidance",
    "StagePlan",
    "T5Encoder",
    "TextFeatures",
    "Tokens",
    "load",
]
