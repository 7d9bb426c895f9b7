"""Acceleration methods. `Method` is dense generation; a paper's method overrides the parts it changes."""

from .auto import Auto
from .combine import Combined
from .drop_guidance import DropGuidance
from .fastvar import FastVAR
from .method import DENSE, Method, MethodRun, Plans, RunSetup, Span, StagePlan, TokenCounts
from .registry import METHODS, MethodLike, resolve_method
from .situation import Situation
from .skip import SkipStages
from .sparsevar import SparseVAR
from .stagevar import StageVAR
from .tome import ToMe

__all__ = [
    "DENSE",
    "METHODS",
    "Auto",
    "Combined",
    "DropGuidance",
    "FastVAR",
    "Method",
    "MethodLike",
    "MethodRun",
    "Plans",
    "RunSetup",
    "Situation",
    "SkipStages",
    "Span",
    "SparseVAR",
    "StagePlan",
    "StageVAR",
    "ToMe",
    "TokenCounts",
    "resolve_method",
]
