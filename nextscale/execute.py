"""From a request to its output: the executor runs, and when all is launched the host waits for the device once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .engine import Executor
from .engine.memory import memory_errors
from .generate import StageOutput, require_finite
from .output import Checks, Output, Preview, costs_of, mask_of, stage_reports, stages_run
from .report import Report, peak_memory, reset_peak
from .request import Request

if TYPE_CHECKING:
    from .pipeline import Pipeline


def execute(
    pipe: Pipeline, request: Request, choose: Callable[[Request], Executor], on_stage: Callable[[Preview], None] | None, decode: bool
) -> Output:
    """`choose`: what runs the request. `on_stage`: called after every stage."""
    device, clock, done_stages = pipe.model.device, request.clock, list[StageOutput]()

    def stage_done(done: StageOutput) -> None:
        done_stages.append(done.without_logits())
        if on_stage is None:
            clock.lap("stage", done.stage.index)
            return
        clock.stop("stage", done.stage.index)
        on_stage(Preview(done, done.canvas.latent.clone(), pipe.tokenizer))
        clock.start("stage", done.stage.index + 1)

    with memory_errors(device, lambda: pipe.reserved(request), request):
        executor = choose(request)
        reset_peak(device)
        with torch.inference_mode():
            with clock.time("condition"):
                inputs = pipe.model.prompt_inputs(request.prompts, request.guidance.needs_both, request.schedule, request.negative)
                executor.condition(inputs)
            clock.start("stage")
            latent, finite = executor.run(request, stage_done)
            checks = Checks.of(finite, latent, done_stages)
            with clock.time("decode"):
                pixels = executor.decode() if decode else latent.new_empty(request.batch, 3, 0, 0)
        # What needs no result comes before the host waits for the device. Copies are ordinary tensors, not inference tensors.
        copies = pixels.clone(), latent.clone(), copied([done.codes for done in done_stages if done.codes is not None])
        masks = tuple(mask_of(done, request.batch) for done in done_stages) if request.compute_mask else None
        costs = costs_of(pipe.planning, pipe.model, request, inputs, done_stages)
        stages = stages_run(done_stages, costs, request)
        known = partial(
            Report,
            model=pipe.name,
            engine=executor.engine,
            captured_batch=executor.captured_batch,
            method=request.method.label,
            selection_reason=request.selection_reason,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            dtype=str(pipe.model.dtype).removeprefix("torch."),
            size=(pixels.shape[2], pixels.shape[3]),
            seeds=request.seeds,
            cost_share=costs.share,
            peak_memory=peak_memory(device),
            planned_memory=pipe.reserved(request),
            quantize=pipe.model.quantize,
        )
        failed, padding = checks.read()
    require_finite(failed, len(request.schedule))
    report = known(
        stages=stage_reports(stages, padding, clock),
        condition_seconds=clock.seconds("condition") or 0.0,
        decode_seconds=clock.seconds("decode") or 0.0,
    )
    return Output(*copies, report, masks)


def copied(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies in memory of their own, in one launch where they are of one dtype."""
    fresh = [torch.empty_like(tensor) for tensor in tensors]
    if fresh:
        torch._foreach_copy_(fresh, list(tensors))
    return tuple(fresh)
