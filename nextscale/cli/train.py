"""`nextscale train`: words, then a tokenizer, then a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from ..errors import SettingError
from ..lab.metrics import Lpips
from ..lab.shards import read_shard
from ..lab.train.curves import plot_curves
from ..lab.train.data import Pictures, read_pictures
from ..lab.train.export import write_bundle
from ..lab.train.model import train_model
from ..lab.train.model_settings import ModelTraining, check_parts, check_training
from ..lab.train.run import Budget
from ..lab.train.settings import changed
from ..lab.train.tokenizer import train_tokenizer
from ..lab.train.tokenizer_settings import TokenizerTraining, check_sides
from ..lab.train.words import make_word_encoder
from ..loading.load import choose_device, load_module
from ..loading.presets import NANO_MODEL, NANO_TOKENIZER
from ..models import Infinity
from ..text.words import WordTextEncoder
from ..tokenizers import InfinityTokenizer
from .program import app

train = typer.Typer(no_args_is_help=True)
app.add_typer(train, name="train", help="Train a model of Infinity's kind: its words, its tokenizer, the model itself.")

Data = Annotated[list[Path], typer.Option("--data", metavar="SHARD", help="Tar files with captions.jsonl and pictures; give it again.")]
HeldOut = Annotated[list[Path], typer.Option("--held-out", metavar="SHARD", help="Shards that are only measured on.")]
Folder = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="State, curve and results; an interrupted run goes on from here.")]
Minutes = Annotated[float | None, typer.Option(help="How long to train, time before an interruption included.")]
Steps = Annotated[int | None, typer.Option(help="How many steps to train, in place of minutes.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting, such as learning_rate=1e-3 or model.depth=12; see the docs."),
]
Compile = Annotated[bool, typer.Option("--compile", help="torch.compile the blocks: a minute at first, then faster on a GPU.")]
Device = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", show_default="cuda if there is a GPU", help="cpu, cuda or cuda:N.")
]


@train.command()
def words(
    data: Data,
    sentence_model: Annotated[Path, typer.Option(metavar="FOLDER", help="A sentence model whose word meanings are taken over.")],
    out: Annotated[Path, typer.Option(metavar="FILE")] = Path("words.safetensors"),
    size: Annotated[int, typer.Option(min=100, help="Entries of the vocabulary.")] = 5000,
) -> None:
    """Make the word encoder that a model is trained with: a vocabulary and frozen word vectors."""
    check_target(out)
    records = [record for shard in data for record in read_shard(shard)[0]]
    encoder = make_word_encoder(records, sentence_model, size)
    encoder.save(out)
    typer.echo(f"{len(encoder.vocabulary)} words and parts of words: {out}")


@train.command()
def tokenizer(
    data: Data,
    held_out: HeldOut,
    out: Folder,
    minutes: Minutes = None,
    steps: Steps = None,
    sides: Annotated[str, typer.Option(metavar="LIST", help="One or two sides of the pictures, in pixels.")] = "256,512",
    metrics: Annotated[Path | None, typer.Option(metavar="PATH", help="LPIPS weights: a file, or a folder that holds it.")] = None,
    change: Changes = None,
    compiled: Compile = False,
    device: Device = None,
) -> None:
    """Train a multi-scale binary tokenizer."""
    where, budget = choose_device(device), chosen_budget(minutes, steps)
    settings = changed(TokenizerTraining(compile=compiled), change or [])
    check_apart(data, held_out)
    lengths = parsed_sides(sides)
    check_sides(settings.tokenizer, lengths)
    lpips = Lpips.load(metrics, device=where) if settings.lpips else None
    train_tokenizer(settings, by_side(data, lengths, where), by_side(held_out, lengths, where), out, budget, where, lpips)


@train.command()
def model(
    data: Data,
    held_out: HeldOut,
    tokenizer: Annotated[Path, typer.Option(metavar="FILE", help="What `nextscale train tokenizer` left.")],
    words: Annotated[Path, typer.Option(metavar="FILE", help="What `nextscale train words` left.")],
    out: Folder,
    start: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Weights of a model to begin with, in place of random ones.")
    ] = None,
    minutes: Minutes = None,
    steps: Steps = None,
    change: Changes = None,
    tokenizer_change: Annotated[
        list[str] | None, typer.Option("--set-tokenizer", metavar="NAME=VALUE", help="How the tokenizer is built, such as bits=8.")
    ] = None,
    compiled: Compile = False,
    device: Device = None,
) -> None:
    """Train a text-to-image transformer on a tokenizer's bits, together with its word encoder. Its phases say which sides it sees."""
    where, budget = choose_device(device), chosen_budget(minutes, steps)
    settings = changed(ModelTraining(compile=compiled), change or [])
    check_apart(data, held_out)
    with torch.device("meta"):
        coder = InfinityTokenizer(TokenizerTraining(changed(NANO_TOKENIZER, tokenizer_change or [])).tokenizer)
    load_module(coder, tokenizer, where, torch.float32)
    reader = WordTextEncoder.load(words, device=where)
    check_training(settings, coder, reader)
    sides, host = settings.sides, torch.device("cpu")
    train_model(settings, reader, coder, by_side(data, sides, host), by_side(held_out, sides, host), out, budget, where, start)


@train.command()
def bundle(
    model: Annotated[Path, typer.Option(metavar="FILE", help="What `nextscale train model` left.")],
    tokenizer: Annotated[Path, typer.Option(metavar="FILE", help="What `nextscale train tokenizer` left.")],
    words: Annotated[Path, typer.Option(metavar="FILE", help="The words that the model was trained with, from its own folder.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER")],
) -> None:
    """Write a trained model of nano's layout as the three files that the package carries."""
    host = torch.device("cpu")
    with torch.device("meta"):
        network, coder = Infinity(NANO_MODEL), InfinityTokenizer(NANO_TOKENIZER)
    load_module(network, model, host, torch.float32)
    load_module(coder, tokenizer, host, torch.float32)
    reader = WordTextEncoder.load(words)
    check_parts(NANO_MODEL, coder, reader)
    size = write_bundle(network, coder, reader, out)
    typer.echo(f"{size / 1e6:.2f} MB: {out}")


@train.command()
def curve(
    folder: Annotated[list[Path], typer.Argument(metavar="FOLDER", help="Folders of runs.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="FILE")] = Path("curve.svg"),
) -> None:
    """Draw the loss curves of runs."""
    plot_curves(folder, out)
    typer.echo(str(out))


def chosen_budget(minutes: float | None, steps: int | None) -> Budget:
    if (minutes is None) == (steps is None):
        raise SettingError("say how long to train: --minutes or --steps, one of them")
    return Budget(steps, None if minutes is None else 60 * minutes)


def parsed_sides(sides: str) -> list[int]:
    try:
        return sorted({int(side) for side in sides.split(",")})
    except ValueError as error:
        raise SettingError(f"--sides {sides!r}: expected whole numbers such as 256,512") from error


def by_side(shards: list[Path], sides: list[int], device: torch.device) -> dict[int, Pictures]:
    return {side: pictures.to(device) for side, pictures in read_pictures(shards, sides).items()}


def check_apart(data: list[Path], held_out: list[Path]) -> None:
    if both := {shard.resolve() for shard in data} & {shard.resolve() for shard in held_out}:
        raise SettingError(f"{both.pop()} is both learnt from and held out: expected other shards to measure on")


def check_target(file: Path) -> None:
    """Before the work, not after it."""
    if file.is_dir() or not file.parent.is_dir():
        raise SettingError(f"--out {file}: expected the name of a file in a folder that exists")
