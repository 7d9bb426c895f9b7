"""Distances to the dense image of many methods that differ in late stages alone, image by image, as a file of rows.

    python -m benchmarks.late_rows OUT.jsonl --prompts val.tar [--images 96] [--size 256] [--content 0.25 0.4]

The early stages of a batch run once, for all methods and for dense generation. Every line of OUT is an image: LPIPS to the dense image of
the same seed and the share of the late stages' cells that ran, by method, and what was known of the image before the late stages. Numbers
that OUT has already are not measured again. `benchmarks.anchors` and `benchmarks.per_image` read such files.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale import Pipeline, load
from nextscale.accel import DropGuidance, Method, MethodRun, RunSetup
from nextscale.accel.combine import Combined
from nextscale.accel.frequency import anchor_count, neighbour_similarity
from nextscale.accel.select import pick
from nextscale.accel.skipvar import gradient, high_frequencies, preview_of
from nextscale.accel.sparsevar import SparseVAR
from nextscale.accel.sparsevar.run import SparseRun
from nextscale.accel.sparsevar.settings import Anchors
from nextscale.io import from_levels, to_levels
from nextscale.lab.evals.late_stages import Late, LateStages
from nextscale.lab.evals.prompts import EvalPrompt, read_eval_prompts
from nextscale.lab.evals.quality import mixed_batches
from nextscale.lab.metrics.lpips import Lpips
from nextscale.lab.results import append_rows, read_rows
from nextscale.stage import Schedule, Stage

KEEPS = (0.15, 0.25, 0.4, 0.7)
PREVIEW = 4  # the stage of whose size the small previews are


@dataclass(frozen=True)
class FarthestAnchors(SparseVAR):
    """SparseVAR whose anchors are the farthest points of the logits that are expected in the region that is left out."""

    anchors: Anchors = "content"

    def start(self, setup: RunSetup) -> MethodRun:
        return FarthestRun(self, setup)


class FarthestRun(SparseRun):
    def _covering(self, stage: Stage, computed: Tensor, alpha: int) -> Tensor:
        assert self.logits is not None
        return farthest_cells(self.logits.at(stage.size), ~computed, anchor_count(stage.size, alpha))


def farthest_cells(vectors: Tensor, free: Tensor, count: int) -> Tensor:
    """Marks `count` free cells [B, cells]: first the most typical one, then always the one least similar to all that are marked."""
    unit = F.normalize(vectors, dim=-1)
    mean = (unit * free[..., None]).sum(dim=1, keepdim=True)
    nearest = -(unit * mean).sum(dim=-1)  # [B, cells]
    marked = torch.zeros_like(free)
    for number in range(count):
        cell = nearest.masked_fill(marked | ~free, torch.inf).argmin(dim=1, keepdim=True)
        similarity = (unit * pick(unit, cell)).sum(dim=-1)
        nearest = similarity if number == 0 else torch.maximum(nearest, similarity)
        marked = marked.scatter(1, cell, True)
    return marked & free


PLACED: Mapping[str, Callable[..., SparseVAR]] = {
    "content": partial(SparseVAR, anchors="content"),
    "farthest": FarthestAnchors,
}


def methods(given: argparse.Namespace, first: int, stages: int) -> dict[str, Method]:
    """By name: budgets with anchors on the grid, some with anchors placed otherwise, and thresholds. All run the conditional rows alone."""
    named = {f"keep {keep}": SparseVAR(keep=late(keep, first, stages)) for keep in given.keeps}
    for where, placed in PLACED.items():
        named |= {f"{where} {keep}": placed(keep=late(keep, first, stages)) for keep in getattr(given, where)}
    named |= {f"tau {tau}": SparseVAR(tau=tau, first_stage=first) for tau in given.taus}
    return {name: Combined((method, DropGuidance(first))) for name, method in named.items()}


def late(keep: float, first: int, stages: int) -> dict[int, float]:
    return dict.fromkeys(range(first, stages), keep)


def known_before(late: LateStages) -> list[dict[str, Any]]:
    """What an image shows before its late stages."""
    seen, small = late.seen, late.schedule[PREVIEW]
    assert seen.change is not None and seen.logits is not None
    change, logits = seen.change.values[..., 0].float(), seen.logits.values.float()
    bits = logits.unflatten(2, (-1, 2)).log_softmax(dim=-1)
    entropy = -(bits.exp() * bits).sum(dim=-1).mean(dim=(1, 2))
    latent = late.canvas.latent.float()
    roughness = sum((latent.roll(1, axis) - latent).abs().mean(dim=(1, 2, 3)) for axis in (2, 3))
    preview = preview_of(latent, small, late.canvas)
    numbers: Mapping[str, Tensor] = {
        "entropy": entropy,
        "likeness": neighbour_similarity(logits, seen.logits.size).mean(dim=1),
        "roughness": roughness,
        "preview_gradient": gradient(preview).mean(dim=(1, 2, 3)),
        "preview_high": high_frequencies(preview),
    }
    return [
        {name: round(float(values[image]), 6) for name, values in numbers.items()}
        | {"change": [float(f"{value:.4g}") for value in change[image].tolist()]}
        for image in range(len(change))
    ]


class Measuring:
    def __init__(self, pipe: Pipeline, lpips: Lpips, schedule: Schedule, first: int, chosen: Mapping[str, Method]) -> None:
        self.pipe, self.lpips, self.schedule, self.first = pipe, lpips, schedule, first
        self.methods = chosen
        self.watch = SparseVAR(keep={stage: 0.5 for stage in range(first, len(schedule))})
        self.cells = sum(stage.cells for stage in schedule.stages[first:])

    @torch.inference_mode()
    def rows(self, prompts: list[EvalPrompt], seeds: list[int]) -> list[dict[str, Any]]:
        late = LateStages(self.pipe, self.schedule, [prompt.text for prompt in prompts], seeds, self.first, self.watch)
        dense = self.shown(late.finish(Method()))
        rows = [
            {"number": seed, "style": prompt.style, "lpips": {}, "tokens": {}, **known}
            for prompt, seed, known in zip(prompts, seeds, known_before(late), strict=True)
        ]
        for name, method in self.methods.items():
            found = late.finish(method)
            distances = self.lpips(self.shown(found), dense)
            for row, distance, tokens in zip(rows, distances.tolist(), found.tokens.tolist(), strict=True):
                row["lpips"][name], row["tokens"][name] = round(distance, 6), round(tokens / self.cells, 5)
        return rows

    def shown(self, found: Late) -> Tensor:
        """Images in [-1, 1], in steps of 8 bits."""
        return from_levels(to_levels(self.pipe.tokenizer.decode(found.latent)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--rows", type=int, help="stop when OUT has so many; another call may go on with other methods")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--late", type=int, default=2, help="how many of the last stages are late")
    parser.add_argument("--keeps", nargs="*", type=float, default=KEEPS, help="budgets, with anchors on the grid")
    parser.add_argument("--taus", nargs="*", type=float, default=[], help="thresholds, with anchors on the grid")
    for where in PLACED:
        parser.add_argument(f"--{where}", nargs="*", type=float, default=[], help="budgets with anchors placed so")
    parser.add_argument("--dtype", default=None, choices=["float32", "bfloat16"])
    given = parser.parse_args()
    pipe = load(given.model, engine="eager", dtype=None if given.dtype is None else getattr(torch, given.dtype))
    schedule = pipe.settings.schedules.choose((given.size, given.size), None)
    first = len(schedule) - given.late
    chosen = methods(given, first, len(schedule))
    measuring = Measuring(pipe, Lpips.load(pipe.model.device), schedule, first, chosen)
    prompts = read_eval_prompts(given.prompts, given.images)
    done = {row["number"] for row in read_rows(given.out)} if given.out.exists() else set()
    for numbers in mixed_batches(len(prompts), given.batch):
        part = [number for number in numbers if given.seed + number not in done]
        if not part:
            continue
        if given.rows is not None and len(read_rows(given.out) if given.out.exists() else []) >= given.rows:
            break
        begun, worked = time.perf_counter(), time.process_time()
        rows = measuring.rows([prompts[number] for number in part], [given.seed + number for number in part])
        append_rows(rows, given.out)
        print(f"{part}: {time.perf_counter() - begun:.1f} s, {time.process_time() - worked:.1f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
