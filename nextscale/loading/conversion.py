"""Writes published checkpoints as safetensors files, under the published names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..checkpoints import convert
from ..io import write_text
from ..models import HartConfig
from ..tokenizers import HartTokenizerConfig
from .artifacts import converted_file
from .config_file import own_config_file
from .hart_config import dump_config
from .modules import checkpoint_spec, naming_the_right_model
from .presets import ModelSpec, build_model, build_tokenizer


@dataclass(frozen=True)
class Conversion:
    """One part of a model, `source`, that is to become the safetensors file `target`."""

    spec: ModelSpec
    source: Path
    target: Path
    is_model: bool  # otherwise the tokenizer

    @classmethod
    def plan(cls, spec: ModelSpec, source: Path, target: Path, is_model: bool) -> Conversion:
        """What HART's files say of themselves is read now."""
        return cls(checkpoint_spec(spec, source if is_model else None, None if is_model else source), source, target, is_model)

    @property
    def settings(self) -> dict[Path, str]:
        """What the tensors do not say, by the file beside the target that says it: HART's settings."""
        config = self.spec.model if self.is_model else self.spec.tokenizer
        return {own_config_file(self.target): dump_config(config)} if isinstance(config, HartConfig | HartTokenizerConfig) else {}

    def run(self, dtype: torch.dtype | None = None) -> int:
        """Number of tensors written. Without `dtype` they stay as they are."""
        with torch.device("meta"):
            module = build_model(self.spec.model) if self.is_model else build_tokenizer(self.spec.tokenizer)
        with naming_the_right_model(self.source):
            tensors = convert(self.source, self.target, module, module.layout, dtype)
        for file, text in self.settings.items():
            write_text(text, file)
        return tensors


def is_pickled(path: Path) -> bool:
    """Whether a file or a folder of weights is in torch's own format."""
    return not any(file.suffix == ".safetensors" for file in (path.iterdir() if path.is_dir() else [path]))


def convert_beside(spec: ModelSpec, source: Path, is_model: bool) -> Path:
    """Writes pickled weights as safetensors where `load` finds them first."""
    target = converted_file(source)
    Conversion.plan(spec, source, target, is_model).run()
    return target
