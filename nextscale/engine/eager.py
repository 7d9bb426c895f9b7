"""Requests that are launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from ..generate import StageOutput, generate
from ..models.base import Conditioning, NextScaleModel, PromptInputs
from ..request import Request
from ..tokenizers.base import Tokenizer
from .executor import Engine, Generated


class Eager:
    engine: ClassVar[Engine] = "eager"
    captured_batch: ClassVar[int | None] = None
    _cond: Conditioning
    _latent: Tensor

    def __init__(self, model: NextScaleModel, tokenizer: Tokenizer, tables: Any) -> None:
        """`tables`: what the model makes of the request's schedule."""
        self._model, self._tokenizer, self._tables = model, tokenizer, tables

    def condition(self, inputs: PromptInputs) -> None:
        self._cond = self._model.condition_from(inputs, self._tables)

    def run(self, request: Request, watch: Callable[[StageOutput], None]) -> Generated:
        canvas = self._tokenizer.canvas(request.schedule, request.batch)
        finite = generate(self._model, self._cond, canvas, request, watch)
        self._latent = canvas.latent
        return Generated(canvas.latent, finite)

    def decode(self) -> Tensor:
        return self._tokenizer.decode(self._latent)
