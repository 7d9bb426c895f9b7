"""Pictures to tensors and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from nextscale.io import grid, to_pil
from nextscale_research.quality.prompts import from_pil


def striped(width: int, height: int) -> Image.Image:
    """Left third red, middle green, right third blue."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    for channel in range(3):
        pixels[:, channel * width // 3 : (channel + 1) * width // 3, channel] = 255
    return Image.fromarray(pixels)


def test_levels_are_clamped_and_truncated() -> None:
    pixels = torch.tensor([-2.0, -1.0, 0.0, 0.999, 1.0, 3.0]).view(1, 1, 1, 6).expand(1, 3, 1, 6)
    (image,) = to_pil(pixels)
    assert np.array(image)[0, :, 0].tolist() == [0, 0, 127, 254, 255, 255]


def test_a_picture_of_the_right_size_comes_back() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8))
    pixels = from_pil(image, (12, 20))
    assert pixels.shape == (1, 3, 12, 20)
    assert -1 <= pixels.min() < pixels.max() <= 1
    assert np.abs(np.array(to_pil(pixels)[0]).astype(int) - np.array(image)).max() <= 1


@pytest.mark.parametrize("size", [(16, 16), (8, 8), (30, 10), (10, 30), (7, 13)])
def test_other_sizes_are_covered_then_cropped_around_the_center(size: tuple[int, int]) -> None:
    pixels = from_pil(striped(48, 16), size)
    assert pixels.shape == (1, 3, *size)
    assert pixels[0, :, size[0] // 2, size[1] // 2].argmax() == 1  # the middle stays the middle


def test_gray_and_transparent_pictures_become_rgb() -> None:
    for mode in ("L", "RGBA", "P"):
        assert from_pil(striped(9, 9).convert(mode), (9, 9)).shape == (1, 3, 9, 9)


def test_a_sheet_holds_every_picture_in_reading_order() -> None:
    sheet = grid([Image.new("RGB", (4, 2), (i, 0, 0)) for i in range(5)])
    assert sheet.size == (12, 4)
    assert [sheet.getpixel((4 * (i % 3), 2 * (i // 3)))[0] for i in range(5)] == list(range(5))
    assert sheet.getpixel((11, 3)) == (255, 255, 255)
