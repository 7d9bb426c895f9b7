"""Stages of few tokens: what their products, their launches and torch.compile take, captured.

    python -m benchmarks.small_stages [--model infinity-2b] [--only products|stages|profile|compile] [--out FILE]

products   every product of a block for 2 to 800 rows, with weights from memory: cuBLAS, cuBLASLt's gelu, our kernel with several tiles.
           Prints the entries of TILES in nextscale/kernels/few_rows_tiles.py that are worth it.
stages     every stage of a captured request: as it is; with rotation and attention in kernels of their own; with launches that overlap
           (nextscale/kernels/overlap.py); with the tiles that `products` has found, if it ran before; with both.
profile    the kernels of a captured request of 256 x 256 pixels by the time that they take together, and what passes between them.
compile    a run of blocks at one stage: ours, and plain torch through torch.compile. Only models of Infinity's kind.

Products and stages of infinity-2b take about two and a half minutes on an H200, most of it compiling; `compile` about as long again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nextscale.kernels.few_rows_tiles import TILES, RowTile
from nextscale.lab.bench.requests import request_prompts
from nextscale.lab.bench.runner import release, with_engine
from nextscale.loading.presets import model_spec
from nextscale.loading.random_weights import random_pipeline
from nextscale.models import attention
from nextscale.pipeline import Pipeline

from . import few_rows
from .compiled_blocks import compiled_times
from .results import RESULTS, append, measure

PARTS = ("products", "stages", "profile", "compile")
PROFILED = (256, 256)  # pixels: nothing but small stages
SHOWN = 25  # kernels
REQUESTS = 7
Found = dict[tuple[int, int], dict[int, RowTile | None]]


def measure_products(model: str, out: Path) -> Found:
    found: Found = {}
    print(f"{'product':>8} {'N':>6} {'K':>6} {'rows':>5} {'cuBLAS us':>10} {'TB/s':>6} {'best us':>8} {'TB/s':>6}  fastest")
    for one in few_rows.products(model_spec(model).model.block):
        for rows in few_rows.ROWS:
            config = {"model": model, "case": one.name, "rows": rows, "columns": one.columns, "depth": one.depth, "dtype": "bfloat16"}
            row = measure("few_rows", config, partial(few_rows.timed, one, rows))
            append([row], out)
            if "error" in row:
                print(f"{one.name:>8} {one.columns:6} {one.depth:6} {rows:5} {row['error']}", flush=True)
                continue
            rates = [one.bytes / us / 1e6 for us in (row["cublas_us"], row["us"])]
            print(
                f"{one.name:>8} {one.columns:6} {one.depth:6} {rows:5} {row['cublas_us']:10.2f} {rates[0]:6.2f} {row['us']:8.2f}"
                f" {rates[1]:6.2f}  {row['fastest']}",
                flush=True,
            )
            found.setdefault((one.columns, one.depth), {})[rows] = row["tile"]
    return {shape: worth for shape, tiles in found.items() if (worth := without_tail(tiles))}


def without_tail(tiles: dict[int, RowTile | None]) -> dict[int, RowTile | None]:
    """Up to the largest number of rows that has a tile."""
    last = max((rows for rows, tile in tiles.items() if tile is not None), default=0)
    return {rows: tile for rows, tile in tiles.items() if rows <= last}


class Variant(NamedTuple):
    """How kernels are launched; captures that are made inside keep it."""

    overlapped: bool = False
    tiles: Found | None = None  # None: cuBLAS multiplies everything
    together: bool = False  # few tokens are rotated and attended in one kernel

    @contextmanager
    def set(self) -> Iterator[None]:
        from nextscale.kernels import overlap
        from nextscale.kernels.rotate_attend import MOST_TOKENS

        before = overlap.OVERLAPPED, attention.ROTATED_AND_ATTENDED, dict(TILES)
        overlap.OVERLAPPED, attention.ROTATED_AND_ATTENDED = self.overlapped, MOST_TOKENS if self.together else 0
        TILES.clear()
        TILES.update(self.tiles or {})
        try:
            yield
        finally:
            overlap.OVERLAPPED, attention.ROTATED_AND_ATTENDED = before[:2]
            TILES.clear()
            TILES.update(before[2])


def measure_stages(pipe: Pipeline, tiles: Found, out: Path) -> None:
    variants = {"as it is": Variant(), "rotation and attention at once": Variant(together=True), "overlapped": Variant(overlapped=True)}
    if tiles:
        variants |= {"tiles": Variant(tiles=tiles), "overlapped, tiles": Variant(True, tiles)}
    for name, variant in variants.items():
        with variant.set():
            row = measure("small_stages", {"model": pipe.name, "case": name, "dtype": "bfloat16"}, partial(stage_times, pipe))
        append([row], out)
        print(f"{name:>20}", row.get("error") or f"{row['total_ms']:8.2f} ms  {row['stage_median_ms']}", flush=True)


def stage_times(pipe: Pipeline) -> dict[str, Any]:
    """Of captured requests at the model's own size, one image, guided."""
    one = with_engine(pipe, "graphs")
    prompts = request_prompts(one, 1, 0)
    one.warmup(prompts)
    reports = [one(prompts, seed=seed).report for seed in range(REQUESTS)]
    times = [round(1000 * statistics.median(report.stages[i].seconds for report in reports), 3) for i in range(len(reports[0].stages))]
    one.captures.clear()
    release(pipe.model.device)
    return {"stage_median_ms": times, "total_ms": round(sum(times), 3), "tokens": [stage.tokens for stage in reports[0].stages]}


