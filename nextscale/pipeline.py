"""From a prompt to images: the part of the library that most users meet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from .engine import Captures, Eager, Engine, Executor, WarmUp
from .engine.captures import graphs_run_on, obstacle
from .engine.executor import checked_engine, checked_memory
from .engine.memory import memory_errors, require_room
from .engine.tables import ScheduleTables
from .engine.turns import turn_on
from .engine.variants import TooManyTokens
from .errors import SettingError
from .execute import execute
from .guidance import Guidance, GuidanceLike
from .habits import Habits
from .methods.auto import Auto
from .methods.method import Method
from .methods.registry import MethodLike, resolve_method
from .methods.selection import SelectionContext
from .methods.strategy import Partners, split_strategy
from .models.base import NextScaleModel
from .output import Output, Preview, Stages
from .planning.memory import ASSUMED_KEPT, reserved_bytes
from .planning.remembered import Planning
from .profiles import Profile, require_own
from .request import Request, Revise, SeedLike, as_prompts, read_prompts, resolve_seed
from .resolve import Call, resolve, with_room_for_all
from .sampling import Sampling
from .schedules import AspectLike, Schedules, SizeLike
from .stage import Schedule
from .text.prompts import PromptReader, Prompts
from .tokenizers.autoencoder import module_to_channels_last
from .tokenizers.base import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """How a model generates when the caller does not say otherwise."""

    schedules: Schedules
    guidance: Guidance
    sampling: Sampling


class Accelerated:
    """Ends an acceleration where a `with` block ends."""

    def __init__(self, pipeline: Pipeline, previous: Method) -> None:
        self._pipeline, self._previous = pipeline, previous

    def __enter__(self) -> Pipeline:
        return self._pipeline

    def __exit__(self, *_: object) -> None:
        self._pipeline.method = self._previous


class Pipeline(Habits):
    """A model, its tokenizer and a reader of prompts. `nextscale.load` builds one from published files.

    It may be called from several threads. On a GPU one call runs at a time and the others wait; a call from inside `on_stage` runs
    eagerly at once. `on_stage` must not wait for another thread that calls a pipeline on the same GPU.
    """

    def __init__(
        self,
        model: NextScaleModel,
        tokenizer: Tokenizer,
        reader: PromptReader,
        settings: Settings,
        name: str = "custom",
        engine: Engine | None = None,
        graph_memory: int | None = None,
        profiles: tuple[Profile, ...] = (),
    ) -> None:
        """engine: "graphs" captures requests that come again as CUDA graphs, and is the default on a GPU; "eager" never does.

        graph_memory: bytes of the GPU that captured graphs may keep; None is 40 % of what it has. profiles: what `auto` chooses from.
        """
        self._engine = checked_engine(engine)
        self._tables = ScheduleTables(model)
        self.planning = Planning(model)
        self.captures = Captures(model, tokenizer, self._tables, checked_memory(graph_memory))
        self.model = model.eval()
        self.tokenizer = module_to_channels_last(tokenizer.eval())
        self.reader = reader
        self.settings = settings
        self.name = name
        self.method = Method()
        self.profiles = profiles
        self.partners = Partners()

    def __call__(
        self,
        prompt: Any,
        *,
        seed: SeedLike = None,
        size: SizeLike = None,
        aspect: AspectLike = None,
        guidance: GuidanceLike = None,
        negative: Any = None,
        method: MethodLike = None,
        compute_mask: bool = False,
        keep_stages: bool = False,
        on_stage: Callable[[Preview], None] | None = None,
        revise: Revise | None = None,
        prefix_codes: Sequence[Tensor] = (),
        decode: bool = True,
        warmup: bool = False,
        **sampling: Any,
    ) -> Output:
        """Generates one image per prompt, or per seed if there is one prompt and several seeds.

        prompt: a prompt, a list of prompts, or precomputed text features; for class models class numbers, -1 meaning "no class".
        seed: image i uses seed + i, or the i-th of a list, and is the same image alone or in any batch. None takes a fresh seed
            (the report tells which). A torch.Generator is one stream for the whole batch, as in the reference implementations.
        size, aspect: (height, width) in pixels, a pixel budget such as "0.25M", or a Schedule; "16:9" or height / width.
        guidance: a number keeps the model's published form; a list is one scale per stage; or a Guidance.
        negative: like prompt, what to steer away from.
        method: an acceleration method, its name, or several; None is the one set by `accelerate`.
        compute_mask: the output tells for every cell which share of the network was run.
        keep_stages: the output keeps what there was after each stage, to look at later.
        on_stage: called after every stage with a Preview. revise: may replace a stage's codes.
        prefix_codes: codes of the first stages, such as another call's, which are read and not generated.
        decode: False leaves pixels empty.
        warmup: capture such requests now and not at the second one, where they can be captured; the report tells which engine ran.
        sampling: top_k, top_p, temperature, greedy, ...: fields of `Sampling`; those left out keep the published values.
        """
        asked = self.method if method is None else resolve_method(method)
        schedule = self.settings.schedules.choose(size, aspect)
        with self._turn() as nested:
            prompts = read_prompts(self.reader, prompt, seed)
            resolved, reason = asked.resolve(self.situation(schedule, len(prompts)))
            strategy, beside = split_strategy(resolved)
            if strategy is None:
                call = Call(prompts, schedule, beside, seed, guidance, negative, compute_mask, revise, prefix_codes, reason, sampling)
                request = resolve(self, call)
                latents: list[Tensor] | None = [] if keep_stages else None
                with self._watched(request.schedule, on_stage, latents) as watch:
                    output = self._run(request, watch, warmup, nested, decode)
                return output if latents is None else replace(output, stages=Stages(tuple(latents), self.tokenizer))
            resolved.forecast(self.model, schedule, guided=False)  # what does not fit is refused before anything runs
            more = {"compute_mask": compute_mask, "keep_stages": keep_stages, "on_stage": on_stage, "revise": revise, "decode": decode}
            arguments = self._arguments(
                prompts, schedule, seed, guidance, negative, prefix_codes=prefix_codes, warmup=warmup, **more, **sampling
            )
        output = strategy.generate(self, arguments, beside)  # each of its calls waits for the device
        return replace(output, report=replace(output.report, method=resolved.label, selection_reason=reason))

    def warmup(
        self,
        prompt: Any,
        *,
        size: SizeLike = None,
        aspect: AspectLike = None,
        guidance: GuidanceLike = None,
        negative: Any = None,
        method: MethodLike = None,
        **sampling: Any,
    ) -> WarmUp:
        """Captures requests like this one on the GPU before they come; takes what a call takes.

        Any prompts do: what counts is how many there are, one for each image, and for texts roughly how long. Other sizes, batches,
        guidance scales, sampling settings and methods are captured each for itself, here or when they come for the second time.
        """
        if self.engine != "graphs":
            raise SettingError(
                f"engine {self.engine!r} replays nothing: load the model on a GPU, with engine='graphs' or without an engine"
            )
        begun, graphs, kept = time.perf_counter(), self.captures.graphs, self.captures.bytes
        chosen, schedule = self.method if method is None else resolve_method(method), self.settings.schedules.choose(size, aspect)
        with self._turn() as nested:
            prompts = read_prompts(self.reader, prompt, 0)
            resolved, _ = chosen.resolve(self.situation(schedule, len(prompts)))
            strategy, beside = split_strategy(resolved)
            if strategy is None:
                request = resolve(self, Call(prompts, schedule, beside, 0, guidance, negative, sampling=sampling))
                hindrance = "warmup is called from inside on_stage: call it before" if nested else obstacle(self.model.device, request)
                if hindrance is not None:
                    raise SettingError(hindrance)
                with memory_errors(self.model.device, partial(self.reserved, request), request):
                    return self.captures.capture(request)
            arguments = self._arguments(prompts, schedule, 0, guidance, negative, **sampling)
        strategy.warmup(self, arguments, beside)
        return WarmUp(time.perf_counter() - begun, self.captures.graphs - graphs, self.captures.bytes - kept)

    @property
    def engine(self) -> Engine:
        return self._engine or ("graphs" if self.model.device.type == "cuda" else "eager")

    def accelerate(self, method: MethodLike) -> Accelerated:
        """All further calls use `method`: a Method, a name such as "stagevar" or "sparsevar:tau=0.6", or a list of them.

        As a context manager, only the calls inside the `with` block.
        """
        resolved = resolve_method(method)
        found, _ = resolved.resolve(self.situation())
        for kept in (
            () if isinstance(found, Auto) else (1.0, ASSUMED_KEPT)
        ):  # what does not fit this model is refused now, tokens left out or not
            self.planning.forecast(found, self.settings.schedules.choose(None, None), True, kept)
        previous, self.method = self.method, resolved
        return Accelerated(self, previous)

    def dense(self) -> Accelerated:
        """Back to dense generation."""
        return self.accelerate(Method())

    def add_profile(self, profile: Profile | str | Path) -> None:
        """`auto` chooses from this one as well: a profile of this model, or its file."""
        loaded = profile if isinstance(profile, Profile) else Profile.load(profile)
        require_own(loaded, self.model)
        self.profiles = (*(known for known in self.profiles if known != loaded), loaded)

    def planned_memory(self, images: int = 1, size: SizeLike = None, aspect: AspectLike = None, text_tokens: int = 64) -> int:
        """Bytes that a guided request keeps until it ends, besides weights and activations: keys, values and text keys."""
        schedule = self.settings.schedules.choose(size, aspect)
        plans = self.settled(self.method, schedule, images).forecast(self.model, schedule, kept=ASSUMED_KEPT)
        return reserved_bytes(self.model, schedule, plans, images, 2 * images, text_tokens)

    def settled(self, method: MethodLike, schedule: Schedule, batch: int = 1) -> Method:
        """The method that such a request runs: the one given, or what `auto` takes for it."""
        return resolve_method(method).resolve(self.situation(schedule, batch))[0]

    # --- the story of a call

    def reserved(self, request: Request) -> int:
        """Bytes that the request is known to need for keys, values and text."""
        return self.planning.reserved_bytes(request.schedule, request.plans, request.batch, request.rows, request.text_tokens)

    def situation(self, schedule: Schedule | None = None, batch: int = 1) -> SelectionContext:
        """What a method that chooses among others is told of a request."""
        return SelectionContext(self.name, self.model, self.model.device, self.tokenizer.pixels_per_token, self.profiles, schedule, batch)

    def _arguments(
        self, prompts: Prompts, schedule: Schedule, seed: SeedLike, guidance: GuidanceLike, negative: Any, **more: Any
    ) -> dict[str, Any]:
        """Returns all arguments of a call, for a strategy to change."""
        return {
            "prompt": prompts,
            "seed": resolve_seed(seed, len(prompts), self.model.device),
            "size": schedule,
            "guidance": guidance,
            "negative": None if negative is None else as_prompts(self.reader, negative),
            **{"compute_mask": False, "keep_stages": False, "on_stage": None, "revise": None},
            **{"prefix_codes": (), "decode": True, "warmup": False, **more},
        }

    def _turn(self) -> AbstractContextManager[bool]:
        """Until this caller may use the device; whether it does already, further up."""
        device = self.model.device
        return turn_on(device).taken() if graphs_run_on(device) else nullcontext(False)

    def _run(self, request: Request, on_stage: Callable[[Preview], None] | None, warmup: bool, nested: bool, decode: bool) -> Output:
        choose = partial(self._executor, warmup=warmup, nested=nested)
        begun = request.positions() if request.method.data_dependent else []
        try:
            return execute(self, request, choose, on_stage, decode)
        except TooManyTokens as error:
            log.info("%s: the request starts anew, with memory for all cells", error)
        for rng, state in begun:
            rng.set_state(state)
        return execute(self, with_room_for_all(self, request), choose, on_stage, decode)

    def _executor(self, request: Request, warmup: bool, nested: bool) -> Executor:
        """Captured graphs where there are some, or where capturing pays; they have the memory that they need."""
        if self.engine == "graphs" and not nested:
            replay = self.captures.replay(request, at_once=warmup)
            if replay is not None:
                return replay
        require_room(self.model.device, self.reserved(request), request, self.captures.bytes)
        return Eager(self.model, self.tokenizer, self._tables.of(request.schedule))
