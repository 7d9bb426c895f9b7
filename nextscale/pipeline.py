"""From a prompt to images: the part of the library that most users meet."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from numbers import Integral
from typing import Any, Literal, get_args

import torch
from PIL import Image
from torch import Tensor

from .accel.method import Method
from .accel.registry import MethodLike, resolve_method
from .canvas import Canvas
from .engine.graphs import Captures, WarmUp
from .errors import OutOfMemory, SettingError
from .generate import Request, Revise, StageDone, as_sampled, generate, require_finite
from .guidance import Guidance, GuidanceLike, GuidedRows, resolve_guidance
from .io import to_pil
from .models.base import NextScaleModel, PromptInputs
from .planning.cost import RequestCost, StageCost, Workload, as_run, request_cost
from .planning.memory import reserved_bytes
from .report import Report, StageReport, Stopwatch, free_memory, peak_memory, reset_peak
from .sampling import ImageRng, Rng, Sampling, SharedRng, method_rng
from .schedules import AspectLike, ScheduleBook, SizeLike
from .stage import Schedule
from .text.prompts import PromptReader, Prompts
from .tokenizers.autoencoder import lay_out
from .tokenizers.base import Tokenizer

Engine = Literal["graphs", "eager"]
TABLES = 8  # schedules whose positions are kept; 5 MB each for images of 1024 x 1024 pixels
SeedLike = int | Sequence[int] | torch.Generator | Rng | None


@dataclass(frozen=True)
class Settings:
    """How a model draws when the caller does not say otherwise."""

    schedules: ScheduleBook
    guidance: Guidance
    sampling: Sampling


@dataclass(frozen=True, eq=False)
class Output:
    """What a call returns."""

    pixels: Tensor  # [B, 3, H, W], the decoder's output, nominally in [-1, 1]
    latent: Tensor  # what was decoded
    codes: tuple[Tensor, ...]  # per stage that was run, as drawn on the canvas
    report: Report
    compute_mask: tuple[Tensor, ...] | None = None  # per stage, if asked for: share of the network that ran for every cell, [B, h, w]

    @property
    def images(self) -> list[Image.Image]:
        return to_pil(self.pixels)


@dataclass(frozen=True, eq=False)
class Preview:
    """Given to `on_stage` after each stage."""

    done: StageDone  # where a recording was replayed, without logits, and the next request writes into its tensors
    latent: Tensor  # what the canvas held after this stage
    tokenizer: Tokenizer

    @property
    def canvas(self) -> Canvas:
        """Goes on changing while generation does."""
        return self.done.canvas

    @torch.inference_mode()
    def images(self) -> list[Image.Image]:
        """The images as they would be if generation stopped here. FlexVAR's grow with the stage."""
        return to_pil(self.tokenizer.decode(self.latent))


def mask_of(done: StageDone, batch: int) -> Tensor:
    if done.compute_mask is not None:
        return done.compute_mask.view(batch, *done.stage.size).float().clone()
    return torch.full((batch, *done.stage.size), 0.0 if done.skipped else 1.0, device=done.canvas.latent.device)


def read_back(finite: Mapping[int, Tensor], latent: Tensor, done_stages: Sequence[StageDone]) -> tuple[list[int], list[float]]:
    """The stages whose numbers are not all finite, and of the tokens that each stage ran the share that no image needed.

    The host waits for the device here and, unless a method asks, nowhere else.
    """
    checks = torch.stack([*finite.values(), latent.isfinite().all()])
    needed = {done.stage.index: done.counts.double().mean() for done in done_stages if done.counts is not None}
    told = torch.cat([checks.double(), *(mean[None] for mean in needed.values())]).tolist()
    means = dict(zip(needed, told[len(checks) :], strict=True))
    failed = [stage for stage, good in zip([*finite, len(done_stages) - 1], told, strict=False) if not good]
    return failed, [1 - means[done.stage.index] / done.num_tokens if done.stage.index in means else 0.0 for done in done_stages]


class Accelerated:
    """Ends an acceleration where a `with` block ends."""

    def __init__(self, pipeline: Pipeline, previous: Method) -> None:
        self._pipeline, self._previous = pipeline, previous

    def __enter__(self) -> Pipeline:
        return self._pipeline

    def __exit__(self, *_: object) -> None:
        self._pipeline.method = self._previous


