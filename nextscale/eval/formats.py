"""What formats of the weights cost: the same prompts and seeds, generated in the model's own dtype and in every variant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..device import DTYPES as TORCH_DTYPES
from ..errors import SettingError
from ..loading.load import quantize_model
from ..methods.method import Method
from ..models.base import NextScaleModel
from ..models.quantization import FORMATS, PRODUCTS, Quantize, find
from ..offline.prompts import EvalPrompt
from ..pipeline import Pipeline
from ..planning.memory import weights_bytes
from ..schedules import SizeLike
from .agreement import real_features
from .bench import release
from .judges import Judges, Measured
from .quality import WARM_UPS, Requests, conditions, mixed_batches
from .results import Row
from .summary import Summary

BENCHMARK = "formats"
OWN = "as loaded"  # the variant without a format
NAMES = tuple(product.name for product in PRODUCTS)
DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in TORCH_DTYPES)


@dataclass(frozen=True)
class Variant:
    """A format, and products that keep the model's dtype; or another dtype, whose roundings are what a format can be compared with."""

    format: Quantize | None = None
    keep: tuple[str, ...] = ()
    dtype: str | None = None

    @staticmethod
    def parse(text: str) -> Variant:
        """A dtype, or a format, and after a colon the products that stay as they are, joined by commas: fp8:attention.proj,modulation."""
        if text in DTYPES:
            return Variant(dtype=text)
        name, _, kept = text.partition(":")
        keep = tuple(filter(None, kept.split(",")))
        format = next((known for known in FORMATS if known == name), None)
        if format is None or not set(keep) <= set(NAMES):
            raise SettingError(
                f"{text!r}: choose {', '.join(DTYPES)} or {' or '.join(FORMATS)}, after these :NAME,NAME for what stays as it is, of"
                f" {', '.join(NAMES)}"
            )
        return Variant(format, keep)

    @staticmethod
    def alone(format: Quantize, product: str) -> Variant:
        """One product quantised, and all others as they are."""
        return Variant(format, tuple(name for name in NAMES if name != product))

    @property
    def name(self) -> str:
        if self.format is None:
            return self.dtype or OWN
        return f"{self.format}:{','.join(self.keep)}" if self.keep else self.format

    def apply(self, pipeline: Pipeline) -> Pipeline:
        if self.format is not None:
            quantize_model(pipeline.model, self.format, keep=self.keep)
        return pipeline if self.dtype is None else pipeline.to(getattr(torch, self.dtype))


def compare_formats(
    load: Callable[[], Pipeline],
    variants: Sequence[Variant],
    prompts: Sequence[EvalPrompt],
    judges: Judges,
    *,
    size: SizeLike = None,
    seed: int = 0,
    batch: int = 32,
) -> Iterator[Row]:
    """A row per variant, that of the model as it is loaded first: time, memory, likeness to its images, agreement, distances of sets.

    One model is in memory at a time, and so variants do not take turns: times are those of each run by itself. On a CPU e4m3 is emulated,
    and its times mean nothing.
    """
    if not prompts:
        raise SettingError("formats are compared on one or more prompts; got none")
    own: list[Tensor] = []
    dense, references = Measured(), None
    for variant in (Variant(), *variants):
        pipeline = variant.apply(load())
        schedule = pipeline.settings.schedules.choose(size, None)
        requests = Requests(pipeline, schedule, prompts, seed, mixed_batches(len(prompts), batch))
        measured = dense if variant == Variant() else Measured()
        generate_all(requests, judges, measured, own)
        if variant == Variant() and judges.features is not None and all(prompt.encoded is not None for prompt in prompts):
            references = real_features(judges.features, requests.in_order)
        summary = Summary(dense, requests.in_order, judges.agreement, references)
        about = conditions(requests, measured.reports[0]) | {"benchmark": BENCHMARK, "variant": variant.name}
        yield about | {"weights_gb": round(weights_bytes(pipeline.model) / 1e9, 3)} | summary.row(measured)
        device = pipeline.model.device
        del pipeline, requests
        release(device)


def generate_all(requests: Requests, judges: Judges, measured: Measured, own: list[Tensor]) -> None:
    """All batches, judged against `own`, which the first variant fills."""
    first = not own
    if requests.pipeline.model.device.type == "cuda":
        for _ in range(WARM_UPS):
            measured.untimed.append(requests.generate(Method(), requests.longest()).report)
    for turn, numbers in enumerate(requests.batches):
        done = requests.generate(Method(), numbers)
        measured.reports.append(done.report)
        if first:
            own.append(done.images.cpu())
        judges.measure(done.images, done.images if first else own[turn].to(done.images.device), measured)


def products_of(model: NextScaleModel) -> list[str]:
    """Names of the products that the blocks of this model have."""
    return [product.name for product in PRODUCTS if find(model.stack[0], product) is not None]
