"""Adapters are trained, resumed and loaded again."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import nextscale
from nextscale.checkpoints.adapters import read_adapter
from nextscale.errors import NextscaleError, PromptError, SettingError
from nextscale.pipeline import Pipeline
from tests.helpers.tiny import fresh_pipeline
from training.lora import AdapterLinear, LoraTraining, train_lora
from training.lora_data import Captioned, cropped, encoded, read_captioned, schedule_for, split
from training.run import Budget

SETTINGS = LoraTraining(rank=4, alpha=4.0, batch=4, at_once=2, learning_rate=3e-2, warmup=2, sample_every=100)


@pytest.fixture(scope="module")
def negatives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of dark pictures, with captions that say so."""
    folder, random = tmp_path_factory.mktemp("negatives"), torch.Generator().manual_seed(0)
    for number in range(12):
        pixels = torch.randint(0, 60, (3, 4, 3), generator=random, dtype=torch.uint8).numpy()
        Image.fromarray(pixels).resize((24, 32), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"thing {number} in negative colors")
    return folder


def tiny() -> Pipeline:
    return fresh_pipeline("infinity")


def trained(pictures: Path, out: Path, steps: int, settings: LoraTraining = SETTINGS) -> dict[str, Any]:
    return train_lora(tiny(), read_captioned(pictures), out, Budget(steps), settings)


def test_a_run_learns_resumes_and_loads(negatives: Path, tmp_path: Path) -> None:
    pipe = tiny()
    base = {name: tensor.clone() for name, tensor in pipe.model.state_dict().items()}
    results = train_lora(pipe, read_captioned(negatives), tmp_path / "whole", Budget(20), SETTINGS)
    for name, tensor in pipe.model.state_dict().items():
        assert torch.equal(tensor, base[name]), name
    (before,), (after,) = results["held_out_before"].values(), results["held_out_after"].values()
    assert after["loss"] < before["loss"]
    assert len(after["stages"]) == len(after["bit_accuracy"]) == len(pipe.settings.schedules.choose(None, None))

    trained(negatives, tmp_path / "twice", steps=7)
    trained(negatives, tmp_path / "twice", steps=20)
    whole, twice = (read_adapter(tmp_path / name) for name in ("whole", "twice"))
    assert whole.sha256 == twice.sha256

    pipe.load_lora(tmp_path / "whole")
    assert [one.name for one in pipe("thing 3 in negative colors", seed=0).report.loras] == ["whole"]
    written = {file.name for file in (tmp_path / "whole").iterdir()}
    assert {"samples.png", "samples-before.png", "curve.jsonl", "adapter_config.json", "adapter_model.safetensors"} <= written
    with pytest.raises(NextscaleError, match="rank"):
        trained(negatives, tmp_path / "whole", steps=20, settings=LoraTraining(rank=2))


def test_nano_learns(negatives: Path, tmp_path: Path) -> None:
    pipe, pictures = nextscale.load("nano", device="cpu"), read_captioned(negatives)[:2]
    settings = LoraTraining(rank=1, batch=1, at_once=1, warmup=1, learning_rate=1e-2, targets=("mlp",))
    results = train_lora(pipe, pictures, tmp_path / "out", Budget(2), settings, (128, 128))
    (before,), (after,) = results["held_out_before"].values(), results["held_out_after"].values()
    assert after["loss"] < before["loss"]
    assert pipe.load_lora(tmp_path / "out") == "out"


