"""Metrics of folders by networks: numbers of the libraries that others use, and a cache that continues where it stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from nextscale.errors import CheckpointError, MissingExtra, NextscaleError, SettingError, SizeError
from nextscale.eval.folders import ImageFolder, describe
from nextscale.metrics import Lpips
from nextscale.metrics.lpips import WEIGHTS
from nextscale.metrics.pixels import psnr, ssim
from nextscale_research.metrics import frechet
from nextscale_research.metrics.cache import CACHE, features_of, states
from nextscale_research.metrics.dists import Dists
from nextscale_research.metrics.files import DINOV2, INCEPTION, VARIABLE, metric_folder
from nextscale_research.metrics.frechet import frechet_distance
from nextscale_research.metrics.judges import NetworkJudge, frechet_interval, judges, spread
from nextscale_research.metrics.library import inception_score, kernel_distance
from nextscale_research.metrics.neighbors import precision_recall
from nextscale_research.metrics.networks import NETWORKS, Network, central, clip, dinov2, inception
from tests.conftest import PROJECT
from tests.eval.test_folders import picture_folder, run

SHARED = PROJECT.parent / "shared" / "metrics"
CPU = torch.device("cpu")
needs_networks = pytest.mark.skipif(not SHARED.is_dir(), reason="the metric networks are not at ../shared/metrics")
needs_torchmetrics = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tiny_dists() -> Dists:
    """VGG16 with random weights of a fit size; alpha and beta positive, as the published ones."""
    torch.manual_seed(5)
    network = Dists()
    network.alpha.data.uniform_(0, 1)
    network.beta.data.uniform_(0, 1)
    return network


# --- the libraries


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What torchmetrics and, where it is installed, torch-fidelity say, and what they were given."""
    folder = tmp_path_factory.mktemp("libraries")
    a = torch.rand(3, 3, 64, 48, generator=seeded(1)) * 2 - 1
    dists = {f"dists.{name}": value for name, value in tiny_dists().state_dict().items()}
    given = {
        "ours": torch.randn(40, 12, generator=seeded(2)).abs(),
        "real": torch.randn(40, 12, generator=seeded(3)).abs() + 0.1,
        "a": a,
        "b": (a + 0.2 * torch.randn(a.shape, generator=seeded(4))).clamp(-1, 1),
        **dists,
    }
    save_file(given, folder / "given.safetensors")
    (folder / "lpips.safetensors").write_bytes(WEIGHTS.read_bytes())
    picture_folder(folder / "ours", 8, seed=1)
    picture_folder(folder / "real", 8, seed=2)
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.library_values", folder], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "values.json").read_text()), given


@needs_torchmetrics
def test_numbers_are_those_of_torchmetrics(libraries: tuple[dict[str, Any], dict[str, Tensor]]) -> None:
    values, given = libraries[0]["torchmetrics"], libraries[1]
    ours, real, a, b = (given[name] for name in ("ours", "real", "a", "b"))
    assert float(frechet_distance(ours, real)) == pytest.approx(values["fid"], rel=1e-6)
    assert psnr(a, b).tolist() == pytest.approx(values["psnr"], rel=1e-5)
    assert ssim(a, b).tolist() == pytest.approx(values["ssim"], rel=1e-4)
    network = tiny_dists()
    assert network(a, b).tolist() == pytest.approx(values["dists"], rel=1e-4)
    assert min(values["dists"]) > 1e-3
    found = Lpips.load()(a, b).tolist()
    assert found == pytest.approx(values["lpips"], rel=1e-3)  # the file holds float16, torchmetrics' heads are float32


@needs_torchmetrics
@pytest.mark.skipif(
    find_spec("torch_fidelity") is not None and find_spec("torchvision") is None, reason="torchmetrics needs torchvision then"
)
def test_what_torchmetrics_does_is_asked_of_it(libraries: tuple[dict[str, Any], dict[str, Tensor]]) -> None:
    values, given = libraries[0]["torchmetrics"], libraries[1]
    mean, deviation = kernel_distance(given["ours"], given["real"], subsets=3)
    assert mean == pytest.approx(values["kid"], rel=1e-4)
    assert deviation == pytest.approx(0, abs=1e-4 * abs(mean))
    assert inception_score(given["ours"], splits=1)[0] == pytest.approx(values["inception_score"], rel=1e-4)


