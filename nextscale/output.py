"""What a call returns and what it shows on the way, made from what its stages have done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from PIL import Image
from torch import Tensor

from .canvas import Canvas
from .generate import StageOutput
from .io import to_pil
from .models.base import NextScaleModel, PromptInputs
from .notebook import output_html
from .planning.cost import RequestCost, Workload, as_run
from .planning.remembered import Planning
from .report import Report, StageReport, Stopwatch
from .request import Request
from .stage import to_double
from .tokenizers.base import Tokenizer


@dataclass(frozen=True, eq=False)
class Stages:
    """What there was after each stage; decoded when it is asked for."""

    latents: tuple[Tensor, ...]
    tokenizer: Tokenizer

    def __len__(self) -> int:
        return len(self.latents)

    @torch.inference_mode()
    def images(self, stage: int) -> list[Image.Image]:
        """All images of the batch as they would be if generation had stopped after this stage. FlexVAR's grow with the stage."""
        return to_pil(self.tokenizer.decode(self.latents[stage]))

    @torch.inference_mode()
    def strip(self, image: int = 0) -> list[Image.Image]:
        """One image of the batch after every stage."""
        return [to_pil(self.tokenizer.decode(latent[image : image + 1]))[0] for latent in self.latents]


@dataclass(frozen=True, eq=False)
class Output:
    """What a call returns. A notebook shows it by itself."""

    pixels: Tensor  # [B, 3, H, W], the decoder's output, nominally in [-1, 1]
    latent: Tensor  # what was decoded
    codes: tuple[Tensor, ...]  # per stage that was run, as put on the canvas
    report: Report
    compute_mask: tuple[Tensor, ...] | None = None  # per stage, with compute_mask=True: share of the network run for every cell, [B, h, w]

    stages: Stages | None = None  # with keep_stages=True

    @cached_property
    def images(self) -> list[Image.Image]:
        """Made when they are first asked for."""
        return to_pil(self.pixels)

    def _repr_html_(self) -> str:
        return output_html(self.images, self.stages.strip() if self.stages else [], self.report)


@dataclass(frozen=True, eq=False)
class Preview:
    """Given to `on_stage` after each stage."""

    done: StageOutput  # where captured graphs are replayed, without logits, and the next request writes into its tensors
    latent: Tensor  # a copy of what the canvas held after this stage
    tokenizer: Tokenizer

    @property
    def canvas(self) -> Canvas:
        """Goes on changing while generation does."""
        return self.done.canvas

    @torch.inference_mode()
    def images(self) -> list[Image.Image]:
        """The images as they would be if generation stopped here. FlexVAR's grow with the stage."""
        return to_pil(self.tokenizer.decode(self.latent))


def mask_of(done: StageOutput, batch: int) -> Tensor:
    if done.compute_mask is not None:
        return done.compute_mask.view(batch, *done.stage.size).float().clone()
    return torch.full((batch, *done.stage.size), 0.0 if done.skipped else 1.0, device=done.canvas.latent.device)


@dataclass(frozen=True, eq=False)
class Checks:
    """What the host has to read of a request, still on the device: reading it waits for everything that was launched by then."""

    numbers: Tensor  # whether the stages and the latent are finite, then mean counts of tokens
    finite: tuple[int, ...]  # stages of the first, and the last one for the latent
    counted: tuple[int, ...]  # stages of the second
    done_stages: Sequence[StageOutput]

    @classmethod
    def of(cls, finite: Mapping[int, Tensor], latent: Tensor, done_stages: Sequence[StageOutput]) -> Checks:
        checks = torch.stack([*finite.values(), latent.isfinite().all()])
        needed = {done.stage.index: to_double(done.counts).mean() for done in done_stages if done.counts is not None}
        numbers = torch.cat([to_double(checks), *(mean[None] for mean in needed.values())])
        return cls(numbers, (*finite, len(done_stages) - 1), tuple(needed), done_stages)

    def read(self) -> tuple[list[int], list[float]]:
        """The stages whose numbers are not all finite, and of the tokens that each stage ran the share that no image needed.

        The host waits for the device here and, unless a method asks, nowhere else.
        """
        numbers = self.numbers.tolist()
        failed = [stage for stage, good in zip(self.finite, numbers, strict=False) if not good]
        means = dict(zip(self.counted, numbers[len(self.finite) :], strict=True))
        padding = {stage: 1 - mean / self.done_stages[stage].num_tokens for stage, mean in means.items()}
        return failed, [padding.get(done.stage.index, 0.0) for done in self.done_stages]


@dataclass(frozen=True)
class Costs:
    """MACs of a request."""

    dense: RequestCost  # the same request in dense generation
    spent: RequestCost  # what was run

    @property
    def share(self) -> float:
        return self.spent.share(self.dense)


def costs_of(
    planning: Planning, model: NextScaleModel, request: Request, inputs: PromptInputs, done_stages: Sequence[StageOutput]
) -> Costs:
    workload = Workload(
        request.schedule,
        request.batch,
        request.guidance.needs_both,
        0 if inputs.text is None else inputs.text.length,
        request.sampling.refine,
        len(request.prefix_codes),
        model.residual_scale(request.guidance, request.schedule[-1]) != 1,
    )
    plans = [as_run(model, done.stage, done.plan, done.num_tokens) for done in done_stages]
    counts = {done.stage.index: done.known_counts for done in done_stages if done.known_counts is not None}
    return Costs(planning.cost(workload), planning.cost(workload, plans, counts))


def stages_run(done_stages: Sequence[StageOutput], costs: Costs, request: Request) -> list[Callable[..., StageReport]]:
    """The reports of all stages, to be given what is known when the device is done: padding and times."""
    stages = zip(done_stages, costs.spent.stages, costs.dense.stages, strict=True)
    return [
        partial(
            StageReport,
            done.stage.index,
            *done.stage.size,
            skipped=done.skipped,
            tokens=done.num_tokens,
            computed=spent.computed,
            rows=done.rows,
            cfg_branches=done.rows // request.batch,
            cost_share=spent.share(dense),
            dense_macs=dense.total,
        )
        for done, spent, dense in stages
    ]


def stage_reports(stages: Sequence[Callable[..., StageReport]], padding: Sequence[float], clock: Stopwatch) -> tuple[StageReport, ...]:
    """`padding`: of the tokens that each stage ran, the share that no image needed."""
    return tuple(
        stage(
            padding=unneeded,
            seconds=clock.seconds("stage", index) or 0.0,
            sampling_seconds=clock.seconds("sampling", index),
            residual_seconds=clock.seconds("residual", index),
        )
        for index, (stage, unneeded) in enumerate(zip(stages, padding, strict=True))
    )
