"""Command line of `python -m training`: word encoder, tokenizer, model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

import nextscale
from nextscale.cli.files import require_writable
from nextscale.cli.options import MACHINE, Device, Force, grouped, out_option
from nextscale.cli.parse import parse_size
from nextscale.cli.program import Program
from nextscale.errors import SettingError
from nextscale.io import write_image, write_text
from nextscale.loading.load import choose_device, load_module
from nextscale.loading.presets import NANO_MODEL, NANO_TOKENIZER
from nextscale.metrics import Lpips
from nextscale.models import Infinity
from nextscale.schedules import INFINITY_SIZES
from nextscale.text.words import FILE_NAME, WordTextEncoder
from nextscale.tokenizers import InfinityTokenizer

from .data import Pictures, decoded, read_pictures
from .export import MODEL, TOKENIZER, write_bundle
from .lora import LoraTraining, train_lora
from .lora_data import read_captioned
from .model import train_model
from .model_settings import ModelTraining, check_parts, check_training
from .pack import pack as pack_shards
from .records import Record, read_records
from .run import Budget
from .scenes import Mix, Scenes
from .settings import changed
from .sheet import contact_sheet
from .sprites import Sprites
from .tokenizer import train_tokenizer
from .tokenizer_settings import TokenizerTraining, check_sides, schedule_of
from .words import make_word_encoder

app = typer.Typer(
    cls=Program,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train a model like Infinity: its word encoder, its tokenizer, the model itself.",
)

SIDES = (256, 512)  # pixels
BUNDLE = (MODEL, TOKENIZER, FILE_NAME)
TrainedTokenizer = Annotated[Path, typer.Option("--tokenizer", metavar="FILE", help="What `python -m training tokenizer` wrote.")]
TrainedWords = Annotated[
    Path, typer.Option("--words", metavar="FILE", help="What `python -m training words` wrote, or a trained model's own words.safetensors.")
]
Data = Annotated[
    list[Path], typer.Option("--data", metavar="SHARD", help="A .tar shard of captions.jsonl and pictures to train on; can be repeated.")
]
SETTING = "A setting, such as learning_rate=1e-3 or model.depth=12; can be repeated, see training/README.md."


@dataclass(frozen=True)
class RunOptions:
    """Data, length and output folder of a run."""

    data: Data
    held_out: Annotated[list[Path], typer.Option("--held-out", metavar="SHARD", help="A shard to measure on; can be repeated.")]
    out: Annotated[Path, out_option("FOLDER", "Folder for state, curve and results; an interrupted run continues from it.")]
    minutes: Annotated[
        float | None, typer.Option("--minutes", metavar="N", help="Training time, including that before an interruption.")
    ] = None
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", help="Number of training steps, in place of --minutes.")] = None
    change: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help=SETTING)] = None
    compiled: Annotated[
        bool, typer.Option("--compile", rich_help_panel=MACHINE, help="torch.compile the blocks: a minute at first, then faster on a GPU.")
    ] = False
    device: Device = None

    def budget(self) -> Budget:
        if (self.minutes is None) == (self.steps is None):
            raise SettingError("how long to train is not clear: give --minutes or --steps, one of them")
        return Budget(self.steps, None if self.minutes is None else 60 * self.minutes)

    def require_apart(self) -> None:
        if both := {shard.resolve() for shard in self.data} & {shard.resolve() for shard in self.held_out}:
            raise SettingError(f"{both.pop()} is in --data and in --held-out: give other shards to measure on")

    def pictures(self, sides: list[int], device: torch.device) -> tuple[dict[int, Pictures], dict[int, Pictures]]:
        """Pictures of the shards to train on and of those held out, by side."""
        training, held_out = (read_pictures(shards, sides).items() for shards in (self.data, self.held_out))
        return {side: read.to(device) for side, read in training}, {side: read.to(device) for side, read in held_out}


@app.command()
def words(
    data: Data,
    sentence_model: Annotated[
        Path, typer.Option("--sentence-model", metavar="FOLDER", help="A sentence model whose word vectors are distilled.")
    ],
    out: Annotated[Path, out_option("FILE", "The .safetensors file to write.")] = Path("words.safetensors"),
    entries: Annotated[int, typer.Option("--entries", metavar="N", min=100, help="Entries of the vocabulary.")] = 5000,
    force: Force = False,
) -> None:
    """Make the word encoder that a model is trained with: a vocabulary and frozen word vectors."""
    require_file_name(out)
    require_writable([out], force)
    records = [record for shard in data for record in read_records(shard)[0]]
    encoder = make_word_encoder(records, sentence_model, entries)
    encoder.save(out)
    typer.echo(f"{len(encoder.vocabulary)} words and parts of words: {out}")


@app.command()
@grouped
def tokenizer(
    *,
    run: RunOptions,
    size: Annotated[
        list[int] | None,
        typer.Option("--size", metavar="SIDE", show_default="256 and 512", help="A side of the pictures in pixels; can be given twice."),
    ] = None,
) -> None:
    """Train a multi-scale binary tokenizer."""
    device, budget = choose_device(run.device), run.budget()
    settings = changed(TokenizerTraining(compile=run.compiled), run.change or [])
    run.require_apart()
    sides = sorted(set(size or SIDES))
    check_sides(settings.tokenizer, sides)
    lpips = Lpips.load(device) if settings.lpips else None
    train_tokenizer(settings, *run.pictures(sides, device), run.out, budget, device, lpips)


@app.command()
@grouped
def model(
    *,
    run: RunOptions,
    tokenizer: TrainedTokenizer,
    words: TrainedWords,
    start: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Weights of a model to start from, in place of random ones.")
    ] = None,
    stretch: Annotated[
        float | None, typer.Option("--stretch", metavar="N", help="Minutes after which this session ends; the same command goes on.")
    ] = None,
    tokenizer_change: Annotated[
        list[str] | None, typer.Option("--set-tokenizer", metavar="NAME=VALUE", help="How the tokenizer is built, such as bits=8.")
    ] = None,
) -> None:
    """Train a text-to-image transformer on a tokenizer's bits, together with its word encoder.

    Its phases say which sizes it sees.
    """
    device, budget = choose_device(run.device), run.budget()
    settings = changed(ModelTraining(compile=run.compiled), run.change or [])
    run.require_apart()
    with torch.device("meta"):
        coder = InfinityTokenizer(TokenizerTraining(changed(NANO_TOKENIZER, tokenizer_change or [])).tokenizer)
    load_module(coder, tokenizer, device, torch.float32)
    reader = WordTextEncoder.load(words, device=device)
    check_training(settings, coder, reader)
    train_model(
        settings,
        reader,
        coder,
        *run.pictures(settings.sides, torch.device("cpu")),
        run.out,
        budget,
        device,
        start,
        math.inf if stretch is None else 60 * stretch,
    )


@app.command()
def pack(
    data: Data,
    out: Annotated[Path, out_option("FILE", "The .tar.gz file to write.")],
    quality: Annotated[int, typer.Option("--quality", metavar="N", min=1, max=100, help="WebP quality of photographs.")] = 40,
    force: Force = False,
) -> None:
    """Write one small shard of all training pictures for a machine that they have to travel to; gunzip it there."""
    require_writable([out], force)
    typer.echo(f"{pack_shards(data, out, quality) / 2**20:.1f} MiB: {out}")


@app.command()
def sheet(
    data: Data,
    out: Annotated[Path, out_option("FILE", "The .png file to write.")] = Path("sheet.png"),
    side: Annotated[int, typer.Option("--side", metavar="SIDE", help="Side of the squares; other pictures have as many pixels.")] = 256,
    pictures: Annotated[int, typer.Option("--pictures", metavar="N", min=1, help="Pictures of every aspect ratio.")] = 6,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0)] = 0,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of the mix, such as plain=0.2.")
    ] = None,
    device: Device = None,
    force: Force = False,
) -> None:
    """Draw composed training pictures of all aspect ratios with their captions."""
    require_writable([out], force)
    target, stride = choose_device(device), NANO_TOKENIZER.autoencoder.stride
    schedules = [schedule_of(template, side, stride) for template in sorted(INFINITY_SIZES)]
    scenes = Scenes(Sprites(read_pictures(data, [side]), target), changed(Mix(), change or []))
    write_image(contact_sheet(scenes, schedules, stride, pictures, seed), out)
    typer.echo(str(out))


@app.command()
def judge(
    data: Data,
    held_out: Annotated[list[Path], typer.Option("--held-out", metavar="SHARD", help="A shard of captions to draw; can be repeated.")],
    out: Annotated[Path, out_option("FOLDER", "Folder for judge.json, judge.md and sheets of images.")],
    edition: Annotated[
        list[str] | None,
        typer.Option(
            "--edition",
            metavar="NAME=FOLDER",
            show_default="first",
            help="A model, and settings of calls: new=runs/model:guidance=5. Without a folder the package's own. Can be repeated.",
        ),
    ] = None,
    size: Annotated[list[int] | None, typer.Option("--size", metavar="SIDE", show_default="256 and 512")] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="At most this many prompts of every kind.")] = None,
    metrics: Annotated[Path | None, typer.Option("--metrics", metavar="FOLDER", help="Folder of metric networks.")] = None,
    device: Device = None,
    force: Force = False,
) -> None:
    """Compare editions of a model: colors, whole subjects, agreement with prompts, Fréchet distance, diversity, reconstruction.

    The prompts and seeds are the same for all; a column compares the second edition with the first.
    """
    from .judge import Counts, Edition, make_exam, sheets, summary, table

    require_writable([out / name for name in ("judge.json", "judge.md")], force)
    target, editions = choose_device(device), [Edition.parse(text) for text in edition or ["first"]]
    shown, asked = (read_all(shards) for shards in (data, held_out))
    asked = (asked[0][:: share_of(asked[0], limit)][:limit], asked[1][:: share_of(asked[1], limit)][:limit])
    exam = make_exam(shown, asked, decoded(*asked, sorted(set(size or SIDES))), metrics, target, Counts.limited(limit))
    scores = {}
    for one in editions:
        scores[one.name] = exam.take(one, target)
        typer.echo(f"{one.name}: {scores[one.name].seconds:.0f} s", err=True)
        for name, image in sheets(exam, one, target).items():
            write_image(image, out / f"{one.name}-{name}.webp")
    rows = summary(exam, scores)
    write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n", out / "judge.json")
    write_text(table(rows), out / "judge.md")
    typer.echo(table(rows))


@app.command()
def bundle(
    weights: Annotated[Path, typer.Option("--weights", metavar="FILE", help="What `python -m training model` wrote.")],
    tokenizer: TrainedTokenizer,
    words: TrainedWords,
    out: Annotated[Path, out_option("FOLDER", "Folder for the three files.")],
    force: Force = False,
) -> None:
    """Write a trained model of nano's layout as the three files that the package carries."""
    require_writable([out / file for file in BUNDLE], force)
    host = torch.device("cpu")
    with torch.device("meta"):
        network, coder = Infinity(NANO_MODEL), InfinityTokenizer(NANO_TOKENIZER)
    load_module(network, weights, host, torch.float32)
    load_module(coder, tokenizer, host, torch.float32)
    reader = WordTextEncoder.load(words)
    check_parts(NANO_MODEL, coder, reader)
    size = write_bundle(network, coder, reader, out)
    typer.echo(f"{size / 1e6:.2f} MB: {out}")


