"""The models of a server, and what a request asks of them: everything that is wrong is found before it waits."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import NextscaleError, PromptError, SettingError, UnknownModel
from ..generate import check_plans
from ..guidance import ResolvedGuidance, resolve_guidance
from ..methods.code import CoDe
from ..methods.combine import Combined
from ..methods.method import Method
from ..methods.registry import resolve_method
from ..methods.skip import SkipStages
from ..pipeline import Pipeline
from ..planning.memory import ASSUMED_KEPT
from ..schedules import InfinitySchedules
from ..stage import Schedule
from ..text.prompts import ClassReader
from .errors import ApiError, as_api_error, refused
from .schema import LARGEST_SEED, ImageRequest
from .settings import Limits

SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")
METHOD = re.compile(r"(?:[\w\s:=,+\-\[\]{}()'\"]|\.(?![A-Za-z_.]))*")  # no slash, no ending: nothing in it can be a file
SAMPLING = ("temperature", "top_k", "top_p", "greedy")
WORDS = {"quality": ("auto", "standard"), "background": ("auto", "opaque"), "response_format": ("b64_json",)}
REASONS = {
    "quality": "quality {value!r} means nothing here: leave it out, and choose between speed and likeness with method",
    "background": "background {value!r} is not possible: the models generate opaque images",
    "response_format": "response_format {value!r}: no image is stored here, so there is no address; use b64_json",
    "style": "style {value!r} means nothing here: say it in the prompt",
    "num_inference_steps": "num_inference_steps {value!r}: the size fixes the stages; stop_after_stage and method run fewer",
}


@dataclass(frozen=True, eq=False)
class Asked:
    """A request that fits its model."""

    model: str
    prompt: str | int
    negative: str | int | None
    seeds: tuple[int, ...]
    schedule: Schedule
    size: tuple[int, int]  # height, width
    method_text: str  # as it can be asked for again, without stop_after_stage
    partial_stages: tuple[int, ...]
    settings: Mapping[str, Any]  # of the pipeline's call


@dataclass(frozen=True)
class Served:
    """A model that is served. All devices have the same one; this is any of them."""

    name: str
    pipeline: Pipeline

    @property
    def classes(self) -> bool:
        return isinstance(self.pipeline.reader, ClassReader)

    @property
    def default(self) -> Schedule:
        return self.pipeline.settings.schedules.choose(None, None)

    def pixels(self, schedule: Schedule) -> tuple[int, int]:
        """Height and width of the images of a schedule."""
        height, width = schedule.grid
        return height * self.pipeline.tokenizer.pixels_per_token, width * self.pipeline.tokenizer.pixels_per_token

    @property
    def budgets(self) -> tuple[str, ...]:
        book = self.pipeline.settings.schedules
        return tuple(book.budgets) if isinstance(book, InfinitySchedules) else ()


class Catalogue:
    """`method`: what requests run that name none, as it is written on the command line."""

    def __init__(self, models: Sequence[Served], aliases: Mapping[str, str], method: str, limits: Limits) -> None:
        self.models = {served.name: served for served in models}
        self.aliases, self.method, self.limits = dict(aliases), method, limits
        self._default = resolve_method(method)

    def find(self, name: str | None) -> Served:
        if name is None:
            return next(iter(self.models.values()))
        served = self.models.get(self.aliases.get(name, name))
        if served is None:
            raise UnknownModel(f"no model {name[:80]!r} is served; there are {', '.join([*self.models, *self.aliases])}")
        return served

    def ask(self, request: ImageRequest) -> Asked:
        """ApiError, with the field, for what cannot be honoured."""
        served = self.find(request.model)
        require_known_words(request)
        prompt, negative = self._prompts(served, request)
        images = request.n or 1
        schedule = chosen_schedule(served, request)
        size = served.pixels(schedule)
        self._require_allowed(images, size)
        settings = {"size": schedule, **self._sampling(served, request, schedule)}
        guided = self._guided(served, request, schedule, settings)
        if negative is not None and not guided.needs_both:
            raise refused("negative_prompt", "a negative prompt needs guidance: without it the second cfg branch does not run")
        method = self._method(served, request, schedule, guided)
        plans = fitting(served, method, schedule, guided, "method" if request.stop_after_stage is None else "stop_after_stage")
        settings |= {"method": method} | ({"compute_mask": True} if request.masks else {})
        if request.partial_images and not request.stream:
            raise refused("partial_images", "partial images are sent in a stream only: add stream=true, or leave them out")
        run = [stage for stage, plan in enumerate(plans) if not plan.skip]
        partial = spread(run, request.partial_images or 0)
        named = self.method if request.method is None else request.method
        return Asked(served.name, prompt, negative, seeds_of(request, images), schedule, size, named, partial, settings)

    def blamed(self, error: Exception, asked: Asked) -> ApiError:
        """The answer to a job that failed; of two prompts, the one that cannot be read."""
        if not isinstance(error, PromptError) or asked.negative is None:
            return as_api_error(error)
        try:
            self.models[asked.model].pipeline.reader.read(asked.prompt)
        except PromptError:
            return as_api_error(error, "prompt")
        return as_api_error(error, "negative_prompt")

    def _require_allowed(self, images: int, size: tuple[int, int]) -> None:
        if images > self.limits.images:
            raise refused("n", f"n is {images}; this server generates {self.limits.images} images at a time")
        if images * size[0] * size[1] > self.limits.pixels:
            asked = f"{images} image(s) of {size[1]}x{size[0]}"
            raise refused("size", f"{asked} are more than the {self.limits.pixels} pixels that a request may have here")

    def _prompts(self, served: Served, request: ImageRequest) -> tuple[str | int, str | int | None]:
        def read(param: str, text: str) -> str | int:
            if len(text) > self.limits.prompt_chars:
                message = f"{param} has {len(text)} characters; this server reads {self.limits.prompt_chars}"
                raise refused(param, message, "string_above_max_length")
            if not text.strip():
                raise refused(param, f"{param} is empty: write at least one visible character", "empty_string")
            if not served.classes:
                return text
            if not re.fullmatch(r"\s*-?\d{1,6}\s*", text, re.ASCII):
                raise refused(param, f"{served.name} generates classes: {param} is a class number, such as '207'")
            with about(param):
                served.pipeline.reader.read(int(text))
            return int(text)

        return read("prompt", request.prompt), None if request.negative_prompt is None else read("negative_prompt", request.negative_prompt)

    @staticmethod
    def _sampling(served: Served, request: ImageRequest, schedule: Schedule) -> dict[str, Any]:
        given = {name: getattr(request, name) for name in SAMPLING if getattr(request, name) is not None}
        for name, value in given.items():
            with about(name):
                changed = served.pipeline.settings.sampling.changed(**{name: value})
                changed.check(schedule)
                served.pipeline.model.check_sampling(changed)
        return given

    @staticmethod
    def _guided(served: Served, request: ImageRequest, schedule: Schedule, settings: dict[str, Any]) -> ResolvedGuidance:
        scale = request.guidance_scale
        guidance = tuple(scale) if isinstance(scale, list) else scale
        with about("guidance_scale"):
            guided = ResolvedGuidance(
                resolve_guidance(guidance, served.pipeline.settings.guidance), schedule, len(served.pipeline.model.blocks)
            )
        if guidance is not None:
            settings["guidance"] = guidance
        return guided

    def _method(self, served: Served, request: ImageRequest, schedule: Schedule, guided: ResolvedGuidance) -> Method:
        method = self._default if request.method is None else parsed_method(request.method)
        with about("method"):
            method = served.pipeline.settled(method, schedule)  # for one image: `auto` must not depend on who shares the batch
        if isinstance(method, CoDe):
            raise refused("method", f"method {method.label}: it runs a second model beside {served.name}; requests run one")
        fitting(served, method, schedule, guided, "method")
        if request.stop_after_stage is None:
            return method
        left = len(schedule) - 1 - request.stop_after_stage
        if left < 0:
            message = f"stop_after_stage {request.stop_after_stage}: this size has the stages 0 to {len(schedule) - 1}"
            raise refused("stop_after_stage", message)
        return Combined((method, SkipStages(left))) if left else method


@contextmanager
def about(param: str) -> Iterator[None]:
    """Errors of settings inside are those of a field."""
    try:
        yield
    except NextscaleError as error:
        raise as_api_error(error, param) from error


def require_known_words(request: ImageRequest) -> None:
    """Refuses what clients of other servers may ask for and this one cannot do."""
    for param, reason in REASONS.items():
        value = getattr(request, param)
        if value is not None and value not in WORDS.get(param, ()):
            raise refused(param, reason.format(value=value), "unsupported_value")
    if request.output_compression is not None and (request.output_format or "png") == "png":
        raise refused("output_compression", "png loses nothing: leave output_compression out, or choose jpeg or webp")


def chosen_schedule(served: Served, request: ImageRequest) -> Schedule:
    book = served.pipeline.settings.schedules
    with about("aspect" if request.aspect is not None else "size"):
        if (request.width is None) != (request.height is None):
            raise refused("height" if request.height is None else "width", "give both width and height, or size")
        if request.width is not None and request.height is not None:
            if request.size not in (None, "auto"):
                raise refused("size", "width and height already give the size: leave size out")
            return book.choose((request.height, request.width), request.aspect)
        size = request.size or "auto"
        if size == "auto":
            return book.choose(None, request.aspect)
        if found := SIZE.fullmatch(size):
            return book.choose((int(found[2]), int(found[1])), request.aspect)
        if size in served.budgets:
            return book.choose(size, request.aspect)
        offers = sorted({f"{width}x{height}" for height, width in book.offers()}, key=lambda one: [int(side) for side in one.split("x")])
        raise refused("size", f"size {size!r}: give auto or WIDTHxHEIGHT; {served.name} has {', '.join([*served.budgets, *offers])}")


def parsed_method(text: str) -> Method:
    """The same parser as on the command line, for text of strangers."""
    if not METHOD.fullmatch(text) or not text.strip():
        raise refused("method", f"method {text!r}: give a name with settings, such as fastvar or skip:last=2")
    with about("method"):
        return quietly(lambda: resolve_method(text), f"method {text!r} cannot be read")


def fitting(served: Served, method: Method, schedule: Schedule, guided: ResolvedGuidance, param: str) -> Sequence[Any]:
    """The plans of all stages, where the method fits the model and the size."""
    with about(param):

        def plans() -> Sequence[Any]:
            for kept in (ASSUMED_KEPT, 1.0):  # some of what does not fit shows only where tokens are left out
                found = method.forecast(served.pipeline.model, schedule, guided.needs_both, kept)
                check_plans(found, len(served.pipeline.model.blocks), guided)
            return found

        return quietly(plans, f"{method.label} has settings that do not fit this model and size")


def quietly(read: Callable[[], Any], message: str) -> Any:
    """Values of the wrong kind may fail in many ways: all of them are the caller's."""
    try:
        return read()
    except (NextscaleError, ApiError):
        raise
    except Exception as error:
        raise SettingError(f"{message} ({type(error).__name__})") from error


def seeds_of(request: ImageRequest, images: int) -> tuple[int, ...]:
    if isinstance(request.seed, list):
        if len(request.seed) != images:
            raise refused("seed", f"{len(request.seed)} seeds for {images} images: give one number, or one per image")
        return tuple(request.seed)
    first = secrets.randbits(32) if request.seed is None else request.seed
    if first + images - 1 > LARGEST_SEED:
        raise refused("seed", f"seed {first} leaves no room for {images} images: seeds end at {LARGEST_SEED}")
    return tuple(range(first, first + images))


def spread(stages: Sequence[int], partials: int) -> tuple[int, ...]:
    """So many of the stages before the last, evenly spread; all of them where there are not more."""
    before = list(stages[:-1])
    if partials >= len(before):
        return tuple(before)
    return tuple(stages[round((number + 1) * len(stages) / (partials + 1)) - 1] for number in range(partials))
