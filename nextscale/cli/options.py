"""The options that commands share, in groups. Modules of the command line import torch only where they need it, so that help is quick."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from ..errors import PromptError, SettingError
from . import parse

if TYPE_CHECKING:
    import torch

    from ..loading import ModelSpec
    from ..methods import Method
    from ..pipeline import Pipeline
    from ..stage import Schedule

DEFAULT_MODEL = "nano"  # part of the package
SAMPLING, MACHINE, OUTPUT = "Guidance and sampling", "Model and machine", "Output"  # panels of the help


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces each argument that is a dataclass of annotated options by its fields, for typer, and builds the dataclass for the call."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    flat = []
    for name, parameter in inspect.signature(command).parameters.items():
        for one in inspect.signature(groups[name]).parameters.values() if name in groups else [parameter]:
            annotation = get_type_hints(groups.get(name, command), include_extras=True)[one.name]
            flat.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotation))

    @wraps(command)
    def run(**values: Any) -> None:
        built = {name: group(**{field.name: values.pop(field.name) for field in fields(group)}) for name, group in groups.items()}
        command(**values, **built)

    run.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in flat}
    return run


def option(names: str, metavar: str | None, help: str, panel: str | None = None, default: bool | str = True, **limits: Any) -> Any:
    """Returns a typer option. `default`: the text that the help shows for it."""
    return typer.Option(*names.split(), metavar=metavar, help=help, rich_help_panel=panel, show_default=default, **limits)


def list_methods(asked: list[str] | None) -> list[str] | None:
    if asked and "help" in asked:
        from .show import method_table, result_console

        result_console().print(method_table())
        raise typer.Exit
    return asked


# --- single options

MODEL_HELP, DEFAULT_DEVICE = "Model name from `nextscale models`.", "cuda if there is a GPU"
ModelName = Annotated[str, option("--model -m", "NAME", MODEL_HELP)]
Device = Annotated[str | None, option("--device", "DEVICE", "cpu, cuda, cuda:N or mps.", MACHINE, DEFAULT_DEVICE)]
DtypeName = Literal["float32", "bfloat16", "float16"]
Dtype = Annotated[DtypeName | None, option("--dtype", "DTYPE", "float32, bfloat16 or float16.", MACHINE, "bfloat16, on the CPU float32")]
Quantize = Annotated[
    Literal["fp8", "int8"] | None,
    option("--quantize", "FORMAT", "8-bit weights: fp8 (faster on Ada, Hopper and newer GPUs) or int8 (less memory anywhere).", MACHINE),
]
KvDtype = Annotated[Literal["int8"] | None, option("--kv-dtype", "DTYPE", "KV cache type: int8 halves it.", MACHINE, "as --dtype")]
Offline = Annotated[bool, option("--offline", None, "Do not download; fail if a file is missing.", MACHINE)]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="METHOD",
        show_default="dense",
        callback=list_methods,
        help="Acceleration method with settings, such as skip:last=2 or auto:speedup=2; join several with +. `--method help` lists them.",
    ),
]
Batch = Annotated[int, option("--batch", "N", "Images per batch; smaller batches need less memory.", MACHINE, min=1)]
Size = Annotated[
    str | None,
    option("--size", "SIZE", "WIDTHxHEIGHT, a side, a pixel budget such as 0.25M, or FlexVAR's token maps 1,2,6x4.", None, "model"),
]
Aspect = Annotated[str | None, option("--aspect", "W:H", "Aspect ratio such as 16:9.")]
SEED = "Seed of the first image; each further image takes the next one."
Seed = Annotated[int, option("--seed", "N", SEED, min=0)]
NumImages = Annotated[int, option("--num-images -n", "N", "Images per prompt.", min=1)]
PROMPT_FILES = "Prompt file: .txt with one per line, .jsonl with prompts or captions, or .tar of images and captions."
PromptsFile = Annotated[Path | None, option("--prompts", "FILE", PROMPT_FILES)]
Limit = Annotated[int | None, option("--limit", "N", "Number of prompts from FILE, evenly spread.", None, "all", min=1)]
Force = Annotated[bool, option("--force", None, "Overwrite existing files.", OUTPUT)]
Json = Annotated[bool, option("--json", None, "Print JSON.", OUTPUT)]
Ray = Annotated[
    str | None,
    option(
        "--ray",
        "ADDRESS,workers=N,gpus=X",
        "Run on a Ray cluster: alone it starts one on this machine, auto or an address joins one. workers: actors; gpus: share of each.",
        MACHINE,
    ),
]


def out_option(metavar: str, help: str, default: bool | str = True) -> Any:
    return option("--out", metavar, help, OUTPUT, default)


# --- groups


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a file."""

    prompts_file: PromptsFile = None
    limit: Limit = None

    def read_file(self) -> list[str]:
        if self.prompts_file is not None:
            from ..offline.prompts import read_prompts

            return read_prompts(self.prompts_file, self.limit)
        if self.limit is not None:
            raise SettingError("--limit needs a prompt file. Add --prompts FILE.")
        return []


