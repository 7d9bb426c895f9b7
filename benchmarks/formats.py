"""Compares quantized weights with the model as loaded, at the same seeds.

    python -m benchmarks.formats images --prompts SHARD [-m nano] [--size 512] [--batch 32] [--limit N] [--out FILE] [VARIANT ...]
    python -m benchmarks.formats errors [-m infinity-2b] [--random-weights] [--outliers 100] [--each] [--out FILE] [VARIANT ...]

A variant is fp8 or int8, optionally with the layers that are not quantized (fp8:feed_forward.fc2,attention.proj), or another dtype as a
baseline: any rounding changes some sampled codes, and then the image. "images" compares images. "errors" also works with random weights: it
measures relative errors of logits for the same codes, and the share of codes or bits that are sampled differently, per stage. --each also
quantizes every layer separately. On a CPU e4m3 is emulated in float32: errors equal a GPU's, times do not.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nextscale import Pipeline, load
from nextscale.cli.parse import parse_size
from nextscale.device import choose_device, choose_dtype
from nextscale.eval.bench import release, request_prompts
from nextscale.eval.results import Row
from nextscale.loading.load import random_pipeline
from nextscale.metrics import Lpips
from nextscale.models.quantization import FORMATS
from nextscale_research.metrics.efficientnet import EfficientNetLite0
from nextscale_research.quality.agreement import Agreement
from nextscale_research.quality.format_errors import Seen, generate_seen, plant_outliers, stage_errors
from nextscale_research.quality.formats import Variant, compare_formats, products_of
from nextscale_research.quality.judge import SetJudge
from nextscale_research.quality.prompts import read_eval_prompts

from .formats_table import ERRORS
from .results import measure, options, record


def opened(args: argparse.Namespace, outliers: float = 0.0) -> Pipeline:
    device = choose_device(args.device)
    dtype = choose_dtype(None if args.dtype is None else getattr(torch, args.dtype), device)
    random = getattr(args, "random_weights", False)
    pipe = random_pipeline(args.model, device=device, dtype=dtype) if random else load(args.model, device=device, dtype=dtype)
    if outliers:
        plant_outliers(pipe.model, outliers)
    return pipe


def judged_rows(args: argparse.Namespace, variants: Sequence[Variant]) -> Iterator[Row]:
    device = choose_device(args.device)
    agreement = None if args.probe is None else Agreement.load(args.probe, device)
    sets = None if args.metrics is None else SetJudge(EfficientNetLite0.load(args.metrics, device), agreement)
    prompts = read_eval_prompts(args.prompts, args.limit)
    yield from compare_formats(
        partial(opened, args), variants, prompts, Lpips.load(device), sets, size=args.size, seed=args.seed, batch=args.batch
    )


def error_rows(args: argparse.Namespace, variants: Sequence[Variant]) -> Iterator[Row]:
    for outliers in (0.0, args.outliers) if args.outliers else (0.0,):
        pipe = opened(args, outliers)
        config = {
            "model": args.model,
            "weights": "random" if args.random_weights else "checkpoint",
            "size": args.size,
            "batch": args.batch,
            "outliers": outliers,
            "dtype": str(pipe.model.dtype).removeprefix("torch."),
        }
        prompts = request_prompts(pipe, args.batch, args.seed)
        expected = generate_seen(pipe, prompts, args.size, seed=args.seed)
        alone = [Variant.alone(form, name) for form in FORMATS for name in products_of(pipe.model)] if args.each else []
        del pipe
        for variant in (*variants, *alone):
            release(choose_device(args.device))
            yield measure(ERRORS, config | {"variant": variant.name}, partial(errors_of, args, variant, outliers, prompts, expected))


def errors_of(args: argparse.Namespace, variant: Variant, outliers: float, prompts: Any, expected: Seen) -> dict[str, Any]:
    pipe = variant.apply(opened(args, outliers))
    return stage_errors(generate_seen(pipe, prompts, args.size, expected.codes, args.seed), expected)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = options(__doc__)
    parser.add_argument("task", choices=("images", "errors"))
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help="for example fp8 or int8; default: both")
    parser.add_argument("-m", "--model", default="nano")
    parser.add_argument("--size", type=parse_size)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--prompts", type=Path, help="images: held-out prompts")
    parser.add_argument("--limit", type=int, help="images: number of prompts")
    parser.add_argument("--metrics", type=Path, help="images: folder of the networks that compare images")
    parser.add_argument("--probe", type=Path, help="images: probes for agreement with the prompt")
    parser.add_argument("--random-weights", action="store_true", help="errors: use random weights")
    parser.add_argument("--outliers", type=float, default=0.0, help="errors: also measure with outlier channels larger by this factor")
    parser.add_argument("--each", action="store_true", help="errors: also quantize each layer separately")
    args = parser.parse_intermixed_args(arguments)  # variants may come last
    if args.task == "images" and args.prompts is None:
        parser.error("images needs --prompts FILE")
    variants = [Variant.parse(name) for name in args.variants or FORMATS]
    return record((judged_rows if args.task == "images" else error_rows)(args, variants), args.out)


if __name__ == "__main__":
    main()
