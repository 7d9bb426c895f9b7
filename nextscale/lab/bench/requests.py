"""The requests that are timed: classes, or features of prompts of usual lengths, which need no text encoder."""

from __future__ import annotations

from typing import Any

from ...models import Infinity
from ...pipeline import Pipeline
from ...planning.cost import Workload
from ...text.prompts import TextReader
from .suites import Case

TEXT_TOKENS = (50, 20, 77, 33)  # lengths of the prompts of a batch, repeated


def request_prompts(pipe: Pipeline, batch: int, seed: int) -> Any:
    """Classes, or prompts that are read already: encoding a prompt is not measured."""
    each = [seed + image for image in range(batch)]
    if not isinstance(pipe.reader, TextReader):
        return [number % 10 for number in each]
    lengths = text_lengths(pipe, batch)  # the number, of one or two tokens, and the encoder's own one are three of them
    return pipe.reader.read([f"{number % 100} " + "word " * (length - 3) for number, length in zip(each, lengths, strict=True)])


def text_lengths(pipe: Pipeline, batch: int) -> list[int]:
    """Tokens of every prompt, at most as many as the model reads."""
    longest = pipe.model.config.longest_text if isinstance(pipe.model, Infinity) else max(TEXT_TOKENS)
    return [min(TEXT_TOKENS[image % len(TEXT_TOKENS)], longest) for image in range(batch)]


def request_workload(pipe: Pipeline, case: Case) -> Workload:
    """What such a request asks for, to count its MACs and its memory."""
    text = max(text_lengths(pipe, case.batch)) if pipe.model.stack[0].has_text else 0
    return Workload(pipe.settings.schedules.choose(case.size, None), case.batch, text_tokens=text, refine=pipe.settings.sampling.refine)
