"""Attention to lists of keys against dense attention, on the last stages of infinity-2b at 1024 x 1024: SparVAR's two patterns.

python -m benchmarks.sparse_attention [--out FILE]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from nextscale.accel.sparse import KeyLists, key_map
from nextscale.accel.sparvar import GROUP
from torch import Tensor

from nextscale import Schedule, SparVAR, kernels
from nextscale.lab.results import Row
from nextscale.models.attention import attend

from .attention import HEAD_DIM, HEADS, SIDES
from .results import measure, options, record, require_gpu


def random_lists(rows: int, queries: int, keys: int, listed: int, device: str) -> KeyLists:
    """As many keys as are chosen, anywhere, other ones for every row, head and group."""
    groups = -(-queries // GROUP)
    scores = torch.rand(rows, HEADS, groups, keys, device=device)
    numbers = scores.topk(listed, dim=-1).indices.sort(dim=-1).values.int().contiguous()
    return KeyLists(numbers, numbers.new_full(numbers.shape[:3], listed), GROUP)


def candidates(stage: int, rows: int, device: str) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    schedule, method = Schedule(SIDES), SparVAR()
    there = key_map(schedule, schedule[stage], 0)
    q, k, v = (torch.randn(rows, n, HEADS, HEAD_DIM, device=device).bfloat16() for n in (schedule[stage].cells, there.keys, there.keys))
    windows = method.window_lists(there, schedule, torch.device(device))
    chosen = random_lists(rows, schedule[stage].cells, there.keys, method.listed_keys(schedule, schedule[stage], 0), device)
    scale = 1 / HEAD_DIM
    yield "dense", partial(attend, q, k, v, None, scale)
    for name, lists in (("windows", windows), ("chosen keys", chosen)):
        yield name, partial(kernels.attend_lists, q, k, v, lists.numbers, lists.counts, lists.group, scale)


def timed(stage: int, rows: int, device: str = "cuda") -> dict[str, Any]:
    from triton.testing import do_bench_cudagraph

    found = {}
    for name, run in candidates(stage, rows, device):
        run()
        torch.cuda.synchronize()
        found[name] = {"graph_ms": round(do_bench_cudagraph(run, rep=20, return_mode="median"), 5)}
    return {"kernels": found}


def measured() -> Iterator[Row]:
    for stage in (10, 11, 12):
        for rows in (2, 8):
            config = {"case": f"stage {stage}", "rows": rows, "dtype": "bfloat16", "quality": None}
            yield measure("sparse attention", config, partial(timed, stage, rows))


@torch.inference_mode()
def main() -> None:
    parser = options(__doc__)
    args = parser.parse_args()
    require_gpu(parser, "kernels are measured")
    record(measured(), args.out)


if __name__ == "__main__":
    main()
