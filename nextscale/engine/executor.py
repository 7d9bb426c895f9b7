"""The one interface between a pipeline and what runs its requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol, get_args

from torch import Tensor

from ..errors import SettingError
from ..generate import StageOutput
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

    def run(self, request: Request, watch: Callable[[StageOutput], None]) -> Generated:
        """All stages; `watch` sees each one when it has been launched."""
        ...

    def decode(self) -> Tensor:
        """Pixels [B, 3, H, W]."""
        ...


def checked_engine(engine: Engine | None) -> Engine | None:
    if engine is not None and engine not in get_args(Engine):
        raise SettingError(f"engine {engine!r}: choose one of {', '.join(get_args(Engine))}")
    return engine


def checked_memory(graph_memory: int | None) -> int | None:
    if graph_memory is not None and (isinstance(graph_memory, bool) or not isinstance(graph_memory, int) or graph_memory <= 0):
        raise SettingError(f"graph_memory {graph_memory!r}: give a whole number of bytes; engine='eager' captures nothing")
    return graph_memory
