"""`nextscale tune`: finds settings for a model and writes a profile."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.markup import escape

from ..errors import NextscaleError, PromptError, SettingError
from ..eval.results import version, where
from ..eval.timing import ROUNDS
from ..loading.artifacts import local_weights, profile_folders
from ..loading.load import prompt_reader
from ..loading.presets import ModelSpec
from ..methods.auto import Auto
from ..methods.registry import parse_method
from ..metrics import Lpips
from ..offline.prompts import EvalPrompt, evenly_spread, read_eval_prompts
from ..pipeline import Pipeline
from ..planning.cost import Workload
from ..profiles import SUFFIX, Profile, fingerprint, profile_folder, profile_name
from ..stage import Schedule
from ..tune import tune as search
from ..tune.log import SUFFIX as TRIALS
from ..tune.log import TrialLog
from ..tune.prompts import own_prompts
from ..tune.trials import Bench
from ..tune.validate import SKIPPED, prove
from .files import require_writable
from .models import show_profile as show
from .old_options import OUTPUT, Batch, Force, ModelOptions, PromptsFile, Seed, SizeOptions, given_by_user, out_option
from .options import grouped
from .program import MEASURE, app
from .show import result_console, share_bar

OWN_PROMPTS = 256  # of ours, where none are given
PROVED = 0.25  # of the time, on the prompts of the proof
LATEST = 1.4  # times the search's own time, after which it stops: with the proof that is 1.3 times --minutes
FEWEST_PROVED = 4  # winners
MINUTES, IMAGES = 10.0, 24
NEEDED = 65  # trials, about, that no search goes without: every knob alone, other methods alone, and the best that is predicted
NEEDED_SHARE = 0.6  # of the search's time, that they may take
COST = 0.75  # of a trial, relative to dense generation, in the mean of the needed ones

BAR = 36  # columns of a narrow terminal that the bar, the share and the time have beside what is done

OnProgress = Callable[[str, float], None]


class Prompts(NamedTuple):
    """None of them is in both lists."""

    seen: list[Any]  # by the search
    proof: list[Any]
    source: str  # in words


@dataclass(frozen=True)
class SearchOptions:
    """What the search sees, what judges it, and how long it may take."""

    prompts_file: PromptsFile = None
    test: Annotated[
        Path | None,
        typer.Option(
            "--test", metavar="FILE", show_default="every second prompt", help="Prompts of the proof, which the search does not see."
        ),
    ] = None
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="NAME=NUMBER", help="What you are after: speedup=2, lpips=0.08 or ms=50 (per image)."),
    ] = None
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            metavar="N",
            min=0.01,
            show_default=f"{MINUTES:g}",
            help="Minutes of search and proof; all of --test is proved, however long that takes.",
        ),
    ] = None
    images: Annotated[
        int | None,
        typer.Option(
            "--images",
            metavar="N",
            min=1,
            show_default=f"{IMAGES}, fewer where time is short",
            help="Images that a candidate generates first, at least.",
        ),
    ] = None
    trials: Annotated[
        Path | None,
        typer.Option(
            "--trials",
            metavar="FILE",
            rich_help_panel=OUTPUT,
            show_default="beside the profile, until that is written",
            help=f"Keep the trials of the search there, *{TRIALS}: `nextscale profiles FILE --plot` draws what they say of each knob.",
        ),
    ] = None
    start: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="Prove the points of this profile here, on this machine and batch and the prompts of --test."
        ),
    ] = None

    def check(self) -> None:
        """Refuses what has no effect, and names that nothing would find."""
        given = {"--prompts": self.prompts_file, "--minutes": self.minutes, "--images": self.images, "--trials": self.trials}
        if self.start is not None and (idle := [name for name, value in given.items() if value is not None]):
            raise SettingError(
                f"--from {self.start} searches nothing, so that {' and '.join(idle)} would have no effect: leave them out; --test"
                " gives the prompts of the proof"
            )
        if self.trials is not None and not self.trials.name.endswith(TRIALS):
            raise SettingError(f"--trials {self.trials}: give a name that ends in {TRIALS}, by which `nextscale profiles` knows it")

    def read(self, spec: ModelSpec, pipeline: Pipeline) -> Prompts:
        if self.prompts_file is None:
            given, source = own_prompts(pipeline, OWN_PROMPTS), "prompts of nextscale"
        else:
            given, source = prompts_of(self.prompts_file, spec), self.prompts_file.name
        searched, spare = halved(given)
        proof = None if self.test is None else prompts_of(self.test, spec)
        if self.start is not None:
            proved_on = source if self.test is None else self.test.name
            return Prompts([], spare if proof is None else proof, f"points of {self.start.name}, proved on {proved_on}")
        if self.test is None or proof is None:
            return Prompts(searched, spare, f"{source}, every second one for the proof")
        shared = set(proof)
        if self.prompts_file is None:
            shared |= set(spare)  # which a later --from may prove the winners on
        seen = [prompt for prompt in given if prompt not in shared]
        if not seen:
            raise PromptError(f"--test {self.test} holds all prompts of the search: give other ones")
        return Prompts(seen, proof, f"{source} for the search, {self.test.name} for the proof")


@app.command(rich_help_panel=MEASURE)
@grouped
def tune(
    context: typer.Context,
    *,
    name: Annotated[str | None, typer.Argument(metavar="MODEL", show_default=False, help="The same as --model.")] = None,
    model: ModelOptions,
    searching: SearchOptions,
    size: SizeOptions,
    batch: Batch = 8,
    seed: Seed = 0,
    out: Annotated[Path | None, out_option("FILE", f"The profile, *{SUFFIX}.", "beside --weights, or in this folder")] = None,
    force: Force = False,
) -> None:
    """Find the settings that fit a model: how fast it can be, and what that costs.

    The search can be stopped and started again: what it has measured lies beside the profile until the profile is written.
    """
    if name is not None:
        if given_by_user(context, "model") and model.model != name:
            raise SettingError(f"two models, {name} and -m {model.model}: name the one to tune")
        model = replace(model, model=name)
    spec = model.spec
    schedule = size.schedule(spec)
    searching.check()
    wanted = None if searching.target is None else parsed_target(searching.target)
    with share_bar() as progress:
        task = progress.add_task("loading", total=1.0)

        def on_progress(what: str, share: float) -> None:
            progress.update(task, completed=share, description=escape(shorten(what, progress.console.width - BAR)))

        pipeline = model.load()
        file = out or default_file(model, pipeline, schedule, batch)
        if not file.name.endswith(SUFFIX):
            raise SettingError(f"--out {file}: give a name that ends in {SUFFIX}, by which `load` finds it")
        require_writable([file], force)
        prompts = searching.read(spec, pipeline)
        if searching.start is None:
            require_batches(prompts.seen, batch)
        require_batches(prompts.proof, batch, " of the proof")
        everything = [*prompts.seen, *prompts.proof]
        for first in range(0, len(everything), batch):  # what is too long to be read is refused before the search
            pipeline.reader.read(everything[first : first + batch])
        lpips = Lpips.load(pipeline.model.device)
        bench = Bench(pipeline, schedule, prompts.seen, batch, seed, lpips, searching.images or IMAGES)
        log_file = searching.trials or file.with_name(file.name.removesuffix(SUFFIX) + TRIALS)
        with stopping(log_file):
            winners, searched = found_points(searching, bench, log_file, on_progress)
            before = 0.0 if searching.start is not None else 1 - PROVED
            profile = prove(
                pipeline,
                winners,
                [EvalPrompt(prompt) for prompt in proof_prompts(searching, bench, prompts.proof, len(winners))],
                lpips,
                schedule=schedule,
                batch=batch,
                seed=seed,
                searched=searched,
                source=prompts.source,
                on_progress=lambda what, share: on_progress(f"proof: {what}", before + (1 - before) * share),
            )
    profile.save(file)
    if searching.trials is None:
        log_file.unlink(missing_ok=True)
    console = result_console()
    show(console, file, profile)
    if (found := profile_folders(spec, model.weights or local_weights(spec) or file)[-1]).resolve() != file.resolve().parent:
        console.print(f"`auto` looks for it in {found}: move it there, or call pipe.add_profile({str(file)!r})", markup=False)
    if wanted is not None:
        point = wanted.point_of(profile)
        console.print(f"{wanted.label} takes {point.as_method().label}: {point.label}", markup=False)


@contextmanager
def stopping(log_file: Path) -> Iterator[None]:
    """Says what Ctrl-C leaves, and how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"the trials so far are kept in {log_file}: the same command continues" if log_file.exists() else "nothing is kept"
        typer.echo(f"stopped: {kept}", err=True)
        raise


