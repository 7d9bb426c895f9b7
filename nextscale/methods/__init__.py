"""Acceleration methods. `Method` is dense generation; a paper's method overrides the parts it changes."""

from .auto import Auto
from .combine import Combined
from .drop_guidance import DropGuidance
from .fastvar import FastVAR
from .method import DENSE, Method, MethodRun, Plans, RunSetup, SelectionContext, Span, StagePlan, TokenCounts
from .near_mask import NearMask
from .registry import METHODS, MethodLike, method_names, resolve_method
from .skip import SkipStages
from .sparsevar import SparseVAR
from .stagevar import StageVAR

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
    "NearMask",
    "Plans",
    "RunSetup",
    "SelectionContext",
    "SkipStages",
    "Span",
    "SparseVAR",
    "StagePlan",
    "StageVAR",
    "TokenCounts",
    "method_names",
    "resolve_method",
]
