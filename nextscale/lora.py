"""LoRA adapters of a pipeline, fused into the weights in place, so that captured CUDA graphs stay valid."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .checkpoints import open_checkpoint
from .checkpoints.adapters import CONFIG, SINGLE_FILES, AdapterFile, LowRank, published_module, read_adapter, underscored
from .checkpoints.hub import snapshot
from .checkpoints.layout import PublishedTensor, published_places
from .errors import CheckpointError, NextscaleError, SettingError
from .io import expanded
from .models.base import NextScaleModel
from .models.quantization import QuantizedLinear
from .serialization import listed
from .validation import is_finite, require

log = logging.getLogger(__name__)

ADAPTER_FILES = (CONFIG, *SINGLE_FILES)
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
MAX_OFFERED = 8  # adapters of a folder in host memory
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


Scales = Mapping[str, float] | tuple[tuple[str, float], ...]
"""Adapters and their scales; pairs can be a key of batches."""


@dataclass(frozen=True)
class AppliedLora:
    """An adapter that is part of the weights."""

    name: str
    scale: float
    sha256: str  # of its file


@dataclass(frozen=True, eq=False)
class Update:
    """A low-rank update of some rows of a layer's weight."""

    rows: slice
    low_rank: LowRank


@dataclass(frozen=True, eq=False)
class Adapter:
    name: str
    sha256: str
    updates: dict[str, tuple[Update, ...]]  # by the name of the layer