class Pipeline:
    """A model, its tokenizer and a reader of prompts. `nextscale.load` builds one from published files."""

    def __init__(
        self,
        model: NextScaleModel,
        tokenizer: Tokenizer,
        reader: PromptReader,
        settings: Settings,
        name: str = "custom",
        engine: Engine | None = None,
    ) -> None:
        """engine: "graphs" replays what `warmup` has recorded, and is the default on a GPU; "eager" never does."""
        self._engine = checked_engine(engine)
        self.captures = Captures(model, tokenizer)
        self._tables: dict[tuple[Schedule, torch.device], Any] = {}
        self.model = model.eval()
        self.tokenizer = lay_out(tokenizer.eval())
        self.reader = reader
        self.settings = settings
        self.name = name
        self.method = Method()

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
        on_stage: Callable[[Preview], None] | None = None,
        revise: Revise = as_sampled,
        **sampling: Any,
    ) -> Output:
        """Draws one image per prompt, or per seed if there is one prompt and several seeds.

        prompt: a text, a list of texts, or precomputed text features; for class models class numbers, -1 meaning "no class".
        seed: image i uses seed + i, or the i-th of a list, and is the same image alone or in any batch. None draws a fresh seed
            (the report tells which). A torch.Generator is one stream for the whole batch, as in the authors' programs.
        size, aspect: (height, width) in pixels, a pixel budget such as "0.25M", or a Schedule; "16:9" or height / width.
        guidance: a number keeps the model's published form; a list is one scale per stage; or a Guidance.
        negative: like prompt, what to steer away from.
        method: an acceleration method, its name, or several; None is the one set by `accelerate`. compute_mask: keep which cells were run.
        on_stage: called after every stage with a Preview. revise: may replace a stage's codes.
        sampling: top_k, top_p, temperature, greedy, ...: fields of `Sampling`; those left out keep the published values.
        """
        chosen = self.method if method is None else resolve_method(method)
        request, prompts, against, seeds = self._request(prompt, seed, size, aspect, guidance, negative, compute_mask, revise, sampling)
        return self._run(request, prompts, against, seeds, chosen, on_stage)

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
        """Records requests like this one on the GPU, so that later calls replay them; takes what a call takes.

        Any prompts do: what counts is how many there are, one for each image, and for texts roughly how long. Other sizes, batches,
        guidance scales, sampling settings and methods need a recording each; calls without one run eagerly and say so once.
        """
        if self.engine != "graphs":
            raise SettingError(
                f"engine {self.engine!r} replays nothing: load the model on a GPU, with engine='graphs' or without an engine"
            )
        chosen = self.method if method is None else resolve_method(method)
        request, prompts, against, _ = self._request(prompt, 0, size, aspect, guidance, negative, False, as_sampled, sampling)
        with torch.inference_mode():
            given = self.model.prompt_inputs(prompts, request.guidance.needs_both, request.schedule, against)
            tables = self._schedule_tables(request.schedule)
        longest = longest_text(prompts, against)
        planned = partial(reserved_bytes, self.model, request.schedule, chosen, request.batch, request.rows, longest)
        with memory_errors(self.model.device, planned, request):
            return self.captures.capture(request, chosen, longest, given, tables)

    def _request(
        self,
        prompt: Any,
        seed: SeedLike,
        size: SizeLike,
        aspect: AspectLike,
        guidance: GuidanceLike,
        negative: Any,
        compute_mask: bool,
        revise: Revise,
        sampling: dict[str, Any],
    ) -> tuple[Request, Prompts, Prompts | None, tuple[int, ...] | None]:
        """The request, what it draws, what it steers away from, and its seeds if they are numbers."""
        schedule = self.settings.schedules.choose(size, aspect)
        chosen = self._sampling(schedule, sampling)
        guided = GuidedRows(resolve_guidance(guidance, self.settings.guidance), schedule, len(self.model.blocks))
        prompts = self.reader.read(prompt)
        if len(prompts) == 1 and isinstance(seed, Sequence) and seed:
            prompts = prompts.repeat(len(seed))
        draws, seeds = self._rng(seed, len(prompts))
        own_draws = draws if seeds is None else method_rng(seeds, self.model.device)
        against = self._against(negative, len(prompts), guided)
        clock = Stopwatch(self.model.device)
        return Request(len(prompts), schedule, guided, chosen, draws, revise, clock, own_draws, compute_mask), prompts, against, seeds

    @property
    def engine(self) -> Engine:
        return self._engine or ("graphs" if self.model.device.type == "cuda" else "eager")

    def accelerate(self, method: MethodLike) -> Accelerated:
        """All further calls use `method`: a Method, a name such as "stagevar" or "sparsevar:tau=0.6", or a list of them.

        As a context manager, only the calls inside the `with` block.
        """
        resolved = resolve_method(method)
        for kept in (1.0, 0.5):  # what does not fit this model is refused now; some of it shows only where tokens are left out
            resolved.forecast(self.model, self.settings.schedules.choose(None, None), kept)
        previous, self.method = self.method, resolved
        return Accelerated(self, previous)

    def dense(self) -> Accelerated:
        """Back to dense generation."""
        return self.accelerate(Method())

    def planned_memory(self, images: int = 1, size: SizeLike = None, aspect: AspectLike = None, text_tokens: int = 64) -> int:
        """Bytes that a guided request keeps until it ends, besides weights and activations: keys, values and text keys."""
        schedule = self.settings.schedules.choose(size, aspect)
        return reserved_bytes(self.model, schedule, self.method, images, 2 * images, text_tokens)

    def _run(
        self,
        request: Request,
        prompts: Prompts,
        negative: Prompts | None,
        seeds: tuple[int, ...] | None,
        method: Method,
        on_stage: Callable[[Preview], None] | None,
    ) -> Output:
        device, schedule, batch = self.model.device, request.schedule, request.batch
        done_stages: list[StageDone] = []
        clock, longest = request.clock, longest_text(prompts, negative)

        def stage_done(done: StageDone) -> None:
            clock.stop("stage", done.stage.index)
            done_stages.append(done.without_logits())
            if on_stage is not None:
                latent = done.canvas.latent
                on_stage(Preview(done, latent if recording is None else latent.clone(), self.tokenizer))  # a replay writes there again
            clock.start("stage", done.stage.index + 1)

        @cache
        def planned() -> int:
            return reserved_bytes(self.model, schedule, method, batch, request.rows, longest)

        replayable = self.captures.taken(request, method, longest) if self.engine == "graphs" else nullcontext()
        with replayable as recording, memory_errors(device, planned, request):
            if recording is None:  # a recording has the memory that it needs
                require_room(device, planned(), request, self.captures.bytes)
            reset_peak(device)
            with torch.inference_mode():
                with clock.time("condition"):
                    given = self.model.prompt_inputs(prompts, request.guidance.needs_both, schedule, negative)
                    if recording is None:
                        cond = self.model.condition_from(given, self._schedule_tables(schedule))
                    else:
                        recording.condition(given)
                clock.start("stage")
                if recording is None:
                    canvas = self.tokenizer.canvas(schedule, batch)
                    finite = generate(self.model, cond, canvas, request, method, stage_done)
                else:
                    canvas, finite = recording.canvas, recording.run(request, stage_done)
                with clock.time("decode"):
                    pixels = self.tokenizer.decode(canvas.latent) if recording is None else recording.decode()
            # What needs no result comes before the host waits for the device. Copies are ordinary tensors, not inference tensors.
            copies = pixels.clone(), canvas.latent.clone(), tuple(done.codes.clone() for done in done_stages if done.codes is not None)
            kept = tuple(mask_of(done, batch) for done in done_stages) if request.compute_mask else None
            dense, spent = self._costs(request, given, done_stages)
            peak, need = peak_memory(device), planned()
            failed, padding = read_back(finite, canvas.latent, done_stages)
        require_finite(failed, len(schedule))
        stages = zip(done_stages, padding, spent.stages, dense.stages, strict=True)
        report = Report(
            model=self.name,
            method=method.label,
            engine="eager" if recording is None else "graphs",
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            dtype=str(self.model.dtype).removeprefix("torch."),
            size=(pixels.shape[2], pixels.shape[3]),
            seeds=seeds,
            stages=tuple(
                self._stage_report(done, batch, unneeded, cost, cost.share(same), clock, recording is None)
                for done, unneeded, cost, same in stages
            ),
            cost_share=spent.share(dense),
            condition_seconds=clock.seconds("condition"),
            decode_seconds=clock.seconds("decode"),
            peak_memory=peak,
            planned_memory=need,
        )
        return Output(*copies, report, kept)

    def _schedule_tables(self, schedule: Schedule) -> Any:
        """What the model makes of a schedule, kept for the last few of them."""
        key = schedule, self.model.device
        tables = self._tables.pop(key) if key in self._tables else self.model.schedule_tables(schedule)
        if len(self._tables) == TABLES:
            del self._tables[next(iter(self._tables))]
        self._tables[key] = tables  # the last one used is the last to go
        return tables

    def _costs(self, request: Request, given: PromptInputs, done_stages: Sequence[StageDone]) -> tuple[RequestCost, RequestCost]:
        """MACs of the same request in dense generation, and of what was run."""
        workload = Workload(
            request.schedule,
            request.batch,
            request.guidance.needs_both,
            0 if given.text is None else given.text.length,
            request.sampling.refine,
            self.model.residual_scale(request.guidance, request.schedule[-1]) != 1,
        )
        plans = [as_run(self.model, done.stage, done.plan, done.num_tokens) for done in done_stages]
        return request_cost(self.model, workload), request_cost(self.model, workload, plans)

    @staticmethod
    def _stage_report(
        done: StageDone, batch: int, padding: float, cost: StageCost, cost_share: float, clock: Stopwatch, eager: bool
    ) -> StageReport:
        index = done.stage.index
        return StageReport(
            index,
            *done.stage.size,
            skipped=done.skipped,
            tokens=done.num_tokens,
            computed=cost.computed,
            padding=padding,
            rows=done.rows,
            cfg_branches=done.rows // batch,
            cost_share=cost_share,
            seconds=clock.seconds("stage", index),
            sampling_seconds=clock.seconds("choice", index) if eager else None,
            residual_seconds=clock.seconds("residual", index) if eager else None,
        )

    def _against(self, negative: Any, images: int, guidance: GuidedRows) -> Prompts | None:
        """What the second branch reads; None where it does not run, or where the model has its own idea of "no prompt"."""
        if negative is None:
            empty = self.reader.empty() if guidance.needs_both else None
            return None if empty is None else empty.repeat(images)
        if not guidance.needs_both:
            raise SettingError("a negative prompt needs guidance: without it the second branch does not run")
        prompts = self.reader.read(negative)
        if len(prompts) == 1:
            return prompts.repeat(images)
        if len(prompts) != images:
            raise SettingError(f"{len(prompts)} negative prompts for {images} images: give one, or one per image")
        return prompts

    def _sampling(self, schedule: Schedule, changes: dict[str, Any]) -> Sampling:
        sampling = self.settings.sampling.changed(**changes)
        sampling.check(schedule)
        self.model.check_sampling(sampling)
        if sampling.smooth and not self.tokenizer.mixes_codes:
            raise SettingError(f"smooth mixes entries of a codebook; {self.name} does not support it")
        if sampling.forbidden and max(sampling.forbidden) >= self.tokenizer.codes:
            raise SettingError(f"forbidden {sampling.forbidden}: {self.name} has {self.tokenizer.codes} numbered codes")
        return sampling

    def _rng(self, seed: SeedLike, images: int) -> tuple[Rng, tuple[int, ...] | None]:
        if isinstance(seed, torch.Generator):
            return SharedRng(seed), None
        if isinstance(seed, Rng):
            return seed, None
        if seed is None:
            seed = secrets.randbits(32)
        given = list(range(int(seed), int(seed) + images)) if isinstance(seed, Integral) else seed
        if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(s, Integral) and 0 <= s < 2**63 for s in given):
            raise SettingError(f"seed {seed!r}: give whole numbers from 0 to 2**63 - 1, or a torch.Generator")
        if len(given) != images:
            raise SettingError(f"{len(given)} seeds for {images} images: give one number, or one per image")
        seeds = tuple(int(one) for one in given)
        return ImageRng(seeds, self.model.device), seeds


