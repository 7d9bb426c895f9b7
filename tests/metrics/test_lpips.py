"""LPIPS: the stored distances, its formula on tiny weights, and that it comes with the package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from nextscale.assets import EMBEDDED
from nextscale.errors import SizeError
from nextscale.metrics import Lpips
from nextscale.metrics.lpips import SMALLEST_SIDE
from nextscale_research.metrics.files import VARIABLE
from tests.conftest import PROJECT

PICTURES = Path(__file__).parents[1] / "data" / "lpips"  # Fluent Emoji, Copyright (c) Microsoft Corporation, MIT: the second is recolored
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


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable is set, and the home folder is empty."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("NEXTSCALE_HOME", str(tmp_path))


def test_stored_distances(bare_machine: None) -> None:
    network = Lpips.load()
    others = torch.cat([picture(PICTURES / f"{name}.png") for name in STORED])
    apple = picture(PICTURES / "a_red_apple.png").expand_as(others)
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


def test_images_that_are_too_small_have_no_network() -> None:
    assert Lpips.load_for((SMALLEST_SIDE, 40), "cpu") is not None
    assert Lpips.load_for((40, SMALLEST_SIDE - 1), "cpu") is None


def test_its_licenses_come_with_it() -> None:
    """Every license that the table names is a file, and every file of licenses is among those of the wheel."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    shipped = {path for pattern in project["license-files"] for path in PROJECT.glob(pattern)}
    for table in EMBEDDED.glob("**/LICENSES.md"):
        named = {table.parent / name for name in re.findall(r"`(licenses/[^`]+)`", table.read_text())}
        assert named <= set((table.parent / "licenses").iterdir()) <= shipped
        assert named and table in shipped
    assert "lpips-BSD-2-Clause.txt" in {path.name for path in shipped}
