"""What methods save and what they cost: the same prompts and seeds, generated densely and with every method, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from ..errors import NextscaleError, SettingError
from ..io import to_levels
from ..methods.method import Method
from ..offline.prompts import EvalPrompt
from ..pipeline import Pipeline
from ..report import Report
from ..schedules import SizeLike
from ..stage import Schedule
from .agreement import real_features
from .judges import Judges, Measured
from .methods import DENSE
from .results import BENCHMARK, Row, short_error, where
from .summary import Summary
from .timing import repeated, wait

SHOWN = 8  # images per method on a sheet
WARM_UPS = 2  # untimed batches of every method on a GPU: programs are loaded in the first, graphs are captured in the second

OnProgress = Callable[[str, float], None]
"""Called before every batch with the method that is next and the share of all batches that is done."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What `evaluate` returns."""

    rows: list[Row]  # one per method, dense first
    shown: list[str]  # a few of the prompts
    samples: dict[str, Tensor]  # their images with every method that generated them, [n, 3, H, W], 8 bits


class Batch(NamedTuple):
    """All that is left of a batch: its latents, codes and pixels do not fill the memory while the next is generated."""

    images: Tensor  # [B, 3, H, W], 8 bits
    report: Report


@dataclass(frozen=True, eq=False)
class Requests:
    """What every method is asked for: batches of prompts, all of one size, so that one captured graph serves them all."""

    pipeline: Pipeline
    schedule: Schedule
    prompts: Sequence[EvalPrompt]
    seed: int
    batches: list[list[int]]  # numbers of the prompts

    @cached_property
    def in_order(self) -> list[EvalPrompt]:
        """The prompts in the order in which their images come."""
        return [self.prompts[number] for numbers in self.batches for number in numbers]

    def captions(self, numbers: Sequence[int]) -> list[str]:
        return [self.prompts[number].text for number in numbers]

    def longest(self) -> list[int]:
        """The batch with the longest prompt, whose captured graph has room for all others. What cannot be read is refused here."""
        lengths = [self.pipeline.reader.read(self.captions(numbers)).longest for numbers in self.batches]
        return self.batches[lengths.index(max(lengths))]

    def generate(self, method: Method, numbers: Sequence[int]) -> Batch:
        """The images of these prompts. Where one is lacking to the size of the first batch, the first prompt runs once more."""
        filled = [*numbers, *numbers[: len(self.batches[0]) - len(numbers)]]
        wait(self.pipeline.model.device)  # what is still running of the last measurement is not this method's
        seeds = [self.seed + number for number in filled]
        output = self.pipeline(self.captions(filled), seed=seeds, size=self.schedule, method=method)
        if not output.pixels.isfinite().all():
            raise NextscaleError("the decoded images have values that are not finite")
        return Batch(to_levels(output.pixels[: len(numbers)]), output.report)


