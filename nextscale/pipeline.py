"""From a prompt to images: the part of the library that most users meet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, cast

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from .device import Timer, check_quantize, choose_device, choose_dtype, device_lock, place, reset_peak
from .edit import Edit
from .edit_inputs import EditOptions, read_edit
from .engine import Captures, EagerExecutor, Engine, Executor, WarmUp
from .engine.captures import graphs_run_on, obstacle
from .engine.executor import ScheduleTables, checked_engine, checked_memory
from .engine.memory import memory_errors, require_room
from .errors import SettingError
from .generate import StageOutput, all_finite
from .guidance import Guidance, GuidanceLike
from .lora import Loras, Scales, find_adapter
from .methods.auto import Auto
from .methods.method import Method, SelectionContext
from .methods.near_mask import NearMask
from .methods.registry import MethodLike, resolve_method
from .methods.strategy import Partners, combined, split_strategy
from .methods.token_ops import require_own_text
from .models.base import NextScaleModel
from .output import Output, Preview, Stages, mask_of
from .planning import Planner
from .planning.memory import reserved_bytes
from .profiles import Profile, fingerprint, require_own
from .report import EditReport, build_report
from .request import Request, Revise, SeedLike, as_prompts, build_request, from_diffusers, read_prompts, resolve_seed
from .sampling import Sampling
from .schedules import AspectLike, Schedules, SizeLike
from .stage import Schedule
from .text.prompts import PromptReader, Prompts, TextReader
from .tokenizers.autoencoder import module_to_channels_last
from .tokenizers.base import Tokenizer
from .validation import require

OnStage = Callable[[Preview], None]


@dataclass(frozen=True)
class Settings:
    """How a model generates when the caller does not say otherwise."""

    schedules: Schedules
    guidance: Guidance
    sampling: Sampling


class Persistence(Protocol):
    """Reads and writes pipelines. It lives in a higher layer, `loading`, which sets it."""

    def load(self, source: str | Path, **options: Any) -> Pipeline: ...

    def save(self, pipeline: Any, folder: str | Path) -> Path: ...


class Accelerated:
    """Ends an acceleration where a `with` block ends."""

    def __init__(self, pipeline: Pipeline, previous: Method) -> None:
        self._pipeline, self._previous = pipeline, previous

    def __enter__(self) -> Pipeline:
        return self._pipeline

    def __exit__(self, *_: object) -> None:
        self._pipeline.method = self._previous


class Pipeline:
    """A model, its tokenizer and a reader of prompts. `nextscale.load` builds one from published files.

    It may be called from several threads. On a GPU one call runs at a time and the others wait; a call from inside `on_stage` runs
    eagerly at once. `on_stage` must not wait for another thread that calls a pipeline on the same GPU.
    """

    persistence: ClassVar[Persistence]
    progress: bool = False
    """Whether calls show a bar of their tokens, stage by stage, on stderr. On a GPU the host then waits for every stage."""
    weights_folder: Path | None = None
    """Where the weights were read from."""

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
        self.planning = Planner(model)
        self.captures = Captures(model, tokenizer, self._tables, checked_memory(graph_memory))
        self.model = model.eval()
        self.tokenizer = module_to_channels_last(tokenizer.eval())
        self.reader = reader
        self.settings = settings
        self.name = name
        self.method = Method()
        self.profiles = profiles
        self.partners = Partners()
        self.loras = Loras(model)

    def __repr__(self) -> str:
        method = "" if self.method == Method() else f", {self.method.label}"
        return f"Pipeline({self.name}, {self.model.device}, {str(self.model.dtype).removeprefix('torch.')}{method})"

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
        lora: Scales | None = None,
        edit: Edit | None = None,
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
        lora: adapters of `load_lora` and their scales for this call; None is what `set_loras` chose, {} the base model.
        edit: codes of images that stay outside a mask; `Pipeline.edit` makes them.
        sampling: top_k, top_p, temperature, greedy, ...: fields of `Sampling`; those left out keep the published values. diffusers' names
            guidance_scale, negative_prompt, height, width and num_images_per_prompt work too.
        """
        prompt, size, guidance, negative = from_diffusers(sampling, prompt, size, guidance, negative)
        asked = self.method if method is None else resolve_method(method)
        schedule = self.settings.schedules.choose(size, aspect)
        with self._lock() as nested:
            self.loras.use(lora, nested)
            prompts = read_prompts(self.reader, prompt, seed)
            resolved, reason = asked.resolve(self.situation(schedule, len(prompts)))
            strategy, beside = split_strategy(resolved)
            if strategy is None:
                wishes = (compute_mask, revise, prefix_codes, reason, edit)
                request = build_request(self, prompts, schedule, beside, seed, guidance, negative, *wishes, **sampling)
                latents: list[Tensor] | None = [] if keep_stages else None
                with self._watchers(schedule, on_stage, latents) as watchers:
                    output = self._run(request, watchers, warmup, nested, decode)
                return (
                    output
                    if latents is None
                    else replace(output, stages=Stages(tuple(latents), self.tokenizer, edit.paste if edit else None))
                )
            require(edit is None, "method", "one that makes a single call, for an edit", strategy.label)
            resolved.forecast(self.model, schedule, guided=False)  # what does not fit is refused before anything runs
            more = {"compute_mask": compute_mask, "keep_stages": keep_stages, "on_stage": on_stage, "revise": revise, "decode": decode}
            arguments = self._arguments(
                prompts, schedule, seed, guidance, negative, prefix_codes=prefix_codes, warmup=warmup, lora=lora, **more, **sampling
            )
        output = strategy.generate(self, arguments, beside)  # each of its calls waits for the device
        return replace(output, report=replace(output.report, method=resolved.label, selection_reason=reason))

    def edit(
        self,
        image: Any,
        prompt: Any,
        *,
        mask: Any = None,
        strength: float | None = None,
        options: EditOptions | None = None,
        seed: SeedLike = None,
        size: SizeLike = None,
        aspect: AspectLike = None,
        method: MethodLike = None,
        **call: Any,
    ) -> Output:
        """Changes images: inside a mask (in-painting, and out-painting after `nextscale.expanded`), or all over (variations).

        image: a PIL image, a list of images, or a tensor [B, 3, H, W] in [-1, 1]. One image is repeated for several prompts or seeds.
            EditInputs, which `read_edit` has made, stand for image, mask, strength, options, size and aspect.
        mask: where the image changes: a PIL image (white), or a tensor [H, W] or [B, 1, H, W] in [0, 1]. None is everywhere. Pixels
            outside of it keep their 8-bit levels.
        strength: share of the stages that change the image, in (0, 1]; earlier ones keep its codes. None: 0.6 without a mask; with one,
            from the first stage on of which 2 x 2 cells fit into the mask.
        options: further settings, see EditOptions.
        size, aspect: as in a call. None: the image's own size if the model offers it, else the nearest aspect ratio. The image is resized
            and cropped; an error if more than 1/8 would be cut off.
        call: what a call takes, except `revise` and `prefix_codes`.
        """
        for name in ("revise", "prefix_codes", "edit"):
            require(name not in call, name, "left out of an edit, which sets the codes itself", call.get(name))
        shape, pixels = (self.settings.schedules, size, aspect), self.tokenizer.pixels_per_token
        inputs = read_edit(image, mask, strength, options or EditOptions(), *shape, pixels)
        chosen, reason = self.method if method is None else resolve_method(method), None
        with self._lock():
            prompts = read_prompts(self.reader, prompt, seed)
            images = max(len(prompts), len(inputs))
            prompts = prompts.repeat(images) if len(prompts) == 1 else prompts
            require(len(inputs) in (1, images), "image", f"one for all {images} prompts, or one each", f"{len(inputs)} images")
            if inputs.near_mask:
                chosen, reason = self._beside_near_mask(chosen, inputs.schedule, images)
            edit = inputs.encoded(self.tokenizer, self.model.adds_residual)
        edit = edit if len(inputs) == images else edit.repeat(images)
        prefix = edit.codes[: min(inputs.from_stage)]
        output = self(prompts, seed=seed, size=inputs.schedule, method=chosen, prefix_codes=prefix, edit=edit, **call)
        found = EditReport(inputs.shares, inputs.from_stage)
        return replace(output, report=replace(output.report, edit=found, selection_reason=reason or output.report.selection_reason))

    def _beside_near_mask(self, asked: Method, schedule: Schedule, images: int) -> tuple[Method, str | None]:
        """Returns NearMask and a method as one, and why the method was selected; where they do not combine the method, and why not."""
        method, reason = asked.resolve(self.situation(schedule, images))
        try:
            require_own_text(self.model, images, "NearMask keeps other tokens")
            both = combined([NearMask(), method])
            self.planning.forecast(both, schedule, True)
        except SettingError as error:
            named = any(isinstance(one, NearMask) for one in getattr(method, "methods", [method]))
            return method, reason if named else f"without NearMask: {error}"
        return both, reason

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
        prompt, size, guidance, negative = from_diffusers(sampling, prompt, size, guidance, negative)
        begun, graphs, kept = time.perf_counter(), self.captures.graphs, self.captures.bytes
        chosen, schedule = self.method if method is None else resolve_method(method), self.settings.schedules.choose(size, aspect)
        with self._lock() as nested:
            prompts = read_prompts(self.reader, prompt, 0)
            resolved, _ = chosen.resolve(self.situation(schedule, len(prompts)))
            strategy, beside = split_strategy(resolved)
            if strategy is None:
                request = build_request(self, prompts, schedule, beside, 0, guidance, negative, **sampling)
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
        if not isinstance(found, Auto):  # what does not fit this model is refused now
            self.planning.forecast(found, self.settings.schedules.choose(None, None), True)
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
        plans = self.settled(self.method, schedule, images).forecast(self.model, schedule)
        return reserved_bytes(self.model, schedule, plans, images, 2 * images, text_tokens)

    def settled(self, method: MethodLike, schedule: Schedule, batch: int = 1) -> Method:
        """The method that such a request runs: the one given, or what `auto` takes for it."""
        return resolve_method(method).resolve(self.situation(schedule, batch))[0]

    # --- adapters

    def load_lora(self, source: str | Path, name: str | None = None, scale: float = 1.0) -> str:
        """Loads a LoRA adapter and applies it to all further calls. Returns its name, by default that of the file or folder.

        Weights change in place, so captured graphs stay valid. On a CPU, load the first adapter before other threads call the pipeline.

        Args:
            source: PEFT folder, safetensors file (PEFT, diffusers or kohya), or the name of a repository on the hub.
            scale: 0 keeps the adapter loaded and leaves the base weights, bit for bit.

        Raises:
            CheckpointError: the file is damaged, is not a LoRA, or does not fit the model. Nothing is applied then.
        """
        path = find_adapter(source)
        with device_lock(self.model.device).held() as nested:
            if self.model.fingerprint is None:
                self.model.fingerprint = fingerprint(self.model)  # profiles belong to the base
            return self.loras.load(path, name or path.stem, scale, nested)

    def set_loras(self, scales: Scales) -> None:
        """Chooses the adapters of all further calls: {"ink": 0.8, "toy": 0.4}. Others are not applied; {} is the base model."""
        with self._lock() as nested:
            self.loras.set(scales, nested)

    def unload_lora(self, name: str) -> None:
        """Forgets an adapter. The weights are those from before `load_lora`, bit for bit."""
        with self._lock() as nested:
            self.loras.remove(name, nested)

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

    def _lock(self) -> AbstractContextManager[bool]:
        """Waits until this caller may use the device; yields True inside another call of the same thread."""
        device = self.model.device
        return device_lock(device).held() if graphs_run_on(device) or self.loras else nullcontext(False)

    @contextmanager
    def _watchers(self, schedule: Schedule, on_stage: OnStage | None, latents: list[Tensor] | None) -> Iterator[list[OnStage]]:
        """Yields what is called after each stage: it keeps latents, moves the bar, and is the caller's own function."""
        watchers: list[OnStage] = [] if latents is None else [lambda preview: latents.append(preview.latent)]
        with Progress(console=Console(stderr=True), transient=True) if self.progress else nullcontext() as bar:
            if bar is not None:
                task = bar.add_task("", total=schedule.tokens)

                def advance(preview: Preview) -> None:
                    if self.model.device.type == "cuda":
                        torch.cuda.current_stream(self.model.device).synchronize()
                    stage = preview.done.stage
                    bar.update(task, advance=stage.cells, description=f"stage {stage.index + 1}/{len(schedule)}")

                watchers.append(advance)
            yield watchers if on_stage is None else [*watchers, on_stage]

    def _run(self, request: Request, watchers: Sequence[OnStage], warmup: bool, nested: bool, decode: bool) -> Output:
        device, done_stages, edit = self.model.device, list[StageOutput](), request.edit
        timer, paste = Timer(device), edit.paste if edit else None

        def stage_done(done: StageOutput) -> None:
            done_stages.append(done.without_logits())
            if not watchers:
                timer.lap("stage", done.stage.index)
                return
            timer.stop("stage", done.stage.index)
            preview = Preview(done, done.canvas.latent.clone(), self.tokenizer, paste)
            for watcher in watchers:
                watcher(preview)
            timer.start("stage", done.stage.index + 1)

        with memory_errors(device, partial(self.reserved, request), request):
            executor = self._executor(request, warmup, nested)
            reset_peak(device)
            with torch.inference_mode():
                generated = executor.run(request, timer, stage_done, decode)
                finite = torch.stack([*generated.finite.values(), all_finite(generated.latent)])  # its scratch is free before the copies
            # What needs no result comes before the host waits. Copies are ordinary tensors, not inference tensors.
            pixels, latent = generated.pixels.clone(), generated.latent.clone()
            codes = copied([codes_of(done, edit) for done in done_stages if done.codes is not None])
            masks = tuple(mask_of(done, request.batch) for done in done_stages) if request.compute_mask else None
            report = build_report(self, request, executor, generated, finite, done_stages, timer)
        return Output(paste(pixels) if paste and decode else pixels, latent, codes, report, masks)

    def _executor(self, request: Request, warmup: bool, nested: bool) -> Executor:
        """Returns captured graphs where there are some, or where capturing pays. They have the memory that they need."""
        if self.engine == "graphs" and not nested:
            replay = self.captures.replay(request, at_once=warmup)
            if replay is not None:
                return replay
        require_room(self.model.device, self.reserved(request), request, self.captures.bytes)
        return EagerExecutor(self.model, self.tokenizer, self._tables.of(request.schedule))

    # --- as other libraries' pipelines

    @classmethod
    def from_pretrained(cls, source: str | Path, **options: Any) -> Self:
        """A pipeline by a model's name, or from a folder that `save_pretrained` wrote; `options` are those of `nextscale.load`.

        A folder is read in the precision that it was saved in, unless `dtype` says otherwise.
        """
        return cast(Self, cls.persistence.load(source, **options))

    def save_pretrained(self, folder: str | Path) -> Path:
        """Writes one folder that `from_pretrained` reads back bit for bit: settings, safetensors, tokenizer, tuning profiles.

        A small encoder of words is part of it; of a published text encoder the folder says where it is. Adapters are not part of it.
        """
        with self._lock(), self.loras.removed():
            return self.persistence.save(self, folder)

    def to(self, *where: str | torch.device | torch.dtype) -> Self:
        """Moves everything to a device, casts the weights to a dtype, or both: pipe.to("cuda", torch.bfloat16).

        What generates in float32 stays in float32. Graphs that were captured before are captured anew.
        """
        dtypes = [one for one in where if isinstance(one, torch.dtype)]
        devices = [one for one in where if not isinstance(one, torch.dtype)]
        if not where or len(dtypes) > 1 or len(devices) > 1:
            raise SettingError(f"to{where}: give a device, a dtype, or one of each")
        device = choose_device(devices[0]) if devices else self.model.device
        dtype = choose_dtype(dtypes[0] if dtypes else self.model.dtype, device)
        if check_quantize(self.model.quantize, device, dtype) is not None and dtype != self.model.dtype:
            raise SettingError(f"to({dtype}): quantized weights were made for {self.model.dtype}; load the model again with this dtype")
        with self._lock(), self.loras.removed():
            place(self.model, device, dtype, self.model.float32)
            place(self.tokenizer, device, dtype, self.tokenizer.float32)
            module_to_channels_last(self.tokenizer)
            self.reader.to(device)
        return self

    def enable_model_cpu_offload(self) -> None:
        """Keeps a large text encoder in the host's memory; the GPU has it only while a new prompt is encoded.

        Transformer and tokenizer stay on the GPU: captured graphs read them where they lie.
        """
        if not isinstance(self.reader, TextReader) or not self.reader.can_offload:
            raise SettingError("this model has no text encoder that is worth moving: generation needs all of it at once")
        self.reader.offload()


def codes_of(done: StageOutput, edit: Edit | None) -> Tensor:
    """Returns the codes that a stage has put on the canvas; for an edit those of all cells."""
    assert done.codes is not None and done.tokens is not None
    return done.codes if edit is None else edit.written(done.codes, done.tokens)


def copied(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns copies in memory of their own, made in one launch if they are of one dtype."""
    fresh = [torch.empty_like(tensor) for tensor in tensors]
    if fresh:
        torch._foreach_copy_(fresh, list(tensors))
    return tuple(fresh)
