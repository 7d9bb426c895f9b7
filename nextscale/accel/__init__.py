"""Acceleration methods. `Method` is dense generation; a paper's method overrides the parts it changes."""

from .code import CoDe
from .combine import Combined
from .fastvar import FastVAR
from .litevar import LiteVAR
from .method import DENSE, ImageGroup, Method, MethodRun, Plans, RunSetup, Span, StagePlan
from .pitome import PiToMe
from .registry import METHODS, MethodLike, resolve_method
from .scalekv import ScaleKV
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
    "CoDe",
    "Combined",
    "FastVAR",
    "ImageGroup",
    "LiteVAR",
    "Method",
    "MethodLike",
    "MethodRun",
    "PiToMe",
    "Plans",
    "RunSetup",
    "ScaleKV",
    "SkipStages",
    "SkipVAR",
    "Span",
    "SparVAR",
    "SparseVAR",
    "SparseViT",
    "StagePlan",
    "StageVAR",
    "ToMe",
    "ZipVL",
    "resolve_method",
]
