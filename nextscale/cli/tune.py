"""`nextscale tune`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from ..errors import NextscaleError, PromptError, SettingError
from .files import default_out, require_writable
from .models import show_profile
from .options import Batch, Force, ModelOptions, PromptsFile, Seed, SizeOptions, option, out_option
from .parse import parse_pairs, parse_prompt, size_text
from .show import result_console, share_bar, show_next, stopping

if TYPE_CHECKING:
    from ..loading import ModelSpec
    from ..pipeline import Pipeline
    from ..stage import Schedule
    from ..tune.log import TrialLog
    from ..tune.trials import Bench

DEFAULT_PROMPTS = 256  # if none are given
MINUTES = 10.0
BAR = 36  # columns of a narrow terminal that the bar, the share and the time need beside the text
SUFFIX = ".profile.json"

OnProgress = Callable[[str, float], None]


class Prompts(NamedTuple):
    """Prompts of the search and of validation; none is in both lists."""

    search: list[Any]
    held_out: list[Any]
    source: str  # in words


def tune(
    *,
    model: ModelOptions,
    prompts: PromptsFile = None,
    test: Annotated[
        Path | None, option("--test", "FILE", "Held-out prompts for validation; all of them are used.", None, "every second prompt")
    ] = None,
    target: Annotated[str | None, option("--target", "NAME=NUMBER", "Also show the point for speedup=2, lpips=0.08 or ms=50.")] = None,
    minutes: Annotated[float | None, option("--minutes", "N", "Minutes of search and validation.", None, f"{MINUTES:g}", min=0.01)] = None,
    start: Annotated[Path | None, option("--from", "FILE", "Do not search: validate the points of this profile on this machine.")] = None,
    size: SizeOptions,
    batch: Batch = 8,
    seed: Seed = 0,
    out: Annotated[Path | None, out_option("FILE", f"The profile, *{SUFFIX}.", "beside --weights, or here")] = None,
    force: Force = False,
) -> None:
    """Search settings for a model and validate them: how fast it can be, and how far from dense images.

    A search can be stopped and continued: its trials are kept beside the profile.
    """
    from ..methods.auto import Auto
    from ..metrics import Lpips
    from ..offline.prompts import evenly_spread
    from ..profiles import profile_folder, profile_name
    from ..tune.budget import NEEDED, VALIDATION, filling_batches, validation_prompts
    from ..tune.log import SUFFIX as TRIALS
    from ..tune.log import TrialLog
    from ..tune.trials import Bench
    from ..tune.validate import validate

    spec = model.spec
    schedule = size.schedule(spec)
    given = {"--prompts": prompts, "--minutes": minutes}
    if start is not None and (idle := [name for name, value in given.items() if value is not None]):
        raise SettingError(f"--from {start} searches nothing: {' and '.join(idle)} would have no effect. Leave them out.")
    wanted = None if target is None else Auto(**parse_pairs("--target", [target], ("speedup", "lpips", "ms")))
    limit = minutes or MINUTES
    with share_bar() as progress:
        task = progress.add_task("loading", total=1.0)

        def on_progress(what: str, share: float) -> None:
            shown = shorten(what, max(20, progress.console.width - BAR), placeholder="…")
            progress.update(task, completed=share, description=escape(shown))

        pipeline = model.load()
        height, width = (side * pipeline.tokenizer.pixels_per_token for side in schedule.grid)
        name = profile_name(pipeline.name, (height, width), pipeline.model.device.type, batch)
        file = out or (default_out(name) if model.weights is None else profile_folder(model.weights) / name)
        if not file.name.endswith(SUFFIX):
            raise SettingError(f"--out must end in {SUFFIX}, by which `load` finds it; got {file}.")
        log_file = file.with_name(file.name.removesuffix(SUFFIX) + TRIALS)
        require_writable([file], force)
        used = read_prompts(prompts, test, start, spec, pipeline)
        for kind, several in (("prompts", used.search), ("held-out prompts", used.held_out)):
            if len(several) < batch and (several is used.held_out or start is None):
                raise PromptError(f"{len(several)} {kind} do not fill a batch of {batch}. Pass more prompts, or a smaller --batch.")
            for first in range(0, len(several), batch):  # too long prompts are refused before the search
                pipeline.reader.read(several[first : first + batch])
        bench = Bench(pipeline, schedule, used.search, batch, seed, Lpips.load(pipeline.model.device))
        held_out, searched, before = used.held_out, 0, 0.0

        def kept() -> str:
            trials = 0 if start is not None else len(TrialLog.read(log_file).trials)
            return f"{trials} of about {NEEDED} trials are in {log_file}; the same command continues." if trials else ""

        with stopping(kept):
            if start is None:
                if file.exists():
                    log_file.unlink(missing_ok=True)  # the trials of a finished search
                log, before = TrialLog.read(log_file), 1 - VALIDATION
                winners = search(bench, log, limit, test is None, on_progress)
                searched = max(trial.images for trial in log.trials.values())
                if test is None:
                    held_out = evenly_spread(held_out, validation_prompts(batch, bench.dense_time() / batch, limit, len(winners)))
            else:
                winners = starting_points(start, pipeline, schedule)
            profile = validate(
                pipeline,
                winners,
                evenly_spread(held_out, filling_batches(len(held_out), batch)),
                bench.lpips,
                schedule=schedule,
                batch=batch,
                seed=seed,
                searched=searched,
                source=used.source,
                on_progress=lambda what, share: on_progress(f"validation: {what}", before + (1 - before) * share),
            )
    profile.save(file)
    show_profile(result_console(), file, profile)
    show_found(file, model, "auto" if wanted is None else f"auto:{target}")
    if wanted is not None:
        point = wanted.point_of(profile)
        result_console().print(f"{wanted.label} takes {point.as_method().label}: {point.label}", markup=False, soft_wrap=True)


def show_found(file: Path, model: ModelOptions, method: str) -> None:
    """Prints how to use the profile."""
    from ..loading.artifacts import local_weights, profile_folders

    folder = profile_folders(model.spec, model.weights or local_weights(model.spec) or file)[-1]
    if folder.resolve() != file.resolve().parent:
        result_console().print(f"`auto` reads profiles in {folder}. Move it there, or call pipe.add_profile({str(file)!r}).", markup=False)
    show_next(f"nextscale generate -m {model.model} --method {method} PROMPT")


def search(bench: Bench, log: TrialLog, minutes: float, choose: bool, on_progress: OnProgress) -> list[str]:
    """Returns the winners. choose: at most as many as validation has time for."""
    from ..offline.prompts import evenly_spread
    from ..planning.cost import Workload
    from ..tune import Search
    from ..tune.budget import LATEST, NEEDED, VALIDATION, first_round, max_winners, needed_minutes
    from ..tune.search import MAX_WINNERS
    from ..validation import is_int

    pipeline = bench.pipeline
    images: int = log.conditions.get("images", 0)
    if not is_int(images, 1) or images % bench.batch:
        images = first_round(bench.batch, per_image := bench.first_look(), minutes, len(bench.prompts))
        needed = math.ceil(needed_minutes(images, per_image))
        typer.echo(f"The smallest search takes about {needed} of the {minutes:g} minutes here ({NEEDED} trials).", err=True)
    log.start(conditions(bench, images))
    if there := len(log.trials):
        typer.echo(f"{there} trials are in {log.file}: the search continues.", err=True)

    def on_trial(what: str, share: float) -> None:
        if share > LATEST:
            rest = share * (NEEDED - len(log.trials)) / max(1, len(log.trials) - there)  # of --minutes, at the pace so far
            raise NextscaleError(
                f"the trials that every search needs take longer than --minutes {minutes:g} here: {len(log.trials)} of about {NEEDED}"
                f" are kept in {log.file}. Run the same command with --minutes {math.ceil(minutes * max(2, rest))} to continue."
            )
        on_progress(what, min(share, 1.0) * (1 - VALIDATION))

    text = pipeline.reader.read(bench.part(0)[0]).longest if pipeline.model.stack[0].has_text else 0
    guided = any(scale != 1 for scale in pipeline.settings.guidance.scales(bench.schedule))
    workload = Workload(bench.schedule, bench.batch, guided, text, pipeline.settings.sampling.refine)
    winners = Search(bench, log, images, 60 * minutes * (1 - VALIDATION), workload, on_trial).run()
    most = max_winners(bench.batch, bench.dense_time() / bench.batch, minutes) if choose else MAX_WINNERS
    return [candidate.text for candidate in evenly_spread(winners, min(most, MAX_WINNERS))]


def read_prompts(prompts: Path | None, test: Path | None, start: Path | None, spec: ModelSpec, pipeline: Pipeline) -> Prompts:
    from ..tune.prompts import own_prompts

    given = own_prompts(pipeline, DEFAULT_PROMPTS) if prompts is None else prompts_of(prompts, spec)
    source = "prompts of nextscale" if prompts is None else prompts.name
    number = {prompt: count for count, prompt in enumerate(dict.fromkeys(given))}  # a prompt that comes again is in the same half again
    searched, spare = ([prompt for prompt in given if number[prompt] % 2 == half] for half in (0, 1))
    held_out = spare if test is None else prompts_of(test, spec)
    if start is not None:
        return Prompts([], held_out, f"points of {start.name}, validated on {test.name if test else source}")
    if test is None:
        return Prompts(searched, spare, f"{source}, every second one held out")
    shared = {*held_out, *(spare if prompts is None else ())}  # a later --from may validate the winners on the spare ones
    seen = [prompt for prompt in given if prompt not in shared]
    if not seen:
        raise PromptError(f"--test {test} holds all prompts of the search. Pass other ones.")
    return Prompts(seen, held_out, f"{source} for the search, {test.name} held out")


def prompts_of(file: Path, spec: ModelSpec) -> list[Any]:
    """Returns captions, or class numbers for a class model."""
    from ..offline.prompts import read_prompts

    found = read_prompts(file)
    try:
        return found if spec.text_encoder is not None else [parse_prompt(text, spec) for text in found]
    except PromptError as error:
        raise PromptError(f"{file} must have one class number per line for {spec.name} ({error})") from None


def conditions(bench: Bench, images: int) -> dict[str, Any]:
    """Returns the conditions of trials; earlier trials are reused only under the same conditions."""
    from ..eval.results import version, where
    from ..profiles import fingerprint

    model = bench.pipeline.model
    machine = where(model.device)
    return {
        "model": fingerprint(model),
        "grids": [list(stage.size) for stage in bench.schedule],
        "batch": bench.batch,
        "seed": bench.seed,
        "images": images,
        "prompts": hashlib.sha256(json.dumps(list(bench.prompts)).encode()).hexdigest()[:16],
        "dtype": str(model.dtype),
        "quantize": model.quantize,
        "kv_dtype": model.kv_dtype,
        "hardware": machine["hardware"],
        "torch": machine["torch"],
        "version": version(),
    }


def starting_points(file: Path, pipeline: Pipeline, schedule: Schedule) -> list[str]:
    from ..profiles import Profile, require_own

    profile = Profile.load(file)
    require_own(profile, pipeline.model)
    if len(profile.grids) != len(schedule):
        raise SettingError(
            f"--from {file} has settings for {len(profile.grids)} stages, and this size has {len(schedule)}. Add --size"
            f" {size_text(profile.size)}."
        )
    return [point.method for point in profile.points]
