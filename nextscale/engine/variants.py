"""The captured graphs of one stage: a single one, or one per number of tokens where that depends on the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..canvas import Canvas
from ..generate import StageOutput
from ..methods.method import TokenCounts

# Shares of the cells for which a data-dependent stage is captured: close together where few tokens are kept and each of them tells, so
# that padding is a few percent of what is run.
PARTS = 32
BUCKETS = (*range(PARTS, PARTS // 2, -2), *range(PARTS // 2, 0, -1))


def bucket_sizes(cells: int) -> tuple[int, ...]:
    """The numbers of tokens for which a data-dependent stage is captured, from all cells down."""
    return tuple(dict.fromkeys(max(1, cells * share // PARTS) for share in BUCKETS))


def buckets(cells: int, images: int, packed: bool) -> dict[int, TokenCounts]:
    """The same by the number that has to be sufficient: the tokens of all images where rows are packed, else those of one."""
    if packed:
        return {size: TokenCounts(0, cells, size) for size in bucket_sizes(images * cells)}
    return {size: TokenCounts(0, size, images * size) for size in bucket_sizes(cells)}


@dataclass(frozen=True, eq=False)
class StageGraph:
    """A stage with one number of tokens: its graph and what it leaves. Most skipped stages launch nothing and have no graph."""

    graph: torch.cuda.CUDAGraph | None
    done: StageOutput

    def replay(self) -> None:
        if self.graph is not None:
            self.graph.replay()


class TokenCounter:
    """Counts the tokens that a data-dependent stage keeps, which the host has to know: a graph computes them, and they are copied."""

    def __init__(self, graph: torch.cuda.CUDAGraph, counts: Tensor) -> None:
        """counts: what the graph leaves, [B] on the device."""
        self._graph, self._counts = graph, counts
        self._on_host = torch.zeros(counts.shape, dtype=counts.dtype, pin_memory=counts.is_cuda)
        self._copied = torch.cuda.Event()

    def start(self) -> None:
        self._graph.replay()
        self._on_host.copy_(self._counts, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(self._counts.device))

    def counts(self) -> tuple[int, ...]:
        """Waits for the counts, not for what was launched after them."""
        self._copied.synchronize()
        return tuple(self._on_host.tolist())


@dataclass(frozen=True, eq=False)
class StageVariants:
    """A captured stage. Where it is data-dependent, `counter` counts the tokens and there is a graph for every bucket size."""

    graphs: Mapping[int, StageGraph]  # by number of tokens of an image, or of all images where rows are packed, the largest first
    latent: Tensor  # what the canvas holds afterwards, whichever graph was replayed
    finite: Tensor | None
    counter: TokenCounter | None = None
    packed: bool = False

    def smallest_sufficient(self, counts: Sequence[int] | None) -> StageGraph:
        """`counts`: the tokens of every image, where they are counted."""
        if counts is None:
            return next(iter(self.graphs.values()))
        needed = sum(counts) if self.packed else max(counts)
        return self.graphs[min(size for size in self.graphs if size >= needed)]

    def on(self, canvas: Canvas) -> StageVariants:
        """The same with this canvas in what it shows."""
        shown = {size: StageGraph(known.graph, replace(known.done, canvas=canvas)) for size, known in self.graphs.items()}
        return replace(self, graphs=shown)

    @property
    def count(self) -> int:
        """How many graphs were captured for it."""
        return sum(variant.graph is not None for variant in self.graphs.values()) + (self.counter is not None)
