"""What differs from request to request, at fixed addresses: a captured graph reads it there, and every replay puts its own there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..models.base import PromptInputs
from ..models.text_context import TextInputs, masked_length
from ..sampling import ImageRng, NoiseKind, Rng, Streams

# --- prompts

TEXT_BUCKETS = (128, 512)
"""Prompts are padded to one of these, so that few captures serve all of them. Attention reads a prompt up to its length, so that room
costs the products that make its keys and values and little else."""


def text_bucket(tokens: int) -> int:
    """Room for prompts of this length; 0 where there is no text."""
    return next((room for room in TEXT_BUCKETS if room >= tokens), masked_length(tokens)) if tokens else 0


class StaticInputs:
    """A copy of what the prompts of a batch give, in which others can take their place; their texts may have up to `room` tokens.

    Fewer prompts are padded: the last one of each cfg branch is repeated.
    """

    @torch.inference_mode()
    def __init__(self, inputs: PromptInputs, batch: int, room: int) -> None:
        self._batch = batch
        text = None
        if inputs.text is not None:
            like, texts = inputs.text.rows, len(inputs.text.lengths)
            rows = like.new_zeros(texts * room, like.shape[1])
            text = TextInputs(rows, room=room, counts=torch.zeros(texts, dtype=torch.int32, device=like.device))
        self.value = PromptInputs(tuple(torch.empty_like(rows) for rows in inputs.rows), text)
        self.load(inputs)

    @torch.inference_mode()
    def load(self, inputs: PromptInputs) -> None:
        targets = list(self.value.rows)
        fresh = [padded_rows(rows, target.shape[0], self._batch) for rows, target in zip(inputs.rows, targets, strict=True)]
        text, buffer = inputs.text, self.value.text
        if text is not None and buffer is not None and buffer.counts is not None:
            text = padded_texts(text, buffer.counts.shape[0], self._batch)
            if max(text.lengths) > buffer.room:
                raise ValueError(f"a text of {max(text.lengths)} tokens where there is room for {buffer.room}")
            starts = range(0, buffer.rows.shape[0], buffer.room)
            targets += [buffer.rows.narrow(0, start, length) for start, length in zip(starts, text.lengths, strict=True)]
            fresh += text.rows.split(text.lengths)
            buffer.rows.zero_()  # else another request's NaN would stay behind the texts, and zero times NaN is NaN
            lengths = torch.tensor(text.lengths, dtype=torch.int32, pin_memory=buffer.counts.is_cuda)
            buffer.counts.copy_(lengths, non_blocking=True)
        torch._foreach_copy_(targets, fresh)


def padded_order(entries: int, expected: int, batch: int) -> list[int]:
    """Which of `entries`, one per image and cfg branch, stand in a batch of more images, which has `expected` of them."""
    images = entries // (expected // batch)
    return [start + min(image, images - 1) for start in range(0, entries, images) for image in range(batch)]


def padded_rows(rows: Tensor, expected: int, batch: int) -> Tensor:
    return rows if rows.shape[0] == expected else rows[padded_order(rows.shape[0], expected, batch)]


def padded_texts(text: TextInputs, expected: int, batch: int) -> TextInputs:
    if len(text.lengths) == expected:  # also where a single text is that of all images
        return text
    each = text.rows.split(text.lengths)
    order = padded_order(len(each), expected, batch)
    return TextInputs(torch.cat([each[entry] for entry in order]), tuple(text.lengths[entry] for entry in order))


# --- random numbers


@dataclass(frozen=True, eq=False)
class NoiseBuffer:
    kind: NoiseKind
    numbers: Tensor  # [B, ...]


class StaticRng(Streams):
    """Remembers which noise a request asks for, in order. A second run of the same request gets the same buffers again."""

    def __init__(self) -> None:
        self._buffers: list[NoiseBuffer] = []
        self._next = 0
        self._ends: list[int] = []  # how many buffers the request has used when each stage ends

    @property
    def position(self) -> int:
        """How many buffers the request has used so far."""
        return self._next

    def rewind(self, position: int = 0) -> None:
        self._next = position

    def end_stage(self) -> None:
        self._ends.append(self._next)

    def share_memory(self) -> None:
        """Between the stages that have ended, each of which is to be refilled before it runs. Codes of 4096 kinds take as many numbers
        per token: 152 MB for all stages of an image of 1024 x 1024 pixels, of which the last stage has 67."""
        stages = [self._buffers[start:end] for start, end in pairwise([0, *self._ends])]
        size = max((sum(buffer.numbers.numel() for buffer in stage) for stage in stages), default=0)
        if not size:
            return
        shared = torch.full((size,), 0.5, device=self._buffers[0].numbers.device)
        self._buffers = [buffer for stage in stages for buffer in _placed(stage, shared)]

    @torch.inference_mode()
    def refill(self, rng: Rng, stage: int | None = None, images: int | None = None) -> None:
        """Writes the noise that a request with this `rng` would get: that of one stage, or all.

        images: how many of the batch the request has, None for all. The others repeat the last one, so that they need no more tokens
        than it does.
        """
        start, end = (0, len(self._buffers)) if stage is None else (self._ends[stage - 1] if stage else 0, self._ends[stage])
        for buffer in self._buffers[start:end]:
            own = buffer.numbers if images is None else buffer.numbers[:images]
            if isinstance(rng, ImageRng):
                rng.fill(buffer.kind, own)  # one launch per image
            else:
                own.copy_(getattr(rng, buffer.kind)(own.shape, own.device))
            if images is not None:
                buffer.numbers[images:] = own[-1:]

    def draw(self, kind: NoiseKind, shape: Sequence[int], device: torch.device) -> Tensor:
        if self._next == len(self._buffers):
            if torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{kind} {list(shape)} is asked for in the capture and was not in the runs before it")
            self._buffers.append(NoiseBuffer(kind, torch.full(tuple(shape), 0.5, device=device)))
        known = self._buffers[self._next]
        if known.kind != kind or known.numbers.shape != torch.Size(shape):
            raise RuntimeError(
                f"a request asked for {known.kind} {list(known.numbers.shape)} at first and for {kind} {list(shape)} the second time"
            )
        self._next += 1
        return known.numbers


def positions(rngs: Sequence[StaticRng]) -> list[int]:
    return [rng.position for rng in rngs]


def rewind(rngs: Sequence[StaticRng], to: Sequence[int]) -> None:
    for rng, position in zip(rngs, to, strict=True):
        rng.rewind(position)


def _placed(stage: Sequence[NoiseBuffer], shared: Tensor) -> Iterator[NoiseBuffer]:
    """The same buffers one after the other in `shared`."""
    start = 0
    for buffer in stage:
        end = start + buffer.numbers.numel()
        yield NoiseBuffer(buffer.kind, shared[start:end].view(buffer.numbers.shape))
        start = end
