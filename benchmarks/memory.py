"""Measures the peaks of the recipes in docs/guides/memory.md, within the memory of the card that each is for.

    python -m benchmarks.memory [--recipe NAME ...] [--weights published] [--text-encoder PATH] [--engines eager graphs] [--out FILE]

A recipe runs with random weights unless published ones are asked for. Torch is not allowed more memory than the card has, less what a
context of CUDA takes; what does not fit is a row with an error. "peak_gb" is the largest of the turns: "encoding_gb" while a prompt is
encoded, "generating_gb" from there to the image. Without a text encoder its turn is not measured but filled: memory of the size that its
published weights have lies beside the model meanwhile.

All of these are what torch has reserved, with blocks that it keeps for later: in eager generation these grow with every stage, as far as
the limit allows, and are given back before anything fails. "allocated_gb" is what was in use at once from the prompt's features to the
image, which is what "predicted_gb", that of `nextscale plan`, speaks of. `python -m benchmarks.tables` writes the table.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from nextscale import Pipeline, load
from nextscale.eval.bench import TEXT_TOKENS, request_prompts
from nextscale.eval.results import Row, wait
from nextscale.loading.artifacts import encoder_bytes
from nextscale.loading.load import random_pipeline, without_weights
from nextscale.loading.presets import model_spec
from nextscale.methods.registry import resolve_method
from nextscale.planning.cost import Workload
from nextscale.planning.memory import ASSUMED_KEPT, request_memory

from .results import measure, options, record, require_gpu

GIB = 2**30
CONTEXT = 0.6 * GIB  # of a card, for CUDA itself: 0.5 GiB were measured on an H200
PROMPT = "a lighthouse on a cliff in a storm, waves against the rocks, oil on canvas"


@dataclass(frozen=True)
class Recipe:
    """A model on a card that is small for it."""

    model: str
    card: int  # GiB
    method: str = "dense"
    options: Mapping[str, Any] = field(default_factory=dict)  # of `load`


RECIPES: dict[str, Recipe] = {
    "2b": Recipe("infinity-2b", 8, options={"kv_dtype": "int8"}),
    "2b stagevar": Recipe("infinity-2b", 8, "stagevar"),
    "2b sparsevar": Recipe("infinity-2b", 8, "sparsevar:keep=0.25"),
    "2b int8 stagevar": Recipe("infinity-2b", 6, "stagevar", {"kv_dtype": "int8", "quantize": "int8"}),
    "8b": Recipe("infinity-8b", 16, options={"kv_dtype": "int8", "quantize": "int8"}),
    "8b stagevar": Recipe("infinity-8b", 16, "stagevar:ranks=0.3", {"kv_dtype": "int8", "quantize": "int8"}),
    "8b bfloat16": Recipe("infinity-8b", 24, options={"kv_dtype": "int8"}),
}


def opened(recipe: Recipe, engine: str, published: bool, text_encoder: str | None) -> Pipeline:
    device = torch.device("cuda")
    if published:
        return load(recipe.model, device=device, engine=engine, text_encoder=text_encoder, offload_text=True, **recipe.options)
    pipe = random_pipeline(recipe.model, device=device, dtype=torch.bfloat16, **recipe.options)
    return Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, pipe.name, engine, int(0.9 * recipe.card * GIB))


def peak_since(reset: bool = True) -> int:
    wait(torch.device("cuda"))
    found = torch.cuda.max_memory_reserved()
    if reset:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return found


def encoded(pipe: Pipeline, recipe: Recipe, published: bool) -> tuple[Any, int]:
    """A prompt that is read, and the peak of reading it."""
    peak_since()
    if published:
        prompts = pipe.reader.read(PROMPT)
        return prompts, peak_since()
    encoder = torch.empty(encoder_bytes(model_spec(recipe.model)), dtype=torch.uint8, device="cuda")
    wait(torch.device("cuda"))
    peak = torch.cuda.max_memory_reserved()
    del encoder
    peak_since()
    return request_prompts(pipe, 1, 0), peak


def predicted(recipe: Recipe) -> dict[str, int]:
    """Bytes of each turn, without weights and without a GPU."""
    spec = model_spec(recipe.model)
    model, tokenizer = without_weights(spec, torch.bfloat16, **recipe.options)
    schedule = spec.settings.schedules.choose(None, None)
    workload = Workload(schedule, 1, text_tokens=TEXT_TOKENS[0])
    memory = request_memory(model, tokenizer, workload, resolve_method(recipe.method).forecast(model, schedule, True, ASSUMED_KEPT))
    encoding = memory.weights + encoder_bytes(spec)
    return {"encoding": encoding, "generating": memory.peak, "peak": max(encoding, memory.peak)}


def peaks(recipe: Recipe, engine: str, published: bool, text_encoder: str | None) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (recipe.card * GIB - CONTEXT) / whole))
    try:
        pipe, method = opened(recipe, engine, published, text_encoder), resolve_method(recipe.method)
        weights = torch.cuda.memory_allocated()
        prompts, encoding = encoded(pipe, recipe, published)
        output = pipe(prompts, seed=0, method=method, warmup=engine == "graphs")
        generating, allocated = peak_since(reset=False), torch.cuda.max_memory_allocated()
        ran = output.report.engine
        del output, pipe
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    found = {"weights": weights, "encoding": encoding, "generating": generating, "allocated": allocated, "peak": max(encoding, generating)}
    rounded = {f"{name}_gb": round(size / 1e9, 2) for name, size in found.items()}
    return rounded | {
        "engine": ran,
        "predicted_gb": {name: round(size / 1e9, 2) for name, size in predicted(recipe).items()},
        "fits": found["peak"] <= recipe.card * GIB - CONTEXT,
    }


def rows(args: argparse.Namespace) -> Iterator[Row]:
    for name in args.recipe:
        recipe = RECIPES[name]
        for engine in args.engines:
            config = {"recipe": name, "model": recipe.model, "card_gib": recipe.card, "method": recipe.method, **recipe.options}
            config |= {"batch": 1, "engine_asked": engine, "weights": args.weights}
            yield measure("memory", config, partial(peaks, recipe, engine, args.weights == "published", args.text_encoder))


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = options(__doc__)
    parser.add_argument("--recipe", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--engines", nargs="+", default=["eager", "graphs"], choices=["eager", "graphs"])
    parser.add_argument("--weights", default="random", choices=["random", "published"])
    parser.add_argument("--text-encoder", help="folder or hub name, with published weights")
    args = parser.parse_args(arguments)
    require_gpu(parser, "`nextscale plan` predicts memory everywhere, and it is measured")
    return record(rows(args), args.out)


if __name__ == "__main__":
    main()
