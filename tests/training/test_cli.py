"""`python -m training` from shards to a model that draws, by the commands that training/README.md shows."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import typer.main
from PIL import Image
from typer.testing import Result

import nextscale
import training.__main__ as commands
from nextscale.checkpoints import write_weights
from nextscale.loading.presets import NANO_MODEL, NANO_TOKENIZER
from nextscale.models import Infinity
from nextscale.offline.prompts import CAPTIONS
from nextscale.text.words import SINGLE_PARTS, Vocabulary, WordEncoder, WordEncoderConfig, WordTextEncoder
from nextscale.tokenizers import InfinityTokenizer
from tests.helpers.cli import run_cli
from tests.training.test_data import lines, picture, shard
from training.__main__ import app
from training.model_settings import ModelTraining
from training.model_trainer import initialize
from training.records import Record
from training.settings import changed
from training.tokenizer_settings import TokenizerTraining

PAGE = (Path(__file__).parents[2] / "training" / "README.md").read_text()
COMMANDS = [shlex.split(line)[3:] for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
TRIALS = [command for command in COMMANDS if "--steps" in command]
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(*arguments: object) -> Result:
    words = [str(argument) for argument in arguments]
    return run_cli(*words, program=app, columns=200)


def succeed(*arguments: object) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    return result


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2 and result.stderr.startswith("error: "), result.output
    return result.stderr


def tiny_words(width: int = 192) -> WordTextEncoder:
    torch.manual_seed(1)
    vocabulary = Vocabulary(["red", "blue", "a", "square", *SINGLE_PARTS])
    model = WordEncoder(WordEncoderConfig(len(vocabulary), vector_channels=8, width=width, layers=1, heads=2, longest=16))
    model.vectors.normal_()
    return WordTextEncoder(vocabulary, model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards, words, and what the trials of the page make of them."""
    folder = tmp_path_factory.mktemp("training")
    for name, count in (("train", 6), ("val", 2)):
        colors = ["red" if i % 2 else "blue" for i in range(count)]
        records = [{"file": f"{i}.png", "caption": f"a {color} square", "subject": "a square"} for i, color in enumerate(colors)]
        shard(folder / f"{name}.tar", {CAPTIONS: lines(*records)} | {f"{i}.png": picture(color=color) for i, color in enumerate(colors)})
    tiny_words().save(folder / "words.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in TRIALS:
            succeed(*command, "--device", "cpu")
    return folder


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def trial(part: str, *more: object, without: tuple[str, ...] = ()) -> list[object]:
    """The page's command for a part, for another folder, with more options and without some."""
    command = next(command for command in TRIALS if command[0] == part)
    kept = [command[0]]
    for option, value in zip(command[1::2], command[2::2], strict=True):
        kept += [] if option in without or option == "--out" else [option, value]
    return [*kept, "--out", "runs/refused", *more]


# --- the page


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_the_page_shows_commands_that_are_there(command: list[str]) -> None:
    group = typer.main.get_command(app)  # type: ignore[attr-defined]
    values = group.commands[command[0]].make_context(command[0], command[1:]).params
    defaults = {"model": ModelTraining(), "tokenizer": TokenizerTraining()}
    if command[0] in defaults:
        changed(defaults[command[0]], values["change"] or [])
        changed(NANO_TOKENIZER, values.get("tokenizer_change") or [])
        assert (values["minutes"] is None) != (values["steps"] is None)


def test_the_page_names_all_commands_and_fields() -> None:
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert {command[0] for command in COMMANDS} == commands - {"lora"}  # which has docs/guides/lora.md
    rows = " ".join(re.findall(r"^\| (`.*?) \| (?:required|optional)", PAGE, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", rows)) == set(Record.__dataclass_fields__)


def test_trials_leave_what_the_page_says(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    named = {"tokenizer": {"reconstructions.png"}, "model": {"samples-32.png", "words.safetensors"}}
    for run_folder, part in (("small", "tokenizer"), ("small-model", "model")):
        files = {file.name for file in (folder / "runs" / run_folder).iterdir()}
        assert files == {f"{part}.safetensors", "metrics.json", "curve.jsonl", "curve.svg", "state.pt"} | named[part]
        assert json.loads((folder / "runs" / run_folder / "metrics.json").read_text())["steps"] == 20
    assert Image.open(folder / "runs/small-model/samples-32.png").size == (6 * 32, 32)


def test_the_result_draws_as_the_page_says() -> None:
    scope: dict[str, object] = {}
    exec(CODE[1], scope)
    pipe = scope["pipe"]
    assert isinstance(pipe, nextscale.Pipeline)
    assert pipe("a red square", seed=0, size=nextscale.Schedule([1, 2, 4])).images[0].size == (32, 32)


# --- going on


def test_a_run_goes_on_and_another_begins_with_its_weights(folder: Path) -> None:
    shutil.copytree("runs/small-model", "runs/longer")
    longer = [*trial("model", without=("--steps",)), "--steps", 22, "--out", "runs/longer", "--device", "cpu"]
    succeed(*longer)
    steps = [json.loads(line)["step"] for line in (folder / "runs/longer/curve.jsonl").read_text().splitlines()]
    assert steps == [20, 20, 22, 22]  # losses and results
    before = Path("runs/small-model")
    more = ("--from", before / "model.safetensors", "--words", before / "words.safetensors", "--steps", 1, "--out", "runs/from")
    succeed(*trial("model", *more, without=("--words", "--steps")), "--device", "cpu")
    assert "other settings (flips)" in refused(*longer, "--set", "flips=0.1")


# --- refusals, before pictures are read


@pytest.mark.parametrize(
    ("part", "more", "without", "message"),
    [
        ("tokenizer", (), ("--steps",), "--minutes or --steps"),
        ("tokenizer", ("--minutes", 1), (), "--minutes or --steps"),
        ("tokenizer", (), ("--data",), "Missing option '--data'"),
        ("tokenizer", ("--size", "40"), ("--size",), "side 40: at 8 pixels per token choose"),
        ("tokenizer", ("--size", "big"), ("--size",), "--size"),
        ("tokenizer", ("--size", "16", "--size", "32", "--size", "64"), ("--size",), "one or two sizes"),
        ("tokenizer", ("--set", "tokenizer.channels=20"), (), "no tokenizer can be built"),
        ("tokenizer", ("--set", "speed=1"), (), "there is no 'speed' here"),
        ("tokenizer", ("--device", "gpu"), (), "cpu, cuda, cuda:N or mps"),
        ("tokenizer", ("--held-out", "train.tar"), ("--held-out",), "train.tar is in --data and in --held-out"),
        ("model", ("--words", "nowhere"), ("--words",), "nowhere"),
        ("model", ("--set-tokenizer", "bits=8"), (), "mis-shaped"),
        ("model", ("--set", "model.bits_per_token=8"), (), "tokenizer has 4 bits per token, the model 8"),
        ("model", ("--set", "model.text_channels=256"), (), "word encoder has 192 channels, the model reads 256"),
        ("model", ("--set", "phases=[[1,[[32,4,8]]]]"), (), "stage 4 of pictures of side 32, which have 3"),
        ("model", ("--set", "mix.plain=2"), (), "mix.plain is a share"),
    ],
)
def test_refusals(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: str, more: tuple[object, ...], without: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(commands, "read_pictures", lambda *_: pytest.fail("pictures were read"))
    device = () if "--device" in more else ("--device", "cpu")
    assert message in refused(*trial(part, *more, *device, without=without))
    assert not (folder / "runs/refused").exists()


def test_missing_and_damaged_shards_are_named(folder: Path) -> None:
    (folder / "bad.tar").write_bytes(b"no tar file")
    for name in ("nowhere.tar", "bad.tar"):
        assert f"{name} cannot be read as a tar file" in refused(*trial("tokenizer", "--held-out", name, "--device", "cpu"))
    words = ("words", "--data", "train.tar", "--sentence-model", "x", "--out", "no/words.safetensors")
    assert "in a folder that exists" in refused(*words)
    assert "words.safetensors exists already" in refused(*words[:-1], "words.safetensors")
    assert not (folder / "runs/refused").exists()


# --- the package's files


def bundle(model: str, tokenizer: str, words: str) -> list[object]:
    return ["bundle", "--weights", model, "--tokenizer", tokenizer, "--words", words, "--out", "refused"]


def test_a_bundle_of_another_layout_is_refused(folder: Path) -> None:
    parts = ("runs/small-model/model.safetensors", "runs/small/tokenizer.safetensors", "runs/small-model/words.safetensors")
    assert "runs/small-model/model.safetensors" in refused(*bundle(*parts))
    assert not (folder / "refused").exists()


def test_a_bundle_of_nanos_layout_is_written(folder: Path) -> None:
    torch.manual_seed(0)
    model, tokenizer = Infinity(NANO_MODEL), InfinityTokenizer(NANO_TOKENIZER)
    initialize(model)
    write_weights(model, folder / "runs/model/model.safetensors", model.layout)
    write_weights(tokenizer, folder / "runs/tokenizer/tokenizer.safetensors", tokenizer.layout)
    tiny_words(128).save(folder / "narrow.safetensors")
    parts = ("runs/model/model.safetensors", "runs/tokenizer/tokenizer.safetensors")
    assert "word encoder has 128 channels, the model reads 192" in refused(*bundle(*parts, "narrow.safetensors"))
    assert not (folder / "refused").exists()
    tiny_words().save(folder / "runs/model/words.safetensors")
    assert "MB: nano" in succeed(*next(command for command in COMMANDS if command[0] == "bundle")).stdout
    assert "--force" in refused(*next(command for command in COMMANDS if command[0] == "bundle"))
    assert sorted(file.name for file in (folder / "nano").iterdir()) == ["model.safetensors", "tokenizer.safetensors", "words.safetensors"]
    scope: dict[str, object] = {"nextscale": nextscale}
    exec(CODE[0], scope)
    pipe = scope["pipe"]
    assert isinstance(pipe, nextscale.Pipeline) and pipe.reader.read("a red square").lengths == (4,)
