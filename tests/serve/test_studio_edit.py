"""Editing in the studio, in a real browser. Skipped without one."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import nextscale
from tests.helpers.serving import Live, live
from tests.helpers.studio import MARKS, chromium, generated, visit

pytestmark = MARKS
SIDE = 128


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live({"nano": nextscale.load("nano", device="cpu")}, batch_delay=0.01) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser: Any, server: Live) -> Iterator[Any]:
    with visit(browser, server.url) as opened:
        yield opened


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    levels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    Image.fromarray(levels).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def opened(page: Any, picture: Path) -> None:
    page.click("#tab-edit")
    page.set_input_files("#file", str(picture))
    page.wait_for_selector("#mask")


def stroke(page: Any, left: float, top: float, right: float, bottom: float) -> None:
    """Paints a line between two places, in shares of the picture."""
    box = page.locator("#mask").bounding_box()
    places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in ((left, top), (right, bottom))]
    page.mouse.move(*places[0])
    page.mouse.down()
    page.mouse.move(*places[1], steps=4)
    page.mouse.up()


def painted(page: Any) -> float:
    """The painted share of the picture."""
    share: float = page.evaluate("""async () => {
        await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));  // until the page has drawn
        const canvas = document.querySelector('#mask');
        const levels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        return levels.filter((level, index) => index % 4 === 3 && level > 127).length / canvas.width / canvas.height; }""")
    return share


def shown(page: Any) -> np.ndarray[Any, Any]:
    source = page.get_attribute(".frame > img", "src")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).convert("RGB"))


def test_only_what_is_painted_changes(page: Any, picture: Path) -> None:
    opened(page, picture)
    page.keyboard.press("]")
    stroke(page, 0.3, 0.25, 0.7, 0.25)
    assert 0.15 < painted(page) < 0.5
    page.click("#send")
    page.wait_for_selector("[data-edited]")
    original = np.asarray(Image.open(picture))
    changed = (shown(page) != original).any(axis=2)
    assert changed[20:44, 50:78].mean() > 0.9 and not changed[SIDE * 5 // 8 :].any()
    assert page.inner_text("#from-text") == "by the mask"
    page.locator("#hold").hover()
    page.mouse.down()
    assert np.array_equal(shown(page), original)
    page.mouse.up()
    assert not np.array_equal(shown(page), original)
    page.click("#again")
    assert painted(page) > 0.15  # the mask is still there
    page.click("#send")
    page.wait_for_selector("[data-edited]")
    page.click("#reuse")
    page.wait_for_selector("#mask")
    assert painted(page) == 0


def test_strokes_are_taken_back_erased_inverted_and_cleared(page: Any, picture: Path) -> None:
    opened(page, picture)
    stroke(page, 0.2, 0.2, 0.8, 0.2)
    one = painted(page)
    stroke(page, 0.2, 0.7, 0.8, 0.7)
    both = painted(page)
    assert both > 1.5 * one > 0
    page.keyboard.press("Control+z")
    assert painted(page) == one
    page.keyboard.press("x")
    assert page.is_checked("#erase")
    stroke(page, 0.2, 0.2, 0.5, 0.2)
    assert 0 < painted(page) < one
    page.click("#undo")
    page.click("#invert")
    assert abs(painted(page) - (1 - one)) < 0.02
    page.click("#clear")
    assert painted(page) == 0
    page.click("#undo")
    page.click("#undo")
    assert painted(page) == one


def test_edges_are_extended_and_the_picture_stays_inside(page: Any, picture: Path) -> None:
    opened(page, picture)
    page.focus('[aria-label="Extend right"]')
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    assert page.get_attribute('[aria-label="Extend right"]', "aria-valuenow") == "64"
    width, height = map(int, page.inner_text("#size-text").partition(",")[0].split(" × "))
    assert width > height  # the shape follows the picture
    page.click("#send")
    page.wait_for_selector("[data-edited]")
    assert shown(page).shape == (height, width, 3)


def test_a_generated_picture_is_edited_everywhere_from_a_stage_on(page: Any) -> None:
    generated(page)
    page.click("#edit")
    page.wait_for_selector("#mask")
    page.locator("#from").fill("6")
    assert page.inner_text("#from-text") == "7 of 7"
    page.fill("#prompt", "a green apple")
    page.click("#send")
    page.wait_for_selector("[data-edited]")
    page.click("#tab-history")
    page.wait_for_selector(".gallery figure:nth-of-type(2)")
    assert page.locator(".gallery figure").count() == 2
    page.click(".gallery figure:first-child button")
    assert "Not restored" in page.inner_text(".banner.note")  # the page says that this picture came from an edit


def test_a_picture_is_dropped_and_something_else_is_refused(page: Any, picture: Path) -> None:
    drop = """async ([bytes, type]) => { const transfer = new DataTransfer();
        transfer.items.add(new File([new Uint8Array(bytes)], 'dropped', {type}));
        dispatchEvent(new DragEvent('drop', {dataTransfer: transfer})); }"""
    page.click("#tab-edit")
    page.click("#send")
    assert "Choose a picture first" in page.inner_text(".banner")
    page.evaluate(drop, [list(b"no picture"), "text/plain"])
    page.wait_for_function("document.querySelector('.banner').innerText.includes('dropped is not a picture')")
    page.evaluate(drop, [list(picture.read_bytes()), "image/png"])
    page.wait_for_selector("#mask")


@pytest.mark.parametrize("width, height", [(1280, 860), (390, 844)])
def test_everything_fits_and_a_finger_paints(width: int, height: int, browser: Any, server: Live, picture: Path) -> None:
    with visit(browser, server.url, viewport={"width": width, "height": height}, has_touch=True) as page:
        opened(page, picture)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        box = page.locator("#mask").bounding_box()
        page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_function("!document.querySelector('#undo').disabled")
        assert painted(page) > 0
