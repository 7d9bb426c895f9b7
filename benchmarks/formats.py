"""What quantised weights cost, against the same model as it is loaded, at the same seeds.

    python -m benchmarks.formats images --prompts SHARD [-m nano] [--size 512] [--batch 32] [--limit N] [--out FILE] [VARIANT ...]
    python -m benchmarks.formats errors [-m infinity-2b] [--random-weights] [--outliers 100] [--each] [--out FILE] [VARIANT ...]
    python -m benchmarks.formats table [--out FILE]

A variant is fp8 or int8, and after a colon the products that stay as they are: fp8:feed_forward.fc2,attention.proj; or another dtype, since
what one rounding changes is what a format has to be compared with: the first codes that differ make another image. "images" judges
images; "errors" needs no judge and no trained weights: relative errors of logits for the same codes, and the share of codes or bits that
are sampled differently, stage by stage. --each also quantises every product alone. "table" writes the tables of docs/quantisation.md.
On a CPU e4m3 is emulated in float32: errors are those of a GPU, times are not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nextscale import Pipeline, load
from nextscale.cli.parse import parse_size
from nextscale.io import write_text
from nextscale.lab.bench.requests import request_prompts
from nextscale.lab.bench.runner import release
from nextscale.lab.bench.tables import with_tables
from nextscale.lab.evals.format_errors import Seen, generate_seen, plant_outliers, stage_errors
from nextscale.lab.evals.formats import NAMES, OWN, Variant, compare_formats, products_of
from nextscale.lab.evals.judges import Judges
from nextscale.lab.evals.prompts import read_eval_prompts
from nextscale.lab.results import Row, read_rows
from nextscale.loading.random_weights import random_pipeline
from nextscale.models.quantized import FORMATS
from nextscale.placement import choose_device, choose_dtype

from .results import RESULTS, append, measure

ERRORS = "format errors"
PAGE = Path(__file__).parent.parent / "docs" / "quantisation.md"


def opened(args: argparse.Namespace, outliers: float = 0.0) -> Pipeline:
    device = choose_device(args.device)
    dtype = choose_dtype(None if args.dtype is None else getattr(torch, args.dtype), device)
    random = getattr(args, "random_weights", False)
    pipe = random_pipeline(args.model, device=device, dtype=dtype) if random else load(args.model, device=device, dtype=dtype)
    if outliers:
        plant_outliers(pipe.model, outliers)
    return pipe


def judged_rows(args: argparse.Namespace, variants: Sequence[Variant]) -> Iterator[Row]:
    judges = Judges.load(args.metrics, args.probe, choose_device(args.device))
    prompts = read_eval_prompts(args.prompts, args.limit)
    yield from compare_formats(partial(opened, args), variants, prompts, judges, size=args.size, seed=args.seed, batch=args.batch)


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


# --- tables


def value(row: Row, name: str, form: str) -> str:
    return format(row[name]["value"], form) if row.get(name) else ""


def images_table(rows: Sequence[Row]) -> str:
    """The newest row of every variant under the conditions of the last one."""
    found = [row for row in rows if row["benchmark"] == "formats" and "error" not in row]
    if not found:
        return ""
    names = ("model", "size", "batch", "images", "seed", "hardware")
    newest = {row["variant"]: row for row in found if all(row[name] == found[-1][name] for name in names)}
    lines = [
        "| weights | GB | ms per image | LPIPS | PSNR | style correct | label in top 5 | Fréchet distance to the model's own |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for variant, row in newest.items():
        title = f"{row['dtype']}, as loaded" if variant == OWN else variant
        cells = (value(row, "lpips", ".4f"), value(row, "psnr", ".1f"), value(row, "style", ".1%"), value(row, "label_top5", ".1%"))
        shown = (f"{row['weights_gb']:.3f}", f"{row['ms_per_image']['median']:.2f}", *cells, value(row, "frechet_dense", ".2f"))
        lines.append(f"| {title} | {' | '.join(shown)} |")
    last = found[-1]
    height, width = last["size"]
    note = f"`{last['model']}`, {last['images']} prompts at {height}x{width}, batches of {last['batch']}; {last['hardware']}."
    return "\n".join([*lines, "", note])


def errors_table(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row["benchmark"] == ERRORS and "error" not in row]
    lines = [
        "| model | weights | outliers | quantised | error of logits: first, mean, last | codes or bits changed: mean, last |",
        "|---|---|---:|---|---|---|",
    ]
    newest = {(row["model"], str(row["size"]), row["weights"], row["outliers"], row["variant"]): row for row in found}
    for (model, _, weights, outliers, variant), row in newest.items():
        logits, changed = row["logits"], row["changed"]
        numbers = f"{logits[0]:.4f}, {sum(logits) / len(logits):.4f}, {logits[-1]:.4f}"
        shares = f"{sum(changed) / len(changed):.2%}, {changed[-1]:.2%}"
        planted = f"{outliers:g}x" if outliers else ""
        lines.append(f"| {model} | {weights} | {planted} | {shown_variant(variant)} | {numbers} | {shares} |")
    where = sorted({f"{row['dtype']} on {row['hardware']}" for row in newest.values()})
    note = f"Relative errors: of the first stage, the mean, the last. Against {', '.join(where)}; on a CPU e4m3 is emulated."
    return "\n".join([*lines, "", note]) if newest else ""


def shown_variant(name: str) -> str:
    """One product by its own name, in place of all others."""
    variant = Variant.parse(name)
    quantised = [product for product in NAMES if variant.format is not None and product not in variant.keep]
    return f"{variant.format}, {quantised[0]} alone" if len(quantised) == 1 else name


def write_page(rows: Sequence[Row]) -> None:
    tables = {"formats": images_table(rows), "format-errors": errors_table(rows)}
    write_text(with_tables(PAGE.read_text(encoding="utf-8"), {name: made for name, made in tables.items() if made}), PAGE)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("images", "errors", "table"))
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help="such as fp8 or int8; default: both")
    parser.add_argument("-m", "--model", default="nano")
    parser.add_argument("--size", type=parse_size)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--prompts", type=Path, help="images: held-out prompts")
    parser.add_argument("--limit", type=int, help="images: prompts to take")
    parser.add_argument("--metrics", type=Path, help="images: folder of the networks that compare images")
    parser.add_argument("--probe", type=Path, help="images: probes for agreement with the prompt")
    parser.add_argument("--random-weights", action="store_true", help="errors: of a model of this layout")
    parser.add_argument("--outliers", type=float, default=0.0, help="errors: also with channels that are so many times larger")
    parser.add_argument("--each", action="store_true", help="errors: also every product alone")
    args = parser.parse_intermixed_args(arguments)  # variants may come last
    if args.task == "table":
        write_page(read_rows(args.out))
        return []
    if args.task == "images" and args.prompts is None:
        parser.error("images are judged by prompts: add --prompts FILE")
    variants = [Variant.parse(name) for name in args.variants or FORMATS]
    found = []
    for row in (judged_rows if args.task == "images" else error_rows)(args, variants):
        append([row], args.out)
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


if __name__ == "__main__":
    main()
