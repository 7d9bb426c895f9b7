"""Cost of weight formats: the same prompts and seeds, generated in the model's own dtype and in every variant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nextscale.device import DTYPES as TORCH_DTYPES
from nextscale.errors import SettingError
from nextscale.eval.bench import release
from nextscale.eval.compare import WARM_UPS, Distance, MethodResult, Requests, mixed_batches
from nextscale.eval.results import DENSE, Row
from nextscale.loading.load import quantize_model
from nextscale.methods.method import Method
from nextscale.models.base import NextScaleModel
from nextscale.models.quantization import BLOCK_LINEARS, FORMATS, Quantize, find_linear
from nextscale.pipeline import Pipeline
from nextscale.planning.memory import weights_bytes
from nextscale.schedules import SizeLike

from .judge import SetJudge
from .prompts import EvalPrompt

BENCHMARK = "formats"
OWN = "as loaded"  # the variant without a format
NAMES = tuple(product.name for product in BLOCK_LINEARS)
DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in TORCH_DTYPES)


@dataclass(frozen=True)
class Variant:
    """A format, and products that keep the model's dtype; or another dtype, as a reference for the error of a format."""

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
        """One product quantized, and all others as they are."""
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
    lpips: Distance,
    sets: SetJudge | None = None,
    *,
    size: SizeLike = None,
    seed: int = 0,
    batch: int = 32,
) -> Iterator[Row]:
    """Yields a row per variant, the model as it is loaded first: time, memory, distance to its images, agreement, sets.

    One model is in memory at a time, so variants do not take turns: each run is timed by itself. On a CPU e4m3 is emulated,
    and its times mean nothing.
    """
    if not prompts:
        raise SettingError("prompts must not be empty")
    own: list[Tensor] = []
    dense = MethodResult()
    for variant in (Variant(), *variants):
        pipeline = variant.apply(load())
        schedule = pipeline.settings.schedules.choose(size, None)
        requests = Requests(pipeline, schedule, [prompt.text for prompt in prompts], seed, mixed_batches(len(prompts), batch))
        result = dense if variant == Variant() else MethodResult()
        generate_all(requests, lpips, result, own, sets, DENSE if variant == Variant() else variant.name)
        about = requests.conditions(result.reports[0]) | {"benchmark": BENCHMARK, "variant": variant.name}
        row = about | {"weights_gb": round(weights_bytes(pipeline.model) / 1e9, 3)} | result.row(dense)
        if sets is not None:
            columns = sets.rows([prompts[number] for numbers in requests.batches for number in numbers])
            row |= columns[DENSE if variant == Variant() else variant.name]
        yield row
        device = pipeline.model.device
        del pipeline, requests
        release(device)


def generate_all(requests: Requests, lpips: Distance, result: MethodResult, own: list[Tensor], sets: SetJudge | None, name: str) -> None:
    """Generates all batches, and compares them with `own`, which the first variant fills."""
    first = not own
    if requests.on_gpu:
        for _ in range(WARM_UPS):
            requests.generate(Method(), requests.longest())
    for turn, numbers in enumerate(requests.batches):
        done = requests.generate(Method(), numbers)
        result.reports.append(done.report)
        if first:
            own.append(done.images.cpu())
        else:
            result.measure(done.images, own[turn].to(done.images.device), lpips)
        if sets is not None:
            sets.add(name, done.images)


def products_of(model: NextScaleModel) -> list[str]:
    """Returns the names of the quantized linear layers in the blocks of this model."""
    return [spec.name for spec in BLOCK_LINEARS if find_linear(model.stack[0], spec.name) is not None]
