"""The judge and the packed shard, from the program to the files, with the model of the package on pictures of 32 pixels."""

from __future__ import annotations

import gzip
import io
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer.main
from PIL import Image

from nextscale.assets import EMBEDDED
from nextscale.checkpoints import Layout, write_weights
from nextscale.errors import SettingError
from nextscale.loading.presets import NANO_TOKENIZER, build_tokenizer
from nextscale.metrics.intervals import Interval
from nextscale.offline.prompts import CAPTIONS
from nextscale.text.words import WordTextEncoder
from nextscale_research.metrics.efficientnet import EfficientNetLite0
from nextscale_research.metrics.files import EFFICIENTNET
from tests.training.test_cli import refused, succeed
from tests.training.test_data import lines, picture, shard
from tests.training.test_scenes import icon
from training.__main__ import app
from training.colors import WORDS
from training.judge import Edition, interval, table, tiled
from training.model_settings import ModelTraining, check_training
from training.records import read_records
from training.rules import looks, whole
from training.settings import changed
from training.wording import is_held


def icon_file(word: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(icon(word).permute(1, 2, 0).numpy()).save(file, "PNG")
    return file.getvalue()


def write_shard(path: Path, start: int, count: int) -> Path:
    """Icons of kinds that have a held-out color, of two styles."""
    kinds = [f"kind{n}" for n in range(200) if any(is_held(f"kind{n}", word) for word in WORDS[:9])][start : start + count]
    records = [
        {"file": f"{kind}.png", "caption": f"a {style} icon of a {kind}", "style": style, "label": kind, "subject": f"a {kind}"}
        for number, kind in enumerate(kinds)
        for style in (("flat", "round")[number % 2],)
    ]
    return shard(path, {CAPTIONS: lines(*records)} | {f"{kind}.png": icon_file(WORDS[n % 8]) for n, kind in enumerate(kinds)})


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    write_shard(folder / "train.tar", 0, 12)
    write_shard(folder / "val.tar", 6, 4)
    torch.manual_seed(0)
    network = EfficientNetLite0()
    write_weights(network, folder / EFFICIENTNET, Layout())
    return folder


def test_judge_compares_two_editions(places: Path) -> None:
    """The same weights at the same settings are equal in everything; at others they are not."""
    options = ["--data", places / "train.tar", "--held-out", places / "val.tar", "--metrics", places, "--device", "cpu"]
    run = ["judge", *options, "--out", places / "out", "--size", 32, "--limit", 2]
    printed = succeed(*run, "--edition", "first", "--edition", "again").stdout
    rows = json.loads((places / "out" / "judge.json").read_text())
    assert {"color", "whole, 1", "whole, not square", "color, not square", "LPIPS between seeds", "style, 32 px", "label, 32 px"} <= set(
        rows
    )
    assert {"tokenizer PSNR, 32 px", "tokenizer LPIPS, 32 px"} <= set(rows) and not any(name.startswith("Fréchet") for name in rows)
    assert all(row["change"] == {"value": 0.0, "low": 0.0, "high": 0.0, "count": row["first"]["count"]} for row in rows.values())
    assert rows["whole, not square"]["first"]["count"] == 14 * 2
    assert (places / "out" / "judge.md").read_text() in printed
    sheets = {file.name for file in (places / "out").glob("*.webp")}
    assert sheets == {f"{name}-{kind}.webp" for name in ("first", "again") for kind in ("squares", "mixed")}
    assert "judge.md exists already" in refused(*run)


def test_editions_are_read(tmp_path: Path) -> None:
    edition = Edition.parse("warm=runs/model:temperature=0.8,guidance=5")
    assert edition == Edition("warm", Path("runs/model"), {"temperature": 0.8, "guidance": 5.0})
    assert Edition.parse("first") == Edition("first", None, {})
    for text in ("a=b:c", "a=b:c=high"):
        with pytest.raises(SettingError, match="expected NAME=FOLDER"):
            Edition.parse(text)
    with pytest.raises(SettingError, match=r"has no model\.safetensors"):
        Edition.parse(f"a={tmp_path}").load(torch.device("cpu"))


def test_tables_have_shares_and_numbers() -> None:
    first, change = interval(Interval(0.5, 0.4, 0.6), 200), interval(Interval(12.34, 11.0, 13.0), 200)
    rows = {"color": {"first": first}, "LPIPS between seeds": {"first": first}, "Fréchet distance, 256 px": {"first": change}}
    _, _, *found = table(rows).splitlines()
    assert found == [
        "| color | 200 | 50.0% (40.0% to 60.0%) |",
        "| LPIPS between seeds | 200 | 0.500 (0.400 to 0.600) |",
        "| Fréchet distance, 256 px | 200 | 12.3 (11.0 to 13.0) |",
    ]


def test_rules_know_color_and_wholeness() -> None:
    images = torch.stack([icon(word).float() / 127.5 - 1 for word in ("red", "blue")])
    assert [WORDS[word] for word in looks(images).words()] == ["red", "blue"]
    assert whole(images).tolist() == [True, True]
    assert whole(images[:, :, 20:]).tolist() == [False, False]  # cut off at the top
    assert whole(torch.ones(1, 3, 64, 64)).tolist() == [False]  # nothing there
    wide = torch.nn.functional.pad(images, (60, 60), value=1.0)
    assert whole(wide).all() and not whole(wide[..., 80:]).any()


def test_sheets_show_images_of_any_shape() -> None:
    sheet = tiled([Image.new("RGB", size, "red") for size in ((64, 32), (32, 64), (10, 10))], cell=40, columns=2)
    assert sheet.size == (80, 80) and sheet.getpixel((20, 20)) == (255, 0, 0) and sheet.getpixel((60, 60)) == (128, 128, 128)


def test_packed_shards_are_smaller_and_icons_stay_exact(tmp_path: Path) -> None:
    noise = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()
    records = [
        {"file": "a.png", "caption": "an icon", "style": "flat", "label": "é"},
        {"file": "b.png", "caption": "a hat", "style": "photo"},
    ]
    Image.fromarray(noise).save(tmp_path / "noise.png")
    files = {"a.png": picture(), "b.png": (tmp_path / "noise.png").read_bytes()}
    first = shard(tmp_path / "first.tar", {CAPTIONS: lines(*records)} | files)
    assert "MiB" in succeed("pack", "--data", first, "--out", tmp_path / "small.tar.gz").stdout
    (tmp_path / "small.tar").write_bytes(gzip.decompress((tmp_path / "small.tar.gz").read_bytes()))
    (read, contents), (before, originals) = read_records(tmp_path / "small.tar"), read_records(first)
    assert read == before and contents[0] == originals[0] and len(contents[1]) < len(originals[1]) / 2
    assert "exists already" in refused("pack", "--data", first, "--out", tmp_path / "small.tar.gz")


# --- the page of the second edition

PLAN = (Path(__file__).parents[2] / "training" / "second-edition.md").read_text()
ON_DEVICE = re.findall(r"```device\n(.*?)\n```", PLAN, re.DOTALL)
LOCAL = re.findall(r"```bash\n(.*?)```", PLAN, re.DOTALL)


def programs(text: str) -> list[list[str]]:
    """Returns the arguments of every call of `python -m training`."""
    parts = [part.strip() for line in text.splitlines() for part in re.split(r";(?![^']*'[^']*(?:;|$))", line)]
    found = [part.partition(" -m training ")[2] for part in parts if " -m training " in part]
    return [shlex.split(part) for part in found]


@pytest.mark.parametrize("command", [*ON_DEVICE, *LOCAL])
def test_the_plan_shows_commands_that_are_there(command: str) -> None:
    assert len(command) < 2000
    group = typer.main.get_command(app)
    found = programs(command)
    assert found or "export" in command
    for arguments in found:
        name, *rest = arguments
        values = group.commands[name].make_context(name, rest).params  # type: ignore[attr-defined]
        if name == "model":
            settings = changed(ModelTraining(), values["change"] or [])
            check_training(settings, build_tokenizer(NANO_TOKENIZER), WordTextEncoder.load(EMBEDDED / "nano" / "words.safetensors"))
            assert (values["minutes"] is None) != (values["steps"] is None)


def test_the_plan_has_four_commands_that_share_their_settings() -> None:
    assert len(ON_DEVICE) == 4
    first, second = (programs(text)[0] for text in ON_DEVICE[1:3])
    assert first == second  # a run that goes on has the same settings