def shorten(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: max(columns, 20) - 1]}…"


def halved(prompts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Every second prompt, and the others. One that comes again is in the same half again."""
    number = {prompt: count for count, prompt in enumerate(dict.fromkeys(prompts))}
    return [one for one in prompts if number[one] % 2 == 0], [one for one in prompts if number[one] % 2]


def require_batches(prompts: Sequence[Any], batch: int, of: str = "") -> None:
    """Times are those of whole batches."""
    if len(prompts) < batch:
        raise PromptError(f"{len(prompts)} prompts{of} for batches of {batch}: give more prompts, or a smaller --batch")


def found_points(searching: SearchOptions, bench: Bench, log_file: Path, on_progress: OnProgress) -> tuple[list[str], int]:
    """The methods that are to be proved, those of another profile or what the search finds, and the number of prompts that it saw."""
    if searching.start is not None:
        return starting_points(searching.start, bench.pipeline, bench.schedule), 0
    minutes = searching.minutes or MINUTES
    seconds = 60 * minutes * (1 - PROVED)
    earlier = TrialLog.first_round(log_file)
    if earlier is None:
        per_image = bench.first_look()
        bench.least = searching.images or affordable(bench.batch, per_image, NEEDED_SHARE * seconds)
        require_time(minutes, bench.images(bench.unit) * per_image)
    elif searching.images is None:
        bench.least = earlier
    log = TrialLog.open(log_file, conditions(bench))
    there = len(log.trials)

    def on_trial(what: str, share: float) -> None:
        if share > LATEST:
            rest = share * (NEEDED - len(log.trials)) / max(1, len(log.trials) - there)  # of --minutes, at the pace so far
            raise NextscaleError(
                f"the trials that every search needs take longer than --minutes {minutes:g} here: {len(log.trials)} of about {NEEDED}"
                f" are kept in {log_file}; run the same command with --minutes {math.ceil(minutes * max(2, rest))} to continue"
            )
        on_progress(what, min(share, 1.0) * (1 - PROVED))

    winners = [candidate.text for candidate in search(bench, log, seconds, workload(bench), on_trial)]
    if searching.test is None:
        winners = evenly_spread(winners, provable(bench, seconds * PROVED / (1 - PROVED)))
    return winners, max(trial.images for trial in log.trials.values())


def affordable(batch: int, per_image: float, seconds: float) -> int:
    """Images of a candidate's first round, so that the trials that every search needs take this time; one batch at least."""
    return IMAGES if batch >= IMAGES else max(batch, min(IMAGES, int(seconds / (NEEDED * per_image))))


def require_time(minutes: float, dense: float) -> None:
    """Refuses a search that cannot end in time, where a dense first round takes `dense` seconds."""
    smallest = NEEDED * COST * dense / (1 - PROVED) / 60
    if smallest > minutes:
        raise SettingError(
            f"the smallest search takes about {math.ceil(smallest)} min here ({NEEDED} trials; dense generation takes {dense:.1f} s):"
            f" pass --minutes {math.ceil(1.2 * smallest)}, or a smaller --size, --batch or --images"
        )


def provable(bench: Bench, seconds: float) -> int:
    """Winners that the proof has time for, with dense generation and plain skipping beside them."""
    return max(FEWEST_PROVED, int(seconds / (ROUNDS * bench.batch * bench.dense_seconds_per_image())) - 1 - SKIPPED)


def proof_prompts(searching: SearchOptions, bench: Bench, proof: Sequence[Any], winners: int) -> list[Any]:
    """Those of --test; without it as many as the rest of the time is enough for, evenly spread, and three batches at least."""
    count = len(proof)
    if searching.test is None and searching.start is None:
        seconds = 60 * (searching.minutes or MINUTES) * PROVED
        longest = bench.dense_seconds_per_image() * (1 + SKIPPED + winners)  # nothing should take longer than dense generation
        count = min(count, max(ROUNDS * bench.batch, int(seconds / longest)))
    return evenly_spread(proof, filling_batches(count, bench.batch))


def filling_batches(count: int, batch: int) -> int:
    """So many prompts, or a few less: the proof makes batches that are alike, of 17 prompts two with 9 and 8 in place of one with 16."""
    batches = -(-count // batch)
    return count if -(-count // batches) == batch else count // batch * batch


def prompts_of(file: Path, spec: ModelSpec) -> list[Any]:
    """Captions, or class numbers where the model takes these."""
    found = [prompt.text for prompt in read_eval_prompts(file)]
    if spec.text_encoder is not None:
        return found
    try:
        classes = [int(text) for text in found]
        prompt_reader(spec, None, torch.device("cpu")).read(classes)  # those of the proof would only be read after the search
    except (ValueError, PromptError) as error:
        raise PromptError(f"{file}: {spec.name} takes class numbers, one per line ({error})") from None
    return classes


def conditions(bench: Bench) -> dict[str, Any]:
    """What trials depend on: those of another start are taken only under the same."""
    prompts = hashlib.sha256(json.dumps(list(bench.prompts)).encode()).hexdigest()[:16]
    model = bench.pipeline.model
    machine = where(model.device)
    return {
        "model": fingerprint(model),
        "grids": [list(stage.size) for stage in bench.schedule],
        "batch": bench.batch,
        "seed": bench.seed,
        "images": bench.least,
        "prompts": prompts,
        "dtype": str(model.dtype),
        "quantize": model.quantize,
        "kv_dtype": model.kv_dtype,
        "hardware": machine["hardware"],
        "torch": machine["torch"],
        "version": version(),
    }


def workload(bench: Bench) -> Workload:
    pipeline = bench.pipeline
    prompts = pipeline.reader.read(bench.part(0)[0])
    text = prompts.longest if pipeline.model.stack[0].has_text else 0
    guided = any(scale != 1 for scale in pipeline.settings.guidance.scales(bench.schedule))
    return Workload(bench.schedule, bench.batch, guided, text, pipeline.settings.sampling.refine)


def starting_points(file: Path, pipeline: Pipeline, schedule: Schedule) -> list[str]:
    profile = Profile.load(file)
    if profile.fingerprint != fingerprint(pipeline.model):
        raise NextscaleError(f"--from {file} is a profile of {profile.model} with other weights: give one of {pipeline.name}")
    if len(profile.grids) != len(schedule):
        size = "x".join(map(str, profile.size))
        raise SettingError(
            f"--from {file} has settings for the {len(profile.grids)} stages of {size}, and these are {len(schedule)}: add --size {size}"
        )
    return [point.method for point in profile.points]


def default_file(model: ModelOptions, pipeline: Pipeline, schedule: Schedule, batch: int) -> Path:
    """Beside the weights, or in the current folder for those that came with the package or from the hub."""
    folder = Path() if model.weights is None else profile_folder(model.weights)
    height, width = (side * pipeline.tokenizer.pixels_per_token for side in schedule.grid)
    return folder / profile_name(pipeline.name, (height, width), pipeline.model.device.type, batch)


def parsed_target(text: str) -> Auto:
    """What `auto` would be asked for."""
    try:
        method = parse_method(f"auto:{text}")
    except SettingError as error:
        raise SettingError(f"--target {text!r}: give one of speedup=2, lpips=0.08, ms=50 ({error})") from error
    assert isinstance(method, Auto)
    return method
