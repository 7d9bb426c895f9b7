"""Models of a server, and the validation of requests before they are queued."""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..edit_inputs import EditInputs
from ..errors import NextscaleError, PromptError, SettingError, UnknownModel
from ..guidance import ResolvedGuidance, resolve_guidance
from ..methods.combine import Combined
from ..methods.method import Method
from ..methods.registry import resolve_method
from ..methods.skip import SkipStages
from ..methods.strategy import Strategy
from ..pipeline import Pipeline
from ..planning.memory import ASSUMED_KEPT
from ..request import check_plans, image_seeds, resolve_sampling
from ..schedules import InfinitySchedules
from ..stage import Schedule
from ..text.prompts import ClassReader
from .errors import FEWER_STAGES, ApiError, as_api_error, refused
from .schema import ImageRequest
from .settings import Limits

SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")
METHOD = re.compile(r"(?:[\w\s:=,+\-\[\]{}()'\"]|\.(?![A-Za-z_.]))*")  # no slash and no file ending: nothing in it can be a file
SAMPLING = ("temperature", "top_k", "top_p", "greedy")
UNSUPPORTED: Mapping[str, tuple[Sequence[str], str]] = {  # field to the values that are accepted, and the remedy for others
    "quality": (("auto", "standard"), "Leave it out; use method to trade quality for speed."),
    "background": (("auto", "opaque"), "The models generate opaque images."),
    "response_format": (("b64_json",), "Images are not stored and have no address; use b64_json."),
    "style": ((), "Describe it in the prompt."),
    "num_inference_steps": ((), FEWER_STAGES),
}


@dataclass(frozen=True, eq=False)
class ParsedRequest:
    """Validated request."""

    model: str
    prompt: str | int
    negative: str | int | None
    seeds: tuple[int, ...]
    schedule: Schedule
    size: tuple[int, int]  # height, width
    method_text: str  # as it can be requested again, without stop_after_stage
    partial_stages: tuple[int, ...]
    settings: Mapping[str, Any]  # of the pipeline's call
    source: EditInputs | None = None  # of an edit
    hashes: dict[str, str] = field(default_factory=dict)  # of the pictures of an edit, by field


