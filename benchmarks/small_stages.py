"""Stages of few tokens: what they, their kernels and torch.compile take, captured.

    python -m benchmarks.small_stages [--model infinity-2b] [--only stages|profile|compile] [--out FILE]

stages     every stage of a captured request at the model's own size.
profile    the kernels of a captured request of 256 x 256 pixels by the time that they take together, and what passes between them.
compile    a run of blocks at one stage: ours, and plain torch through torch.compile. Only models of Infinity's kind.

What their products take: `benchmarks.products`.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nextscale.lab.bench.requests import request_prompts
from nextscale.lab.bench.runner import release, with_engine
from nextscale.lab.results import append_rows
from nextscale.loading.random_weights import random_pipeline
from nextscale.pipeline import Pipeline

from .compiled_blocks import compiled_times
from .results import measure, options, record, require_gpu

PROFILED = (256, 256)  # pixels: nothing but small stages
SHOWN = 25  # kernels
REQUESTS = 7


def measure_stages(pipe: Pipeline, out: Path) -> None:
    row = measure("small_stages", {"model": pipe.name, "dtype": "bfloat16"}, partial(stage_times, pipe))
    append_rows([row], out)
    print(row.get("error") or f"{row['total_ms']:.2f} ms  {row['stage_median_ms']}", flush=True)


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
    append_rows([row], out)
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
    record(compiled_times(pipe), out)


PARTS = {"stages": measure_stages, "profile": measure_profile, "compile": measure_compiled}


@torch.inference_mode()
def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", default="infinity-2b")
    parser.add_argument("--only", choices=PARTS, action="append", help="can be repeated; default: all")
    args = parser.parse_args()
    require_gpu(parser, "kernels are measured")
    pipe = random_pipeline(args.model, device="cuda", dtype=torch.bfloat16)
    for part, measured in PARTS.items():
        if part in (args.only or PARTS):
            measured(pipe, args.out)


if __name__ == "__main__":
    main()