@needs_torchmetrics
@pytest.mark.skipif(find_spec("torch_fidelity") is None, reason="torch-fidelity is not installed")
def test_numbers_are_those_of_torch_fidelity(libraries: tuple[dict[str, Any], dict[str, Tensor]]) -> None:
    values, given = libraries[0]["torch_fidelity"], libraries[1]
    precise, recalled = precision_recall(given["ours"], given["real"])
    assert float(precise.double().mean()) == pytest.approx(values["precision"], abs=1e-6)
    assert float(recalled.double().mean()) == pytest.approx(values["recall"], abs=1e-6)
    ours, theirs = values["whole"]["ours"], values["whole"]["theirs"]  # two folders, with random weights in the network of FID
    assert ours["fid"] == pytest.approx(theirs["frechet_inception_distance"], rel=1e-3, abs=1e-4)
    assert ours["precision"] == pytest.approx(theirs["precision"], abs=1e-5)
    assert ours["recall"] == pytest.approx(theirs["recall"], abs=1e-5)
    assert ours["inception_score"] == pytest.approx(theirs["inception_score_mean"], rel=1e-4)


# --- measures by themselves


def test_precision_and_recall_by_hand() -> None:
    real = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]])
    near, far = real + 0.25, real + 100
    precise, recalled = precision_recall(torch.cat((near, far)), real, neighbors=1)
    assert precise.tolist() == [True] * 5 + [False] * 5  # 4.25 is within 1 of 4
    assert recalled.all()
    with pytest.raises(SettingError, match="more than 3 images"):
        precision_recall(real[:3], real)


def test_dists_is_nothing_for_equal_images_and_refuses_others() -> None:
    network, image = tiny_dists(), torch.rand(2, 3, 32, 32, generator=seeded(0)) * 2 - 1
    assert network(image, image).tolist() == pytest.approx([0, 0], abs=1e-5)
    with pytest.raises(SizeError, match="equal shape"):
        network(image, image[:, :, :16])


def test_an_interval_takes_the_moments_of_the_real_set_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    moments = frechet._moments
    monkeypatch.setattr(frechet, "_moments", lambda x: counted.append(len(x)) or moments(x))
    ours, real = torch.randn(20, 4, generator=seeded(1)), torch.randn(30, 4, generator=seeded(2))
    found = frechet_interval(ours, real, 10)
    assert counted.count(30) == 1 and counted.count(20) == 11
    assert found["value"] == round(float(frechet_distance(ours, real)), 5) and found["low"] < found["value"] < found["high"]


def test_a_single_part_has_no_interval() -> None:
    assert spread(2.0, float("nan")) == {"value": 2.0}
    assert spread(2.0, 0.5) == {"value": 2.0, "low": pytest.approx(1.02), "high": pytest.approx(2.98)}


def test_clip_cuts_the_center() -> None:
    levels = torch.zeros(1, 3, 64, 128, dtype=torch.uint8)
    levels[:, :, :, 32:96] = 255
    assert central(levels, 32).mean() > 0.99
    assert central(levels, 32).shape == (1, 3, 32, 32)


# --- networks that come as folders


@pytest.fixture(scope="module")
def transformer_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny random DINOv2 and CLIP, stored as the published ones are."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("networks")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.Dinov2Model(transformers.Dinov2Config(image_size=28, patch_size=14, **small)).save_pretrained(folder / DINOV2)
    words = [*"abcdefghijklmnopqrstuvwxyz", *(f"{letter}</w>" for letter in "abcdefghijklmnopqrstuvwxyz")]
    vocabulary = {word: number for number, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
    text = transformers.CLIPTextConfig(vocab_size=len(vocabulary), intermediate_size=16, eos_token_id=len(vocabulary) - 1, **small)
    vision = transformers.CLIPVisionConfig(image_size=32, patch_size=16, intermediate_size=16, **small)
    config = transformers.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8)
    where = folder / "clip-vit-large-patch14"
    transformers.CLIPModel(config).save_pretrained(where)
    (where / "vocab.json").write_text(json.dumps(vocabulary))
    (where / "merges.txt").write_text("#version: 0.2\n")
    transformers.CLIPTokenizer.from_pretrained(where).save_pretrained(where)
    return folder


