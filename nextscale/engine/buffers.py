"""Inputs of captured requests at fixed addresses: graphs read them there, and every replay overwrites them."""

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
"""Prompts are padded to one of these lengths, so that few captures serve all prompts. Attention reads only up to a prompt's length; padding
mainly costs the projection to keys and values."""


def text_bucket(tokens: int) -> int:
    """Returns the padded length for prompts of this length; 0 without text."""
    return next((room for room in TEXT_BUCKETS if room >= tokens), masked_length(tokens)) if tokens else 0


class StaticInputs:
    """Copy of the inputs of a batch that `load` overwrites; texts may have up to `room` tokens.

    If a request has fewer prompts, the last one of each CFG branch is repeated.
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
                raise ValueError(f"a text must have at most {buffer.room} tokens for this capture; got {max(text.lengths)}.")
            starts = range(0, buffer.rows.shape[0], buffer.room)
            targets += [buffer.rows.narrow(0, start, length) for start, length in zip(starts, text.lengths, strict=True)]
            fresh += text.rows.split(text.lengths)
            buffer.rows.zero_()  # padding must be finite: NaN of an earlier request would spread, because 0 * NaN is NaN
            lengths = torch.tensor(text.lengths, dtype=torch.int32, pin_memory=buffer.counts.is_cuda)
            buffer.counts.copy_(lengths, non_blocking=True)
        torch._foreach_copy_(targets, fresh)


def padded_order(entries: int, expected: int, batch: int) -> list[int]:
    """Returns the indices that pad `entries`, one per image and CFG branch, to `expected` entries of a larger batch."""
    images = entries // (expected // batch)
    return [start + min(image, images - 1) for start in range(0, entries, images) for image in range(batch)]


def padded_rows(rows: Tensor, expected: int, batch: int) -> Tensor:
    return rows if rows.shape[0] == expected else rows[padded_order(rows.shape[0], expected, batch)]


def padded_texts(text: TextInputs, expected: int, batch: int) -> TextInputs:
    if len(text.lengths) == expected:  # also if all images share one text
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
    """Random number streams that record the buffers that a request uses, in order. Later runs of the request get the same buffers."""

    def __init__(self) -> None:
        self._buffers: list[NoiseBuffer] = []
        self._next = 0
        self._ends: list[int] = []  # number of buffers used at the end of each stage

    @property
    def position(self) -> int:
        """Number of buffers used so far."""
        return self._next

    def rewind(self, position: int = 0) -> None:
        self._next = position

    def end_stage(self) -> None:
        self._ends.append(self._next)

    def share_memory(self) -> None:
        """Lets all stages share the memory of the largest one, since each is refilled before it runs. With a codebook of 4096 codes, an
        image of 1024 x 1024 pixels needs 152 MB of noise for all stages, and 67 MB for the last one."""
        stages = [self._buffers[start:end] for start, end in pairwise([0, *self._ends])]
        size = max((sum(buffer.numbers.numel() for buffer in stage) for stage in stages), default=0)
        if not size:
            return
        shared = torch.full((size,), 0.5, device=self._buffers[0].numbers.device)
        self._buffers = [buffer for stage in stages for buffer in _placed(stage, shared)]

    @torch.inference_mode()
    def refill(self, rng: Rng, stage: int | None = None, images: int | None = None) -> None:
        """Fills the buffers of one stage, or of all, with the noise that a request with this `rng` would draw.

        images: number of images of the request if it is smaller than the batch. Padding repeats the noise of the last image, so that it
            does not need more tokens than that image.
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
                raise RuntimeError(f"noise of the capture must be drawn in the runs before it; got {kind} {list(shape)}.")
            self._buffers.append(NoiseBuffer(kind, torch.full(tuple(shape), 0.5, device=device)))
        known = self._buffers[self._next]
        if known.kind != kind or known.numbers.shape != torch.Size(shape):
            raise RuntimeError(f"noise must be {known.kind} {list(known.numbers.shape)} as in the first run; got {kind} {list(shape)}.")
        self._next += 1
        return known.numbers


def positions(rngs: Sequence[StaticRng]) -> list[int]:
    return [rng.position for rng in rngs]


def rewind(rngs: Sequence[StaticRng], to: Sequence[int]) -> None:
    for rng, position in zip(rngs, to, strict=True):
        rng.rewind(position)


def _placed(stage: Sequence[NoiseBuffer], shared: Tensor) -> Iterator[NoiseBuffer]:
    """Yields the same buffers as consecutive views of `shared`."""
    start = 0
    for buffer in stage:
        end = start + buffer.numbers.numel()
        yield NoiseBuffer(buffer.kind, shared[start:end].view(buffer.numbers.shape))
        start = end