class Loras:
    """The adapters of one model, and the weights without them.

    Weights are computed from pristine copies in host memory, never from fused ones, so that the same scales always give the same bits and
    no adapters give the base. weights: the file of the base; quantized layers are quantized again from it.
    """

    def __init__(self, model: NextScaleModel, weights: Path | None = None) -> None:
        self.model, self.weights = model, weights
        self.default: dict[str, float] = {}  # scales of calls that do not name adapters
        self.offered: dict[str, Path] = {}  # adapters that are loaded when a call names them
        self.switches, self.switch_seconds = 0, 0.0  # changes of the weights so far
        self._adapters: dict[str, Adapter] = {}  # the one used last comes last
        self._applied: dict[str, float] = {}
        self._pristine: dict[str, dict[str, Tensor]] = {}  # tensors of a layer by its name, on the host
        self._base: dict[str, Tensor] = {}  # weights of quantized layers before they were quantized, on the host

    def __bool__(self) -> bool:
        return bool(self._adapters or self.offered)

    @property
    def names(self) -> list[str]:
        return sorted(self._adapters)

    @property
    def applied(self) -> tuple[AppliedLora, ...]:
        return tuple(AppliedLora(name, scale, self._adapters[name].sha256) for name, scale in self._applied.items())

    def load(self, path: Path, name: str, scale: float, nested: bool) -> str:
        """Reads an adapter and applies it beside the others. Changes nothing unless every module of the file fits."""
        require(NAME.fullmatch(name), "name", "1 to 64 letters, digits, '.', '_' or '-'", name)
        require(name not in self._adapters, "name", "free: unload that adapter first, or pass another name", name)
        require(is_finite(scale), "scale", "a finite number", scale)
        self._add(name, path)
        try:
            self.set(self.default | {name: scale}, nested)
        except BaseException:
            self._forget(name)
            raise
        return name

    def offer(self, folder: Path) -> None:
        """Lets calls name the adapters of a folder: PEFT folders and safetensors files that fit the model. Logs why others do not.

        They are loaded when they are first used. The MAX_OFFERED used last stay in host memory.
        """
        for path in sorted(folder.iterdir()):
            if path.is_dir() or path.suffix == ".safetensors":
                try:
                    require(NAME.fullmatch(path.stem), "name", "1 to 64 letters, digits, '.', '_' or '-'", path.stem)
                    fitted(self.model, read_adapter(path))
                except NextscaleError as error:
                    log.warning("the adapter %s is not offered: %s", path.name, error)
                else:
                    self.offered[path.stem] = path

    def set(self, scales: Scales, nested: bool) -> None:
        """Applies adapters to this and all further calls."""
        self.use(scales, nested)
        self.default = self._applied

    def use(self, scales: Scales | None, nested: bool) -> None:
        """Applies adapters to one call. nested: True inside another call, during which weights must not change."""
        if scales is not None:
            self._load_offered(dict(scales) if isinstance(scales, Mapping | tuple) else {})
        wanted = self.default if scales is None else self.checked(scales)
        if wanted != self._applied:
            require(not nested, "lora", "that of the call around `on_stage`", dict(wanted))
            self.apply(wanted)

    def remove(self, name: str, nested: bool) -> None:
        """Forgets an adapter. The weights are as if it had never been loaded."""
        self.checked({name: 1.0})
        self.set({other: scale for other, scale in self.default.items() if other != name}, nested)
        self._forget(name)

    def checked(self, scales: Scales) -> dict[str, float]:
        """Returns scales other than 0, sorted by name. Raises SettingError for unknown adapters and for scales that are not numbers."""
        require(isinstance(scales, Mapping | tuple), "lora", 'a mapping such as {"ink": 0.8}', scales)
        scales = dict(scales)
        for name, scale in scales.items():
            require(name in self._adapters, "lora", f"one of the loaded adapters ({listed(self.names) or 'none'})", name)
            require(is_finite(scale), f"scale of {name}", "a finite number", scale)
        return {name: float(scales[name]) for name in sorted(scales) if scales[name] != 0}

    @torch.no_grad()
    def apply(self, scales: Scales) -> None:
        """Sets the weights to the base plus these adapters. Only layers of adapters whose scale changes are written."""
        begun, wanted = time.perf_counter(), self.checked(scales)
        changed = {name for name in {*wanted, *self._applied} if wanted.get(name) != self._applied.get(name)}
        layers = sorted({layer for name in changed for layer in self._adapters[name].updates})
        try:
            for layer in layers:
                self._write(layer, [(wanted[name], one) for name in wanted for one in self._adapters[name].updates.get(layer, ())])
        except BaseException:
            for layer in layers:
                self._write(layer, [])
            self._applied = {}
            raise
        self._applied = wanted
        if layers:
            self.switches += 1
            self.switch_seconds += time.perf_counter() - begun

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Puts the base weights back for a while. They may move or be cast meanwhile."""
        applied = self._applied
        self.apply({})
        try:
            yield
        finally:
            for layer in self._pristine:
                self._keep(layer, again=True)
            self._base.clear()
            self.apply(applied)

    def _add(self, name: str, path: Path) -> None:
        file = read_adapter(path)
        adapter = Adapter(name, file.sha256, fitted(self.model, file))
        for layer in adapter.updates:
            self._keep(layer)
        self._adapters[name] = adapter

    def _forget(self, name: str) -> None:
        del self._adapters[name]
        used = {layer for adapter in self._adapters.values() for layer in adapter.updates}
        for kept in (self._pristine, self._base):
            for layer in kept.keys() - used:
                del kept[layer]

    def _load_offered(self, scales: Mapping[str, float]) -> None:
        """Loads the offered adapters of a call, and forgets those that were not used for longest."""
        for name in scales:
            if name in self._adapters:
                self._adapters[name] = self._adapters.pop(name)
            elif name in self.offered:
                self._add(name, self.offered[name])
        spare = [name for name in self._adapters if name in self.offered and name not in {*scales, *self._applied, *self.default}]
        for name in spare[: max(len(self._adapters) - MAX_OFFERED, 0)]:
            self._forget(name)

    def _keep(self, layer: str, again: bool = False) -> None:
        if again or layer not in self._pristine:
            module = self.model.get_submodule(layer)
            self._pristine[layer] = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors_of(module).items()}

    def _write(self, layer: str, updates: list[tuple[float, Update]]) -> None:
        module, pristine = self.model.get_submodule(layer), self._pristine[layer]
        if not updates:
            for name, tensor in tensors_of(module).items():
                tensor.copy_(pristine[name])
        elif isinstance(module, QuantizedLinear):
            weight = updated(self._base_weight(layer).to(self.model.device), updates)
            scale = getattr(module, "input_scale", 1.0)  # captured graphs have it as a number
            for name, tensor in tensors_of(type(module).of(weight.to(self.model.dtype), None, scale)).items():
                tensors_of(module)[name].copy_(tensor)
        else:
            weight = module.get_parameter("weight")
            weight.copy_(updated(pristine["weight"].to(weight.device), updates))

    def _base_weight(self, layer: str) -> Tensor:
        """Returns the weight of a quantized layer as it was before, from the file."""
        if layer not in self._base:
            if self.weights is None:
                raise SettingError("adapters on quantized weights need the file of the base weights: load the model from a file.")
            checkpoint = open_checkpoint(self.weights, self.model.layout)
            places = {key: place for key, place in weights_of(self.model).items() if place.parameter == f"{layer}.weight"}
            parts = dict(checkpoint.tensors(places))
            ordered = sorted(places, key=lambda key: places[key].rows.start)
            self._base[layer] = torch.cat([parts[key].reshape(-1, parts[key].shape[-1]) for key in ordered]).to(self.model.dtype)
        return self._base[layer]


def updated(base: Tensor, updates: list[tuple[float, Update]]) -> Tensor:
    """Returns a weight [out, in] plus its updates, summed in float32."""
    total = base.to(torch.float32, copy=True)
    for scale, update in updates:
        own, rows = update.low_rank, base[update.rows].float()
        change = own.scale * (own.up.to(base.device) @ own.down.to(base.device))
        if own.magnitude is not None:  # DoRA sets the norm of every row
            turned = rows + change
            change = (
                turned * (own.magnitude.to(base.device) / turned.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny))[:, None] - rows
            )
        total[update.rows] += scale * change
    return total


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of a layer that depend on its weight."""
    return dict(module.named_buffers()) if isinstance(module, QuantizedLinear) else {"weight": module.get_parameter("weight")}


