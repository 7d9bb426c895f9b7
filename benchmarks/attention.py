"""Our attention and every exact kernel that torch has, on the shapes of a model's stages: which is the fastest where.

    python -m benchmarks.attention [--out FILE]

Shapes are those of infinity-2b at 1024 x 1024, guided: two rows an image, 16 heads of 128 channels, bfloat16. Calls are captured in a CUDA
graph and replayed, so that the host's part is not in the times: captured requests do not pay it. "eager_ms" is what the host needs to
launch a call and the device to run it, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nextscale import kernels
from nextscale.cache import real_entries
from nextscale.lab.results import Row
from nextscale.models.attention import attend

from .results import measure, options, record, require_gpu

HEADS, HEAD_DIM = 16, 128
SIDES = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)
TEXT, TEXT_LENGTHS = 64, (24, 61)  # room for a text; tokens of the two kinds of rows
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    queries: int
    keys: int
    lengths: tuple[int, ...] | None = None  # of the rows, in turn, where they are shorter than the room for keys

    @property
    def flops(self) -> int:
        real = self.rows * self.keys if self.lengths is None else sum(self.lengths) * self.rows // len(self.lengths)
        return 4 * self.queries * real * HEADS * HEAD_DIM


def cases() -> Iterator[Case]:
    held = 0
    for number, side in enumerate(SIDES, start=1):
        cells = side * side
        held += cells
        yield Case(f"stage {number}", 2, cells, held)
        if cells >= 1024:
            kept = cells * 3 // 10
            yield Case(f"stage {number}, 30 % of the queries", 2, kept, held - cells + kept)
            yield Case(f"stage {number}, 30 %, rows of different length", 2, kept, held, (held - cells + kept, held - cells // 2))
            yield Case(f"stage {number}, batch 4", 8, cells, held)
        if cells in (1, 64, 256, 1024, 4096):
            yield Case(f"stage {number} to the text", 2, cells, TEXT, TEXT_LENGTHS)
    for queries in (16, 4096):
        yield Case(f"{queries} queries to equally long texts", 2, queries, TEXT, (50,))
    yield Case("307 queries, rows equally long", 2, 307, 2521, (1804,))
    yield Case("1228 queries, rows equally long", 2, 1228, 10521, (7653,))
    yield Case("few queries of one row, many keys", 1, 409, 7000)


def candidates(case: Case, device: str) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    generator = torch.Generator(device).manual_seed(0)

    def normal(tokens: int) -> Tensor:
        return torch.randn(case.rows, tokens, HEADS, HEAD_DIM, generator=generator, device=device).bfloat16()

    q, k, v = normal(case.queries), normal(case.keys), normal(case.keys)
    scale = 1 / HEAD_DIM
    each = case.lengths or (case.keys,)
    lengths = torch.tensor(each * (case.rows // len(each)), dtype=torch.int32, device=device)
    # Rows that are equally long need no mask.
    read, mask = (each[0], None) if len(each) == 1 else (case.keys, real_entries(lengths, case.keys))

    def through(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return attend(q, k[:, :read], v[:, :read], mask, scale)

    for name, backend in BACKENDS.items():
        yield name, partial(through, backend)
    yield "lengths", partial(kernels.attend_lengths, q, k, v, lengths, scale)


def timed(case: Case, device: str = "cuda") -> dict[str, Any]:
    from triton.testing import do_bench, do_bench_cudagraph

    found: dict[str, Any] = {}
    for name, run in candidates(case, device):
        try:
            run()
        except RuntimeError as error:  # the backend does not take such a call
            found[name] = {"error": str(error).splitlines()[0][:120]}
            continue
        torch.cuda.synchronize()  # what follows runs on another stream
        graph = do_bench_cudagraph(run, rep=5, return_mode="median")
        found[name] = {"graph_ms": round(graph, 5), "eager_ms": round(do_bench(run, warmup=2, rep=5, return_mode="median"), 5)}
        found[name]["tflops"] = round(case.flops / graph / 1e9, 1)
    times = {name: row["graph_ms"] for name, row in found.items() if "graph_ms" in row}
    return {"kernels": found, "fastest": min(times, key=lambda name: times[name])}


def rows() -> Iterator[Row]:
    for case in cases():
        shape = {"rows": case.rows, "queries": case.queries, "keys": case.keys, "lengths": case.lengths}
        yield measure("attention", {"case": case.name, **shape, "dtype": "bfloat16", "quality": None}, partial(timed, case))


@torch.inference_mode()
def main() -> None:
    parser = options(__doc__)
    args = parser.parse_args()
    require_gpu(parser, "kernels are measured")
    record(rows(), args.out)


if __name__ == "__main__":
    main()
