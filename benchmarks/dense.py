"""Dense generation, plain eager, random weights: time and peak memory.

    python -m benchmarks.dense [--out FILE] [--repeats N] [NAME ...]

Every row is one model, size and batch with guidance. "generate" is everything from text features to the finished latent, "decode"
the image decoder; "residual" (HART's diffusion head) and "choice" (from logits to codes, STAR's refinement included) are parts of
"generate". All from device events inside the pipeline's own report. Random weights draw noise, so quality is not measured.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from nextscale import Output, Pipeline
from nextscale.prompts import TextReader
from nextscale.random_weights import random_pipeline

from .results import RESULTS, append, measure, spread

TEXT_TOKENS = (50, 20, 77, 33)  # of the prompts in a batch, repeated


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    size: tuple[int, int]  # height, width
    batch: int = 1

    def config(self, pipe: Pipeline) -> dict[str, Any]:
        return {
            "case": self.name,
            "model": self.model,
            "size": list(self.size),
            "batch": self.batch,
            "dtype": str(pipe.model.dtype).removeprefix("torch."),
            "engine": "eager",
            "method": "dense",
            "guided": True,
            "weights": "random",
            "quality": None,
        }


CASES = (
    Case("2b-1024", "infinity-2b", (1024, 1024)),
    Case("2b-1024-batch4", "infinity-2b", (1024, 1024), batch=4),
    Case("2b-2:1", "infinity-2b", (1440, 720)),
    Case("8b-1024", "infinity-8b", (1024, 1024)),
    Case("8b-512", "infinity-8b-512", (512, 512)),
    Case("var-d30-256", "var-d30", (256, 256), batch=8),
    Case("var-d36-512", "var-d36", (512, 512)),
    Case("flexvar-d24-256", "flexvar-d24", (256, 256), batch=8),
    Case("hart-1024", "hart-0.7b", (1024, 1024)),
    Case("hart-1024-batch4", "hart-0.7b", (1024, 1024), batch=4),
    Case("star-256", "star-256", (256, 256)),
    Case("star-512", "star-512", (512, 512)),
    Case("star-1024", "star-1024", (1024, 1024)),
    Case("star-1024-batch4", "star-1024", (1024, 1024), batch=4),
    Case("star-1024-sampler", "star-1024-sampler", (1024, 1024)),
)


def prompts(pipe: Pipeline, case: Case, seed: int) -> Any:
    """Classes, or features of texts with the numbers of tokens above: encoding a text is not measured."""
    numbers = [seed + i for i in range(case.batch)]
    if not isinstance(pipe.reader, TextReader):
        return [number % 1000 for number in numbers]
    words = [TEXT_TOKENS[i % len(TEXT_TOKENS)] - 2 for i in range(case.batch)]  # besides the number, and the encoder's end token
    return pipe.reader.read([f"{number} " + "word " * count for number, count in zip(numbers, words, strict=True)])


def draw(pipe: Pipeline, case: Case, seed: int) -> Output:
    return pipe(prompts(pipe, case, seed), seed=seed, size=case.size)


def run(pipe: Pipeline, case: Case, repeats: int) -> dict[str, Any]:
    for seed in range(3):
        draw(pipe, case, seed)
    reports = [draw(pipe, case, seed).report for seed in range(repeats)]
    generate = spread([report.seconds - report.decode_seconds for report in reports])
    parts = {
        "decode": spread([report.decode_seconds for report in reports]),
        "choice": spread([sum(stage.choice_seconds for stage in report.stages) for report in reports]),
        "residual": spread([sum(stage.residual_seconds for stage in report.stages) for report in reports]),
    }
    stages = [spread([report.stages[i].seconds for report in reports])["median_ms"] for i in range(len(reports[0].stages))]
    return {
        "repeats": repeats,
        **generate,
        **parts,
        "stage_median_ms": stages,
        "tokens": [stage.tokens for stage in reports[0].stages],
        "peak_gb": round(max(report.peak_memory for report in reports) / 1e9, 2),
        "weights_gb": round(weights_bytes(pipe) / 1e9, 2),
        "planned_gb": round(reports[0].planned_memory / 1e9, 2),
    }


def weights_bytes(pipe: Pipeline) -> int:
    return sum(p.numel() * p.element_size() for module in (pipe.model, pipe.tokenizer) for p in module.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"cases to run: {', '.join(case.name for case in CASES)}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    chosen = [case for case in CASES if not args.names or case.name in args.names]
    for model, cases in groupby(chosen, key=lambda case: case.model):
        run_model(model, list(cases), args.repeats, args.out)


def run_model(model: str, cases: list[Case], repeats: int, out: Path) -> None:
    """Its own function, so that the weights are freed before the next model's are made."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    pipe = random_pipeline(model, device=device, dtype=dtype)
    for case in cases:
        row = measure("dense", case.config(pipe), partial(run, pipe, case, repeats))
        append([row], out)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
