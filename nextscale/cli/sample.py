"""`nextscale sample`."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import SettingError, SizeError
from .files import default_out
from .options import MACHINE, OUTPUT, Batch, ImageOptions, Limit, Methods, ModelOptions, Ray, SamplingOptions, option, out_option
from .parse import AUTO, LOCAL, choose_schedule, parse_lora, parse_methods, parse_ray, torch_dtype
from .show import image_bar, show_next, stopping

if TYPE_CHECKING:
    import torch

    from ..batching.ray_cluster import RaySettings
    from ..methods import Method
    from ..offline.plan import Batch as PlannedBatch
    from ..offline.prompts import SamplePrompt
    from ..pipeline import Pipeline
    from ..stage import Schedule


@dataclass(frozen=True)
class RunOptions:
    """The prompts, the folder of the images, and the share of this process."""

    prompts_file: Annotated[
        Path,
        option(
            "--prompts",
            "FILE",
            ".jsonl file with prompt (or caption, text, class) and optional id, seed, size, aspect; or one per line, or a .tar shard.",
        ),
    ]
    limit: Limit = None
    out: Annotated[Path | None, out_option("FOLDER", "Folder of the images; existing ones are verified and kept.", "samples")] = None
    format: Annotated[Literal["png", "jpg", "webp"], option("--format", "FORMAT", "png, jpg or webp.", OUTPUT)] = "png"
    shard: Annotated[
        str, option("--shard", "i/N", f"Part of this process, 0/8 to 7/8; {AUTO} under torchrun or Slurm. All may share a folder.", MACHINE)
    ] = "0/1"
    ray: Ray = None
    random_weights: Annotated[
        bool, option("--random-weights", None, "Random weights, to measure speed: reads no files, images mean nothing.", MACHINE)
    ] = False

    def batches(self, model: ModelOptions, image: ImageOptions, sampling: SamplingOptions, batch: int) -> list[PlannedBatch]:
        from ..offline.plan import plan_batches
        from ..offline.prompts import read_sample_prompts

        spec = model.spec
        usual = image.schedule(spec)

        def schedule(prompt: SamplePrompt) -> Schedule:
            if prompt.size is None and prompt.aspect is None:
                return usual
            try:
                return choose_schedule(spec.settings.schedules, prompt.size or image.size, prompt.aspect or image.aspect)
            except SizeError as error:
                raise SizeError(f"{self.prompts_file}, prompt {prompt.id!r}: {error}") from error

        return plan_batches(
            read_sample_prompts(self.prompts_file, self.limit),
            batch=batch,
            read=partial(sampling.prompt, spec=spec),
            schedule=schedule,
            seeds=image.num_images,
            seed=image.seed,
            suffix=f".{self.format}",
        )


def sample(
    *, model: ModelOptions, method: Methods = None, image: ImageOptions, sampling: SamplingOptions, batch: Batch = 8, run: RunOptions
) -> None:
    """Generate the images of a prompt file into a folder, one file and one manifest line each.

    An interrupted run continues with the same command; existing images are verified and kept.
    """
    from ..offline.lock import working_folder
    from ..offline.ray import sample_on_ray
    from ..offline.sampler import sample as generate_missing
    from ..offline.shard import Shard
    from ..offline.store import Store

    shard, ray, acceleration = Shard.parse(run.shard), parse_ray(run.ray), parse_methods(method)
    if ray is not None:
        require_known_actors(model, ray, acceleration)
    elif run.shard == AUTO:
        model = on_own_gpu(model)
    batches, arguments, chosen = run.batches(model, image, sampling, batch), {}, {}
    for one in {one.schedule: one for one in batches}.values():
        resolved, _ = model.resolved(acceleration, one.schedule, one.images)
        if resolved != acceleration:
            chosen[one.pictures[0].stages] = resolved.label
        arguments = sampling.call_arguments(model.spec, one.schedule)
    out = run.out or default_out("samples")
    if out.exists() and not out.is_dir():
        raise SettingError(f"--out must be a folder; {out} is a file.")
    message = f"The images in {out} are complete; the same command continues."
    with (
        ended_by_sigterm(message),
        stopping(lambda: message),
        working_folder(out, shard) as work,
        image_bar() as progress,
        warnings.catch_warnings(),
    ):
        warnings.showwarning = lambda message, *_, **__: typer.echo(f"note: {message}", err=True)  # without the line of code
        task = progress.add_task("generating", total=sum(len(one.pictures) for one in shard.part(batches)))
        settings = described(model, sampling, acceleration.label, method, run.random_weights)
        store = Store(out, work, shard, settings, versions(None if ray else model.torch_device, batch), chosen)
        load = partial(random, model) if run.random_weights else partial(model.load, as_released=sampling.as_released)
        run_all = generate_missing if ray is None else partial(sample_on_ray, ray_settings=ray)
        done = run_all(load, {**arguments, "method": acceleration}, batches, store, on_images=partial(progress.advance, task))
        if shard.count > 1:
            store.read(batches)  # other shards may have begun meanwhile, with other settings
    speed = "" if done.images_per_second is None else f", {done.images_per_second:.2f} images/s after the first batch, files included"
    kept = f"; {done.there} kept" if done.there else ""
    typer.echo(f"{done.written} {'image' if done.written == 1 else 'images'} written to {out}{speed}{kept}")
    show_next(f"nextscale evaluate {out} --real FOLDER  # FID against real images")


def require_known_actors(model: ModelOptions, ray: RaySettings, method: Method) -> None:
    """Raises SettingError for settings that other machines of a cluster may understand differently."""
    from ..methods.auto import Auto

    if model.device not in (None, "cpu"):
        raise SettingError(f"--device must be cpu or left out with --ray, which assigns GPUs to its actors; got {model.device}.")
    if ray.address == LOCAL:
        return
    if model.dtype is None:
        raise SettingError("--dtype is required on a cluster, whose devices may differ from those here. For GPUs pass --dtype bfloat16.")
    if isinstance(method, Auto):
        raise SettingError(f"--method {method.label} depends on the machine, and a cluster may have several kinds. Name the method itself.")


def on_own_gpu(model: ModelOptions) -> ModelOptions:
    """Returns the options with a GPU of its own for each process that a launcher starts on one machine."""
    import torch

    local, gpus = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID"), torch.cuda.device_count()
    return model if model.device or local is None or gpus < 2 else replace(model, device=f"cuda:{int(local) % gpus}")


def random(model: ModelOptions) -> Pipeline:
    """Returns a pipeline with random weights."""
    from ..device import choose_dtype
    from ..loading.load import random_pipeline

    if model.weights or model.tokenizer or model.text_encoder or model.offload_text:
        raise SettingError("--random-weights reads no files. Leave out --weights, --tokenizer, --text-encoder and --offload-text.")
    device = model.torch_device
    dtype = choose_dtype(torch_dtype(model.dtype), device)
    return model.adapted(random_pipeline(model.spec, device=device, dtype=dtype, quantize=model.quantize, kv_dtype=model.kv_dtype))


def described(
    model: ModelOptions, sampling: SamplingOptions, label: str, method: Sequence[str] | None, random_weights: bool
) -> dict[str, Any]:
    """Returns what images depend on besides prompt and seed, as plain values. Files are compared by name and content."""
    found: dict[str, Any] = {"model": model.model}
    for name in ("weights", "tokenizer", "text_encoder"):
        if (file := getattr(model, name)) is not None:
            found[name] = named_with_content(file)
    if random_weights:
        found["weights"] = "random"
    if model.lora:
        found["lora"] = [f"{named_with_content(path)}:{scale:g}" for path, scale in map(parse_lora, model.lora)]
    found["method"] = label
    if files := re.findall(r"[^\s=,{}\[\]]+\.json", " ".join(method or ())):
        found["method_files"] = list(map(named_with_content, files))
    found["dtype"] = model.dtype or ("bfloat16" if model.torch_device.type == "cuda" else "float32")
    types = {"quantize": model.quantize, "kv_dtype": model.kv_dtype}
    return found | {name: value for name, value in types.items() if value is not None} | sampling.changes


def named_with_content(given: str | Path) -> str:
    """Returns the name of a file or folder of weights with a digest of sizes and samples of the content, at most 4 MiB per file."""
    from ..checkpoints.files import WEIGHT_SUFFIXES
    from ..io import expanded

    path = expanded(given)
    if not path.exists():  # a repository of the hub
        return str(given)
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in WEIGHT_SUFFIXES and file.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path)} {size}".encode())
        with file.open("rb") as content:
            for number in range(64):
                content.seek(max(size - 2**16, 0) * number // 63)
                digest.update(content.read(2**16))
    return f"{path.name} ({digest.hexdigest()[:12]})"


def versions(device: torch.device | None, batch: int) -> dict[str, Any]:
    """Returns the versions of the programs, and the device; without one, workers of a cluster add their own."""
    import torch

    from ..eval.results import version, where

    found = where(device or torch.device("cpu"))
    known = {"nextscale": version(), "commit": found["commit"], "torch": found["torch"], "batch": batch}
    return known | ({"device": found["hardware"]} if device else {})


@contextmanager
def ended_by_sigterm(message: str) -> Iterator[None]:
    """Prints the message after SIGTERM, as Slurm sends it. Files that are being written are finished first."""

    def stop(number: int, _: object) -> None:
        typer.echo(f"Stopped. {message}", err=True)
        raise SystemExit(128 + number)

    if current_thread() is not main_thread():  # others may not set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
