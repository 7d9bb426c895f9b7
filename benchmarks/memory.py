"""Measures the peak memory of the recipes in docs/guides/memory.md, limited to the memory of each recipe's card.

    python -m benchmarks.memory [--recipe NAME ...] [--weights published] [--text-encoder PATH] [--engines eager graphs] [--out FILE]

Weights are random by default. Torch's memory is limited to the card's minus a CUDA context; running out of memory gives a row with an
error. "encoding_gb" is the peak while a prompt is encoded, "generating_gb" the peak from there to the image, and "peak_gb" the larger one.
With random weights the text encoder is replaced by an allocation of its published size.

These values are the memory that torch has reserved, which includes cached blocks; in eager mode those grow with every stage up to the
limit, and are released before an allocation fails. "allocated_gb" is the memory in use from the prompt's features to the image, which
"predicted_gb" of `nextscale plan` estimates. `python -m benchmarks.tables` writes the table.
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
CONTEXT = 0.6 * GIB  # reserved for CUDA; 0.5 GiB were measured on an H200
PROMPT = "a lighthouse on a cliff in a storm, waves against the rocks, oil on canvas"


@dataclass(frozen=True)
class Recipe:
    """A model and a card with little memory for it."""

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
    """Returns an encoded prompt and the peak memory of encoding it."""
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
    """Returns the predicted bytes of each phase; needs neither weights nor a GPU."""
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
    parser.add_argument("--text-encoder", help="folder or hub name; for published weights")
    args = parser.parse_args(arguments)
    require_gpu(parser, "memory is measured")
    return record(rows(args), args.out)


if __name__ == "__main__":
    main()
