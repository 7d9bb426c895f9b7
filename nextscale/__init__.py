"""nextscale: fast, exact inference for next-scale image generators."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

    from .edit_inputs import EditOptions, expanded, mask_from_alpha
    from .errors import NextscaleError
    from .guidance import ConstantGuidance, Guidance, RampGuidance, StageGuidance
    from .loading import MODELS, ModelSpec
    from .loading.load import load
    from .methods import (
        Auto,
        DropGuidance,
        FastVAR,
        Method,
        MethodRun,
        NearMask,
        SkipStages,
        SparseVAR,
        StagePlan,
        StageVAR,
    )
    from .pipeline import Output, Pipeline, Preview
    from .profiles import Profile
    from .report import Report
    from .sampling import Sampling
    from .stage import Schedule, Stage, Tokens
    from .text import T5Encoder, TextFeatures

MODULES = {  # of the public names; each is imported when a name of it is first used, so that the command line starts without torch
    "edit_inputs": ("EditOptions", "expanded", "mask_from_alpha"),
    "errors": ("NextscaleError",),
    "guidance": ("ConstantGuidance", "Guidance", "RampGuidance", "StageGuidance"),
    "loading": ("MODELS", "ModelSpec", "load"),
    "pipeline": ("Output", "Pipeline", "Preview"),
    "profiles": ("Profile",),
    "report": ("Report",),
    "sampling": ("Sampling",),
    "stage": ("Schedule", "Stage", "Tokens"),
    "text": ("T5Encoder", "TextFeatures"),
}

__all__ = [
    "MODELS",
    "Auto",
    "ConstantGuidance",
    "DropGuidance",
    "EditOptions",
    "FastVAR",
    "Guidance",
    "Method",
    "MethodRun",
    "ModelSpec",
    "NearMask",
    "NextscaleError",
    "Output",
    "Pipeline",
    "Preview",
    "Profile",
    "RampGuidance",
    "Report",
    "Sampling",
    "Schedule",
    "SkipStages",
    "SparseVAR",
    "Stage",
    "StageGuidance",
    "StagePlan",
    "StageVAR",
    "T5Encoder",
    "TextFeatures",
    "Tokens",
    "expanded",
    "load",
    "mask_from_alpha",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version(__name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in MODULES.items() if name in names), "methods")
    if module != "errors":
        import_module(".loading", __name__)  # pipelines can then be saved
    return getattr(import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return [*__all__, *globals()]