def test_dinov2_and_clip_are_read_from_folders(transformer_folders: Path, tmp_path: Path) -> None:
    folder = picture_folder(tmp_path / "images", 3)
    found = features_of(folder, dinov2(transformer_folders, CPU), CPU)
    assert found.shape == (3, 16)
    network = clip(transformer_folders, CPU)
    assert network.text is not None
    assert features_of(folder, network, CPU).shape == network.text(["a cat", "a dog", "an owl"]).shape == (3, 8)


def test_clip_score_is_the_cosine(transformer_folders: Path, tmp_path: Path) -> None:
    folder = picture_folder(tmp_path / "images", 2)
    with pytest.raises(NextscaleError, match="must have a manifest"):
        NetworkJudge(clip(transformer_folders, CPU), None, CPU).check(folder)
    lines = [
        {
            "file": f"00{n}.png",
            "id": str(n),
            "prompt": p,
            "seed": n,
            "size": [80, 80],
            "settings": {"model": "m"},
            "sha256": "",
            "versions": {},
        }
        for n, p in enumerate(("a cat", "a dog"))
    ]
    (folder.path / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = ImageFolder(folder.path)
    row = describe(folder, CPU) | NetworkJudge(clip(transformer_folders, CPU), None, CPU).row(folder, lambda images: None)
    network = clip(transformer_folders, CPU)
    assert network.text is not None
    images, prompts = features_of(folder, network, CPU), network.text(["a cat", "a dog"])
    expected = 100 * torch.cosine_similarity(images, prompts).clamp(min=0).mean()
    assert row["clip_score"]["value"] == pytest.approx(float(expected), abs=1e-3)
    assert row["model"] == "m" and row["images"] == 2


def test_missing_networks_are_named_with_address_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="huggingface.co/facebook/dinov2-large"):
        metric_folder(DINOV2, tmp_path)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    result = run(picture_folder(tmp_path / "a", 2).path, "--real", tmp_path / "a")
    assert result.exit_code == 2
    assert INCEPTION in result.output and str(tmp_path) in result.output and "github.com/toshas/torch-fidelity" in result.output


def test_an_inception_file_with_another_content_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / INCEPTION).write_bytes(b"something that would be unpickled")
    with pytest.raises(CheckpointError, match="sha256"):
        inception(tmp_path, CPU)


@pytest.mark.parametrize(("name", "module"), [("efficientnet", "kid"), ("inception", "inception")])
def test_missing_torchmetrics_is_noticed_with_the_networks(name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NETWORKS, name, lambda *_: replace(counting([]), name=name))
    monkeypatch.setitem(sys.modules, f"torchmetrics.image.{module}", None)
    real = picture_folder(tmp_path / "real", 1) if module == "kid" else None
    with pytest.raises(MissingExtra, match="torchmetrics"):
        judges(["fd-efficientnet" if real else "inception-score"], real, None, CPU)
    monkeypatch.setitem(NETWORKS, "clip", lambda *_: replace(counting([]), text=lambda prompts: torch.zeros(len(prompts), 3)))
    judges(["clip-score"], real, None, CPU)


# --- features


def counting(calls: list[int]) -> Network:
    def features(levels: Tensor) -> Tensor:
        calls.append(len(levels))
        return levels.float().mean(dim=(2, 3))

    return Network("mean", "0" * 64, features)


