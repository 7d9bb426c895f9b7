"""What a request takes in memory, from its plans: nothing is run, and the model may be on the meta device.

Keys and values are what is allocated, to the byte, unless a method that decides by the image runs more than was assumed. Activations
are an estimate for eager generation in bfloat16. With it the peaks of dense generation that were measured on an H200 are met within 2%
for Infinity, STAR and VAR; those of HART and FlexVAR, whose decoder made the peak then, were 5 and 8% higher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from ..cache import CacheSpec, StageKeys
from ..models.hart import Hart
from ..models.text_context import context_bytes
from ..tokenizers.tiles import choose_strips, decode_bytes, images_at_a_time, stride
from .cost import Workload, tokens_per_layer
from .fastvar import RememberedBlocks
from .method import DENSE, Method, StagePlan

if TYPE_CHECKING:
    import torch

    from ..models.base import NextScaleModel
    from ..stage import Schedule
    from ..tokenizers.autoencoder import Decoder
    from ..tokenizers.base import Tokenizer

ASSUMED_KEPT = 0.5
"""Share of the cells for which memory is reserved where a method decides by the image; what runs more makes the caches grow."""

FLOAT = 4  # bytes
SPARE = 2  # maps of the residual stream, for what attention kernels and the rest of a request take: 15 were measured where 13 are counted
RESTORING = 4  # maps that a span needs to restore what it did not run: input, resized memory, their sum, and a copy in other order


# --- keys and values


def planned_cache(model: NextScaleModel, schedule: Schedule, plans: Sequence[StagePlan], images: int, rows: int) -> CacheSpec:
    """Sizes of the caches of a request whose stages follow `plans`; it begins with so many `rows`."""
    planned = []
    running = rows
    for stage, plan in zip(schedule, plans, strict=True):
        if plan.skip:
            continue
        if plan.branches != "both":
            running = min(running, images)
        tokens = stage.cells if plan.width is None else plan.width
        layers = tokens_per_layer(plan.spans, tokens, model.text_prefix if stage.index == 0 else 0, len(model.blocks))
        planned.append(StageKeys(stage.index, running, tuple(parts.attention for parts in layers)))
    return replace(model.cache_spec(schedule, rows), planned=tuple(planned))


def reserved_cache(
    model: NextScaleModel, schedule: Schedule, method: Method, images: int, rows: int, kept: float = ASSUMED_KEPT
) -> CacheSpec:
    """What a request with this method reserves before it starts."""
    if method.changes("layer_cache"):  # knows its own need
        return model.cache_spec(schedule, rows)
    return planned_cache(model, schedule, method.forecast(model, schedule, kept), images, rows)


def text_bytes(model: NextScaleModel, rows: int, text_tokens: int) -> int:
    """Text keys and values, where blocks attend to a text of so many tokens. They stay until the request ends."""
    config = model.block_config
    return context_bytes(len(model.blocks), rows, text_tokens, config.width, model.dtype) if config.text else 0


def reserved_bytes(model: NextScaleModel, schedule: Schedule, method: Method, images: int, rows: int, text_tokens: int) -> int:
    """Keys, values and text of a request: what it is known to need before it starts, besides weights and activations."""
    return reserved_cache(model, schedule, method, images, rows).bytes + text_bytes(model, rows, text_tokens)


# --- everything


@dataclass(frozen=True)
class RequestMemory:
    """Bytes. What is drawn is decoded when its keys and values are gone, so that the larger of both makes the peak."""

    weights: int  # of model and tokenizer
    cache: int  # keys and values when most are held, the last stage's workspace included
    text: int
    remembered: int  # outputs of earlier stages, when most are held
    drawing: int  # cache, text, what is remembered and activations, in the stage that takes most
    decoding: int

    @property
    def peak(self) -> int:
        return self.weights + max(self.drawing, self.decoding)


def request_memory(
    model: NextScaleModel, tokenizer: Tokenizer, workload: Workload, plans: Sequence[StagePlan] | None = None
) -> RequestMemory:
    """Of a request whose stages follow `plans`; None is dense generation."""
    schedule, images = workload.schedule, workload.images
    rows = images * (2 if workload.guided else 1)
    plans = plans or (DENSE,) * len(schedule)
    cache = planned_cache(model, schedule, plans, images, rows)
    text = text_bytes(model, rows, workload.text_tokens)
    running = {stage.stage: stage for stage in cache.stages}
    stored: dict[object, int] = {}
    drawing = most_stored = 0
    for stage, plan in zip(schedule, plans, strict=True):
        if plan.skip:
            continue
        ran = running[stage.index]
        stored |= stored_maps(model, plan, ran.rows * stage.cells)
        most_stored = max(most_stored, sum(stored.values()))
        tokens = stage.cells if plan.width is None else plan.width
        working = max(block_activations(model, plan, ran, tokens), head_activations(model, ran.rows, images, tokens))
        drawing = max(drawing, cache.bytes_at(stage.index) + text + sum(stored.values()) + working)
    return RequestMemory(
        weights_bytes(model) + weights_bytes(tokenizer),
        cache.bytes,
        text,
        most_stored,
        drawing,
        decoding_bytes(tokenizer, schedule, images, model.dtype),
    )


def weights_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def stored_maps(model: NextScaleModel, plan: StagePlan, tokens: int) -> dict[object, int]:
    """Bytes that the spans of a plan leave in `env.memory`, by name, for so many tokens over all rows."""
    one = tokens * model.block_config.width * model.dtype.itemsize
    maps: dict[object, int] = {}
    for span in plan.spans:
        each = len(model.stack[0].parts) if isinstance(span, RememberedBlocks) else 1  # FastVAR keeps every branch of a block
        maps |= {name: each * one for name in getattr(span, "stores", ())}
    return maps


def block_activations(model: NextScaleModel, plan: StagePlan, ran: StageKeys, tokens: int) -> int:
    """Of the block that takes most, when `tokens` of a row enter."""
    config, size = model.block_config, model.dtype.itemsize
    # Input, normalised, queries, keys and values; queries and keys twice in float32, before and after they are turned.
    attention = 5 * size + 2 * 2 * FLOAT * (2 if isinstance(model, Hart) else 1)
    hidden = config.hidden / config.width
    feed_forward = size * (2 + (4 if config.gated else 2) * hidden)  # input, normalised, hidden before and after the activation
    one = ran.rows * config.width
    whole = one * tokens * size * (RESTORING if plan.spans else 0)
    return round(max(ran.tokens) * one * (max(attention, feed_forward) + SPARE * size) + whole)


def head_activations(model: NextScaleModel, rows: int, images: int, tokens: int) -> int:
    """Logits in float32 of all rows and guided; numbered codes are sorted too, with their places."""
    choices = model.head.out_features
    return tokens * choices * (rows * FLOAT + images * (3 * FLOAT + 8))


def decoding_bytes(tokenizer: Tokenizer, schedule: Schedule, images: int, dtype: torch.dtype) -> int:
    """Of a batch, decoded as `tokenizers.tiles` does it."""
    decoder: Decoder = tokenizer.decoder  # type: ignore[assignment]
    height, width = tokenizer.map_size(schedule[-1])
    shape = (images, 1, height, width)
    together = images_at_a_time(decoder, shape, dtype, None)
    image = 3 * height * width * stride(decoder) ** 2 * (dtype.itemsize + FLOAT)
    return (
        together * decode_bytes(decoder, (height, width), dtype, choose_strips(decoder, shape, dtype, None)) + (images - together) * image
    )
