"""Methods that the papers compare with. They register through the entry points "nextscale.methods" of this package."""

from .litevar import LiteVAR
from .pitome import PiToMe
from .sparsevit import SparseViT
from .sparvar import SparVAR
from .stagevar_variants import StageVARVariants
from .zipvl import ZipVL

__all__ = ["LiteVAR", "PiToMe", "SparVAR", "SparseViT", "StageVARVariants", "ZipVL"]
