"""Rows of results from what was measured: time, MACs, likeness to dense images, distances of sets, agreement with the prompt."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..metrics.frechet import Directions, Moments, frechet_distance
from ..metrics.intervals import mean_interval, set_interval
from ..offline.prompts import EvalPrompt
from ..report import Report
from .agreement import Agreement
from .judges import Measured
from .results import Row
from .timing import percentiles, percentiles_and_range

DIRECTIONS = 64  # principal directions of the features along which Fréchet distances are taken; see metrics.frechet
IMAGES_PER_DIRECTION = 4  # fewer images than that determine no covariance,
FEWEST_DIRECTIONS = 16  # and along fewer directions than these a distance says nothing: 64 images are needed
FRECHET_RESAMPLES = 100


@dataclass(frozen=True, eq=False)
class Summary:
    """Rows of methods that generated the same images."""

    dense: Measured
    prompts: Sequence[EvalPrompt]
    agreement: Agreement | None
    references: Tensor | None  # features of real images of the prompts

    def row(self, result: Measured) -> Row:
        if result.error is not None:
            return {"engine": None, "error": result.error}
        row = self._cost(result)
        if result is not self.dense:
            row |= self._likeness(result)
        return row | self._frechet(result) | self._agreement(result)

    def _cost(self, result: Measured) -> Row:
        reports, pairs = result.reports, list(zip(self.dense.reports, result.reports, strict=True))
        return {
            "engine": engine_of(reports),
            "ms_per_image": percentiles_and_range([1000 * report.seconds / batch_of(report) for report in reports]),
            "decode_ms_per_image": percentiles([1000 * report.decode_seconds / batch_of(report) for report in reports]),
            "speedup": percentiles_and_range([dense.seconds / report.seconds for dense, report in pairs]),
            "speedup_without_decoding": percentiles([without_decoding(dense) / without_decoding(report) for dense, report in pairs]),
            "cost_share": round(statistics.fmean(report.cost_share for report in reports), 4),
            "kept": round(computed_share(reports), 4),
            "padding": round(statistics.fmean(report.padding for report in reports), 4),
            "tokens": stage_means([[stage.tokens for stage in report.stages] for report in reports]),
            "rows": [stage.rows for stage in reports[0].stages],
            "peak_gb": eager_peak_gb([*result.untimed, *reports]),
        }

    @staticmethod
    def _likeness(result: Measured) -> Row:
        """Likeness to the dense image of the same seed. Equal images have no PSNR: they are counted, and its mean is that of the others."""
        decibels = result.pair("psnr")
        different = decibels[decibels.isfinite()]
        return {
            "identical": round(1 - len(different) / len(decibels), 4),
            "psnr": mean_interval(different).rounded() if len(different) else None,
            "ssim": mean_interval(result.pair("ssim")).rounded(),
            "lpips": mean_interval(result.pair("lpips")).rounded(),
        }

    def _frechet(self, result: Measured) -> Row:
        """Distances to real images, which stay as they are while ours are resampled, and to the dense ones, resampled in pairs."""
        if self._directions is None:
            return {}
        along = self._directions
        ours, theirs = (along(torch.cat(features).cpu()) for features in (result.features, self.dense.features))
        row: Row = {"frechet_directions": ours.shape[1]}
        if self.references is not None:
            fixed = Moments.of(along(self.references.cpu()))
            row["frechet_real"] = self._distance(lambda part: frechet_distance(ours[part], fixed))
        if result is not self.dense:
            row["frechet_dense"] = self._distance(lambda part: frechet_distance(ours[part], theirs[part]))
        return row

    def _distance(self, of_images: Callable[[Tensor], Tensor]) -> dict[str, float]:
        found = set_interval(of_images, len(self.prompts), FRECHET_RESAMPLES).rounded()
        return found | {"low": max(found["low"], 0.0)}

    @cached_property
    def _directions(self) -> Directions | None:
        """The directions in which real images vary most, or dense ones where there are no real ones; None for too few images."""
        number = min(DIRECTIONS, len(self.prompts) // IMAGES_PER_DIRECTION)
        if number < FEWEST_DIRECTIONS or not self.dense.features:
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


# --- what reports say


def batch_of(report: Report) -> int:
    return len(report.seeds or ())


def without_decoding(report: Report) -> float:
    """Seconds from prompt features to codes."""
    return report.seconds - report.decode_seconds


def engine_of(reports: Sequence[Report]) -> str:
    """The engine that ran; both names where requests differ."""
    return " and ".join(sorted({report.engine for report in reports}))


def computed_share(reports: Sequence[Report]) -> float:
    """Share of the cells that the sublayers ran, mean of all images; padding, which no image needed, does not count."""
    ran = [sum(stage.computed * (1 - stage.padding) for stage in report.stages) for report in reports]
    return statistics.fmean(ran) / sum(stage.height * stage.width for stage in reports[0].stages)


def stage_means(numbers: Sequence[Sequence[float]]) -> list[float]:
    """Means over the reports of one number per stage; whole ones stay whole."""
    means = [round(statistics.fmean(column), 1) for column in zip(*numbers, strict=True)]
    return [int(mean) if mean.is_integer() else mean for mean in means]


def eager_peak_gb(reports: Sequence[Report]) -> float | None:
    """The most GPU memory that an eager request took; captured ones share a pool, and on the CPU a process's size says nothing."""
    peaks = [report.peak_memory for report in reports if report.engine == "eager" and report.device != "cpu"]
    return round(max(peaks) / 1e9, 2) if peaks else None
