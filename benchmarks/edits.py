"""Edits: MACs and time of all cells, NearMask and skipping, and how near they are to the image and to the edit of all cells.

On a CPU: `python -m benchmarks.edits --pictures val.tar --limit 8`, nano on held-out pictures at 256 px, masks of 5, 20 and 40 %.
On a GPU: `python -m benchmarks.edits --model infinity-2b`, random weights at 1024 px, milliseconds of a 20 % edit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

import nextscale
from nextscale import EditOptions, Pipeline
from nextscale.edit_inputs import read_edit
from nextscale.eval.results import Row
from nextscale.io import from_levels, to_levels
from nextscale.loading.load import random_pipeline
from nextscale.metrics import Lpips
from nextscale.metrics.intervals import mean_interval
from nextscale.metrics.pixels import psnr
from nextscale.schedules import InfinitySchedules

from .results import measure, options, record, require_gpu

SIDE = 256
SHARES = (0.05, 0.2, 0.4)
METHODS = {
    "all cells": (None, False),
    **{f"NearMask, margin {margin}": (f"nearmask:margin={margin}", True) for margin in range(5)},
    "last stage skipped": ("skip:last=1", False),
    "last two stages skipped": ("skip:last=2", False),
}
FEW = ("all cells", "NearMask, margin 2", "last stage skipped")
ROUNDS = 10
GPU_METHODS = {"all cells": (None, False), "NearMask": (None, True), "NearMask, guidance dropped": ("dropguidance:first_stage=10", True)}


class Held(NamedTuple):
    """A picture that nano was not trained on."""

    levels: Tensor  # [3, SIDE, SIDE]
    caption: str


def held_out(shard: Path, limit: int | None) -> list[Held]:
    from training.data import read_pictures

    pictures = read_pictures([shard], [SIDE])[SIDE]
    chosen = range(0, len(pictures), max(1, len(pictures) // limit)) if limit else range(len(pictures))
    return [Held(pictures.pixels[number], pictures.records[number].caption) for number in list(chosen)[:limit]]


def square(share: float, side: int, number: int) -> Tensor:
    """The mask of a square somewhere in the picture, [side, side]; every picture has its own place."""
    edge, generator = round(side * share**0.5), torch.Generator().manual_seed(number)
    top, left = (int(torch.randint(0, side - edge + 1, (1,), generator=generator)) for _ in range(2))
    mask = torch.zeros(side, side)
    mask[top : top + edge, left : left + edge] = 1
    return mask


def seam(pixels: Tensor, mask: Tensor) -> float:
    """The mean step across the edge of the mask, in levels."""
    levels = to_levels(pixels).float()
    steps = [(levels.diff(dim=axis).abs().mean(dim=-3), mask.diff(dim=axis) != 0) for axis in (-2, -1)]
    return float(torch.cat([step[..., edge].flatten() for step, edge in steps]).mean())


def compared(pipe: Pipeline, lpips: Lpips, held: Held, mask: Tensor, number: int, names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Returns the measurements of all methods on one picture. Methods take turns, and each picture begins with another one."""
    image, found, plain = from_levels(held.levels[None]), dict[str, dict[str, float]](), dict[str, Tensor]()
    start = number % len(names)
    for name in (*names[start:], *names[:start]):
        method, near = METHODS[name]
        call: dict[str, Any] = {"mask": mask, "seed": number, "method": method}
        begun = time.process_time()  # of the CPU: other programs do not count
        output = pipe.edit(image, held.caption, **call, options=EditOptions(near_mask=near, paste=False))
        seconds = time.process_time() - begun
        plain[name] = output.pixels
        outside = mask == 0
        composed = torch.where(outside, output.pixels, image)
        found[name] = {
            "macs": output.report.cost_share,
            "cpu_seconds": seconds,
            "psnr_outside": float(psnr(composed.clamp(-1, 1), image)),
            "lpips_outside": float(lpips(composed, image)),
            "seam_ratio": seam(pasted(output.pixels, image, mask), mask) / max(seam(image, mask), 0.1),
            "lpips_inside": float(lpips(torch.where(outside, image, output.pixels), image)),
        }
    for name in names:
        inside = [torch.where(mask == 0, image, plain[one]) for one in (name, "all cells")]
        found[name]["lpips_to_all_cells"] = float(lpips(*inside))
        found[name]["speedup"] = found["all cells"]["cpu_seconds"] / found[name]["cpu_seconds"]
    return found


