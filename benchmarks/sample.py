"""Compares images per second of `nextscale sample` with generating the same batches without writing files.

    python -m benchmarks.sample -m nano --size 512 --batch 32 [--batches 12] [--method stagevar] [--random-weights] [--out FILE]

"written_per_s" is the speed that `sample` reports for all batches but the first, until the last file is written. "generated_per_s" is the
speed of calling the pipeline with the same prompts, up to pixels on the device. Both alternate; "share" is their ratio per round.
--writers and --format tell where the rest goes: a PNG of 512 x 512 pixels takes 17 ms of a core, 11 without any compression.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from nextscale import Pipeline, load
from nextscale.eval.results import Row, percentiles, wait
from nextscale.io import IMAGE_FORMATS
from nextscale.loading.load import random_pipeline
from nextscale.methods.method import Method
from nextscale.methods.registry import resolve_method
from nextscale.offline import sampler
from nextscale.offline.lock import working_folder
from nextscale.offline.plan import Batch, plan_batches
from nextscale.offline.prompts import SamplePrompt
from nextscale.offline.sampler import Generator, longest_prompts, sample
from nextscale.offline.shard import Shard
from nextscale.offline.store import Store
from nextscale.tune.prompts import own_prompts

from .results import measure, options, record


def planned(pipe: Pipeline, size: int | None, batch: int, batches: int, suffix: str) -> list[Batch]:
    prompts, schedule = own_prompts(pipe, batch * batches), pipe.settings.schedules.choose(size, None)
    return plan_batches(
        [SamplePrompt(f"{number:05d}", str(prompt)) for number, prompt in enumerate(prompts)],
        batch=batch,
        read=type(prompts[0]),
        schedule=lambda _: schedule,
        suffix=suffix,
    )


def written_per_second(pipe: Pipeline, method: Method, batches: Sequence[Batch]) -> float:
    with TemporaryDirectory() as folder, working_folder(Path(folder), Shard()) as work:
        speed = sample(lambda: pipe, {"method": method}, batches, Store(Path(folder), work, Shard(), {}, {})).images_per_second
    assert speed is not None, "there are at least two batches"
    return speed


def generated_per_second(generator: Generator, batches: Sequence[Batch], device: torch.device) -> float:
    """Returns images per second without the first batch, as `sample` does."""
    generator.output(batches[0])
    wait(device)
    begun = time.perf_counter()
    for batch in batches[1:]:
        generator.output(batch)
    wait(device)
    return sum(batch.images for batch in batches[1:]) / (time.perf_counter() - begun)


def speeds(pipe: Pipeline, method: Method, batches: Sequence[Batch], repeats: int) -> dict[str, Any]:
    generator = Generator(pipe, {"method": method})
    generator.prepare(batches, longest_prompts(batches))
    written, generated = [], []
    for _ in range(repeats):
        generated.append(generated_per_second(generator, batches, pipe.model.device))
        written.append(written_per_second(pipe, method, batches))
    share = [one / other for one, other in zip(written, generated, strict=True)]
    found = {"written_per_s": written, "generated_per_s": generated, "share": share}
    return {"engine": pipe.engine, "repeats": repeats, **{name: percentiles(values) for name, values in found.items()}}


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = options(__doc__)
    parser.add_argument("-m", "--model", default="nano")
    parser.add_argument("--size", type=int, help="side of square images in pixels; by default the model's")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--batches", type=int, default=12, help="at least 2; the first is not timed")
    parser.add_argument("--method", default="dense")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--writers", type=int, default=sampler.WRITERS, help="threads that encode and write")
    parser.add_argument("--format", choices=sorted(suffix[1:] for suffix in IMAGE_FORMATS), default="png")
    args = parser.parse_args(arguments)
    if args.batches < 2:
        parser.error("--batches must be at least 2, because the first is not timed")
    sampler.WRITERS = args.writers
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    pipe = (partial(random_pipeline, dtype=dtype) if args.random_weights else load)(args.model, device=device)
    return record([row(pipe, args)], args.out)


def row(pipe: Pipeline, args: argparse.Namespace) -> Row:
    batches = planned(pipe, args.size, args.batch, args.batches, f".{args.format}")
    size = [side * pipe.tokenizer.pixels_per_token for side in batches[0].schedule.grid]
    case = {"model": args.model, "size": size, "batch": args.batch, "method": args.method, "images": args.batch * args.batches}
    case |= {"writers": args.writers, "format": args.format}
    case |= {"dtype": str(pipe.model.dtype).removeprefix("torch."), "weights": "random" if args.random_weights else "published"}
    return measure("sample", case, lambda: speeds(pipe, resolve_method(args.method), batches, args.repeats))


if __name__ == "__main__":
    main()