@app.command()
def lora(
    model: Annotated[str, typer.Option("--model", "-m", metavar="MODEL", help="An Infinity model, or nano.")],
    data: Annotated[Path, typer.Option("--data", metavar="FOLDER|TAR|JSONL", help="Pictures with captions.")],
    out: Annotated[Path, out_option("FOLDER", "Folder for the adapter, in PEFT's format; an interrupted run continues from it.")],
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", help="Number of training steps.")] = None,
    minutes: Annotated[float | None, typer.Option("--minutes", metavar="N", help="Training time instead of --steps.")] = None,
    rank: Annotated[int, typer.Option("--rank", metavar="N", help="Rank of the updates.")] = LoraTraining.rank,
    alpha: Annotated[float, typer.Option("--alpha", metavar="X", help="Updates are scaled by alpha / rank.")] = LoraTraining.alpha,
    targets: Annotated[str, typer.Option("--targets", metavar="PARTS", help="attention, mlp, or both.")] = ",".join(LoraTraining.targets),
    rate: Annotated[float, typer.Option("--lr", metavar="X", help="Learning rate.")] = LoraTraining.learning_rate,
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Pictures per step.")] = LoraTraining.batch,
    size: Annotated[str | None, typer.Option("--size", metavar="SIZE", help="Pixel budget such as 0.25M, or WIDTHxHEIGHT.")] = None,
    change: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help=SETTING)] = None,
    device: Device = None,
) -> None:
    """Train a LoRA adapter. `nextscale generate --lora FOLDER` uses it."""
    budget = Budget(steps, None if minutes is None else 60 * minutes)
    parts = tuple(part.strip() for part in targets.split(","))
    at_once = min(batch, LoraTraining.at_once)
    settings = changed(LoraTraining(rank, alpha, parts, rate, batch=batch, at_once=at_once), change or [])
    pictures = read_captioned(data)
    train_lora(nextscale.load(model, device=device), pictures, out, budget, settings, None if size is None else parse_size(size))
    typer.echo(f"{out}: nextscale generate -m {model} --lora {out} PROMPT")


def read_all(shards: Sequence[Path]) -> tuple[list[Record], list[bytes]]:
    found = [read_records(shard) for shard in shards]
    return [record for records, _ in found for record in records], [file for _, files in found for file in files]


def share_of(items: Sequence[object], limit: int | None) -> int:
    """Returns the step at which `limit` items are spread over all of them."""
    return 1 if limit is None else max(1, len(items) // limit)


def require_file_name(file: Path) -> None:
    """Raises SettingError now rather than after the work."""
    if file.is_dir() or not file.parent.is_dir():
        raise SettingError(f"--out {file}: expected the name of a file in a folder that exists")


if __name__ == "__main__":
    app(prog_name="python -m training")
