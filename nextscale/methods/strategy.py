"""Methods that make one output from several calls of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from .combine import Combined
from .method import Method

Call = Mapping[str, Any]
"""All arguments of a pipeline's call, with prompts that have been read, a schedule as `size` and resolved seeds."""


class Strategy(Method):
    """A method that makes several calls. Methods combined with it run in each of them."""

    second_model: ClassVar[bool] = False  # True: other models run beside the pipeline's own

    def generate(self, pipe: Any, call: Call, beside: Method) -> Any:
        """Returns the output of a pipeline's call."""
        raise NotImplementedError

    def warmup(self, pipe: Any, call: Call, beside: Method) -> None:
        """Captures all requests that such a call makes."""
        self.generate(pipe, {**call, "warmup": True}, beside)

    def planned(self, spec: Any, model: Any, tokenizer: Any, workload: Any) -> Planned:
        """Returns the forecast of a request, without weights, if `second_model`."""
        raise NotImplementedError


class Planned(NamedTuple):
    """Forecast of a request to several models."""

    name: str
    cost: Any  # RequestCost of all
    memory: Any  # RequestMemory of all
    others: Sequence[Any]  # models that run densely after the pipeline's own


@dataclass
class Partners:
    """Further pipelines of a strategy, by name."""

    open: Callable[[str], Any] | None = None  # loads another model with the same options
    known: dict[str, Any] = field(default_factory=dict)


def split_strategy(method: Method) -> tuple[Strategy | None, Method]:
    """Returns the strategy among combined methods, and the other methods."""
    every = method.methods if isinstance(method, Combined) else (method,)
    strategy = next((one for one in every if isinstance(one, Strategy)), None)
    return strategy, combined([one for one in every if one is not strategy])


def combined(methods: Sequence[Method]) -> Method:
    acting = tuple(method for method in methods if method != Method())
    return Combined(acting) if len(acting) > 1 else acting[0] if acting else Method()
