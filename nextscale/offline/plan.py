"""Plan of the batches of a run, which depends neither on existing images nor on the number of shards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import PromptError
from ..io import IMAGE_FORMATS
from ..request import is_seed
from ..stage import Schedule
from ..validation import require
from .prompts import SamplePrompt

MAX_IMAGES = 10_000_000  # the plan takes about 6 GB of memory


@dataclass(frozen=True)
class Picture:
    """Planned image of a run."""

    id: str
    prompt: str | int  # as the pipeline takes it
    seed: int
    schedule: Schedule
    file: str  # its name in the folder
    original: str | None = None  # of a rewritten prompt

    @property
    def stages(self) -> str:
        return " ".join(f"{height}x{width}" for height, width in self.schedule.sizes)


@dataclass(frozen=True)
class Batch:
    """Pictures of one size that are generated together. Rounding depends on the batch size on most devices, so a picture is always
    generated in the same batch."""

    number: int
    pictures: tuple[Picture, ...]
    images: int  # of the request; an incomplete batch is padded with copies of its last picture

    @property
    def schedule(self) -> Schedule:
        return self.pictures[0].schedule

    @property
    def filled(self) -> list[Picture]:
        return [*self.pictures, *[self.pictures[-1]] * (self.images - len(self.pictures))]


def plan_batches(
    prompts: Sequence[SamplePrompt],
    *,
    batch: int,
    read: Callable[[str], str | int],
    schedule: Callable[[SamplePrompt], Schedule],
    seeds: int = 1,
    seed: int = 0,
    suffix: str = ".png",
) -> list[Batch]:
    """Plans batches of at most `batch` images of one size.

    Image k of prompt i has the seed `seed + i * seeds + k`, or the prompt's own seed plus k. read: returns a prompt's text as the pipeline
    takes it. schedule: returns the size of its images.
    """
    require(suffix in IMAGE_FORMATS, "format", f"one of {', '.join(IMAGE_FORMATS)}", suffix)
    require(seeds * len(prompts) <= MAX_IMAGES, "prompts", f"for at most {MAX_IMAGES:,} images, or parts of them", seeds * len(prompts))
    by_size: dict[Schedule, list[Picture]] = {}
    files: dict[str, Picture] = {}  # some file systems ignore case
    for number, prompt in enumerate(prompts):
        first = seed + number * seeds if prompt.seed is None else prompt.seed
        words, size = read(prompt.text), schedule(prompt)
        for value in range(first, first + seeds):
            require(is_seed(value), f"the seed of prompt {prompt.id!r}", "an int in [0, 2**63)", value, PromptError)
            picture = Picture(prompt.id, words, value, size, f"{prompt.id}_{value}{suffix}", prompt.original)
            if (other := files.setdefault(picture.file.lower(), picture)) is not picture:  # such as "a" with seed 1 and "a_1"
                raise PromptError(f"the prompts {other.id!r} and {prompt.id!r} would both write {picture.file}. Give them other ids.")
            by_size.setdefault(size, []).append(picture)
    batches: list[Batch] = []
    for pictures in by_size.values():
        for start in range(0, len(pictures), batch):
            batches.append(Batch(len(batches), tuple(pictures[start : start + batch]), min(batch, len(pictures))))
    return batches
