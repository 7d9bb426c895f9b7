"""The pipeline: prompts in, images out."""

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
    """Default schedules, guidance and sampling of a model."""

    schedules: Schedules
    guidance: Guidance
    sampling: Sampling


class Persistence(Protocol):
    """Reads and writes pipelines. The layer `loading` above sets it."""

    def load(self, source: str | Path, **options: Any) -> Pipeline: ...

    def save(self, pipeline: Any, folder: str | Path) -> Path: ...


class Accelerated:
    """Context manager that restores the previous method."""

    def __init__(self, pipeline: Pipeline, previous: Method) -> None:
        self._pipeline, self._previous = pipeline, previous

    def __enter__(self) -> Pipeline:
        return self._pipeline

    def __exit__(self, *_: object) -> None:
        self._pipeline.method = self._previous


class Pipeline:
    """A model, its tokenizer and a reader of prompts. `nextscale.load` builds one from published files.

    Calls from several threads are safe. On a GPU one call runs at a time and the others wait; a call inside `on_stage` runs eagerly at
    once. `on_stage` must not wait for another thread that calls a pipeline on the same GPU.
    """

    persistence: ClassVar[Persistence]
    progress: bool = False
    """Show a progress bar of the tokens on stderr. On a GPU the host then waits for every stage."""
    weights_folder: Path | None = None
    """Folder of the weights."""

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
        """engine: "graphs" captures repeated requests as CUDA graphs and is the default on a GPU; "eager" never captures.

        graph_memory: bytes of GPU memory for captured graphs; None is 40 % of the total. profiles: the profiles of `auto`.
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
        seed: image i uses seed + i, or the i-th of a list, and is the same image alone or in any batch. None takes a random seed, which
            the report has. A torch.Generator is one stream for the whole batch, as in the reference implementations.
        size, aspect: (height, width) in pixels, a pixel budget such as "0.25M", or a Schedule; "16:9" or height / width.
        guidance: a number keeps the model's published form; a list is one scale per stage; or a Guidance.
        negative: negative prompt, of the same kind as prompt.
        method: an acceleration method, its name, or several; None is the one set by `accelerate`.
        compute_mask: the output has the share of the network that ran for every cell.
        keep_stages: the output has the latents after each stage.
        on_stage: called after every stage with a Preview. revise: may replace a stage's codes.
        prefix_codes: codes of the first stages, for example from another call, instead of generated ones.
        decode: False leaves pixels empty.
        warmup: capture such requests at the first one, not at the second. The report has the engine that ran.
        lora: adapters of `load_lora` and their scales for this call; None is the choice of `set_loras`, {} the base model.
        edit: codes of images that stay outside a mask; `Pipeline.edit` makes them.
        sampling: top_k, top_p, temperature, greedy, ...: fields of `Sampling`; the others keep the published values. diffusers' names
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
            resolved.forecast(self.model, schedule, guided=False)  # refuses wrong settings before anything runs
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
            EditInputs of `read_edit` replace image, mask, strength, options, size and aspect.
        mask: where the image changes: a PIL image (white), or a tensor [H, W] or [B, 1, H, W] in [0, 1]. None is everywhere. Pixels
            outside of it keep their 8-bit levels.
        strength: share of the stages that change the image, in (0, 1]; earlier ones keep its codes. None: 0.6 without a mask; with one,
            the stages from the first one whose 2 x 2 cells fit into the mask.
        options: further settings, see EditOptions.
        size, aspect: as in a call. None: the image's own size if the model offers it, else the nearest aspect ratio. The image is resized
            and cropped; an error if more than 1/8 would be cut off.
        call: other arguments of a call, except `revise` and `prefix_codes`.
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
        """Returns NearMask and a method as one, and the reason for the method; if they do not combine, the method and the reason."""
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
        """Captures requests like this one on the GPU in advance. The arguments are those of a call.

        Only the number of prompts matters, and for texts their approximate length. Requests with another size, batch, guidance scale,
        sampling setting or method are captured separately, here or at their second call.
        """
        if self.engine != "graphs":
            raise SettingError(
                f"warmup needs a GPU with engine='graphs'; the engine is {self.engine!r}. Load the model on a GPU, without an engine."
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
                hindrance = "warmup cannot run inside on_stage. Call it earlier." if nested else obstacle(self.model.device, request)
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
        """Uses `method` for all further calls: a Method, a name such as "stagevar" or "sparsevar:tau=0.6", or a list of them.

        As a context manager, only for the calls inside the `with` block.
        """
        resolved = resolve_method(method)
        found, _ = resolved.resolve(self.situation())
        if not isinstance(found, Auto):  # refuses settings that do not fit this model
            self.planning.forecast(found, self.settings.schedules.choose(None, None), True)
        previous, self.method = self.method, resolved
        return Accelerated(self, previous)

    def dense(self) -> Accelerated:
        """Ends the acceleration."""
        return self.accelerate(Method())

    def add_profile(self, profile: Profile | str | Path) -> None:
        """Adds a profile of this model, or its file, for `auto`."""
        loaded = profile if isinstance(profile, Profile) else Profile.load(profile)
        require_own(loaded, self.model)
        self.profiles = (*(known for known in self.profiles if known != loaded), loaded)

    def planned_memory(self, images: int = 1, size: SizeLike = None, aspect: AspectLike = None, text_tokens: int = 64) -> int:
        """Returns the bytes of keys, values and text keys that a guided request keeps, besides weights and activations."""
        schedule = self.settings.schedules.choose(size, aspect)
        plans = self.settled(self.method, schedule, images).forecast(self.model, schedule)
        return reserved_bytes(self.model, schedule, plans, images, 2 * images, text_tokens)

    def settled(self, method: MethodLike, schedule: Schedule, batch: int = 1) -> Method:
        """Returns the method that such a request runs; for `auto` the one that it selects."""
        return resolve_method(method).resolve(self.situation(schedule, batch))[0]

    # --- adapters

    def load_lora(self, source: str | Path, name: str | None = None, scale: float = 1.0) -> str:
        """Loads a LoRA adapter and applies it to all further calls. Returns its name, by default the name of the file or folder.

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
            return self.loras.load(path, name or Path(source).stem, scale, nested)  # a path in the hub's cache ends in a hash

    def set_loras(self, scales: Scales) -> None:
        """Chooses the adapters of all further calls: {"ink": 0.8, "toy": 0.4}. Others are not applied; {} is the base model."""
        with self._lock() as nested:
            self.loras.set(scales, nested)

    def unload_lora(self, name: str) -> None:
        """Forgets an adapter. The weights are those from before `load_lora`, bit for bit."""
        with self._lock() as nested:
            self.loras.remove(name, nested)

    # --- the steps of a call

    def reserved(self, request: Request) -> int:
        """Returns the bytes of keys, values and text that the request reserves."""
        return self.planning.reserved_bytes(request.schedule, request.plans, request.batch, request.rows, request.text_tokens)

    def situation(self, schedule: Schedule | None = None, batch: int = 1) -> SelectionContext:
        """Returns the facts about a request by which `auto` selects a method."""
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
        """Yields the callbacks of each stage: collecting latents, the progress bar, and the caller's function."""
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
            # The copies are launched before the host waits. They are ordinary tensors, not inference tensors.
            pixels, latent = generated.pixels.clone(), generated.latent.clone()
            codes = copied([codes_of(done, edit) for done in done_stages if done.codes is not None])
            masks = tuple(mask_of(done, request.batch) for done in done_stages) if request.compute_mask else None
            report = build_report(self, request, executor, generated, finite, done_stages, timer)
        return Output(paste(pixels) if paste and decode else pixels, latent, codes, report, masks)

    def _executor(self, request: Request, warmup: bool, nested: bool) -> Executor:
        """Returns captured graphs if there are some or capturing pays. Their memory is reserved."""
        if self.engine == "graphs" and not nested:
            replay = self.captures.replay(request, at_once=warmup)
            if replay is not None:
                return replay
        require_room(self.model.device, self.reserved(request), request, self.captures.bytes)
        return EagerExecutor(self.model, self.tokenizer, self._tables.of(request.schedule))

    # --- methods with the names of other libraries

    @classmethod
    def from_pretrained(cls, source: str | Path, **options: Any) -> Self:
        """Loads a pipeline by a model's name, or from a folder that `save_pretrained` wrote. `options` are those of `nextscale.load`.

        A folder keeps its precision, unless `dtype` is given.
        """
        return cast(Self, cls.persistence.load(source, **options))

    def save_pretrained(self, folder: str | Path) -> Path:
        """Writes a folder that `from_pretrained` reads back bit for bit: settings, safetensors, tokenizer, tuning profiles.

        It contains a small encoder of words. For a published text encoder it contains the location. Adapters are left out.
        """
        with self._lock(), self.loras.removed():
            return self.persistence.save(self, folder)

    def to(self, *where: str | torch.device | torch.dtype) -> Self:
        """Moves everything to a device, casts the weights to a dtype, or both: pipe.to("cuda", torch.bfloat16).

        Parts that run in float32 stay in float32. Graphs are captured again.
        """
        dtypes = [one for one in where if isinstance(one, torch.dtype)]
        devices = [one for one in where if not isinstance(one, torch.dtype)]
        if not where or len(dtypes) > 1 or len(devices) > 1:
            raise SettingError(f"to must get a device, a dtype, or one of each; got {where}.")
        device = choose_device(devices[0]) if devices else self.model.device
        dtype = choose_dtype(dtypes[0] if dtypes else self.model.dtype, device)
        if check_quantize(self.model.quantize, device, dtype) is not None and dtype != self.model.dtype:
            raise SettingError(
                f"quantized weights keep their dtype, {self.model.dtype}; got {dtype}. Load the model again with dtype={dtype}."
            )
        with self._lock(), self.loras.removed():
            place(self.model, device, dtype, self.model.float32)
            place(self.tokenizer, device, dtype, self.tokenizer.float32)
            module_to_channels_last(self.tokenizer)
            self.reader.to(device)
        return self

    def enable_model_cpu_offload(self) -> None:
        """Keeps a large text encoder in host memory; it is on the GPU only while a new prompt is encoded.

        Transformer and tokenizer stay on the GPU, where captured graphs read them.
        """
        if not isinstance(self.reader, TextReader) or not self.reader.can_offload:
            raise SettingError("CPU offload moves a large text encoder, and this model has none. Leave it out.")
        self.reader.offload()


def codes_of(done: StageOutput, edit: Edit | None) -> Tensor:
    """Returns the codes that a stage has put on the canvas, for an edit the codes of all cells."""
    assert done.codes is not None and done.tokens is not None
    return done.codes if edit is None else edit.written(done.codes, done.tokens)


def copied(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns copies of the tensors, made in one launch if they have one dtype."""
    fresh = [torch.empty_like(tensor) for tensor in tensors]
    if fresh:
        torch._foreach_copy_(fresh, list(tensors))
    return tuple(fresh)