def checked_engine(engine: Engine | None) -> Engine | None:
    if engine is not None and engine not in get_args(Engine):
        raise SettingError(f"engine {engine!r}: choose one of {', '.join(get_args(Engine))}")
    return engine


def longest_text(prompts: Prompts, negative: Prompts | None) -> int:
    """Tokens of the longest text of a request; 0 where there is none."""
    return max(prompts.longest, negative.longest if negative is not None else 0)


def memory_advice(device: torch.device, planned: int, request: Request) -> str:
    return (
        f"{request.batch} image(s) of {request.schedule} on {device} need {planned / 2**30:.2f} GiB for keys and values"
        " besides weights and activations: draw fewer images at a time, a smaller size, or in a smaller dtype"
    )


def require_room(device: torch.device, planned: int, request: Request, recorded: int) -> None:
    """Refuses a request whose known need is larger than what is free. `recorded`: bytes that recordings keep for themselves."""
    free = free_memory(device, recorded)
    if free is not None and planned > free:
        raise OutOfMemory(f"{free / 2**30:.2f} GiB are free. {memory_advice(device, planned, request)}")


@contextmanager
def memory_errors(device: torch.device, planned: Callable[[], int], request: Request) -> Iterator[None]:
    """Explains running out of memory on the way."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise OutOfMemory(f"memory ran out. {memory_advice(device, planned(), request)}") from error
        raise