@dataclass(frozen=True)
class Served:
    """Served model, with the pipeline of one of its devices."""

    name: str
    pipeline: Pipeline

    @property
    def classes(self) -> bool:
        return isinstance(self.pipeline.reader, ClassReader)

    @property
    def default(self) -> Schedule:
        return self.pipeline.settings.schedules.choose(None, None)

    def pixels(self, schedule: Schedule) -> tuple[int, int]:
        """Returns the height and width of the images of a schedule."""
        height, width = schedule.grid
        return height * self.pipeline.tokenizer.pixels_per_token, width * self.pipeline.tokenizer.pixels_per_token

    def guided(self, schedule: Schedule, guidance: Any = None) -> ResolvedGuidance:
        scales = resolve_guidance(guidance, self.pipeline.settings.guidance)
        return ResolvedGuidance(scales, schedule, len(self.pipeline.model.blocks))

    def prompt(self, param: str, text: str, max_chars: int) -> str | int:
        """Returns a prompt as the pipeline takes it."""
        if len(text) > max_chars:
            message = f"{param} must have at most {max_chars} characters; got {len(text)}"
            raise refused(param, message, "string_above_max_length")
        if not text.strip():
            raise refused(param, f"{param} must have a visible character", "empty_string")
        if not self.classes:
            return text
        if not re.fullmatch(r"\s*-?\d{1,6}\s*", text, re.ASCII):
            raise refused(param, f"{param} must be a class number, such as '207': {self.name} generates classes")
        with about(param):
            self.pipeline.reader.read(int(text))
        return int(text)

    def adapters(self, request: ImageRequest) -> tuple[tuple[str, float], ...] | None:
        """Returns the requested adapters in order of their names, so that equal choices share batches."""
        if request.lora is None:
            return None
        found, offered = {one.name: one.scale for one in request.lora}, self.pipeline.loras.offered
        if len(found) < len(request.lora):
            raise refused("lora", "lora must name each adapter once")
        if unknown := sorted(found.keys() - offered.keys()):
            raise refused("lora", f"lora must name adapters of {self.name} ({', '.join(offered) or 'none are served'}); got {unknown[0]!r}")
        return tuple(sorted((name, scale) for name, scale in found.items() if scale))

    def schedule(self, request: ImageRequest) -> Schedule:
        """Returns the schedule of the requested size and aspect ratio."""
        book, size = self.pipeline.settings.schedules, request.size or "auto"
        with about("aspect" if request.aspect is not None else "size"):
            if (request.width is None) != (request.height is None):
                raise refused("height" if request.height is None else "width", "width and height must be given together")
            if request.width is not None and request.height is not None:
                if size != "auto":
                    raise refused("size", "size must be left out beside width and height")
                return book.choose((request.height, request.width), request.aspect)
            budgets = [*book.budgets] if isinstance(book, InfinitySchedules) else []
            if size in ("auto", *budgets):
                return book.choose(None if size == "auto" else size, request.aspect)
            if found := SIZE.fullmatch(size):
                if request.aspect is not None:
                    raise refused("aspect", f"aspect must be left out beside size {size}, which fixes it")
                return book.choose((int(found[2]), int(found[1])), request.aspect)
            examples = ", ".join([text_of(self.pixels(self.default)), *budgets])
            raise refused("size", f"size must be auto, WIDTHxHEIGHT or a pixel budget, such as {examples}; got {size!r}")

    def plans(self, method: Method, schedule: Schedule, guided: ResolvedGuidance, param: str) -> Sequence[Any]:
        """Returns the plans of all stages. Raises ApiError if the method does not fit the model and the size."""
        with about(param, f"{method.label} does not fit this model and size"):
            for kept in (ASSUMED_KEPT, 1.0):  # some errors show only where tokens are left out
                plans = method.forecast(self.pipeline.model, schedule, guided.needs_both, kept)
                check_plans(plans, len(self.pipeline.model.blocks), guided)
        return plans


