"""LPIPS: the stored distances, its formula on tiny weights, and how its file is found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from nextscale.errors import CheckpointError, SizeError, WeightsMismatch
from nextscale.lab.metrics import Lpips, metric_file
from nextscale.lab.metrics.files import LPIPS, VARIABLE

from .conftest import PROJECT

SHARED = PROJECT.parent / "shared" / "metrics"
STORED = {"a_red_apple": 0.0, "b_green_apple": 0.371581, "c_red_apple_jpeg20": 0.042983, "d_red_apple_blur": 0.140076}
TINY = (4, 6, 5, 3, 3)


def picture(file: Path) -> Tensor:
    return torch.from_numpy(np.array(Image.open(file).convert("RGB"))).permute(2, 0, 1)[None].float() / 127.5 - 1


def tiny() -> Lpips:
    torch.manual_seed(3)
    network = Lpips(channels=TINY)
    for head in network.lin:
        head.weight.abs_()
    return network


def images(seed: int, count: int = 2, side: int = 40) -> Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@pytest.mark.skipif(not SHARED.is_dir(), reason="the metric networks are not at ../shared/metrics")
def test_stored_distances() -> None:
    network = Lpips.load(SHARED)
    assert {case["b"]: case["float16_weights"] for case in json.loads((SHARED / "check" / "expected.json").read_text())["lpips"]} == {
        f"{name}.png": pytest.approx(distance, abs=1e-6) for name, distance in STORED.items()
    }
    others = torch.cat([picture(SHARED / "check" / f"{name}.png") for name in STORED])
    apple = picture(SHARED / "check" / "a_red_apple.png").expand_as(others)
    assert network(apple, others).tolist() == pytest.approx(list(STORED.values()), abs=1e-5)
    rough = network(apple, others, torch.bfloat16)
    assert rough.dtype == torch.float32
    assert rough.tolist() == pytest.approx(list(STORED.values()), rel=0.02, abs=1e-6)


def test_formula_written_out() -> None:
    """One image and one pixel at a time."""
    network, a, b = tiny(), images(1), images(2)
    distances = torch.zeros(2)
    for image in range(2):
        x, y = ((pixels[image : image + 1] - network.shift) / network.scale for pixels in (a, b))
        for layer, (conv, head) in enumerate(zip(network.features, network.lin, strict=True)):
            x, y = F.relu(conv(x)), F.relu(conv(y))
            for row in range(x.shape[2]):
                for column in range(x.shape[3]):
                    u, v = (pixels[0, :, row, column] / (pixels[0, :, row, column].norm() + 1e-10) for pixels in (x, y))
                    distances[image] += (head.weight.flatten() * (u - v) ** 2).sum() / x[0, 0].numel()
            if layer < 2:
                x, y = F.max_pool2d(x, 3, 2), F.max_pool2d(y, 3, 2)
    assert torch.allclose(network(a, b), distances, rtol=1e-4)


def test_symmetric_zero_at_itself_and_frozen() -> None:
    network, a, b = tiny(), images(1), images(2)
    assert torch.equal(network(a, a), torch.zeros(2))
    assert torch.allclose(network(a, b), network(b, a))
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_gradient_descends_even_where_features_are_dead() -> None:
    network, target = tiny(), images(1)
    network.features[0].bias.fill_(-1.0)  # most pixels have no feature at all
    drawn = images(2).requires_grad_()
    before = network(drawn, target).sum()
    (gradient,) = torch.autograd.grad(before, drawn)
    assert torch.isfinite(gradient).all() and gradient.any()
    assert network(drawn - 1e-3 * gradient / gradient.abs().max(), target).sum() < before


def test_autocast_around_it_changes_nothing() -> None:
    network, a, b = tiny(), images(1), images(2)
    with torch.autocast("cpu", torch.bfloat16):
        inside = network(a, b)
    assert torch.equal(inside, network(a, b))


def test_shapes_that_cannot_be_compared() -> None:
    with pytest.raises(SizeError, match=r"\[2, 3, 40, 40\] and \[2, 3, 48, 48\]"):
        tiny()(images(1), images(2, side=48))
    with pytest.raises(SizeError, match="at least 31 pixels"):
        tiny()(images(1, side=30), images(2, side=30))
    assert tiny()(images(1, side=31), images(2, side=31)).shape == (2,)


def test_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXTSCALE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(CheckpointError, match=r"home.metrics.*PyPI package lpips"):
        metric_file(LPIPS)
    places = {name: tmp_path / name for name in ("home/metrics", "variable", "given")}
    for place in places.values():
        place.mkdir(parents=True)
        (place / LPIPS).touch()
    assert metric_file(LPIPS) == places["home/metrics"] / LPIPS
    monkeypatch.setenv(VARIABLE, str(places["variable"]))
    assert metric_file(LPIPS) == places["variable"] / LPIPS
    assert metric_file(LPIPS, places["given"]) == metric_file(LPIPS, places["given"] / LPIPS) == places["given"] / LPIPS
    with pytest.raises(CheckpointError, match="nothing at"):
        metric_file(LPIPS, tmp_path / "absent")


def test_other_weights_are_refused(tmp_path: Path) -> None:
    save_file({"features.0.weight": torch.zeros(64, 3, 11, 11), "surplus": torch.zeros(1)}, tmp_path / LPIPS)
    with pytest.raises(WeightsMismatch, match=r"(?s)does not fit Lpips.*missing \(14\).*unexpected \(1\): surplus"):
        Lpips.load(tmp_path)
