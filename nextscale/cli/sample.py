"""`nextscale sample`."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import Annotated, Any

import torch
import typer

from ..batching.ray_cluster import LOCAL, RaySettings
from ..errors import SettingError, SizeError
from ..eval.results import where
from ..loading.random_weights import random_pipeline
from ..methods.registry import resolve_method
from ..offline.lock import working_folder
from ..offline.plan import Batch as PlannedBatch
from ..offline.plan import plan_batches
from ..offline.prompts import SamplePrompt, read_sample_prompts
from ..offline.ray import sample_on_ray
from ..offline.sampler import Done, OnImages, sample
from ..offline.shard import AUTO, Shard
from ..offline.store import Store
from ..pipeline import Pipeline
from ..stage import Schedule
from .console import image_bar
from .generate import SamplingOptions
from .groups import grouped
from .options import (
    MACHINE,
    OUTPUT,
    Batch,
    CombinedMethods,
    Limit,
    ModelOptions,
    RayOptions,
    Seed,
    SizeOptions,
    as_kv_dtype,
    as_quantize,
    as_torch_dtype,
    out_option,
)
from .parse import choose_schedule, parse_prompt
from .program import app, version


class Format(StrEnum):
    png = "png"
    jpg = "jpg"
    webp = "webp"


@dataclass(frozen=True)
class SampledPrompts:
    """Which images to generate."""

    prompts_file: Annotated[
        Path,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="A .jsonl file: prompt (or caption, text, class), perhaps id, seed, size, aspect; or one per line, or a .tar shard.",
        ),
    ]
    limit: Limit = None
    seeds: Annotated[int, typer.Option("--seeds", metavar="K", min=1, help="Images per prompt, each with a seed of its own.")] = 1
    seed: Seed = 0

    def batches(self, model: ModelOptions, size: SizeOptions, batch: int, suffix: str) -> list[PlannedBatch]:
        spec = model.spec
        usual = size.schedule(spec)

        def schedule(prompt: SamplePrompt) -> Schedule:
            if prompt.size is None and prompt.aspect is None:
                return usual
            try:
                return choose_schedule(spec.settings.schedules, prompt.size or size.size, prompt.aspect or size.aspect, None)
            except SizeError as error:
                raise SizeError(f"{self.prompts_file}, prompt {prompt.id!r}: {error}") from error

        prompts = read_sample_prompts(self.prompts_file, self.limit)
        return plan_batches(
            prompts, batch=batch, read=partial(parse_prompt, spec=spec), schedule=schedule, seeds=self.seeds, seed=self.seed, suffix=suffix
        )


@dataclass(frozen=True)
class RunOptions:
    """Where images go, and which part of them this process makes."""

    out: Annotated[Path, out_option("FOLDER", "Folder of the images; what is there already is verified and kept.")] = Path("samples")
    format: Annotated[Format, typer.Option("--format", metavar="FORMAT", rich_help_panel=OUTPUT, help="png, jpg or webp.")] = Format.png
    shard: Annotated[
        str,
        typer.Option(
            "--shard",
            metavar="i/N",
            rich_help_panel=MACHINE,
            help=f"The part of the images that this process makes: 0/8 to 7/8, or {AUTO} under torchrun or Slurm. All may share a folder.",
        ),
    ] = "0/1"
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", rich_help_panel=MACHINE, help="No files are read and images mean nothing: to measure speed."),
    ] = False


@app.command("sample")
@grouped
def sample_command(
    *,
    model: ModelOptions,
    prompts: SampledPrompts,
    size: SizeOptions,
    method: CombinedMethods = None,
    sampling: SamplingOptions,
    batch: Batch = 8,
    run: RunOptions,
    on_ray: RayOptions,
) -> None:
    """Generate the images of many prompts into a folder, one file and one line of its manifest each.

    Killed at any moment and started again it ends with the same files. Images that are there are verified and not made again.
    """
    shard = Shard.parse(run.shard)
    ray = on_ray.settings()
    if ray is not None:
        require_known_actors(model, ray)
    model = on_own_gpu(model) if run.shard == AUTO and ray is None else model
    acceleration = resolve_method(method)
    if ray is not None and ray.address != LOCAL and acceleration.chooses:
        raise SettingError(
            f"{acceleration.label} is looked up for the machine that runs it, and a cluster may have several: name the method"
        )
    batches = prompts.batches(model, size, batch, f".{run.format}")
    arguments, chosen = {}, {}
    for one in {one.schedule: one for one in batches}.values():
        settled = model.settled(acceleration, one.schedule, one.images)
        if acceleration.chooses:
            chosen[one.pictures[0].stages] = settled.label
        arguments = sampling.call_arguments(model.spec, one.schedule)
    settings = described(model, sampling, acceleration.label, run)
    if run.out.exists() and not run.out.is_dir():
        raise SettingError(f"--out {run.out} is a file: give a folder")
    total = sum(len(one.pictures) for one in shard.part(batches))
    with (
        stopping(run.out),
        working_folder(run.out, shard) as work,
        progress_of(total) as on_images,
        warnings_as_notes(),
    ):
        store = Store(run.out, work, shard, settings, versions(None if ray else model.torch_device, batch), chosen)
        load = partial(random, model) if run.random_weights else partial(model.load, as_released=sampling.as_released)
        call = {**arguments, "method": acceleration}
        done = sample(load, call, batches, store, on_images) if ray is None else sample_on_ray(load, call, batches, store, ray, on_images)
        if shard.count > 1:
            store.read(batches)  # other shards may have begun meanwhile, with other settings
    show(done, run.out)


def require_known_actors(model: ModelOptions, ray: RaySettings) -> None:
    """Refuses what would mean one thing here and another on the machines of a cluster."""
    if model.device not in (None, "cpu"):
        raise SettingError(f"--device {model.device}: with --ray every actor takes the GPU that Ray gives it; leave it out, or say cpu")
    if ray.address != LOCAL and model.dtype is None:
        raise SettingError(f"--ray {ray.address}: say --dtype, bfloat16 for GPUs; the cluster may have other devices than this machine")


def on_own_gpu(model: ModelOptions) -> ModelOptions:
    """The options with a GPU of its own for each process that a launcher starts on one machine."""
    local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID")
    if model.device is not None or local is None or torch.cuda.device_count() < 2:
        return model
    return replace(model, device=f"cuda:{int(local) % torch.cuda.device_count()}")


def random(model: ModelOptions) -> Pipeline:
    """A pipeline with random weights."""
    if model.weights or model.tokenizer or model.text_encoder or model.offload_text:
        raise SettingError("--random-weights reads no files: leave out --weights, --tokenizer, --text-encoder and --offload-text")
    device = model.torch_device
    dtype = as_torch_dtype(model.dtype) or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    quantize, kv_dtype = as_quantize(model.quantize), as_kv_dtype(model.kv_dtype)
    return random_pipeline(model.spec, device=device, dtype=dtype, quantize=quantize, kv_dtype=kv_dtype)


def described(model: ModelOptions, sampling: SamplingOptions, method: str, run: RunOptions) -> dict[str, Any]:
    """What images depend on besides prompt and seed, as plain values. Files count by name: where they lie does not matter."""
    dtype = model.dtype or ("bfloat16" if model.torch_device.type == "cuda" else "float32")
    files = {"weights": model.weights, "tokenizer": model.tokenizer, "text_encoder": model.text_encoder}
    changed = {name: value for name, value in vars(sampling).items() if value not in (None, False)}
    settings = {
        "model": model.model,
        **{name: Path(value).name for name, value in files.items() if value is not None},
        **({"weights": "random"} if run.random_weights else {}),
        "method": method,
        "dtype": str(dtype),
        **({"quantize": model.quantize.value} if model.quantize else {}),
        **({} if model.kv_dtype is None else {"kv_dtype": str(model.kv_dtype)}),
        **changed,
    }
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def versions(device: torch.device | None, batch: int) -> dict[str, Any]:
    """Versions of the programs, and the device; without one, workers of a cluster add their own."""
    found = where(device or torch.device("cpu"))
    known = {"nextscale": version(), "commit": found["commit"], "torch": found["torch"], "batch": batch}
    return known if device is None else {**known, "device": found["hardware"]}


@contextmanager
def stopping(out: Path) -> Iterator[None]:
    """Says how it goes on where Ctrl-C, or SIGTERM as Slurm sends it, ends the run. Files that are being written are finished first."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    handled = current_thread() is main_thread()  # others may not set handlers
    before = signal.signal(signal.SIGTERM, stop) if handled else None
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        typer.echo(f"stopped: the images in {out} are whole, and the same command makes the others", err=True)
        raise
    finally:
        if handled:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def progress_of(total: int) -> Iterator[OnImages]:
    with image_bar() as progress:
        task = progress.add_task("generating", total=total)
        yield lambda images: progress.advance(task, images)


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Shows warnings as plain lines, without the place in the program that they come from."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: typer.echo(f"note: {message}", err=True)
        yield


def show(done: Done, out: Path) -> None:
    rate = done.images_per_second
    speed = "" if rate is None else f", {rate:.2f} images/s after the first batch, files included"
    there = f"; {done.there} were there" if done.there else ""
    typer.echo(f"{done.written} {'image' if done.written == 1 else 'images'} written to {out}{speed}{there}")