def weights_of(model: NextScaleModel) -> dict[str, PublishedTensor]:
    """Returns the places of the published weights of all linear layers, quantized ones as if they were not."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | QuantizedLinear)}
    shapes = {f"{name}.weight": (module.out_features, module.in_features) for name, module in layers.items()}
    return published_places(shapes, model.layout)


def fitted(model: NextScaleModel, file: AdapterFile) -> dict[str, tuple[Update, ...]]:
    """Returns the updates of a file by layer. Raises CheckpointError with all modules that the model does not have or that do not fit."""
    places = {key.removesuffix(".weight"): place for key, place in weights_of(model).items()}
    known, problems = underscored(places), list[str]()
    updates: dict[str, list[Update]] = {}
    for name, low_rank in file.modules.items():
        module = published_module(name, known)
        if module is None:
            problems.append(f"{name} (unknown)")
            continue
        place = places[module]
        fitting = low_rank.fitted(place.shape)
        if fitting is None:
            problems.append(f"{name} ({list(low_rank.down.shape)} and {list(low_rank.up.shape)} for a weight {list(place.shape)})")
        else:
            updates.setdefault(place.parameter.removesuffix(".weight"), []).append(Update(place.rows, fitting))
    if problems:
        raise CheckpointError(
            f"{file.path} does not fit {model.family}: {len(problems)} of {len(file.modules)} modules: {listed(problems)}. "
            f"Expected published names such as {listed(sorted(places)[:3])}. Nothing was applied."
        )
    return {layer: tuple(found) for layer, found in updates.items()}


def find_adapter(source: str | Path) -> Path:
    """Returns the path of an adapter; fetches it if `source` is the name of a repository on the hub."""
    path = expanded(source)
    return snapshot(str(source), ADAPTER_FILES) if not path.exists() and REPOSITORY.fullmatch(str(source)) else path
