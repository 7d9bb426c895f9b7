"""Methods that the papers compare with. They register through the entry points "nextscale.methods" of this package."""

from .aredit import aredit
from .code import CoDe
from .litevar import LiteVAR
from .pitome import PiToMe
from .scalekv import ScaleKV
from .skipvar import SkipVAR
from .sparsevar_variants import SparseVARVariants
from .sparsevit import SparseViT
from .sparvar import SparVAR
from .stagevar_variants import StageVARVariants
from .tome import ToMe
from .zipvl import ZipVL

__all__ = [
    "CoDe",
    "LiteVAR",
    "PiToMe",
    "ScaleKV",
    "SkipVAR",
    "SparVAR",
    "SparseVARVariants",
    "SparseViT",
    "StageVARVariants",
    "ToMe",
    "ZipVL",
    "aredit",
]
