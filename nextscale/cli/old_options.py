"""The options that commands share: each is defined once here, as a type, and those that belong together form a group."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, overload

import torch
import typer
from typer.models import OptionInfo

from ..batching.ray_cluster import LOCAL, RaySettings
from ..errors import PromptError, SettingError
from ..loading.load import choose_device, load
from ..loading.presets import NANO, ModelSpec, model_spec
from ..methods.method import Method
from ..models.base import KvDtype
from ..models.quantized import FORMATS, Quantize
from ..offline.prompts import EvalPrompt, read_eval_prompts
from ..pipeline import Pipeline
from ..stage import Schedule
from .old_parse import choose_schedule, require_no_model_names, settled_method

VARIABLE = "NEXTSCALE_METRICS"
DEFAULT_MODEL = NANO.name  # it comes with the package
SAMPLING, MACHINE, OUTPUT = "Guidance and sampling", "Model and machine", "Output"  # panels of the help


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Format(StrEnum):
    fp8 = "fp8"
    int8 = "int8"


DTYPES = ", ".join(Dtype)


class KeyValueDtype(StrEnum):
    int8 = "int8"


def as_quantize(format: Format | None) -> Quantize | None:
    return next((known for known in FORMATS if known == format), None)


@overload
def as_torch_dtype(dtype: Dtype) -> torch.dtype: ...
@overload
def as_torch_dtype(dtype: None) -> None: ...
def as_torch_dtype(dtype: Dtype | None) -> torch.dtype | None:
    return None if dtype is None else getattr(torch, dtype.value)


def as_kv_dtype(dtype: KeyValueDtype | None) -> KvDtype | None:
    return None if dtype is None else "int8"


# Every option says its own name: typer 0.27 takes the metavar for it otherwise where they are the same word, and wants --SIZE.

MODEL_HELP = "A name from `nextscale models`"
ModelName = Annotated[str, typer.Option("--model", "-m", metavar="NAME", help=f"{MODEL_HELP}.")]
ModelNames = Annotated[list[str] | None, typer.Option("--model", "-m", metavar="NAME", help=f"{MODEL_HELP}; can be repeated.")]

PromptWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROMPT",
        show_default=False,
        help="Text, or a class number for class models. -1 means no class and needs -- before it: -m var-d16 -- 207 -1",
    ),
]
PromptsFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="Prompts: one per line (# starts a comment), a .jsonl file with prompts or captions, or a .tar shard of images and captions.",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", metavar="N", min=1, show_default="all", help="Number of prompts to take from FILE, evenly spread over it."),
]
ImagesPerPrompt = Annotated[int, typer.Option("--images", metavar="N", min=1, help="Images per prompt.")]
SEED_HELP = "Seed of the first image; each further image takes the next one."
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help=SEED_HELP)]
SeedOrRandom = Annotated[int | None, typer.Option("--seed", metavar="N", min=0, show_default="random", help=SEED_HELP)]

SIZE_HELP = "HEIGHTxWIDTH in pixels, the side of a square, or a pixel budget such as 0.25M"
Size = Annotated[str | None, typer.Option("--size", metavar="SIZE", show_default="the model's own", help=f"{SIZE_HELP}.")]
Sizes = Annotated[
    list[str] | None, typer.Option("--size", metavar="SIZE", show_default="the model's own", help=f"{SIZE_HELP}; can be repeated.")
]
Aspect = Annotated[str | None, typer.Option("--aspect", metavar="W:H", help="Aspect ratio such as 16:9.")]
Sides = Annotated[
    str | None,
    typer.Option("--sides", metavar="LIST", help="FlexVAR: the token maps of all stages, such as 1,2,3,5,8 or 1,2,4x6; replaces --size."),
]

CombinedMethods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="METHOD",
        show_default="dense",
        help="An acceleration method with its settings, such as skip:last=2 or auto:speedup=2; repeat it, or join with +, to combine them.",
    ),
]


def compared_methods(default: str, lists: str = "") -> OptionInfo:
    """--method where each one is a row of a comparison. `lists`: names that stand for several methods."""
    named = f", or {lists}" if lists else ""
    text = f"A method to compare with dense generation, such as fastvar+skip:last=1{named}; repeat it for more rows."
    return typer.Option("--method", metavar="METHOD", show_default=default, help=text)


def out_option(metavar: str, text: str, default: bool | str = True) -> OptionInfo:
    return typer.Option("--out", metavar=metavar, rich_help_panel=OUTPUT, show_default=default, help=text)


Force = Annotated[bool, typer.Option("--force", rich_help_panel=OUTPUT, help="Overwrite existing files.")]

Weights = Annotated[
    Path | None, typer.Option("--weights", metavar="PATH", rich_help_panel=MACHINE, help="File or folder of the model's weights.")
]
TokenizerFile = Annotated[
    Path | None, typer.Option("--tokenizer", metavar="PATH", rich_help_panel=MACHINE, help="File of the tokenizer's weights.")
]
TextEncoderSource = Annotated[
    str | None,
    typer.Option("--text-encoder", metavar="PATH", rich_help_panel=MACHINE, help="Folder, file or hub name of the text encoder."),
]
OffloadText = Annotated[
    bool,
    typer.Option(
        "--offload-text",
        rich_help_panel=MACHINE,
        help="Keep the text encoder on the GPU only while it encodes: less memory, slower prompts.",
    ),
]
Offline = Annotated[bool, typer.Option("--offline", rich_help_panel=MACHINE, help="Fetch nothing: what is missing is an error.")]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", rich_help_panel=MACHINE, show_default="cuda if there is a GPU", help="cpu, cuda or cuda:N."),
]
DtypeName = Annotated[
    Dtype | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        rich_help_panel=MACHINE,
        show_default="bfloat16, on the CPU float32",
        help=f"Type of the weights: {DTYPES}.",
    ),
]
QuantizeName = Annotated[
    Format | None,
    typer.Option(
        "--quantize",
        metavar="FORMAT",
        rich_help_panel=MACHINE,
        show_default="as --dtype says",
        help="Blocks with weights of eight bits: fp8 (Ada, Hopper and newer GPUs: less memory and faster) or int8 (anywhere: less memory).",
    ),
]
KvDtypeName = Annotated[
    KeyValueDtype | None,
    typer.Option(
        "--kv-dtype",
        metavar="DTYPE",
        rich_help_panel=MACHINE,
        show_default="that of the model",
        help="Type in which keys and values are kept: int8 halves them.",
    ),
]
BATCH_HELP = "Images per batch; a smaller one needs less memory"
Batch = Annotated[int, typer.Option("--batch", metavar="N", min=1, rich_help_panel=MACHINE, help=f"{BATCH_HELP}.")]
Batches = Annotated[
    list[int] | None,
    typer.Option("--batch", metavar="N", min=1, rich_help_panel=MACHINE, show_default="1", help=f"{BATCH_HELP}; can be repeated."),
]
Metrics = Annotated[
    Path | None,
    typer.Option(
        "--metrics", metavar="FOLDER", rich_help_panel=MACHINE, show_default=VARIABLE, help="Folder of the networks besides LPIPS."
    ),
]


@dataclass(frozen=True)
class RayOptions:
    """Whether it runs on a Ray cluster, and on how much of it."""

    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            rich_help_panel=MACHINE,
            help=f"Run on a Ray cluster: alone or with {LOCAL} it starts one on this machine, auto or an address joins one.",
        ),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=1, rich_help_panel=MACHINE, show_default="as GPUs allow", help="With --ray: actors."),
    ] = None
    gpus: Annotated[
        float, typer.Option("--gpus", metavar="SHARE", rich_help_panel=MACHINE, help="With --ray: of each actor; 0.25 puts four on a GPU.")
    ] = 1.0

    def settings(self) -> RaySettings | None:
        if self.ray is None:
            if self.workers is not None or self.gpus != 1.0:
                raise SettingError("--workers and --gpus say how many actors a Ray cluster runs: add --ray, or leave them out")
            return None
        return RaySettings(self.ray, self.workers, self.gpus)


@dataclass(frozen=True)
class PromptFile:
    """Prompts of a file."""

    prompts_file: PromptsFile = None
    limit: Limit = None

    def read_file(self) -> list[EvalPrompt]:
        """The prompts of the file; none without a file."""
        if self.prompts_file is not None:
            return read_eval_prompts(self.prompts_file, self.limit)
        if self.limit is not None:
            raise SettingError("--limit takes prompts from a file: add --prompts FILE, or leave it out")
        return []


@dataclass(frozen=True)
class PromptOptions(PromptFile):
    """Prompts of the command line, then those of a file."""

    prompts: PromptWords = None
    images: ImagesPerPrompt = 1

    def read(self) -> list[str]:
        words = self.prompts or []
        require_no_model_names(words)
        prompts = [*words, *(prompt.text for prompt in self.read_file())]
        if not prompts:
            raise PromptError("no prompt: write one, or pass --prompts FILE")
        return prompts


@dataclass(frozen=True)
class SizeOptions:
    """The size of images, in one of three forms."""

    size: Size = None
    aspect: Aspect = None
    sides: Sides = None

    @property
    def given(self) -> bool:
        return (self.size, self.aspect, self.sides) != (None, None, None)

    def schedule(self, spec: ModelSpec) -> Schedule:
        return choose_schedule(spec.settings.schedules, self.size, self.aspect, self.sides)


@dataclass(frozen=True)
class ModelOptions:
    """Which model, its files, and where it runs."""

    model: ModelName = DEFAULT_MODEL
    weights: Weights = None
    tokenizer: TokenizerFile = None
    text_encoder: TextEncoderSource = None
    offload_text: OffloadText = False
    offline: Offline = False
    device: Device = None
    dtype: DtypeName = None
    quantize: QuantizeName = None
    kv_dtype: KvDtypeName = None

    @property
    def spec(self) -> ModelSpec:
        return model_spec(self.model)

    @property
    def torch_device(self) -> torch.device:
        return choose_device(self.device)

    def settled(self, method: Method, schedule: Schedule, batch: int) -> Method:
        """The method that such a request runs; SettingError if its settings do not go with the model or the size."""
        return settled_method(method, self.spec, schedule, batch, self.torch_device, self.weights)

    def load(self, **more: Any) -> Pipeline:
        """`more`: arguments of `nextscale.load` that are no shared options."""
        return load(
            self.model,
            weights=self.weights,
            tokenizer=self.tokenizer,
            text_encoder=self.text_encoder,
            offload_text=self.offload_text,
            download=not self.offline,
            device=self.device,
            dtype=as_torch_dtype(self.dtype),
            quantize=as_quantize(self.quantize),
            kv_dtype=as_kv_dtype(self.kv_dtype),
            **more,
        )


def given_by_user(context: typer.Context, name: str) -> bool:
    """Whether the command line names this option, though it may be with the default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
