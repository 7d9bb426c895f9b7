"""What methods save and what they cost: the same prompts and seeds drawn densely and with every method, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...accel.method import Method
from ...errors import NextscaleError, SettingError
from ...pipeline import Pipeline
from ...report import Report
from ...schedules import SizeLike
from ..machine import where
from ..metrics import Lpips
from ..metrics.efficientnet import EfficientNetLite0
from ..metrics.frechet import Directions, frechet_distance
from ..metrics.pixels import psnr, ssim
from ..results import BENCHMARK, Row
from .agreement import Agreement, real_features
from .bootstrap import mean_interval, set_interval
from .methods import DENSE
from .prompts import EvalPrompt

DIRECTIONS = 64  # of the features, along which Fréchet distances are taken; see metrics.frechet
IMAGES_PER_DIRECTION = 4  # fewer images than that determine no covariance,
FEWEST_DIRECTIONS = 16  # and along fewer directions than these a distance says nothing: 64 images are needed
FRECHET_RESAMPLES = 100
SHOWN = 8  # images per method on a sheet
METRIC_BATCH = 64  # images that are measured at a time


@dataclass(frozen=True, eq=False)
class Judges:
    """The networks that look at images."""

    lpips: Lpips
    features: EfficientNetLite0
    agreement: Agreement | None = None

    @staticmethod
    def load(metrics: Path | None, probe: Path | None, device: torch.device) -> Judges:
        agreement = None if probe is None else Agreement.load(probe, device)
        return Judges(Lpips.load(metrics, device), EfficientNetLite0.load(metrics, device), agreement)


@dataclass(frozen=True, eq=False)
class Evaluation:
    rows: list[Row]  # one per method, dense first
    shown: list[str]  # a few of the prompts
    samples: dict[str, Tensor]  # their images with every method that drew them, [n, 3, H, W], 8 bits


@dataclass(eq=False)
class Measured:
    """What was seen of one method, batch by batch; images in the order in which they were drawn."""

    kept: float | None = None  # share of the cells that ran in the first batch drawn, mean of its images
    error: str | None = None
    reports: list[Report] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)  # [B, 1280]
    pairs: dict[str, list[Tensor]] = field(default_factory=lambda: {"psnr": [], "ssim": [], "lpips": []})  # [B] against dense

    def pair(self, name: str) -> Tensor:
        return torch.cat(self.pairs[name]).double().cpu()


class Drawn(NamedTuple):
    """All that is left of a batch; its latents, codes and pixels do not fill the memory while the next is drawn."""

    images: Tensor  # [B, 3, H, W], 8 bits
    report: Report


def evaluate(
    pipeline: Pipeline,
    methods: Mapping[str, Method],
    prompts: Sequence[EvalPrompt],
    judges: Judges,
    *,
    size: SizeLike = None,
    seed: int = 0,
    batch: int = 64,
    on_draw: Callable[[str, float], None] | None = None,
) -> Evaluation:
    """Draws every prompt with every method and judges the images as they would be stored, in 8 bits.

    Prompt i has seed + i with every method. Batches are mixed: each takes prompts from the whole list. Methods take turns batch by
    batch, on a GPU after a first batch each that is not timed. What fails becomes a row that says so. Times are per image in batches of
    this size, decoding included, reading the prompts not: a method that keeps other numbers of tokens for every image, as SparseVAR
    does, runs as many as its hungriest image of a batch, and `cost_share` counts them; `kept` does not.
    on_draw: is told before every batch which method is next and what share of all is done.
    """
    if DENSE not in methods or not prompts:
        raise SettingError(f"quality is judged against dense generation of one or more prompts; got {', '.join(methods)}, {len(prompts)}")
    schedule = pipeline.settings.schedules.choose(size, None)
    device = pipeline.model.device
    batches = mixed_batches(len(prompts), batch)
    measured = {name: Measured() for name in (DENSE, *methods)}  # each batch starts with the images that the others are compared with
    samples: dict[str, Tensor] = {}

    def texts(numbers: Sequence[int]) -> list[str]:
        return [prompts[number].text for number in numbers]

    def draw(name: str, numbers: Sequence[int]) -> Drawn | None:
        """None if the method cannot; dense generation has to."""
        result = measured[name]
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what is still running of the last measurement is not this method's
        try:
            seeds = [seed + number for number in numbers]
            output = pipeline(texts(numbers), seed=seeds, size=schedule, method=methods[name], compute_mask=result.kept is None)
            if not output.pixels.isfinite().all():
                raise NextscaleError("the decoded images have values that are not finite")
        except Exception as error:
            if name == DENSE:
                raise
            result.error = f"{type(error).__name__}: {error}".splitlines()[0]
            return None
        if output.compute_mask is not None:
            result.kept = kept_share(output.compute_mask)
        return Drawn(stored(output.pixels), output.report)

    drawn = [prompts[number] for numbers in batches for number in numbers]
    references = real_features(judges.features, drawn) if all(prompt.encoded is not None for prompt in drawn) else None
    for numbers in batches:
        pipeline.reader.read(texts(numbers))  # a prompt that cannot be read is told now, not after the batches before it
    if device.type == "cuda":  # it loads its programs at their first use
        for name in measured:
            draw(name, batches[0])
    for turn, numbers in enumerate(batches):
        dense: Tensor | None = None
        for place, (name, result) in enumerate(measured.items()):
            if on_draw is not None:
                on_draw(name, (turn + place / len(measured)) / len(batches))
            found = None if result.error else draw(name, numbers)
            if found is None:
                continue
            dense = found.images if dense is None else dense
            result.reports.append(found.report)
            measure(judges, found.images, dense, result)
            if turn == 0:
                samples[name] = found.images[:SHOWN].cpu()

    common = {
        "benchmark": BENCHMARK,
        "model": pipeline.name,
        "size": [*measured[DENSE].reports[0].size],
        "batch": len(batches[0]),
        "dtype": measured[DENSE].reports[0].dtype,
        "engine": "eager",
        "images": len(drawn),
        "seed": seed,
        **where(device),
    }
    summary = Summary(measured[DENSE], drawn, judges.agreement, references)
    rows = [common | {"method": name, "settings": methods[name].label} | summary.of(result) for name, result in measured.items()]
    return Evaluation(rows, texts(batches[0][:SHOWN]), samples)


def mixed_batches(count: int, batch: int) -> list[list[int]]:
    """Batches of at most `batch` and nearly equal size, each with numbers from the whole range."""
    if batch < 1:
        raise SettingError(f"batch is the number of images drawn at a time, 1 or more; got {batch}")
    batches = -(-count // batch)
    return [list(range(first, count, batches)) for first in range(batches)]


def kept_share(kept: Sequence[Tensor]) -> float:
    """Of all cells of all stages, from masks [B, height, width] of every stage; mean of the images."""
    return sum(float(mask.sum()) for mask in kept) / sum(mask.numel() for mask in kept)


def stored(pixels: Tensor) -> Tensor:
    """[B, 3, H, W] in [-1, 1] as 8 bits, truncated as `images.to_pil` does."""
    return ((pixels.float().clamp(-1, 1) + 1) / 2 * 255).to(torch.uint8)


@torch.inference_mode()
def measure(judges: Judges, images: Tensor, dense: Tensor, result: Measured) -> None:
    for ours, theirs in zip(images.split(METRIC_BATCH), dense.split(METRIC_BATCH), strict=True):
        a, b = (levels.float() / 127.5 - 1 for levels in (ours, theirs))
        result.features.append(judges.features.features(a))
        if images is not dense:
            found = {"psnr": psnr(a, b), "ssim": ssim(a, b), "lpips": judges.lpips(a, b)}
            for name, values in found.items():
                result.pairs[name].append(values)


@dataclass(frozen=True, eq=False)
class Summary:
    """Turns what was measured into rows."""

    dense: Measured
    prompts: Sequence[EvalPrompt]
    agreement: Agreement | None
    references: Tensor | None  # features of real images of the prompts

    def of(self, result: Measured) -> Row:
        if result.error is not None:
            return {"error": result.error}
        row: Row = self._work(result)
        if result is not self.dense:
            row |= self._likeness(result)
        return row | self._frechet(result) | self._agreement(result)

    def _work(self, result: Measured) -> Row:
        reports, dense = result.reports, self.dense.reports
        on_cpu = reports[0].device == "cpu"
        images = [len(report.seeds or ()) for report in reports]
        ratios = [before.seconds / after.seconds for before, after in zip(dense, reports, strict=True)]
        drawing = [
            (before.seconds - before.decode_seconds) / (after.seconds - after.decode_seconds)
            for before, after in zip(dense, reports, strict=True)
        ]
        return {
            "ms_per_image": spread([1000 * report.seconds / count for report, count in zip(reports, images, strict=True)]),
            "decode_ms_per_image": spread([1000 * report.decode_seconds / count for report, count in zip(reports, images, strict=True)]),
            "speedup": spread(ratios),
            "speedup_without_decoding": spread(drawing),
            "cost_share": round(statistics.fmean(report.cost_share for report in reports), 4),
            "kept": None if result.kept is None else round(result.kept, 4),
            "tokens": [stage.tokens for stage in reports[0].stages],
            "rows": [stage.rows for stage in reports[0].stages],
            "peak_gb": None if on_cpu else round(max(report.peak_memory for report in reports) / 1e9, 2),  # of a process it says nothing
        }

    @staticmethod
    def _likeness(result: Measured) -> Row:
        """To the dense image of the same seed. Equal images have no PSNR: they are counted, and its mean is that of the others."""
        decibels = result.pair("psnr")
        different = decibels[decibels.isfinite()]
        return {
            "identical": round(1 - len(different) / len(decibels), 4),
            "psnr": mean_interval(different).rounded() if len(different) else None,
            "ssim": mean_interval(result.pair("ssim")).rounded(),
            "lpips": mean_interval(result.pair("lpips")).rounded(),
        }

    def _frechet(self, result: Measured) -> Row:
        """To real images, which stay as they are while drawn ones are resampled, and to the dense ones, resampled in pairs."""
        if self._directions is None:
            return {}
        along = self._directions
        ours, theirs = (along(torch.cat(features).cpu()) for features in (result.features, self.dense.features))
        row: Row = {"frechet_directions": ours.shape[1]}
        if self.references is not None:
            fixed = along(self.references.cpu())
            row["frechet_real"] = self._distance(lambda part: frechet_distance(ours[part], fixed))
        if result is not self.dense:
            row["frechet_dense"] = self._distance(lambda part: frechet_distance(ours[part], theirs[part]))
        return row

    def _distance(self, of_images: Callable[[Tensor], Tensor]) -> dict[str, float]:
        found = set_interval(of_images, len(self.prompts), FRECHET_RESAMPLES).rounded()
        return found | {"low": max(found["low"], 0.0)}

    @cached_property
    def _directions(self) -> Directions | None:
        """In which real images vary most, or dense ones where there are no real ones; None for too few images."""
        number = min(DIRECTIONS, len(self.prompts) // IMAGES_PER_DIRECTION)
        if number < FEWEST_DIRECTIONS:
            return None
        return Directions.of((torch.cat(self.dense.features) if self.references is None else self.references).cpu(), number)

    def _agreement(self, result: Measured) -> Row:
        """How often the probes see what the prompt asks for, and how much more often than in the dense image of the same seed."""
        if self.agreement is None:
            return {}
        row: Row = {}
        before = self.agreement.hits(torch.cat(self.dense.features), self.prompts)
        for name, (flags, _) in self.agreement.hits(torch.cat(result.features), self.prompts).items():
            if not len(flags):
                continue
            row[name] = mean_interval(flags.double()).rounded() | {"images": len(flags), "real": self.agreement.real.get(name)}
            if result is not self.dense:
                row[f"{name}_change"] = mean_interval(flags.double() - before[name][0].double()).rounded()
        return row


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile."""
    if len(values) == 1:
        return dict.fromkeys(("median", "p20", "p80"), round(values[0], 4))
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": round(statistics.median(values), 4), "p20": round(deciles[1], 4), "p80": round(deciles[7], 4)}
