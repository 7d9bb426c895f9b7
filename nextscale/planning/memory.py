"""What a request takes in memory, from its plans: nothing is run, and the model may be on the meta device.

Keys and values are what is allocated, to the byte, unless a method that decides by the image runs more than was assumed. Activations
are an estimate for eager generation on a GPU in bfloat16: `nextscale bench` writes it beside the peak that it measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from ..accel.fastvar import RememberedBlocks
from ..accel.method import DENSE, Method, StagePlan
from ..cache import CacheSpec, StageKeys
from ..models.blocks import PIECE
from ..models.hart import Hart
from ..models.text_context import context_bytes
from ..tokenizers.tiles import choose_strips, decode_bytes, images_at_a_time, stride
from .cost import Workload, tokens_per_layer

if TYPE_CHECKING:
    import torch

    from ..models.base import NextScaleModel
    from ..stage import Schedule
    from ..tokenizers.autoencoder import Decoder
    from ..tokenizers.base import Tokenizer

ASSUMED_KEPT = 0.5
"""Share of the cells for which memory is reserved where a method decides by the image; what runs more makes the caches grow."""

FLOAT = 4  # bytes
SPARE = 1  # maps of the residual stream, for what kernels and the rest of a request take: 13.2 were measured where 12 had been counted
RESTORING = 4  # maps that a span needs to restore what it did not run: input, resized memory, their sum, and a copy in other order


# --- keys and values


def planned_cache(
    model: NextScaleModel, schedule: Schedule, plans: Sequence[StagePlan], images: int, rows: int, all_cells: bool = False
) -> CacheSpec:
    """Sizes of the caches of a request whose stages follow `plans`; it begins with so many `rows`.

    `all_cells`: room for every cell of a stage, however many of them the plan expects to run.
    """
    planned = []
    running = rows
    for stage, plan in zip(schedule, plans, strict=True):
        if plan.skip:
            continue
        if plan.cfg_branches != "both":
            running = min(running, images)
        tokens = stage.cells if plan.num_tokens is None or all_cells else plan.num_tokens
        layers = tokens_per_layer(plan.spans, tokens, model.text_prefix if stage.index == 0 else 0, len(model.blocks))
        planned.append(StageKeys(stage.index, running, tuple(parts.attention for parts in layers)))
    return replace(model.cache_spec(schedule, rows), planned=tuple(planned))


def reserved_cache(
    model: NextScaleModel, schedule: Schedule, method: Method, plans: Sequence[StagePlan], images: int, rows: int, all_cells: bool = False
) -> CacheSpec:
    """What a request with this method, whose forecast is `plans`, reserves before it starts."""
    if method.changes("layer_cache"):  # knows its own need
        return model.cache_spec(schedule, rows)
    return planned_cache(model, schedule, plans, images, rows, all_cells)


def text_bytes(model: NextScaleModel, rows: int, text_tokens: int) -> int:
    """Text keys and values, where blocks attend to a text of so many tokens. They stay until the request ends."""
    config = model.block_config
    return context_bytes(len(model.blocks), rows, text_tokens, config.dim, model.dtype) if config.text else 0


def reserved_bytes(
    model: NextScaleModel, schedule: Schedule, method: Method, plans: Sequence[StagePlan], images: int, rows: int, text_tokens: int
) -> int:
    """Keys, values and text of a request: what it is known to need before it starts, besides weights and activations."""
    return reserved_cache(model, schedule, method, plans, images, rows).bytes + text_bytes(model, rows, text_tokens)


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
        tokens = stage.cells if plan.num_tokens is None else plan.num_tokens
        keys = cache.bytes_at(stage.index)
        blocks, head = block_activations(model, plan, ran, tokens), head_activations(model, ran.rows, images, tokens)
        needs = [keys + max(blocks, head)]
        if stage.index == cache.final:  # layer by layer, keys are freed once they are in the workspace
            needs = [
                keys + entering_activations(model, ran, tokens),
                keys - cache.freed_bytes(1) + blocks,
                keys - cache.freed_bytes(len(model.blocks)) + head,
            ]
        drawing = max(drawing, max(needs) + text + sum(stored.values()))
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
    one = tokens * model.block_config.dim * model.dtype.itemsize
    maps: dict[object, int] = {}
    for span in plan.spans:
        each = len(model.stack[0].sublayers) if isinstance(span, RememberedBlocks) else 1  # FastVAR keeps every branch of a block
        maps |= {name: each * one for name in getattr(span, "stores", ())}
    return maps


def entering_activations(model: NextScaleModel, ran: StageKeys, tokens: int) -> int:
    """Of the first block until it has room for its keys: input and normalised; without the kernel also queries, keys and values."""
    made = (2 + SPARE) * model.dtype.itemsize + (turned_bytes(model) if isinstance(model, Hart) else 0)
    return ran.rows * model.block_config.dim * max(*ran.tokens, tokens) * made


def turned_bytes(model: NextScaleModel) -> int:
    """Per channel of a token, until queries and keys are normalised and turned: all three, and queries once more where a kernel does it.

    HART's are turned without, in float32: queries and keys before and after, and half of each beside them.
    """
    return 3 * model.dtype.itemsize + 2 * 2 * 2 * FLOAT if isinstance(model, Hart) else 4 * model.dtype.itemsize


def block_activations(model: NextScaleModel, plan: StagePlan, ran: StageKeys, tokens: int) -> int:
    """Of the block that takes most, when `tokens` of a row enter."""
    config, size = model.block_config, model.dtype.itemsize
    computed = max(ran.tokens)
    attention = 2 * size + turned_bytes(model)  # input, normalised
    piece = min(1.0, PIECE / (ran.rows * computed))
    hidden = config.hidden_dim / config.dim * (3 if config.gated else 1)  # the activation takes its place; gate and value lie side by side
    feed_forward = size * (3 + piece * (1 + hidden))  # input, normalised, result
    one = ran.rows * config.dim
    whole = one * tokens * size * (1 + (RESTORING if plan.spans else 0))  # what entered the stage is held
    return round(computed * one * (max(attention, feed_forward) + SPARE * size) + whole)


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
