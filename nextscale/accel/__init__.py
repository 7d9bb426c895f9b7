"""Acceleration methods. `Method` is dense generation; a paper's method overrides the parts it changes."""

from .auto import Auto
from .code import CoDe
from .combine import Combined
from .drop_guidance import DropGuidance
from .fastvar import FastVAR
from .litevar import LiteVAR
from .method import DENSE, Method, MethodRun, Plans, RunSetup, Span, StagePlan, TokenCounts
from .pitome import PiToMe
from .registry import METHODS, MethodLike, resolve_method
from .scalekv import ScaleKV
from .situation import Situation
from .skip import SkipStages
from .skipvar import SkipVAR
from .sparsevar import SparseVAR
from .sparsevit import SparseViT
from .sparvar import SparVAR
from .stagevar import StageVAR
from .tome import ToMe
from .zipvl import ZipVL

__all__ = [
    "DENSE",
    "METHODS",
    "Auto",
    "CoDe",
    "Combined",
    "DropGuidance",
    "FastVAR",
    "LiteVAR",
    "Method",
    "MethodLike",
    "MethodRun",
    "PiToMe",
    "Plans",
    "RunSetup",
    "ScaleKV",
    "Situation",
    "SkipStages",
    "SkipVAR",
    "Span",
    "SparVAR",
    "SparseVAR",
    "SparseViT",
    "StagePlan",
    "StageVAR",
    "ToMe",
    "TokenCounts",
    "ZipVL",
    "resolve_method",
]