def measure_profile(pipe: Pipeline, out: Path) -> None:
    row = measure("profile", {"model": pipe.name, "size": [*PROFILED], "dtype": "bfloat16"}, partial(kernel_times, pipe))
    append([row], out)
    if "error" in row:
        print(row["error"])
        return
    print(f"{row['kernels_ms']:.2f} ms in {row['launches']} kernels of {row['span_ms']:.2f}")
    for name, (count, ms) in [*row["kernels"].items()][:SHOWN]:
        print(f"{ms:8.3f} ms {count:6} x {1000 * ms / count:7.2f} us  {name}", flush=True)


def kernel_times(pipe: Pipeline) -> dict[str, Any]:
    """Count and milliseconds of every kernel of one captured request, the longest first."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    one = with_engine(pipe, "graphs")
    prompts = request_prompts(one, 1, 0)
    one.warmup(prompts, size=PROFILED)
    one(prompts, seed=0, size=PROFILED)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        one(prompts, seed=1, size=PROFILED)
        torch.cuda.synchronize()
    events = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    found: dict[str, tuple[int, float]] = {}
    for event in events:
        count, ms = found.get(event.name[:100], (0, 0.0))
        found[event.name[:100]] = count + 1, ms + event.time_range.elapsed_us() / 1000
    one.captures.clear()
    release(pipe.model.device)
    first, last = min(event.time_range.start for event in events), max(event.time_range.end for event in events)
    return {
        "launches": len(events),
        "kernels_ms": round(sum(ms for _, ms in found.values()), 3),
        "span_ms": round((last - first) / 1000, 3),
        "kernels": {name: (count, round(ms, 4)) for name, (count, ms) in sorted(found.items(), key=lambda item: -item[1][1])},
    }


def measure_compiled(pipe: Pipeline, out: Path) -> None:
    for row in compiled_times(pipe):
        append([row], out)
        print(json.dumps(row), flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="infinity-2b")
    parser.add_argument("--only", choices=PARTS, action="append", help="can be repeated; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("kernels are measured on a GPU")
    chosen = args.only or PARTS
    tiles = measure_products(args.model, args.out) if "products" in chosen else {}
    others = {*chosen} - {"products"}
    pipe = random_pipeline(args.model, device="cuda", dtype=torch.bfloat16) if others else None
    if pipe is not None and "stages" in chosen:
        measure_stages(pipe, tiles, args.out)
    if pipe is not None and "profile" in chosen:
        measure_profile(pipe, args.out)
    if pipe is not None and "compile" in chosen:
        measure_compiled(pipe, args.out)
    for shape, found in tiles.items():
        print(f"    {shape}: {found},")


if __name__ == "__main__":
    main()
