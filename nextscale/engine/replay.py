"""Replay of captured requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from ..device import Timer
from ..generate import StageOutput, per_row
from ..request import Request
from .executor import Engine, Generated, prompt_inputs, text_length
from .graphs import CapturedRequest


class ReplayExecutor:
    """Replays CUDA graphs for one request. If the request has fewer images than the graphs, the batch is padded."""

    engine: ClassVar[Engine] = "graphs"

    def __init__(self, captured: CapturedRequest, images: int) -> None:
        self._captured = captured
        self._images = None if images == captured.batch else images  # None: no padding

    @property
    def captured_batch(self) -> int | None:
        return self._captured.batch

    def run(self, request: Request, timer: Timer, watch: Callable[[StageOutput], None], decode: bool) -> Generated:
        captured, images, canvas = self._captured, self._images, self._captured.canvas
        with timer.time("condition"):
            inputs = prompt_inputs(captured.model, request)
            captured.inputs.load(inputs)
            captured.condition_graph.replay()
        timer.start("stage")
        for target, own in zip(captured.image_inputs, request.image_inputs, strict=True):
            target[:images] = own
            target[request.batch :] = own[-1:]
        for index, stage in enumerate(captured.stages):
            captured.method_rng.refill(request.method_rng, index, images)
            if stage.counter is not None:
                stage.counter.start()
            captured.rng.refill(request.rng, index, images)
            counts = None if stage.counter is None else stage.counter.counts()
            variant = stage.smallest_sufficient(counts)
            variant.replay()
            canvas.latent = stage.latent if images is None else stage.latent[:images]
            done = variant.done if counts is None else replace(variant.done, known_counts=counts)
            watch(done if images is None else first_images(done, images, captured.batch))
        finite = {index: stage.finite for index, stage in enumerate(captured.stages) if stage.finite is not None}
        with timer.time("decode"):
            if decode:
                captured.decode_graph.replay()
            pixels = captured.pixels[:images] if decode else canvas.latent.new_empty(request.batch, 3, 0, 0)
        return Generated(canvas.latent, pixels, finite, text_length(inputs))


def first_images(done: StageOutput, images: int, batch: int) -> StageOutput:
    """Returns the output of a stage without the padding images."""

    def own(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[:images]

    rows, plan, num_tokens, known = done.rows * images // batch, done.plan, done.num_tokens, done.known_counts
    if plan.packed is not None and known is not None:  # subtract tokens of the padding
        packed = plan.packed - sum(known[images:])
        plan, num_tokens = replace(plan, packed=packed), per_row(packed, images)
    return replace(
        done,
        rows=rows,
        plan=plan,
        num_tokens=num_tokens,
        known_counts=None if known is None else known[:images],
        tokens=None if done.tokens is None else done.tokens.rows(slice(0, images)),
        counts=own(done.counts),
        ids=own(done.ids),
        codes=own(done.codes),
        residual=own(done.residual),
    )
