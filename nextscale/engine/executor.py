"""The one interface between a pipeline and what runs its requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from ..generate import StageDone
from ..models.base import PromptInputs
from ..request import Request

Engine = Literal["graphs", "eager"]


class Generated(NamedTuple):
    latent: Tensor  # [B, Z, H, W], what is decoded
    finite: Mapping[int, Tensor]  # by stage that ran: whether all that it computed is


class Executor(Protocol):
    """Runs one request: `condition`, then `run`, then `decode`. What it returns is overwritten by later requests: copy what is kept."""

    @property
    def engine(self) -> Engine: ...

    @property
    def captured_batch(self) -> int | None:
        """Images of the captured graph that is replayed, of which the request may need fewer; None: nothing is replayed."""
        ...

    def condition(self, inputs: PromptInputs) -> None:
        """What the model makes of the prompts."""
        ...

    def run(self, request: Request, watch: Callable[[StageDone], None]) -> Generated:
        """All stages; `watch` sees each one when it has been launched."""
        ...

    def decode(self) -> Tensor:
        """Pixels [B, 3, H, W]."""
        ...
