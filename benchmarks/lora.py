"""Measures adapters: seconds per training step and peak memory, and the time of a change of adapters.

`python -m benchmarks.lora [-m MODEL] [--size BUDGET ...]`. Weights, captions and pictures are random.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from nextscale.checkpoints.adapters import LowRank, write_peft
from nextscale.device import choose_device, choose_dtype, peak_memory, reset_peak
from nextscale.eval.bench import request_prompts
from nextscale.eval.results import percentiles_ms
from nextscale.loading.load import random_pipeline
from nextscale.pipeline import Pipeline
from nextscale.text import TextFeatures
from training.lora import Adapters, LoraTrainer, LoraTraining
from training.lora_data import Bucket

from .results import RESULTS, measure, record

WARM_STEPS = 2


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_bucket(pipe: Pipeline, size: str | None, pictures: int) -> Bucket:
    schedule = pipe.settings.schedules.choose(size, None)
    channels = pipe.tokenizer.canvas(schedule, 1).latent.shape[1]
    text = request_prompts(pipe, pictures, 0)
    assert isinstance(text, TextFeatures)
    return Bucket(schedule, torch.randn(pictures, channels, *schedule.grid).half(), text.to("cpu"))


def training(pipe: Pipeline, size: str | None, settings: LoraTraining, steps: int) -> dict[str, Any]:
    device, bucket = pipe.model.device, random_bucket(pipe, size, settings.batch)
    pipe.model.requires_grad_(False)
    trainer = LoraTrainer(pipe, adapters := Adapters(pipe.model, settings), settings)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(adapters.trained(), lr=settings.learning_rate)
    reset_peak(device)
    seconds = []
    for step in range(WARM_STEPS + steps):
        synchronize(device)
        begun = time.perf_counter()
        trainer.step(step, [bucket], optimizer)
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
    recomputed = trainer.recomputes(bucket.schedule)
    return {"steps": steps, "recomputed": recomputed, "peak_gb": peak_memory(device) / 1e9, **percentiles_ms(seconds[WARM_STEPS:])}


def switching(pipe: Pipeline, settings: LoraTraining, folder: Path, times: int = 10) -> dict[str, Any]:
    """Measures changes between two adapters."""
    layers = dict(Adapters(pipe.model, settings).places)  # type: ignore[arg-type]
    modules = {name: pipe.model.get_submodule(layer) for name, layer in layers.items()}
    shapes = {name: (module.out_features, module.in_features) for name, module in modules.items()}
    for name in ("one", "two"):
        found = {
            key: LowRank(torch.randn(settings.rank, columns), torch.randn(rows, settings.rank)) for key, (rows, columns) in shapes.items()
        }
        write_peft(folder / name, found, alpha=settings.alpha, model=pipe.name)
        pipe.load_lora(folder / name, scale=0)
    seconds = []
    for turn in range(times):
        synchronize(pipe.model.device)
        begun = time.perf_counter()
        pipe.set_loras({("one", "two")[turn % 2]: 0.01})
        synchronize(pipe.model.device)
        seconds.append(time.perf_counter() - begun)
    return {"median_s": statistics.median(seconds), "layers": len(shapes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="infinity-2b")
    parser.add_argument("--size", nargs="+", default=["0.25M", "1M"], help="pixel budgets")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--work", type=Path, default=Path("build/lora"), help="folder for adapters")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device = choose_device(None)
    dtype = choose_dtype(None, device)
    settings = LoraTraining(rank=arguments.rank, batch=arguments.batch, at_once=arguments.batch)
    config = {"model": arguments.model, "dtype": str(dtype).removeprefix("torch."), "rank": arguments.rank, "weights": "random"}
    rows = []
    for size in arguments.size:
        pipe = random_pipeline(arguments.model, device=device, dtype=dtype)
        own = {**config, "size": size, "batch": arguments.batch}
        rows += record([measure("lora training", own, lambda: training(pipe, size, settings, arguments.steps))], arguments.out)  # noqa: B023
    pipe = random_pipeline(arguments.model, device=device, dtype=dtype)
    record([measure("lora switch", config, lambda: switching(pipe, settings, arguments.work))], arguments.out)


if __name__ == "__main__":
    main()
