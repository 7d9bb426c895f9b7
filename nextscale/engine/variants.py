"""CUDA graphs of one stage: one, or one per token count if that depends on the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..canvas import Canvas
from ..generate import StageOutput
from ..methods.method import TokenCounts

# Shares of the cells for which a data-dependent stage is captured. They are closer together for small shares, to keep padding at a few
# percent of the tokens.
PARTS = 32
BUCKETS = (*range(PARTS, PARTS // 2, -2), *range(PARTS // 2, 0, -1))


def bucket_sizes(cells: int) -> tuple[int, ...]:
    """Returns the token counts for which a data-dependent stage is captured, in descending order."""
    return tuple(dict.fromkeys(max(1, cells * share // PARTS) for share in BUCKETS))


def buckets(cells: int, images: int, packed: bool) -> dict[int, TokenCounts]:
    """Returns the buckets by the count that must suffice: tokens of all images if rows are packed, otherwise of one image."""
    if packed:
        return {size: TokenCounts(0, cells, size) for size in bucket_sizes(images * cells)}
    return {size: TokenCounts(0, size, images * size) for size in bucket_sizes(cells)}


@dataclass(frozen=True, eq=False)
class StageGraph:
    """A stage with one token count: its graph and output. Most skipped stages launch nothing and have no graph."""

    graph: torch.cuda.CUDAGraph | None
    done: StageOutput

    def replay(self) -> None:
        if self.graph is not None:
            self.graph.replay()


class TokenCounter:
    """Computes the token counts of a data-dependent stage with a graph, and copies them to the host."""

    def __init__(self, graph: torch.cuda.CUDAGraph, counts: Tensor) -> None:
        """counts: output of the graph, [B] on the device."""
        self._graph, self._counts = graph, counts
        self._on_host = torch.zeros(counts.shape, dtype=counts.dtype, pin_memory=counts.is_cuda)
        self._copied = torch.cuda.Event()

    def start(self) -> None:
        self._graph.replay()
        self._on_host.copy_(self._counts, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(self._counts.device))

    def counts(self) -> tuple[int, ...]:
        """Returns the counts; waits only for them, not for later launches."""
        self._copied.synchronize()
        return tuple(self._on_host.tolist())


@dataclass(frozen=True, eq=False)
class StageVariants:
    """A captured stage. If it is data-dependent, it has a graph per bucket size and a `counter` of the tokens."""

    graphs: Mapping[int, StageGraph]  # by token count of an image, or of all images if rows are packed, in descending order
    latent: Tensor  # the canvas afterwards, whichever graph ran
    finite: Tensor | None
    counter: TokenCounter | None = None
    packed: bool = False

    def smallest_sufficient(self, counts: Sequence[int] | None) -> StageGraph:
        """Returns the smallest graph for the counts of every image; `counts` is None if the stage is not data-dependent."""
        if counts is None:
            return next(iter(self.graphs.values()))
        needed = sum(counts) if self.packed else max(counts)
        return self.graphs[min(size for size in self.graphs if size >= needed)]

    def on(self, canvas: Canvas) -> StageVariants:
        """Returns the same graphs with outputs that refer to this canvas."""
        shown = {size: StageGraph(known.graph, replace(known.done, canvas=canvas)) for size, known in self.graphs.items()}
        return replace(self, graphs=shown)

    @property
    def count(self) -> int:
        """Number of captured graphs."""
        return sum(variant.graph is not None for variant in self.graphs.values()) + (self.counter is not None)