@dataclass(frozen=True)
class PromptOptions(PromptFile):
    """Prompts on the command line, then prompts of a file."""

    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            show_default=False,
            help="Text, or a class number for class models; -1 (no class) needs -- before it: -m var-d16 -- 207 -1",
        ),
    ] = None

    def read(self) -> list[str]:
        prompts = [*(self.prompts or ()), *self.read_file()]
        if not prompts:
            raise PromptError('no prompt given. Write one, such as "a red apple", or pass --prompts FILE.')
        from ..loading import MODELS

        for word in self.prompts or ():
            if word in MODELS:  # most likely -m is missing
                raise PromptError(
                    f"prompt {word!r} is the name of a model. Choose the model with -m {word}, or use the word in a sentence."
                )
        return prompts


@dataclass(frozen=True)
class SizeOptions:
    """The size of images."""

    size: Size = None
    aspect: Aspect = None

    def schedule(self, spec: ModelSpec) -> Schedule:
        return parse.choose_schedule(spec.settings.schedules, self.size, self.aspect)


@dataclass(frozen=True)
class ImageOptions(SizeOptions):
    """Size, seed and number of images."""

    seed: Seed = 0
    num_images: NumImages = 1


@dataclass(frozen=True)
class FileOptions:
    """The files of a model, and its types."""

    weights: Annotated[Path | None, option("--weights", "PATH", "File or folder of the model weights.", MACHINE)] = None
    tokenizer: Annotated[Path | None, option("--tokenizer", "PATH", "File of the tokenizer weights.", MACHINE)] = None
    text_encoder: Annotated[str | None, option("--text-encoder", "PATH", "Text encoder: folder, file or hub name.", MACHINE)] = None
    offload_text: Annotated[
        bool,
        option("--offload-text", None, "Keep the text encoder on the GPU only while it encodes: less memory, slower.", MACHINE),
    ] = False
    offline: Offline = False
    dtype: Dtype = None
    quantize: Quantize = None
    kv_dtype: KvDtype = None

    def open(self, name: str, device: str | None, **more: Any) -> Pipeline:
        """Loads a pipeline. `more`: arguments of `nextscale.load` without an option."""
        from .. import loading

        given = {field.name: getattr(self, field.name) for field in fields(FileOptions)}
        given |= {"download": not given.pop("offline"), "dtype": parse.torch_dtype(self.dtype)}
        return loading.load(name, device=device, **given, **more)


