"""Batches filled up to one size: products of the same shape round alike, whatever comes together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..report import Report
from ..text import TextFeatures
from ..text.prompts import PromptReader
from .jobs import Prompt, Task


def filled(tasks: Sequence[Task], images: int) -> list[Task]:
    """The tasks, and the last of them again and again, which only what reads prompts and seeds may see."""
    return [*tasks, *[tasks[-1]] * (images - len(tasks))]


def read_alone(reader: PromptReader, prompts: Sequence[Prompt | None]) -> Any:
    """Prompts for a pipeline, each text encoded by itself: the numbers that an encoder finds, too, depend on what it reads with it."""
    read = {prompt: reader.read([prompt]) for prompt in dict.fromkeys(prompts)}
    features = [one for prompt in prompts if isinstance(one := read[prompt], TextFeatures)]
    return TextFeatures.joined(features) if features else list(prompts)  # classes need no encoder


def without_fillers(report: Report, images: int, ran: int) -> Report:
    """What is said of the images that somebody asked for, of those that ran; times and memory are those of the whole batch."""
    if images == ran:
        return report
    stages = tuple(replace(stage, rows=stage.rows * images // ran) for stage in report.stages)
    return replace(report, seeds=None if report.seeds is None else report.seeds[:images], stages=stages)
