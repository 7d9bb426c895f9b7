"""The report of a request: time, MACs, tokens and rows per stage, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .device import Timer, peak_memory
from .engine.executor import Executor, Generated
from .generate import StageOutput, require_finite
from .lora import AppliedLora
from .models.base import NextScaleModel
from .planning import Planner
from .planning.cost import RequestCost, Workload, as_run
from .request import Request
from .stage import to_double


@dataclass(frozen=True)
class StageReport:
    index: int
    height: int
    width: int
    skipped: bool
    tokens: float  # tokens per row that enter the first block, HART's text included, the mean if rows are packed; 0 when skipped
    computed: float  # mean of the tokens per row, without text, that the sublayers ran; all cells when dense, 0 when skipped
    padding: float  # share of the tokens that ran only because the captured graph or another image of padded rows has more
    rows: int  # images times cfg branches
    cfg_branches: int  # 2 with guidance, else 1; 0 when skipped
    cost_share: float  # MACs relative to the same stage in dense generation
    dense_macs: int  # MACs of the stage in dense generation
    seconds: float
    sampling_seconds: float | None  # from logits to codes, STAR's refinement included; None: not run, or inside a replay
    residual_seconds: float | None  # HART's residual diffusion; None: not run, or inside a replay


@dataclass(frozen=True)
class EditReport:
    """The part of the images that an edit has changed, per image; a single entry is for all."""

    mask_share: tuple[float, ...]  # share of the pixels
    from_stage: tuple[int, ...]  # the first stage that changed the image


@dataclass(frozen=True)
class Report:
    model: str
    engine: str  # "eager", or "graphs" where captured graphs were replayed
    captured_batch: int | None  # images of the captured graph, which may be more than the request's; None: eager
    method: str  # the methods and their settings other than the defaults
    selection_reason: str | None  # reason for the method if `auto` selected it, else None
    device: str
    dtype: str
    size: tuple[int, int]  # height, width in pixels
    seeds: tuple[int, ...] | None  # None: the caller's own generator
    stages: tuple[StageReport, ...]
    cost_share: float  # MACs relative to dense generation, as `planning.cost` counts them, without decoding
    condition_seconds: float  # prompt features to modulation and text keys
    decode_seconds: float
    peak_memory: int  # bytes: allocated on the GPU during the request, or the largest resident size of the process on the CPU
    planned_memory: int  # bytes that the request reserved for keys, values and text
    quantize: str | None = None  # format of the weights of blocks; None: the dtype
    loras: tuple[AppliedLora, ...] = ()  # adapters that were part of the weights
    edit: EditReport | None = None

    def __repr__(self) -> str:
        return f"Report({self.model}, {self.summary})"

    @property
    def summary(self) -> str:
        """Size, method, time and MACs in one line."""
        return f"{self.size[1]}x{self.size[0]}, {self.method}, {self.seconds:.2f} s, {self.cost_share:.0%} of dense MACs"

    @property
    def seconds(self) -> float:
        return self.condition_seconds + sum(stage.seconds for stage in self.stages) + self.decode_seconds

    @property
    def padding(self) -> float:
        """Share of the tokens of all stages that are padding."""
        ran = sum(stage.tokens * stage.rows for stage in self.stages)
        return sum(stage.padding * stage.tokens * stage.rows for stage in self.stages) / ran

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for JSON."""
        return asdict(self) | {"seconds": self.seconds, "padding": self.padding}


@torch.inference_mode()
def build_report(
    pipe: Any, request: Request, executor: Executor, generated: Generated, finite: Tensor, done_stages: Sequence[StageOutput], timer: Timer
) -> Report:
    """Returns the report of a request. The host waits for the device here and, unless a method asks, nowhere else.

    finite: whether all numbers of each stage that ran, and of the latent, are finite; [stages + 1], on the device.

    Raises NonFiniteLogits if the network's output was not finite.
    """
    model, device, size = pipe.model, pipe.model.device, generated.pixels.shape
    dense, spent = costs(pipe.planning, model, request, generated.text_tokens, done_stages)
    means = {done.stage.index: to_double(done.counts).mean() for done in done_stages if done.counts is not None}
    peak, planned = peak_memory(device), pipe.reserved(request)
    numbers = torch.cat([to_double(finite), *(mean[None] for mean in means.values())]).tolist()
    checked = (*generated.finite, len(done_stages) - 1)
    require_finite([stage for stage, good in zip(checked, numbers, strict=False) if not good], len(done_stages))
    needed = dict(zip(means, numbers[len(checked) :], strict=True))
    stages = [
        StageReport(
            index,
            *done.stage.size,
            skipped=done.skipped,
            tokens=done.num_tokens,
            computed=own.computed,
            padding=1 - needed[index] / done.num_tokens if index in needed else 0.0,
            rows=done.rows,
            cfg_branches=done.rows // request.batch,
            cost_share=own.share(whole),
            dense_macs=whole.total,
            seconds=timer.seconds("stage", index) or 0.0,
            sampling_seconds=timer.seconds("sampling", index),
            residual_seconds=timer.seconds("residual", index),
        )
        for index, (done, own, whole) in enumerate(zip(done_stages, spent.stages, dense.stages, strict=True))
    ]
    return Report(
        model=pipe.name,
        engine=executor.engine,
        captured_batch=executor.captured_batch,
        method=request.method.label,
        selection_reason=request.selection_reason,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        dtype=str(model.dtype).removeprefix("torch."),
        size=(size[2], size[3]),
        seeds=request.seeds,
        stages=tuple(stages),
        cost_share=spent.share(dense),
        condition_seconds=timer.seconds("condition") or 0.0,
        decode_seconds=timer.seconds("decode") or 0.0,
        peak_memory=peak,
        planned_memory=planned,
        quantize=model.quantize,
        loras=pipe.loras.applied,
    )


def costs(
    planning: Planner, model: NextScaleModel, request: Request, text_tokens: int, done_stages: Sequence[StageOutput]
) -> tuple[RequestCost, RequestCost]:
    """Returns the cost of dense generation and the cost of this run."""
    workload = Workload(
        request.schedule,
        request.batch,
        request.guidance.needs_both,
        text_tokens,
        request.sampling.refine,
        len(request.prefix_codes),
        model.residual_scale(request.guidance, request.schedule[-1]) != 1,
    )
    plans = [as_run(model, done.stage, done.plan, done.num_tokens) for done in done_stages]
    counts = {done.stage.index: done.known_counts for done in done_stages if done.known_counts is not None}
    return planning.cost(workload), planning.cost(workload, plans, counts)