@dataclass(frozen=True)
class ModelOptions(FileOptions):
    """The model, its files, and where it runs."""

    model: ModelName = DEFAULT_MODEL
    device: Device = None
    lora: Annotated[
        list[str] | None,
        option("--lora", "PATH[:SCALE]", "LoRA adapter: PEFT folder, safetensors file or hub name. Repeat it to stack several.", MACHINE),
    ] = None

    @property
    def spec(self) -> ModelSpec:
        from ..loading.presets import model_spec

        return model_spec(self.model)

    @property
    def torch_device(self) -> torch.device:
        from ..device import choose_device

        return choose_device(self.device)

    def resolved(self, method: Method, schedule: Schedule, batch: int) -> tuple[Method, str]:
        return parse.resolved_method(method, self.spec, schedule, batch, self.torch_device, self.weights)

    def load(self, **more: Any) -> Pipeline:
        """Loads the pipeline with its adapters. `more`: arguments of `nextscale.load` without an option."""
        return self.adapted(self.open(self.model, self.device, **more))

    def adapted(self, pipe: Pipeline) -> Pipeline:
        for path, scale in map(parse.parse_lora, self.lora or ()):
            pipe.load_lora(path, scale=scale)
        return pipe


@dataclass(frozen=True)
class SamplingOptions:
    """Guidance, and how codes are sampled from logits."""

    guidance: Annotated[
        str | None,
        option(
            "--guidance",
            "SCALE",
            "CFG scale in the model's published form; 3,3,1 is one scale per stage; constant:4 and ramp:2.5 choose the form.",
            SAMPLING,
            "as published",
        ),
    ] = None
    negative: Annotated[str | None, option("--negative", "PROMPT", "Negative prompt or class.", SAMPLING)] = None
    temperature: Annotated[str | None, option("--temperature", "NUMBER", "Below 1 is less random; 1,1,0.5 is one per stage.", SAMPLING)] = (
        None
    )
    top_k: Annotated[int | None, option("--top-k", "K", "Sample from the K most likely codes; 0 means all.", SAMPLING)] = None
    top_p: Annotated[
        float | None, option("--top-p", "P", "Sample from the most likely codes of total probability P; 0 means all.", SAMPLING)
    ] = None
    sampling: Annotated[
        list[str] | None,
        option(
            "--sampling",
            "KEY=VALUE",
            "greedy: take the most likely code. smooth=false (VAR, HART, STAR): sample codes instead of mixing them."
            " refine=false (STAR): sample late stages at once. as_released (STAR): all images of a batch read the first prompt."
            " positive_prompt (Infinity): add words for good faces to prompts about people.",
            SAMPLING,
        ),
    ] = None

    @property
    def switches(self) -> dict[str, bool]:
        return parse.parse_switches(self.sampling or ())

    @property
    def as_released(self) -> bool:
        return self.switches.get("as_released", False)

    @property
    def changes(self) -> dict[str, Any]:
        """The options that were given, with their values."""
        return {name: value for name, value in vars(self).items() if value is not None and name != "sampling"} | self.switches

    def prompt(self, text: str, spec: ModelSpec) -> str | int:
        from ..text import with_positive_prompt

        positive = self.switches.get("positive_prompt", False)
        if positive and spec.text_encoder is None:
            raise SettingError(f"--sampling positive_prompt needs a text model; {spec.name} takes class numbers. Leave it out.")
        return parse.parse_prompt(with_positive_prompt(text) if positive else text, spec)

    def call_arguments(self, spec: ModelSpec, schedule: Schedule) -> dict[str, Any]:
        """Returns the arguments of the pipeline call; wrong values are refused before the weights are loaded."""
        from ..guidance import resolve_guidance

        guidance, switches = parse.parse_guidance(self.guidance, spec.settings.guidance), self.switches
        resolve_guidance(guidance, spec.settings.guidance).scales(schedule)
        given = {"temperature": parse.parse_per_stage("--temperature", self.temperature), "top_k": self.top_k, "top_p": self.top_p}
        given |= {"greedy": switches.get("greedy") or None, "smooth": switches.get("smooth")}
        sampling: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if "refine" in switches:
            if spec.settings.sampling.refine is None:
                raise SettingError(
                    f"--sampling refine needs a model that samples late stages in rounds; {spec.name} does not. Leave it out."
                )
            sampling |= {} if switches["refine"] else {"refine": None}
        spec.settings.sampling.changed(**sampling).check(schedule)
        return {"guidance": guidance, "negative": self.negative and parse.parse_prompt(self.negative, spec), **sampling}