def test_every_target_gets_a_gradient(negatives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def past_the_update(self: AdapterLinear, x: torch.Tensor) -> torch.Tensor:
        return self.base(x)

    monkeypatch.setattr(AdapterLinear, "forward", past_the_update)
    with pytest.raises(SettingError, match="gradient"):
        trained(negatives, tmp_path / "out", steps=1)


def test_recomputed_blocks_have_the_same_gradients(negatives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(negatives, tmp_path / "kept", steps=2)
    monkeypatch.setattr("training.lora.CHECKPOINT_FROM", 0)
    trained(negatives, tmp_path / "again", steps=2)
    kept, again = (read_adapter(tmp_path / name).modules for name in ("kept", "again"))
    for name, one in kept.items():
        torch.testing.assert_close(one.up, again[name].up, rtol=1e-3, atol=1e-5)


def test_targets_are_chosen(negatives: Path, tmp_path: Path) -> None:
    trained(negatives, tmp_path / "mlp", 1, LoraTraining(rank=2, targets=("mlp",), batch=1, at_once=1))
    config = json.loads((tmp_path / "mlp" / "adapter_config.json").read_text())
    assert config["target_modules"] and all(".ffn." in name for name in config["target_modules"])


def test_a_trained_adapter_computes_what_was_trained() -> None:
    torch.manual_seed(0)
    layer = AdapterLinear(nn.Linear(6, 5), rank=2, scale=0.5, generator=torch.Generator().manual_seed(0))
    nn.init.normal_(layer.up)
    x = torch.randn(3, 6)
    fused = layer.base.weight + 0.5 * (layer.up @ layer.down)
    torch.testing.assert_close(layer(x), x @ fused.T + layer.base.bias)


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"targets": ("head",)}, {"targets": ()}, {"learning_rate": 0.0}, {"batch": 0}])
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SettingError):
        LoraTraining(**wrong)  # type: ignore[arg-type]


def test_other_families_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="var"):
        train_lora(fresh_pipeline("var"), [], tmp_path / "out", Budget(1), SETTINGS)


# --- data


def as_folder(source: Path, target: Path) -> Path:
    return source


def as_jsonl(source: Path, target: Path) -> Path:
    lines = [{"file_name": str(file), "text": file.with_suffix(".txt").read_text()} for file in sorted(source.glob("*.png"))]
    (target / "pictures.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return target / "pictures.jsonl"


def as_metadata(source: Path, target: Path) -> Path:
    folder = target / "folder"
    folder.mkdir()
    lines = []
    for file in sorted(source.glob("*.png")):
        (folder / file.name).write_bytes(file.read_bytes())
        lines.append({"file_name": file.name, "text": file.with_suffix(".txt").read_text()})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def as_shard(source: Path, target: Path) -> Path:
    lines = [{"file": file.name, "caption": file.with_suffix(".txt").read_text()} for file in sorted(source.glob("*.png"))]
    (target / "captions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with tarfile.open(target / "shard.tar", "w") as tar:
        tar.add(target / "captions.jsonl", "captions.jsonl")
        for file in sorted(source.glob("*.png")):
            tar.add(file, file.name)
    return target / "shard.tar"


@pytest.mark.parametrize("form", [as_folder, as_jsonl, as_metadata, as_shard])
def test_forms_of_data(form: Callable[[Path, Path], Path], negatives: Path, tmp_path: Path) -> None:
    found = read_captioned(form(negatives, tmp_path))
    assert len(found) == 12 and all("negative" in picture.caption for picture in found)
    assert {picture.image().size for picture in found} == {(24, 32)}
    train, held_out = split(found)
    assert len(held_out) == 1 and len(train) == 11


def test_data_that_cannot_be_used(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(PromptError, match="caption"):
        read_captioned(tmp_path)
    (tmp_path / "a.txt").write_text("a square")
    with pytest.raises(PromptError, match="at least 2"):
        read_captioned(tmp_path)
    (tmp_path / "b.png").write_bytes(b"no picture")
    (tmp_path / "b.txt").write_text("another")
    with pytest.raises(PromptError, match="picture"):
        read_captioned(tmp_path)[1].image()
    (tmp_path / "b.txt").write_text(" ")
    with pytest.raises(PromptError, match="caption"):
        read_captioned(tmp_path)


def test_pictures_keep_their_aspect_ratio(tmp_path: Path) -> None:
    pipe = nextscale.load("nano", device="cpu")
    wide, tall = Image.new("RGB", (400, 200), "red"), Image.new("RGB", (150, 220), "blue")
    assert schedule_for(pipe, wide, "0.06M").grid == pipe.settings.schedules.choose("0.06M", "2:1").grid
    assert schedule_for(pipe, tall, None) == pipe.settings.schedules.choose(None, 1.5)
    assert cropped(wide, 64, 64).size == (64, 64)
    wide.save(tmp_path / "wide.png")
    tall.save(tmp_path / "tall.png")
    pictures = [Captioned(name, "a color", tmp_path / f"{name}.png") for name in ("wide", "tall")]
    buckets = encoded(pipe, pictures, "0.06M")
    assert sorted(len(bucket) for bucket in buckets) == [1, 1]
    assert all(bucket.features.shape[-2:] == bucket.schedule.grid for bucket in buckets)
