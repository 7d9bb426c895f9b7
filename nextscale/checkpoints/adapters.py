"""LoRA files: PEFT folders, and single safetensors files of PEFT, diffusers, kohya and research programs. Start at `read_adapter`."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError
from ..io import regular, write_text
from ..serialization import listed
from .files import DOWNLOAD_AGAIN, open_checkpoint, read_object
from .layout import Layout
from .weights import write_whole

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SINGLE_FILES = (WEIGHTS, "pytorch_lora_weights.safetensors")  # names below a folder
METADATA = "lora_adapter_metadata"  # key of diffusers' settings in a file
PREFIXES = ("base_model.model.", "transformer.", "model.", "module.")  # that programs put before the published names
KOHYA = "lora_unet_"  # before a name whose dots are underscores
MAX_RANK = 4096
MAX_PATTERN, MAX_REPEATS = 200, 3  # characters and repetitions in a pattern

TENSOR = re.compile(
    r"(?P<module>.+?)\.(?:(?P<down>lora_A|lora_down)|(?P<up>lora_B|lora_up)|(?P<magnitude>lora_magnitude_vector|dora_scale)|(?P<alpha>alpha))"
    r"(?:\.(?!weight$)(?P<name>[^.]+))?(?P<weight>\.weight)?"
)
PLAIN: dict[str, tuple[Any, ...]] = {  # settings of PEFT that change the result, with the values at which a file is plain LoRA
    "bias": ("none",),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
    "lora_bias": (None, False),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", None),  # others also change the base weights
}


@dataclass(frozen=True, eq=False)
class LowRank:
    """The update of one layer: scale * up @ down, added to its weight [out, in]."""

    down: Tensor  # [r, in]
    up: Tensor  # [out, r]
    scale: float = 1.0
    magnitude: Tensor | None = None  # [out], of DoRA: the norms that the rows of the sum get

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    def fitted(self, shape: tuple[int, ...]) -> "LowRank | None":
        """Returns the update for a weight of this shape, transposed if the file has it so; None if it does not fit."""
        down, up = self.down, self.up
        if not (shape == (up.shape[0], down.shape[1]) and up.shape[1] == down.shape[0]):
            down, up = down.T, up.T
        fits = shape == (up.shape[0], down.shape[1]) and up.shape[1] == down.shape[0] <= MAX_RANK
        fits &= self.magnitude is None or self.magnitude.shape == shape[:1]
        return LowRank(down.contiguous(), up.contiguous(), self.scale, self.magnitude) if fits else None


@dataclass(frozen=True, eq=False)
class AdapterFile:
    """Low-rank updates by the published name of the layer, as a file names it."""

    path: Path
    sha256: str
    modules: dict[str, LowRank]


def read_adapter(path: str | Path) -> AdapterFile:
    """Reads a LoRA from a folder or a safetensors file. Raises CheckpointError for anything else, with all keys that are not understood."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Pass a LoRA folder or safetensors file, or the name of a repository on the hub.")
    file = next((folder / name for name in SINGLE_FILES if (folder / name).is_file()), None) if path.is_dir() else path
    if file is None:
        raise CheckpointError(f"{path} must hold {' or '.join(SINGLE_FILES)}. Pass the folder or the safetensors file of one adapter.")
    tensors, metadata = read_tensors(file)
    config = peft_config(folder / CONFIG) if file.name == WEIGHTS and (folder / CONFIG).is_file() else diffusers_config(metadata, file)
    with file.open("rb") as content:
        digest = file_digest(content, "sha256").hexdigest()
    return AdapterFile(path, digest, grouped(tensors, config, file))


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors and the metadata of a safetensors file."""
    try:
        with regular(file).open("rb") as content:
            head = content.read(9)
        if head and head[8:] != b"{":
            raise CheckpointError(
                f"{file} must be a safetensors file. Convert a torch file first: nextscale convert -m MODEL --part lora IN OUT.safetensors"
            )
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            return {name: opened.get_tensor(name) for name in names}, dict(opened.metadata() or {})
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file ({error}). {DOWNLOAD_AGAIN}") from error


def peft_config(file: Path) -> dict[str, Any]:
    """Returns the settings of a PEFT folder. Raises CheckpointError for those that plain LoRA does not have."""
    config = read_object(file)
    if config.get("peft_type", "LORA") != "LORA":
        raise CheckpointError(f"{file}: peft_type must be LORA; got {config['peft_type']!r:.80}.")
    refused = [f"{name}={config[name]!r:.60}" for name, plain in PLAIN.items() if name in config and config[name] not in plain]
    if refused:
        raise CheckpointError(f"{file}: unsupported settings {listed(refused)}. Save the adapter as plain LoRA.")
    return config


def diffusers_config(metadata: Mapping[str, str], file: Path) -> dict[str, Any]:
    """Returns the settings in a single file of diffusers; empty for other files."""
    try:
        found = json.loads(metadata.get(METADATA, "{}"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the metadata {METADATA} must be JSON ({error}).") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: the metadata {METADATA} must be a JSON object; got {type(found).__name__}.")
    return {key.removeprefix("transformer."): value for key, value in found.items()}


def grouped(tensors: Mapping[str, Tensor], config: Mapping[str, Any], file: Path) -> dict[str, LowRank]:
    """Returns the updates by module from the tensors of a file."""
    parts: dict[str, dict[str, Tensor]] = {}
    foreign, adapters = [], set[str]()
    for key, tensor in tensors.items():
        match = TENSOR.fullmatch(key)
        if match is None:
            foreign.append(key)
            continue
        adapters.add(match["name"] or "")
        kind = next(kind for kind in ("down", "up", "magnitude", "alpha") if match[kind])
        parts.setdefault(match["module"], {})[kind] = checked(
            key, tensor, dims={"down": 2, "up": 2, "magnitude": 1, "alpha": 0}[kind], file=file
        )
    if foreign:
        raise CheckpointError(f"{file} has {len(foreign)} tensors that are not LoRA: {listed(sorted(foreign))}.")
    if len(adapters) > 1:
        raise CheckpointError(f"{file} has several adapters: {listed(sorted(adapters))}. Save each in a file of its own.")
    if half := sorted(module for module, part in parts.items() if not {"down", "up"} <= part.keys()):
        raise CheckpointError(f"{file} lacks lora_A or lora_B of {len(half)} modules: {listed(half)}.")
    if not parts:
        raise CheckpointError(f"{file} has no LoRA tensors.")
    return {
        module: LowRank(part["down"], part["up"], scale_of(module, part, config, file), part.get("magnitude"))
        for module, part in parts.items()
    }


def checked(key: str, tensor: Tensor, dims: int, file: Path) -> Tensor:
    """Returns a tensor in float32. Raises CheckpointError for other shapes, types and values that are not finite."""
    if dims == 1 and tensor.ndim == 2 and 1 in tensor.shape:  # kohya keeps magnitudes as a column
        tensor = tensor.reshape(-1)
    if dims == 0 and tensor.numel() == 1:
        tensor = tensor.reshape(())
    if tensor.ndim != dims or 0 in tensor.shape or not (tensor.is_floating_point() or dims == 0):
        raise CheckpointError(f"{file}: {key} must be floats with {dims} dimensions; got {tensor.dtype} {list(tensor.shape)}.")
    tensor = tensor.to(torch.float32)
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(f"{file}: {key} has values that are not finite.")
    return tensor


def scale_of(module: str, part: Mapping[str, Tensor], config: Mapping[str, Any], file: Path) -> float:
    """Returns alpha / r of a module, or alpha / sqrt(r); 1 if the file does not tell alpha."""
    rank = min(part["down"].shape)  # research programs store the transpose
    if "alpha" in part:
        return float(part["alpha"]) / rank
    alpha = pattern_value(config.get("alpha_pattern"), module, config.get("lora_alpha"), file)
    told = pattern_value(config.get("rank_pattern"), module, config.get("r"), file)
    if told is not None and told not in part["down"].shape:
        raise CheckpointError(f"{file}: the rank of {module} must be {told:g}, as in its settings; got {rank}.")
    if alpha is None:
        return 1.0
    return alpha / (math.sqrt(rank) if config.get("use_rslora") is True else rank)


def pattern_value(patterns: Any, module: str, default: Any, file: Path) -> float | None:
    """Returns the value of the first pattern that matches the end of a module's name, as PEFT does."""
    if not isinstance(patterns, dict | None):
        raise CheckpointError(f"{file}: rank_pattern and alpha_pattern must be objects; got {patterns!r:.80}.")
    default = next((value for pattern, value in (patterns or {}).items() if matches(pattern, module)), default)
    if default is None:
        return None
    if isinstance(default, bool) or not isinstance(default, int | float) or not math.isfinite(default):
        raise CheckpointError(f"{file}: ranks and alphas must be numbers; got {default!r:.80} for {module}.")
    return float(default)