def test_features_are_kept_and_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nextscale_research.metrics.cache.PART", 4)
    folder, calls = picture_folder(tmp_path / "images", 10), list[int]()
    first = features_of(folder, counting(calls), CPU, batch=3)
    assert sum(calls) == 10 and first.shape == (10, 3)
    calls.clear()
    assert torch.equal(features_of(ImageFolder(folder.path), counting(calls), CPU), first) and not calls
    part = sorted((folder.path / CACHE).rglob("*.safetensors"))[1]
    part.write_bytes(part.read_bytes()[:40])  # damaged
    assert torch.equal(features_of(ImageFolder(folder.path), counting(calls), CPU), first)
    assert sum(calls) == 4
    calls.clear()
    Image.new("RGB", (8, 8), "white").save(folder.path / "009.png")  # another image, of another size
    changed = features_of(ImageFolder(folder.path), counting(calls), CPU)
    assert sum(calls) == 2 and changed[9].tolist() == [255, 255, 255] and torch.equal(changed[:9], first[:9])


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nextscale_research.metrics.cache.PART", 2)
    folder = picture_folder(tmp_path / "images", 6)

    def stop(images: int, seen: list[int] = []) -> None:  # noqa: B006 - counts its calls
        seen.append(images)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        features_of(folder, counting([]), CPU, on_images=stop)
    calls: list[int] = []
    features_of(folder, counting(calls), CPU)
    assert sum(calls) == 2


def test_stored_features_that_are_not_those_of_the_files_are_computed_again(tmp_path: Path) -> None:
    folder, calls = picture_folder(tmp_path / "images", 3), list[int]()
    first = features_of(folder, counting(calls), CPU)
    (part,) = (folder.path / CACHE).rglob("*.safetensors")
    save_file({"features": first[:2].clone()}, part, metadata={"files": states(folder, folder.files)})  # one row too few
    assert torch.equal(features_of(folder, counting(calls), CPU), first)
    part.unlink()
    os.mkfifo(part)  # which may come with a folder of images
    assert torch.equal(features_of(folder, counting(calls), CPU), first) and sum(calls) == 9


def test_features_are_kept_in_the_home_folder_where_the_images_are_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXTSCALE_HOME", str(tmp_path / "home"))
    folder, calls = picture_folder(tmp_path / "images", 3), list[int]()
    (folder.path / CACHE).touch()  # no folder can be made there, not even by root
    first = features_of(folder, counting(calls), CPU)
    assert torch.equal(features_of(folder, counting(calls), CPU), first) and sum(calls) == 3
    (tmp_path / "home").rename(tmp_path / "away")
    (tmp_path / "home").touch()
    with pytest.raises(NextscaleError, match="NEXTSCALE_HOME"):
        features_of(folder, counting(calls), CPU)
    assert torch.equal(features_of(folder, counting(calls), CPU, cache=tmp_path / "cache"), first)


# --- the command


@needs_networks
@needs_torchmetrics
@pytest.mark.skipif(
    find_spec("torch_fidelity") is not None and find_spec("torchvision") is None, reason="torchmetrics needs torchvision then"
)
def test_sets_by_efficientnet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(SHARED))
    monkeypatch.setattr("nextscale_research.metrics.judges.RESAMPLES", 3)
    folder, other = picture_folder(tmp_path / "fast", 6, seed=1), picture_folder(tmp_path / "real", 6, seed=2)
    result = run(folder.path, "--real", other.path, "--metric", "fd-efficientnet", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "fd_efficientnet" in result.output and "precision_efficientnet" in result.output


@pytest.mark.parametrize("absent", ["real", "dense", "manifest"])
def test_folders_that_do_not_fit_are_refused_before_features_are_computed(
    absent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setitem(NETWORKS, "efficientnet", lambda *_: counting(calls))
    monkeypatch.setitem(NETWORKS, "clip", lambda *_: replace(counting(calls), text=lambda prompts: torch.zeros(len(prompts), 3)))
    folder = picture_folder(tmp_path / "images", 3).path
    options = {
        "real": ["--real", tmp_path / "absent"],
        "dense": ["--real", folder, "--metric", "psnr", "--dense", picture_folder(tmp_path / "dense", 2).path],
        "manifest": ["--real", folder, "--metric", "clip-score"],
    }
    result = run(folder, "--metric", "fd-efficientnet", *options[absent], "--device", "cpu")
    assert result.exit_code == 2 and not calls


def test_images_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder = picture_folder(tmp_path / "images", 2)
    (folder.path / "001.png").write_bytes(b"no image")
    with pytest.raises(NextscaleError, match="001.png cannot be read"):
        features_of(folder, counting([]), CPU)