def evaluate(
    pipeline: Pipeline,
    methods: Mapping[str, Method],
    prompts: Sequence[EvalPrompt],
    judges: Judges,
    *,
    size: SizeLike = None,
    seed: int = 0,
    batch: int = 64,
    on_progress: OnProgress | None = None,
) -> Evaluation:
    """Generates every prompt with every method and judges the images as they would be stored, in 8 bits.

    Prompt i has seed + i with every method. Batches are mixed, each with prompts from the whole list, and all of one size. Methods take
    turns batch by batch. Fewer than three batches are timed several times. On a GPU each method first runs two batches that are not timed,
    in which requests that can be captured are: "engine" in a row is the one that ran the timed batches. On a CPU the last method runs one.
    What fails becomes a row with an "error".

    Times are per image in batches of this size, decoding included, encoding the prompts not. Where a method keeps another number of
    tokens in every image, as SparseVAR does, `cost_share` counts the padding of buckets and of rows that cannot be packed; `kept`, the
    share of the cells that the images themselves needed, does not. Both are means over all batches.
    """
    if DENSE not in methods or not prompts:
        raise SettingError(f"quality is judged against dense generation of one or more prompts; got {', '.join(methods)}, {len(prompts)}")
    schedule = pipeline.settings.schedules.choose(size, None)
    requests = Requests(pipeline, schedule, prompts, seed, mixed_batches(len(prompts), batch))
    ordered = {DENSE: methods[DENSE], **methods}  # each turn starts with the images that the others are compared with
    chosen = {name: pipeline.settled(method, schedule, batch) for name, method in ordered.items()}
    measured = {name: Measured() for name in chosen}
    longest = requests.longest()
    has_images = all(prompt.encoded is not None for prompt in prompts)
    references = real_features(judges.features, requests.in_order) if has_images and judges.features is not None else None
    warm_up(requests, chosen, measured, longest)
    samples = take_turns(requests, chosen, measured, judges, on_progress)
    summary = Summary(measured[DENSE], requests.in_order, judges.agreement, references)
    common = conditions(requests, measured[DENSE].reports[0])
    rows = [common | {"method": name, "settings": method.label} | summary.row(measured[name]) for name, method in chosen.items()]
    return Evaluation(rows, requests.captions(requests.batches[0][:SHOWN]), samples)


def warm_up(requests: Requests, methods: Mapping[str, Method], measured: Mapping[str, Measured], numbers: Sequence[int]) -> None:
    """Runs batches that are not timed. On a GPU all methods take turns: the first batch is eager, and its report has the memory that
    this takes. On a CPU one batch suffices: whatever runs first pays for memory that all later calls find."""
    on_gpu = requests.pipeline.model.device.type == "cuda"
    for _ in range(WARM_UPS if on_gpu else 1):
        for name, method in [*methods.items()][0 if on_gpu else -1 :]:
            done = attempt(requests, name, method, measured[name], numbers)
            if done is not None:
                measured[name].untimed.append(done.report)


def take_turns(
    requests: Requests, methods: Mapping[str, Method], measured: Mapping[str, Measured], judges: Judges, on_progress: OnProgress | None
) -> dict[str, Tensor]:
    """Runs all timed batches, judges each once as it comes, and returns the first images of every method."""
    samples: dict[str, Tensor] = {}
    turns = repeated(requests.batches)
    for turn, numbers in enumerate(turns):
        dense: Tensor | None = None
        for place, (name, method) in enumerate(methods.items()):
            if on_progress is not None:
                on_progress(name, (turn + place / len(methods)) / len(turns))
            done = attempt(requests, name, method, measured[name], numbers)
            if done is None:
                continue
            measured[name].reports.append(done.report)
            if turn >= len(requests.batches):
                continue
            dense = done.images if dense is None else dense
            judges.measure(done.images, dense, measured[name])
            if turn == 0:
                samples[name] = done.images[:SHOWN].cpu()
    return samples


def attempt(requests: Requests, name: str, method: Method, result: Measured, numbers: Sequence[int]) -> Batch | None:
    """A batch of a method; None where it fails, and from then on. Dense generation must not fail."""
    if result.error is not None:
        return None
    try:
        return requests.generate(method, numbers)
    except Exception as error:
        if name == DENSE:
            raise
        result.error = short_error(error)
        return None


def conditions(requests: Requests, report: Report) -> Row:
    """What all rows of an evaluation have in common."""
    return {
        "benchmark": BENCHMARK,
        "model": requests.pipeline.name,
        "size": [*report.size],
        "batch": len(requests.batches[0]),
        "dtype": report.dtype,
        "quantize": report.quantize,
        "images": len(requests.prompts),
        "seed": requests.seed,
        **where(requests.pipeline.model.device),
    }


def mixed_batches(count: int, batch: int) -> list[list[int]]:
    """Batches of at most `batch` numbers, each from the whole range; the first ones may have one more than the last."""
    if batch < 1:
        raise SettingError(f"batch is the number of images generated at a time, 1 or more; got {batch}")
    batches = -(-count // batch)
    return [list(range(first, count, batches)) for first in range(batches)]
