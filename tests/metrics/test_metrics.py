"""Distances of images and of sets of images, against values computed another way."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nextscale.errors import CheckpointError, SettingError
from nextscale.metrics import pixels
from nextscale.metrics.intervals import mean_interval
from nextscale.metrics.pixels import psnr, ssim
from nextscale_research.metrics.efficientnet import EfficientNetLite0, central_crop
from nextscale_research.metrics.frechet import Directions, frechet_distance
from nextscale_research.quality.prompts import from_pil
from tests.conftest import PROJECT

NETWORKS = PROJECT.parent / "shared" / "metrics"
needs_networks = pytest.mark.skipif(not NETWORKS.is_dir(), reason="the metric networks are not here")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def test_equal_images_are_at_no_distance() -> None:
    images = noise(2, 3, 16, 20)
    assert psnr(images, images).tolist() == [math.inf, math.inf]
    assert ssim(images, images).tolist() == pytest.approx([1, 1], abs=1e-6)


def test_psnr_by_hand() -> None:
    a = torch.zeros(2, 3, 4, 4)
    b = a.clone()
    b[0] += 0.2  # a tenth of the range: 20 dB
    b[1, 0] += 0.2  # in one channel of three
    assert psnr(a, b).tolist() == pytest.approx([20, 20 + 10 * math.log10(3)], abs=1e-4)
    assert torch.equal(psnr(a + 5, a + 1), psnr(a + 1, a + 1)), "values past the range are clamped"


def test_ssim_is_what_the_formula_says_window_by_window() -> None:
    a, b = noise(1, 3, 13, 14, seed=1), noise(1, 3, 13, 14, seed=2)
    b = 0.6 * a + 0.4 * b
    luma = [(np.array([0.299, 0.587, 0.114]) @ (image[0].double().numpy().reshape(3, -1) + 1) / 2).reshape(13, 14) for image in (a, b)]
    offsets = np.arange(11) - 5
    window = np.exp(-(offsets[:, None] ** 2 + offsets[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    found = []
    for top in range(13 - 10):
        for left in range(14 - 10):
            x, y = (image[top : top + 11, left : left + 11] for image in luma)
            mx, my = (window * x).sum(), (window * y).sum()
            vx, vy, cov = (window * (x - mx) ** 2).sum(), (window * (y - my) ** 2).sum(), (window * (x - mx) * (y - my)).sum()
            found.append((2 * mx * my + 1e-4) * (2 * cov + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)))
    assert ssim(a, b).item() == pytest.approx(np.mean(found), abs=1e-5)


def test_ssim_of_large_images_goes_strip_by_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = noise(2, 3, 40, 30, seed=1), noise(2, 3, 40, 30, seed=2)
    whole, rows = ssim(a, b), list[int]()
    blurred = pixels._blurred
    monkeypatch.setattr(pixels, "_blurred", lambda maps: rows.append(maps.shape[2]) or blurred(maps))
    monkeypatch.setattr(pixels, "STRIP", 2 * 30 * 7)
    assert ssim(a, b).tolist() == pytest.approx(whole.tolist(), abs=1e-6)
    assert rows == [17, 17, 17, 17, 12], "windows of 7 rows, the last strip has 2"


def test_images_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(SettingError, match="equal shape"):
        ssim(noise(1, 3, 12, 12), noise(1, 3, 13, 12))
    with pytest.raises(SettingError, match="equal shape"):
        psnr(noise(1, 3, 8, 8), noise(1, 3, 8, 9))
    with pytest.raises(SettingError, match="11 x 11"):
        ssim(noise(1, 3, 8, 8), noise(1, 3, 8, 8))


# --- Fréchet


def with_moments(mean: list[float], deviations: list[float]) -> torch.Tensor:
    """Points whose mean and covariance are exactly these: on every axis one at either side."""
    count = len(mean)
    points = torch.cat((torch.eye(count), -torch.eye(count))).double() * math.sqrt((2 * count - 1) / 2)
    return points * torch.tensor(deviations) + torch.tensor(mean)


def test_frechet_distance_of_normal_distributions() -> None:
    """Along common axes it is |mean difference|^2 + sum of squared differences of the deviations."""
    a, b = with_moments([0, 0, 1], [1, 2, 3]), with_moments([1, 0, 3], [2, 2, 0])
    assert frechet_distance(a, b).item() == pytest.approx(1 + 4 + 1 + 0 + 9, abs=1e-9)
    turn = torch.linalg.qr(noise(3, 3).double()).Q
    assert frechet_distance(a @ turn, b @ turn).item() == pytest.approx(15, abs=1e-9)
    assert frechet_distance(a, a).item() == pytest.approx(0, abs=1e-9)


def test_frechet_distance_of_few_points_in_many_dimensions() -> None:
    a = noise(6, 40).double()
    shift = torch.zeros(40, dtype=torch.float64)
    shift[3] = 2.0
    assert frechet_distance(a, a + shift).item() == pytest.approx(4, abs=1e-6)
    batched = frechet_distance(torch.stack((a, a + shift)), a)
    assert batched.tolist() == pytest.approx([0, 4], abs=1e-6)
    with pytest.raises(SettingError, match="two or more"):
        frechet_distance(a[:1], a)


def test_directions_keep_distances_inside_them() -> None:
    plane = torch.linalg.qr(noise(30, 2).double()).Q
    a, b = (noise(20, 2, seed=seed).double() @ plane.mT for seed in (1, 2))
    directions = Directions.of(a, 2)
    assert directions(a).shape == (20, 2)
    inside = frechet_distance(directions(a), directions(b)).item()
    assert inside == pytest.approx(frechet_distance(a, b).item(), abs=1e-6)  # outside them roots of rounding are added


# --- EfficientNet


def test_central_crop() -> None:
    image = torch.arange(256.0).expand(1, 3, 256, 256) / 128 - 1
    assert torch.equal(central_crop(image), image[:, :, 16:240, 16:240])
    assert central_crop(noise(1, 3, 40, 60)).shape == (1, 3, 224, 224)


def test_missing_network_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="efficientnet_lite0_fp16.safetensors"):
        EfficientNetLite0.load(tmp_path)


@needs_networks
def test_efficientnet_gives_the_stored_numbers() -> None:
    network = EfficientNetLite0.load(NETWORKS)
    for case in json.loads((NETWORKS / "check" / "expected.json").read_text())["efficientnet_lite0"]:
        image = from_pil(Image.open(NETWORKS / "check" / case["image"]), (224, 224))
        features = network.pooled(((image + 1) * 127.5 - 127) / 128)
        assert features.norm().item() == pytest.approx(case["feature_norm_float16_weights"], rel=1e-4)
        assert features[0, :8].tolist() == pytest.approx(case["first8"], abs=0.02)
        probabilities = network.fc(features).softmax(dim=1)
        assert probabilities.argmax().item() == case["top1"]
        assert probabilities.max().item() == pytest.approx(case["top1_prob"], abs=0.02)
        framed = torch.nn.functional.pad(image, (16, 16, 16, 16))  # 256 pixels, of which the center is looked at
        assert torch.allclose(network.features(framed), features, atol=1e-5)


# --- intervals


def test_intervals_cover_the_true_mean_about_as_often_as_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for repeat in range(200):
        found = mean_interval(torch.randn(60, generator=generator), resamples=300, seed=repeat)
        covered += found.low <= 0 <= found.high
    assert 180 <= covered <= 199


def test_intervals_are_seeded() -> None:
    values = torch.arange(20.0) ** 2
    assert mean_interval(values, seed=1) == mean_interval(values, seed=1) != mean_interval(values, seed=2)
    constant = mean_interval([0.25] * 4)
    assert (constant.value, constant.low, constant.high) == (0.25, 0.25, 0.25)
    with pytest.raises(SettingError, match="images must be"):
        mean_interval([])
