"""Acceleration methods. `Method` is dense generation; a paper's method overrides the parts it changes."""

from .auto import Auto
from .code import CoDe
from .combine import Combined
from .drop_guidance import DropGuidance
from .fastvar import FastVAR
from .method import DENSE, Method, MethodRun, Plans, RunSetup, SelectionContext, Span, StagePlan, TokenCounts
from .registry import METHODS, MethodLike, method_names, resolve_method
from .scalekv import ScaleKV
from .skip import SkipStages
from .skipvar import SkipVAR
from .sparsevar import SparseVAR
from .stagevar import StageVAR
from .tome import ToMe

__all__ = [
    "DENSE",
    "METHODS",
    "Auto",
    "CoDe",
    "Combined",
    "DropGuidance",
    "FastVAR",
    "Method",
    "MethodLike",
    "MethodRun",
    "Plans",
    "RunSetup",
    "ScaleKV",
    "SelectionContext",
    "SkipStages",
    "SkipVAR",
    "Span",
    "SparseVAR",
    "StagePlan",
    "StageVAR",
    "ToMe",
    "TokenCounts",
    "method_names",
    "resolve_method",
]