def matches(pattern: str, module: str) -> bool:
    """Returns True if PEFT would apply a pattern to a module. Only patterns that are quick on every name are accepted."""
    repeats = re.findall(r"(.)[*+{?]", pattern)
    if len(pattern) > MAX_PATTERN or len(repeats) > MAX_REPEATS or ")" in repeats:
        raise CheckpointError(f"rank_pattern and alpha_pattern must be simple patterns; got {pattern!r:.80}. Use the names of modules.")
    try:
        return re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module) is not None
    except re.error as error:
        raise CheckpointError(f"rank_pattern and alpha_pattern must be regular expressions; got {pattern!r:.80} ({error}).") from error


def published_module(name: str, known: Mapping[str, str]) -> str | None:
    """Returns the published name of a module in a file, without what programs put before it; None if the model has no such module.

    known: from published names with underscores for dots to published names.
    """
    if name.startswith(KOHYA):
        return known.get(name.removeprefix(KOHYA))
    while True:
        if known.get(name.replace(".", "_")) == name:
            return name
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if prefix is None:
            return None
        name = name.removeprefix(prefix)


def write_peft(folder: Path, modules: Mapping[str, LowRank], *, alpha: float, model: str) -> None:
    """Writes a folder that PEFT reads. All modules must have the same rank."""
    rank = next(iter(modules.values())).rank
    config = {
        "base_model_name_or_path": model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(modules),
    }
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for module, update in modules.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = update.down.detach().cpu().clone()
        tensors[f"base_model.model.{module}.lora_B.weight"] = update.up.detach().cpu().clone()
    write_whole(tensors, folder / WEIGHTS)
    write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", folder / CONFIG)


def convert_adapter(source: str | Path, target: Path) -> int:
    """Writes a LoRA from a torch file as safetensors, with the same names. Returns the number of tensors."""
    checkpoint = open_checkpoint(source, Layout(wrappers=(("state_dict",), ("lora",))))
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in checkpoint.tensors(checkpoint.entries)}
    grouped(tensors, {}, Path(source))
    write_whole(tensors, target)
    return len(tensors)


def underscored(names: Iterable[str]) -> dict[str, str]:
    """Returns names by their form with underscores for dots, as kohya writes them."""
    return {name.replace(".", "_"): name for name in names}
