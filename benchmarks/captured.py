"""Times of what is captured in a CUDA graph, where the host's part costs nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

WARM_UPS = 2
REPLAYS = 15


def captured_ms(run: Callable[[], Any], replays: int = REPLAYS) -> float:
    """Median time of a replay of everything that `run` launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    times = []
    for number in range(-WARM_UPS, replays):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        if number >= 0:
            times.append(begun.elapsed_time(ended))
    return statistics.median(times)