class Catalogue:
    """Served models. method: default of requests, as on the command line."""

    def __init__(self, models: Sequence[Served], aliases: Mapping[str, str], method: str, limits: Limits) -> None:
        self.models = {served.name: served for served in models}
        self.aliases, self.method, self.limits = dict(aliases), method, limits
        self._default = resolve_method(method)

    def find(self, name: str | None) -> Served:
        if name is None:
            return next(iter(self.models.values()))
        served = self.models.get(self.aliases.get(name, name))
        if served is None:
            raise UnknownModel(f"model must be one of {', '.join([*self.models, *self.aliases])}; got {name[:80]!r}")
        return served

    def parse(self, request: ImageRequest, chosen: Schedule | None = None) -> ParsedRequest:
        """Validates a request. Raises ApiError with the field that is refused. chosen: the schedule of an edit."""
        served, images = self.find(request.model), request.n or 1
        require_supported(request)
        prompt = served.prompt("prompt", request.prompt, self.limits.prompt_chars)
        negative = request.negative_prompt and served.prompt("negative_prompt", request.negative_prompt, self.limits.prompt_chars)
        schedule = chosen or served.schedule(request)
        size = served.pixels(schedule)
        if images > self.limits.images:
            raise refused("n", f"n must be at most {self.limits.images} on this server; got {images}")
        if images * size[0] * size[1] > self.limits.pixels:
            raise refused("size", f"size must be at most {self.limits.pixels} pixels per request; got {images} image(s) of {text_of(size)}")
        sampling = {name: getattr(request, name) for name in SAMPLING if getattr(request, name) is not None}
        for name, value in sampling.items():
            with about(name):
                resolve_sampling(served.pipeline, schedule, {name: value})
        scale = request.guidance_scale
        guidance = tuple(scale) if isinstance(scale, list) else scale
        with about("guidance_scale"):
            guided = served.guided(schedule, guidance)
        if negative is not None and not guided.needs_both:
            raise refused("negative_prompt", "negative_prompt needs guidance, since without it the second cfg branch does not run")
        method, plans = self._method(served, request, schedule, guided)
        if request.partial_images and not request.stream:
            raise refused("partial_images", "partial_images must be left out without stream=true")
        partial = spread([stage for stage, plan in enumerate(plans) if not plan.skip], request.partial_images or 0)
        with about("seed"):
            seeds = image_seeds(secrets.randbits(32) if request.seed is None else request.seed, images)
        settings = {"size": schedule, **sampling, "method": method}
        if (lora := served.adapters(request)) is not None:
            settings["lora"] = lora
        settings |= ({} if guidance is None else {"guidance": guidance}) | ({"compute_mask": True} if request.masks else {})
        named = self.method if request.method is None else request.method
        return ParsedRequest(served.name, prompt, negative, seeds, schedule, size, named, partial, settings)

    def api_error(self, error: Exception, parsed: ParsedRequest) -> ApiError:
        """Returns the answer to a failed job. Of two prompts, it names the one that cannot be read."""
        param = None
        if isinstance(error, PromptError) and parsed.negative is not None:
            try:
                self.models[parsed.model].pipeline.reader.read(parsed.prompt)
                param = "negative_prompt"
            except PromptError:
                param = "prompt"
        return as_api_error(error, param)

    def _method(self, served: Served, request: ImageRequest, schedule: Schedule, guided: ResolvedGuidance) -> tuple[Method, Sequence[Any]]:
        """Returns the method of a request and its plans."""
        method = self._default if request.method is None else parse_method(request.method)
        with about("method"):
            method = served.pipeline.settled(method, schedule)  # for one image: `auto` must not depend on other requests
        if isinstance(method, Strategy) and method.second_model:
            raise refused("method", f"method must run one model; got {method.label}, which also needs a second one")
        plans, last = served.plans(method, schedule, guided, "method"), len(schedule) - 1
        left = 0 if request.stop_after_stage is None else last - request.stop_after_stage
        if left < 0:
            raise refused("stop_after_stage", f"stop_after_stage must be 0 to {last}; got {request.stop_after_stage}")
        if left:
            method = Combined((method, SkipStages(left)))
            plans = served.plans(method, schedule, guided, "stop_after_stage")
        return method, plans


@contextmanager
def about(param: str, message: str = "") -> Iterator[None]:
    """Attributes errors of settings to a field. With a message, also other exceptions, since a wrong value may fail in many ways."""
    try:
        yield
    except NextscaleError as error:
        raise as_api_error(error, param) from error
    except Exception as error:
        if not message or isinstance(error, ApiError):
            raise
        raise as_api_error(SettingError(f"{message} ({type(error).__name__})"), param) from error


def require_supported(request: ImageRequest) -> None:
    """Refuses values that other servers accept and this one does not support."""
    for param, (accepted, remedy) in UNSUPPORTED.items():
        value = getattr(request, param)
        if value is not None and value not in accepted:
            raise refused(param, f"{param}={value!r} is not supported. {remedy}", "unsupported_value")
    if request.output_compression is not None and (request.output_format or "png") == "png":
        raise refused("output_compression", "output_compression must be left out for png, which is lossless")


def parse_method(text: str) -> Method:
    """Parses the method of a client. Refuses text that could name a file."""
    if not METHOD.fullmatch(text) or not text.strip():
        raise refused("method", f"method must be a name with settings, such as fastvar or skip:last=2; got {text!r}")
    with about("method", f"method {text!r} is not valid"):
        return resolve_method(text)


def text_of(size: tuple[int, int]) -> str:
    return f"{size[1]}x{size[0]}"


def spread(stages: Sequence[int], partials: int) -> tuple[int, ...]:
    """Returns up to `partials` stages before the last, evenly spread."""
    if partials >= len(stages) - 1:
        return tuple(stages[:-1])
    return tuple(stages[round((number + 1) * len(stages) / (partials + 1)) - 1] for number in range(partials))
