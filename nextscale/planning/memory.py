"""Memory of a request, computed from its plans. The model does not run and may be on the meta device.

Keys and values are exact to the byte, unless a data-dependent method runs more tokens than assumed. Activations are estimated for eager
generation on a GPU in bfloat16; `python -m benchmarks.suites` compares them with measured peaks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..cache import CacheSpec, CompressedSpec, StageKeys
from ..methods.method import DENSE, StagePlan
from ..models.base import NextScaleModel
from ..models.feed_forward import CHUNK_TOKENS
from ..models.text_context import context_bytes
from ..stage import Schedule
from ..tokenizers.autoencoder import Decoder
from ..tokenizers.base import Tokenizer
from ..tokenizers.tiles import choose_strips, decode_bytes, images_at_a_time, merged_bytes
from .cost import Workload, tokens_per_layer

ASSUMED_KEPT = 0.5
"""Share of the cells assumed for data-dependent methods when estimating memory."""

FLOAT = 4  # bytes
SPARE = 1  # maps of the residual stream, for kernels and the rest of a request: 13.2 maps were measured where 12 had been counted
RESTORING = 4  # maps that a span uses to restore tokens: input, resized memory, their sum, and a transposed copy


# --- keys and values


def reserved_cache(model: NextScaleModel, schedule: Schedule, plans: Sequence[StagePlan], images: int, rows: int) -> CacheSpec:
    """Returns the sizes of the KV cache of a request that follows `plans` and starts with `rows`."""
    planned = []
    running = rows
    for stage, plan in zip(schedule, plans, strict=True):
        if plan.skip:
            continue
        if plan.cfg_branches != "both":
            running = min(running, images)
        tokens = stage.cells if plan.num_tokens is None else plan.num_tokens
        layers = tokens_per_layer(plan.spans, tokens, model.text_prefix if stage.index == 0 else 0, len(model.blocks))
        planned.append(StageKeys(stage.index, running, tuple(layer.attention for layer in layers), plan.kept_keys))
    spec = replace(model.cache_spec(schedule, rows), planned=tuple(planned))
    return CompressedSpec(**vars(spec)) if any(stage.kept for stage in planned) else spec


def text_bytes(model: NextScaleModel, rows: int, text_tokens: int) -> int:
    """Returns the bytes of the text's keys and values, which are kept until the request ends."""
    config = model.block_config
    return context_bytes(len(model.blocks), rows, text_tokens, config.dim, model.dtype) if config.text else 0


def reserved_bytes(model: NextScaleModel, schedule: Schedule, plans: Sequence[StagePlan], images: int, rows: int, text_tokens: int) -> int:
    """Returns the bytes of keys, values and text: the known size of a request besides weights and activations."""
    return reserved_cache(model, schedule, plans, images, rows).bytes + text_bytes(model, rows, text_tokens)


# --- total


@dataclass(frozen=True)
class RequestMemory:
    """Memory of a request in bytes. Images are decoded after the KV cache is freed, so the larger of the two phases is the peak."""

    weights: int  # of model and tokenizer
    cache: int  # peak of keys and values, including the last stage's workspace
    text: int
    stored: int  # peak of stored outputs of earlier stages
    generating: int  # cache, text, stored outputs and activations of the largest stage
    decoding: int

    @property
    def peak(self) -> int:
        return self.weights + max(self.generating, self.decoding)


def request_memory(
    model: NextScaleModel, tokenizer: Tokenizer, workload: Workload, plans: Sequence[StagePlan] | None = None
) -> RequestMemory:
    """Returns the memory of a request that follows `plans`; None is dense generation."""
    schedule, images = workload.schedule, workload.images
    rows = images * (2 if workload.guided else 1)
    plans = plans or (DENSE,) * len(schedule)
    cache = reserved_cache(model, schedule, plans, images, rows)
    text = text_bytes(model, rows, workload.text_tokens)
    running = {stage.stage: stage for stage in cache.stages}
    stored: dict[Hashable, int] = {}
    generating = most_stored = 0
    for stage, plan in zip(schedule, plans, strict=True):
        if plan.skip:
            continue
        ran = running[stage.index]
        stored |= stored_bytes(model, plan, ran.rows * stage.cells)
        most_stored = max(most_stored, sum(stored.values()))
        tokens = stage.cells if plan.num_tokens is None else plan.num_tokens
        keys = cache.bytes_at(stage.index)
        blocks, head = block_activations(model, plan, ran, tokens), head_activations(model, ran.rows, images, tokens)
        needs = [keys + max(blocks, head)]
        if stage.index == cache.final:  # the keys of a layer are freed once they are in the workspace
            needs = [
                keys + entering_activations(model, ran, tokens),
                keys - cache.freed_bytes(1) + blocks,
                keys - cache.freed_bytes(len(model.blocks)) + head,
            ]
        generating = max(generating, max(needs) + text + sum(stored.values()))
    return RequestMemory(
        weights_bytes(model) + weights_bytes(tokenizer) + merged_bytes(tokenizer, model.dtype),
        cache.bytes,
        text,
        most_stored,
        generating,
        decoding_bytes(tokenizer, schedule, images, model.dtype),
    )


