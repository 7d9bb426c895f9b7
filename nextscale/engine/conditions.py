"""What prompts give at fixed addresses, with room for texts of different length."""

from __future__ import annotations

import torch

from ..models.base import PromptInputs
from ..models.text_context import TextBuffer, TextInputs, masked_length

TEXT_BUCKETS = (16, 32, 64, 128, 256, 512)
"""Texts are padded to one of these, so that few recordings serve all prompts."""


def text_bucket(tokens: int) -> int:
    return next((width for width in TEXT_BUCKETS if width >= tokens), masked_length(tokens))


class StaticInputs:
    """A copy of what some prompts give, in which others can take their place; their texts may have up to `width` tokens."""

    @torch.inference_mode()
    def __init__(self, given: PromptInputs, width: int) -> None:
        text = None
        if isinstance(given.text, TextInputs):
            like, samples = given.text.rows, len(given.text.lengths)
            rows = like.new_zeros(samples * width, like.shape[1])
            text = TextBuffer(rows, torch.zeros(samples, dtype=torch.int32, device=like.device), width)
        self.value = PromptInputs(tuple(torch.empty_like(rows) for rows in given.rows), text)
        self.load(given)

    @torch.inference_mode()
    def load(self, given: PromptInputs) -> None:
        targets, fresh = list(self.value.rows), list(given.rows)
        text, room = given.text, self.value.text
        if isinstance(text, TextInputs) and isinstance(room, TextBuffer):
            if max(text.lengths) > room.length:
                raise ValueError(f"a text of {max(text.lengths)} tokens where there is room for {room.length}")
            starts = range(0, room.rows.shape[0], room.length)
            targets += [room.rows.narrow(0, start, length) for start, length in zip(starts, text.lengths, strict=True)]
            fresh += text.rows.split(text.lengths)
            room.rows.zero_()  # else another request's NaN would stay behind the texts, and zero times NaN is NaN
            told = torch.tensor(text.lengths, dtype=torch.int32, pin_memory=room.lengths.is_cuda)
            room.lengths.copy_(told, non_blocking=True)
        torch._foreach_copy_(targets, fresh)