def pasted(pixels: Tensor, image: Tensor, mask: Tensor) -> Tensor:
    """The result that a caller gets."""
    paste = read_edit(image, mask, None, EditOptions(), InfinitySchedules("0.06M", 8), (SIDE, SIDE), None, 8).paste
    assert paste is not None
    return paste(pixels)


def quality(pictures: list[Held], names: tuple[str, ...]) -> Iterator[Row]:
    pipe, lpips = nextscale.load("nano"), Lpips.load()
    for share in SHARES:
        each: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for number, held in enumerate(pictures):
            with torch.inference_mode():
                for name, row in compared(pipe, lpips, held, square(share, SIDE, number), number, names).items():
                    each[name].append(row)
        for name in names:
            config = {"model": "nano", "size": [SIDE, SIDE], "mask_share": share, "method": name, "images": len(pictures)}
            columns = {key: mean_interval([row[key] for row in each[name]]).rounded() for key in each[name][0]}
            yield measure("edits", config, lambda columns=columns: columns)  # type: ignore[misc]


def speed(pipe: Pipeline, side: int) -> Iterator[Row]:
    """Milliseconds end to end, in turns: a full generation, edits of 20 %, and encoding by itself."""
    image = Image.fromarray(torch.randint(0, 256, (side, side, 3), dtype=torch.uint8).numpy())
    mask = Image.fromarray((255 * square(0.2, side, 0)).to(torch.uint8).numpy())
    calls = {"generation": lambda: pipe("a red apple", seed=1, size=(side, side), warmup=True)}
    for label, (method, near) in GPU_METHODS.items():
        settings: dict[str, Any] = {"method": method, "options": EditOptions(near_mask=near), "warmup": True}
        calls[label] = lambda settings=settings: pipe.edit(image, "a red apple", mask=mask, seed=1, **settings)  # type: ignore[misc]
    pixels = torch.zeros(1, 3, side, side, device=pipe.model.device)
    calls["encode"] = lambda: pipe.tokenizer.encode(pixels, pipe.settings.schedules.choose((side, side), None))  # type: ignore[assignment, return-value]
    spent: dict[str, list[float]] = {label: [] for label in calls}
    for turn in range(ROUNDS + 2):
        for label, call in calls.items():
            torch.cuda.synchronize()
            begun = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if turn >= 2:
                spent[label].append(1000 * (time.perf_counter() - begun))
    full = statistics.median(spent["generation"])
    for label, times in spent.items():
        config = {"model": pipe.name, "weights": "random", "size": [side, side], "mask_share": 0.2, "method": label, "batch": 1}
        found = {"ms": round(statistics.median(times), 2), "ms_range": [round(min(times), 2), round(max(times), 2)]}
        yield measure("edits", config, lambda found=found: found | {"share": round(found["ms"] / full, 3)})  # type: ignore[misc]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--pictures", type=Path, help="shard of held-out pictures, for the table of nano")
    parser.add_argument("--limit", type=int, help="number of pictures, evenly spread; default: all")
    parser.add_argument("--few", action="store_true", help="three methods only")
    parser.add_argument("--model", help="measure the time of this model with random weights, on a GPU")
    given = parser.parse_args()
    if given.model:
        require_gpu(parser, "times are measured")
        record(speed(random_pipeline(given.model, device="cuda", dtype=torch.bfloat16), 1024), given.out)
    elif given.pictures:
        record(quality(held_out(given.pictures, given.limit), FEW if given.few else tuple(METHODS)), given.out)
    else:
        parser.error("give --pictures or --model")


if __name__ == "__main__":
    main()
