"""nextscale: fast, exact inference for next-scale image generators."""

from .errors import NextscaleError
from .guidance import ConstantGuidance, Guidance, RampGuidance, StageGuidance
from .loading import MODELS, ModelSpec, load
from .methods import (
    Auto,
    CoDe,
    DropGuidance,
    FastVAR,
    Method,
    MethodRun,
    ScaleKV,
    SkipStages,
    SkipVAR,
    SparseVAR,
    StagePlan,
    StageVAR,
    ToMe,
)
from .pipeline import Output, Pipeline, Preview
from .profiles import Profile
from .report import Report
from .sampling import Sampling
from .stage import Schedule, Stage, Tokens
from .text import T5Encoder, TextFeatures

__all__ = [
    "MODELS",
    "Auto",
    "CoDe",
    "ConstantGuidance",
    "DropGuidance",
    "FastVAR",
    "Guidance",
    "Method",
    "MethodRun",
    "ModelSpec",
    "NextscaleError",
    "Output",
    "Pipeline",
    "Preview",
    "Profile",
    "RampGuidance",
    "Report",
    "Sampling",
    "ScaleKV",
    "Schedule",
    "SkipStages",
    "SkipVAR",
    "SparseVAR",
    "Stage",
    "StageGuidance",
    "StagePlan",
    "StageVAR",
    "T5Encoder",
    "TextFeatures",
    "ToMe",
    "Tokens",
    "load",
]
