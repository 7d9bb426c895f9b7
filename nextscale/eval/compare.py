"""Compares methods with dense generation on the same prompts and seeds, alternately: time, MACs, and distance to the dense images."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import NextscaleError, SettingError
from ..io import from_levels, to_levels
from ..methods.method import Method
from ..metrics.intervals import mean_interval
from ..metrics.pixels import WINDOW, psnr, ssim
from ..pipeline import Pipeline
from ..report import Report
from ..stage import Schedule
from .results import DENSE, Row, percentiles, short_error, wait, where

BENCHMARK = "quality"
SHOWN = 8  # images per method on a sheet
WARM_UPS = 2  # untimed batches of every method on a GPU: programs are loaded in the first, graphs are captured in the second
ROUNDS = 3  # timed rounds, at least
UNEVEN = 1 / 3  # difference of rounds above which a note is printed
METRIC_BATCH = 64  # images that are compared at a time

Distance = Callable[[Tensor, Tensor], Tensor]
"""Distances [B] of two batches of images [B, 3, H, W] in [-1, 1]: LPIPS."""
OnProgress = Callable[[str, float], None]
"""Called before every batch with the method that is next and the share of all batches that is done."""


@dataclass(eq=False)
class MethodResult:
    """Measurements of one method, batch by batch; images in the order in which they were generated."""

    method: Method = field(default_factory=Method)
    error: str | None = None
    reports: list[Report] = field(default_factory=list)
    images: list[Tensor] = field(default_factory=list)  # the first ones, [B, 3, H, W] in 8 bits
    masks: list[tuple[Tensor, ...]] = field(default_factory=list)  # of these by stage, [B, h, w]: share of the network run for each cell
    pairs: dict[str, list[Tensor]] = field(default_factory=dict)  # [B] against dense

    def measure(self, images: Tensor, dense: Tensor, lpips: Distance | None) -> None:
        """Adds the distances of images [B, 3, H, W] to the dense ones, both in 8 bits, by the measures that their size allows."""
        measures = {"psnr": psnr} | ({"ssim": ssim} if min(images.shape[2:]) >= WINDOW else {}) | ({"lpips": lpips} if lpips else {})
        for name, measure in measures.items():
            self.pairs.setdefault(name, []).append(distances(measure, images, dense))

    def row(self, dense: MethodResult) -> Row:
        """Returns the columns of this method."""
        if self.error is not None:
            return {"engine": None, "error": self.error}
        reports, pairs = self.reports, list(zip(dense.reports, self.reports, strict=True))
        row: Row = {
            "settings": reports[0].method,
            "engine": " and ".join(sorted({report.engine for report in reports})),
            "ms_per_image": percentiles_and_range([1000 * report.seconds / batch_of(report) for report in reports]),
            "decode_ms_per_image": percentiles([1000 * report.decode_seconds / batch_of(report) for report in reports]),
            "speedup": percentiles_and_range([theirs.seconds / ours.seconds for theirs, ours in pairs]),
            "cost_share": round(statistics.fmean(report.cost_share for report in reports), 4),
            "kept": round(computed_share(reports), 4),
            "padding": round(statistics.fmean(report.padding for report in reports), 4),
        }
        for name, values in ((name, torch.cat(parts)) for name, parts in self.pairs.items()):
            different = values[values.isfinite()]  # equal images have no PSNR: they are counted, and the mean is over the others
            if name == "psnr":
                row["identical"] = round(1 - len(different) / len(values), 4)
            row[name] = mean_interval(different).rounded() if len(different) else None
        return row


@dataclass(frozen=True, eq=False)
class Comparison:
    """Rows of all methods, dense first; the prompts in the order of the images."""

    rows: list[Row]
    prompts: list[Any]
    results: dict[str, MethodResult]


class Batch(NamedTuple):
    """Images of a batch; its latents and codes do not fill the memory while the next is generated."""

    images: Tensor  # [B, 3, H, W], 8 bits
    masks: tuple[Tensor, ...]
    report: Report


@dataclass(frozen=True, eq=False)
class Requests:
    """Batches of prompts, all of one size, so that one captured graph serves them all."""

    pipeline: Pipeline
    schedule: Schedule
    prompts: Sequence[Any]
    seed: int
    batches: list[list[int]]  # numbers of the prompts

    @property
    def on_gpu(self) -> bool:
        return self.pipeline.model.device.type == "cuda"

    def texts(self, numbers: Sequence[int]) -> list[Any]:
        return [self.prompts[number] for number in numbers]

    def longest(self) -> list[int]:
        """Returns the batch with the longest prompt, whose graph has room for all others. Raises PromptError for wrong prompts."""
        lengths = [self.pipeline.reader.read(self.texts(numbers)).longest for numbers in self.batches]
        return self.batches[lengths.index(max(lengths))]

    def generate(self, method: Method, numbers: Sequence[int], masks: bool = False) -> Batch:
        """Returns the images of these prompts. A batch smaller than the first one is filled with its first prompts."""
        filled = [*numbers, *numbers[: len(self.batches[0]) - len(numbers)]]
        wait(self.pipeline.model.device)  # for work of the last measurement, which is not this method's
        seeds = [self.seed + number for number in filled]
        output = self.pipeline(self.texts(filled), seed=seeds, size=self.schedule, method=method, compute_mask=masks)
        if not output.pixels.isfinite().all():
            raise NextscaleError("the decoded images have values that are not finite")
        shares = tuple(share[: len(numbers)].cpu() for share in output.compute_mask or ())
        return Batch(to_levels(output.pixels[: len(numbers)]), shares, output.report)

    def attempt(self, name: str, result: MethodResult, numbers: Sequence[int], masks: bool = False) -> Batch | None:
        """Returns a batch; None if the method fails, and from then on. Dense generation must not fail."""
        if result.error is not None:
            return None
        try:
            return self.generate(result.method, numbers, masks)
        except Exception as error:
            if name == DENSE:
                raise
            result.error = short_error(error)
            return None

    def conditions(self, report: Report) -> Row:
        """Returns the columns that all rows of a comparison share."""
        return {
            "benchmark": BENCHMARK,
            "model": self.pipeline.name,
            "size": [*report.size],
            "batch": len(self.batches[0]),
            "dtype": report.dtype,
            "quantize": report.quantize,
            "images": len(self.prompts),
            "seed": self.seed,
            **where(self.pipeline.model.device),
        }


def compare(
    pipeline: Pipeline,
    methods: Mapping[str, Method],
    prompts: Sequence[Any],
    lpips: Distance | None,
    *,
    schedule: Schedule,
    seed: int = 0,
    batch: int = 64,
    masks: bool = False,
    on_progress: OnProgress = lambda name, share: None,
    on_images: Callable[[str, Tensor], None] = lambda name, images: None,
) -> Comparison:
    """Generates every prompt densely and with every method, and compares the images as they would be stored, in 8 bits.

    Prompt i has seed + i with every method. Batches are mixed, each with prompts from the whole list, and all of one size. Methods take
    turns batch by batch, in three rounds at least. On a GPU each method first runs two batches that are not timed, in which requests that
    can be captured are: "engine" in a row is the one that ran the timed batches. On a CPU the last method runs one. A method that fails
    has a row with an "error".

    Times are per image in batches of this size, with decoding, without encoding the prompts. Where a method keeps another number of
    tokens in every image, `cost_share` includes the padding of buckets; `kept`, the share of the cells that the images needed, does not.

    Args:
        masks: also collects compute masks of the first images; on a GPU these take calls of their own.
        on_images: called once for each batch and method with the images [B, 3, H, W] in 8 bits.
    """
    if not prompts:
        raise SettingError("prompts must not be empty")
    requests = Requests(pipeline, schedule, prompts, seed, mixed_batches(len(prompts), batch))
    chosen = {DENSE: Method(), **methods}  # each round starts with the images that the others are compared with
    results = {name: MethodResult(method) for name, method in chosen.items()}
    longest = requests.longest()
    for _ in range(WARM_UPS if requests.on_gpu else 1):  # on a CPU one batch: the first one pays for memory that all later ones find
        for name, result in [*results.items()][0 if requests.on_gpu else -1 :]:
            requests.attempt(name, result, longest)
    turns = requests.batches * -(-ROUNDS // len(requests.batches))
    for turn, numbers in enumerate(turns):
        first, dense = turn < len(requests.batches), None
        for place, (name, result) in enumerate(results.items()):
            on_progress(name, (turn + place / len(results)) / len(turns))
            done = requests.attempt(name, result, numbers, masks and not requests.on_gpu)
            if done is None:
                continue
            result.reports.append(done.report)
            if not first:
                continue
            if dense is None:
                dense = done.images
            else:
                result.measure(done.images, dense, lpips)
            on_images(name, done.images)
            if (left := SHOWN - sum(map(len, result.images))) > 0:
                result.images.append(done.images[:left].cpu())
                masked = requests.generate(result.method, numbers, True) if masks and requests.on_gpu else done
                result.masks.append(tuple(share[:left] for share in masked.masks))
    common = requests.conditions(results[DENSE].reports[0])
    rows = [common | {"method": name, "settings": result.method.label} | result.row(results[DENSE]) for name, result in results.items()]
    return Comparison(rows, [prompt for numbers in requests.batches for prompt in requests.texts(numbers)], results)


@torch.inference_mode()
def distances(measure: Distance, ours: Tensor, theirs: Tensor) -> Tensor:
    """Returns the distances [B] of images [B, 3, H, W] in 8 bits."""
    pairs = zip(ours.split(METRIC_BATCH), theirs.to(ours.device).split(METRIC_BATCH), strict=True)
    return torch.cat([measure(from_levels(one), from_levels(other)) for one, other in pairs]).double().cpu()


def mixed_batches(count: int, batch: int) -> list[list[int]]:
    """Returns batches of at most `batch` numbers, each from the whole range; the first ones may have one more than the last."""
    if batch < 1:
        raise SettingError(f"batch must be 1 or more; got {batch}")
    batches = -(-count // batch)
    return [list(range(first, count, batches)) for first in range(batches)]


def percentiles_and_range(values: Sequence[float]) -> dict[str, float]:
    """Returns percentiles with the lowest and the highest value."""
    return percentiles(values) | {"low": round(min(values), 4), "high": round(max(values), 4)}


def is_uneven(row: Row) -> bool:
    """Returns True if the rounds of a row that did not fail differ by more than a third, in speedup or, of dense generation, in time."""
    times = row["ms_per_image" if row["method"] == DENSE else "speedup"]
    return bool(times["high"] / times["low"] - 1 > UNEVEN)


# --- numbers from reports


def batch_of(report: Report) -> int:
    return len(report.seeds or ())


def computed_share(reports: Sequence[Report]) -> float:
    """Returns the share of the cells that the sublayers ran, mean of all images, without padding."""
    ran = [sum(stage.computed * (1 - stage.padding) for stage in report.stages) for report in reports]
    return statistics.fmean(ran) / sum(stage.height * stage.width for stage in reports[0].stages)
