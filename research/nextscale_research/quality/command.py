"""The commands `quality` and `frontier`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table

from nextscale.cli.files import require_results, require_writable
from nextscale.cli.options import MACHINE, Batch, Force, ModelOptions, PromptFile, Seed, SizeOptions, grouped, option, out_option
from nextscale.cli.parse import method_name
from nextscale.cli.show import plain_table, result_console, share_bar
from nextscale.errors import CheckpointError, PromptError, SettingError
from nextscale.eval.results import Row, append_rows, read_rows, where
from nextscale.io import write_text
from nextscale.loading.presets import build_model
from nextscale.methods import Method
from nextscale.metrics import Lpips
from nextscale.pipeline import Pipeline
from nextscale.stage import Schedule

from ..metrics.efficientnet import EfficientNetLite0
from ..metrics.files import EFFICIENTNET, VARIABLE, metric_file
from ..program import app
from .agreement import Agreement, real_features
from .frontier import frontier_svg
from .judge import SetJudge, judge
from .lists import LISTS, chosen_methods
from .prompts import read_eval_prompts
from .rows import comparable, judged, real_agreement

STANDARD = "standard"


@dataclass(frozen=True)
class JudgeOptions:
    """The network that judges sets of images, and the probes on its features."""

    metrics: Annotated[Path | None, option("--metrics", "FOLDER", "Folder of metric networks.", MACHINE, VARIABLE)] = None
    probe: Annotated[Path | None, option("--probe", "FILE", "Probes of the prompt; --data trains them if missing.", MACHINE)] = None
    data: Annotated[list[Path] | None, option("--data", "SHARD", "A .tar shard to train probes on; can be repeated.", MACHINE)] = None

    def features(self) -> Path | None:
        """Returns the file of EfficientNet; None if it is missing and no option needs it."""
        try:
            return metric_file(EFFICIENTNET, self.metrics)
        except CheckpointError:
            if self.metrics or self.probe or self.data:
                raise
            typer.echo(f"Fréchet distances are left out: {EFFICIENTNET} was not found. Pass --metrics FOLDER or set {VARIABLE}.", err=True)
            return None

    def load(self, features: Path | None, prompts: Path, device: torch.device) -> SetJudge | None:
        """Trains missing probes first; they are tested on the images of the prompts."""
        if features is None:
            return None
        network = EfficientNetLite0.load(features, device)
        if self.data and not (self.probe is not None and self.probe.exists()):
            self._train_probe(network, self.data, prompts)
        return SetJudge(network, None if self.probe is None else Agreement.load(self.probe, device))

    def _train_probe(self, network: EfficientNetLite0, data: Sequence[Path], prompts: Path) -> None:
        """Trains probes on real images as they are and once more augmented, and stores them."""
        if self.probe is None:
            raise SettingError("--data trains probes. Add --probe FILE, where they are stored.")
        require_writable([self.probe], force=False)
        if prompts.resolve() in [shard.resolve() for shard in data]:
            raise SettingError(f"{prompts} is in --data and in --prompts. Pass other shards: probes are tested on held-out images.")
        shown = [prompt for shard in data for prompt in read_eval_prompts(shard)]
        held = read_eval_prompts(prompts)
        if any(prompt.encoded is None for prompt in held):
            raise SettingError(f"probes are tested on real images, and {prompts} has none. Pass a .tar shard of held-out images.")
        features = torch.cat((real_features(network, shown), real_features(network, shown, augmented=True)))
        Agreement.train(features, [*shown, *shown], real_features(network, held), held).save(self.probe)


@app.command()
@grouped
def quality(
    *,
    model: ModelOptions,
    prompts: PromptFile,
    method: Annotated[
        list[str] | None, option("--method", "METHOD", f"A method, or a list: {', '.join(LISTS)}; can be repeated.", None, STANDARD)
    ] = None,
    size: SizeOptions,
    seed: Seed = 0,
    batch: Batch = 64,
    judging: JudgeOptions,
    out: Annotated[Path | None, out_option("FILE", "Add a row per method to this .jsonl file.", "none")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out lists whose rows --out has of this commit and machine.")] = False,
) -> None:
    """Compare lists of methods with dense generation, with Fréchet distances and agreement with the prompt.

    Lists run one after another, each beside dense generation of its own; their rows are written as soon as they are known.
    """
    if prompts.prompts_file is None:
        raise PromptError("no prompts. Pass --prompts FILE, such as a shard of held-out images.")
    spec, names = model.spec, [method_name(one) for one in method or [STANDARD]]
    if spec.text_encoder is None:
        raise SettingError(f"prompts of files are text, and {spec.name} takes class numbers. Choose a text model.")
    schedule = size.schedule(spec)
    with torch.device("meta"):
        blocks = len(build_model(spec.model).blocks)
    alone = [one for one in names if one not in LISTS]
    chosen: list[Mapping[str, Method]] = [
        chosen_methods(group, len(schedule), blocks) for group in (*([one] for one in names if one in LISTS), alone) if group
    ]
    for one in alone:
        model.resolved(chosen[-1][one], schedule, batch)
    texts = read_eval_prompts(prompts.prompts_file, prompts.limit)
    require_results(out)
    features, device = judging.features(), model.torch_device
    with share_bar() as progress:
        task = progress.add_task("loading", total=1.0)
        sets, pipeline, lpips = judging.load(features, prompts.prompts_file, device), model.load(), Lpips.load(device)
        conditions = {"model": pipeline.name, "images": len(texts), "seed": seed, **where(device)}
        if resume and out is not None and out.exists():
            chosen = unmeasured(chosen, read_rows(out), conditions, schedule, pipeline)

        def on_batch(name: str, share: float) -> None:
            progress.update(task, completed=share, description=escape(name))

        for methods in chosen:
            own = None if sets is None else replace(sets, features=defaultdict(list))
            found = judge(pipeline, methods, texts, lpips, own, schedule=schedule, seed=seed, batch=batch, on_progress=on_batch)
            pipeline.captures.clear()
            if out:
                append_rows(found.rows, out)
            show_rows(found.rows)


def unmeasured(
    groups: Sequence[Mapping[str, Method]], rows: Sequence[Row], conditions: Row, schedule: Schedule, pipeline: Pipeline
) -> list[Mapping[str, Method]]:
    """Returns the groups that lack rows of this commit and machine. Rows of methods that failed count."""
    wanted = {name: value for name, value in conditions.items() if name != "date"}
    wanted["size"] = [side * pipeline.tokenizer.pixels_per_token for side in schedule.grid]
    known = {row["method"] for row in rows if all(row.get(name) == value for name, value in wanted.items())}
    return [group for group in groups if not known.issuperset(group)]


@app.command()
def frontier(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A .jsonl file that `nextscale compare --out` wrote.")],
    model: Annotated[str | None, option("--model -m", "NAME", "Plot the rows of this model.", None, "model of the last row")] = None,
    out: Annotated[Path, out_option("FILE", "An .svg file.")] = Path("frontier.svg"),
    force: Force = False,
) -> None:
    """Plot distance to dense images against speed, from results of `nextscale compare`."""
    if out.suffix.lower() != ".svg":
        raise SettingError(f"--out must end in .svg; got {out}.")
    require_writable([out], force)
    write_text(frontier_svg(newest_run(read_rows(results), model)), out)


def newest_run(rows: Sequence[Row], model: str | None = None) -> list[Row]:
    """Returns the last row of every method that can be compared with the last row of this model."""
    known = judged(rows)
    fitting = [row for row in known if model in (None, row["model"])]
    if not fitting:
        raise SettingError(f"no row of `nextscale compare` fits; there are rows of {', '.join({row['model'] for row in known}) or 'none'}.")
    return comparable(fitting, fitting[-1])


def show_rows(rows: Sequence[Row]) -> None:
    console = result_console()
    console.print(table_of(rows))
    dense = rows[0]
    if real := real_agreement(dense):
        console.print(f"Style and label are judged by probes; their accuracy on held-out real images: {real}.")
    for row in rows:
        if "error" in row:
            console.print(f"{row['method']} did not run: {row['error']}", markup=False)


def table_of(rows: Sequence[Row], columns: Mapping[str, Column] | None = None) -> Table:
    """Returns a table of the methods that ran, without the columns that no row fills."""
    ran = [row for row in rows if "error" not in row]
    shown = {heading: column for heading, column in (columns or COLUMNS).items() if any(column(row) for row in ran)}
    table = plain_table("method", *shown, folded=("method",))
    for row in ran:
        table.add_row(escape(row["method"]), *(column(row) for column in shown.values()))
    return table


def value(name: str, form: str) -> Column:
    """Returns a column with a measure and its interval, empty if it was not taken."""

    def written(row: Row) -> str:
        if row.get(name) is None:
            return ""
        middle, low, high = (format(row[name][key], form) for key in ("value", "low", "high"))
        return f"{middle} ({low} to {high})"

    return written


Column = Callable[[Row], str]
COLUMNS: dict[str, Column] = {
    "speedup": lambda row: f"{row['speedup']['median']:.2f}",
    "MACs": lambda row: f"{row['cost_share']:.0%}",
    "PSNR": value("psnr", ".1f"),
    "SSIM": value("ssim", ".3f"),
    "LPIPS": value("lpips", ".3f"),
    "Fréchet to real": value("frechet_real", ".1f"),
    "to dense": value("frechet_dense", ".1f"),
    "style": value("style", ".1%"),
    "label": value("label", ".1%"),
    "label top-5": value("label_top5", ".1%"),
}