def weights_bytes(module: nn.Module) -> int:
    """Returns the bytes of a module's parameters and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensors in (module.parameters(), module.buffers()) for tensor in tensors)


def stored_bytes(model: NextScaleModel, plan: StagePlan, tokens: int) -> dict[Hashable, int]:
    """Returns the bytes that the spans of a plan store in `ctx.memory`, by name; `tokens` is the total of all rows."""
    one_map = tokens * model.block_config.dim * model.dtype.itemsize
    return {name: one_map for span in plan.spans for name in span.stores}


def entering_activations(model: NextScaleModel, ran: StageKeys, tokens: int) -> int:
    """Returns the bytes of the first block before it reserves cache memory: input and normalized input; without the kernel also qkv."""
    made = (2 + SPARE) * model.dtype.itemsize + (rotation_bytes(model) if model.rotates_in_float32 else 0)
    return ran.rows * model.block_config.dim * max(*ran.tokens, tokens) * made


def rotation_bytes(model: NextScaleModel) -> int:
    """Returns the bytes per channel of a token while queries and keys are normalized and rotated: qkv, and the rotated queries with the
    kernel, or float32 queries and keys before and after rotation, plus half of each, without it."""
    return 3 * model.dtype.itemsize + 2 * 2 * 2 * FLOAT if model.rotates_in_float32 else 4 * model.dtype.itemsize


def block_activations(model: NextScaleModel, plan: StagePlan, ran: StageKeys, tokens: int) -> int:
    """Returns the bytes of the largest block if `tokens` per row enter."""
    config, size = model.block_config, model.dtype.itemsize
    computed = max(ran.tokens)
    attention = 2 * size + rotation_bytes(model)  # input and normalized input
    piece = min(1.0, CHUNK_TOKENS / (ran.rows * computed))
    hidden = config.hidden_dim / config.dim * hidden_maps(model)
    feed_forward = size * (3 + piece * (1 + hidden))  # input, normalized input and result
    one = ran.rows * config.dim
    whole = one * tokens * size * (1 + (RESTORING if plan.spans else 0))  # the stage's input is kept
    return round(computed * one * (max(attention, feed_forward) + SPARE * size) + whole) + restored_bytes(model)


def hidden_maps(model: NextScaleModel) -> float:
    """Returns the number of maps of hidden states that a feed-forward holds at once. Activations run in place; a gated one holds gate and
    up projection and their product; e4m3 copies of the activation are counted with their size."""
    sides = 2 if model.block_config.gated else 1
    if model.quantize == "fp8":
        return sides + 1 / model.dtype.itemsize
    return 3 if model.block_config.gated else 1


def restored_bytes(model: NextScaleModel) -> int:
    """Returns the bytes of the largest dequantized int8 weight."""
    config = model.block_config
    largest = config.dim * max(3 * config.dim, (1 + config.gated) * config.hidden_dim)
    return largest * model.dtype.itemsize if model.quantize == "int8" else 0


def head_activations(model: NextScaleModel, rows: int, images: int, tokens: int) -> int:
    """Returns the bytes of the float32 logits of all rows and after CFG; codebook logits are also sorted with their indices."""
    choices = model.head.out_features
    return tokens * choices * (rows * FLOAT + images * (3 * FLOAT + 8))


def decoding_bytes(tokenizer: Tokenizer, schedule: Schedule, images: int, dtype: torch.dtype) -> int:
    """Returns the bytes of decoding a batch with `tokenizers.tiles`; for other decoders, only the images."""
    height, width = schedule.grid
    image = 3 * height * width * tokenizer.pixels_per_token**2 * (dtype.itemsize + FLOAT)
    decoder = getattr(tokenizer, "decoder", None)
    if not isinstance(decoder, Decoder):
        return images * image
    height, width = tokenizer.map_size(schedule[-1])
    shape = (images, 1, height, width)
    together = images_at_a_time(decoder, shape, dtype, None)
    one = decode_bytes(decoder, (height, width), dtype, choose_strips(decoder, shape, dtype, None))
    return together * one + (images - together) * image
