"""The studio for everybody: on a phone, in the dark, with a key, and as axe-core judges it."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nextscale
from tests.helpers.serving import Live, live
from tests.helpers.studio import MARKS, chromium, generated, visit

pytestmark = MARKS
AXE = "axe-core@4.14.1"
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live({"nano": nextscale.load("nano", device="cpu")}, batch_delay=0.05) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, from the package index of npm."""
    if (npm := shutil.which("npm")) is None:
        pytest.skip("no npm here, which fetches axe-core")
    folder = tmp_path_factory.mktemp("axe")
    fetched = subprocess.run([npm, "pack", "--silent", AXE], cwd=folder, capture_output=True, text=True, timeout=60)
    if fetched.returncode:
        pytest.skip(f"npm cannot fetch {AXE}: {fetched.stderr.strip()[-200:]}")
    with tarfile.open(next(Path(folder).glob("*.tgz"))) as package:
        content = package.extractfile("package/axe.min.js")
        assert content is not None
        return content.read().decode()


def test_a_phone_shows_the_picture_first_and_nothing_overflows(browser: Any, server: Live) -> None:
    with visit(browser, server.url, **PHONE) as page:
        generated(page)
        frame = page.locator(".frame").bounding_box()
        assert frame["y"] >= 0 and frame["y"] + frame["height"] <= PHONE["viewport"]["height"]  # all of it, wherever the form was scrolled
        page.click("#tab-grid")
        page.uncheck(".chips input >> nth=0")
        page.uncheck(".chips input >> nth=1")
        page.click("#send")
        page.wait_for_selector(".sheet img >> nth=2")
        for view in ("generate", "edit", "compare", "grid", "blind", "history"):
            page.click(f"#tab-{view}")
            page.wait_for_selector(f'#tab-{view}[aria-current="page"]')
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
            sizes = page.locator("input:visible:not([type=range]):not([type=radio]):not([type=checkbox]), select:visible, textarea:visible")
            assert all(
                float(size) >= 16 for size in sizes.evaluate_all("nodes => nodes.map(node => parseFloat(getComputedStyle(node).fontSize))")
            )
            assert not page.locator(".keys").first.is_visible()
        page.click("#tab-generate")
        page.wait_for_selector("#prompt")
        if page.locator("#seed").is_visible():
            page.click(".form > details > summary")
        page.set_viewport_size({"width": 844, "height": 390})  # turned: no summary is left to open the options
        page.wait_for_selector("#seed")
        page.set_viewport_size(PHONE["viewport"])
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.set_viewport_size({"width": 360, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.set_viewport_size(PHONE["viewport"])
        top = [page.locator(name).bounding_box()["y"] for name in (".frame", "#prompt", "#send")]
        assert top == sorted(top) and top[2] < 844


def test_the_picture_is_as_large_as_the_window_allows(browser: Any, server: Live) -> None:
    cut = "nodes => nodes.filter(node => node.scrollWidth > node.clientWidth).map(node => node.innerText)"
    with visit(browser, server.url) as page:
        generated(page)
        for width, height in ((1280, 720), (1280, 800), (1920, 1080)):
            page.set_viewport_size({"width": width, "height": height})
            assert page.locator(".frame").bounding_box()["width"] > 0.68 * height
            assert page.locator(".tools").bounding_box()["y"] < height - 30
            assert page.locator(".tiles span, .figures dd, button").evaluate_all(cut) == []


def test_colors_follow_the_system_until_they_are_chosen(browser: Any, server: Live) -> None:
    color = "getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g).reduce((sum, one) => sum + Number(one), 0)"
    dark, light = f"() => {color} < 150", f"() => {color} > 600"
    with visit(browser, server.url, color_scheme="dark") as page:
        page.wait_for_function(dark)
        page.click("#theme")
        page.wait_for_function(light)
        page.reload()
        page.wait_for_selector("#theme")
        page.wait_for_function(light)
        page.click("#theme")
        page.emulate_media(color_scheme="light")
        page.wait_for_function(dark)


def test_a_key_is_asked_for(browser: Any) -> None:
    with (
        live({"nano": nextscale.load("nano", device="cpu")}, api_keys=("k" * 20,)) as server,
        visit(browser, server.url) as page,
    ):
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-problem")
        page.fill("#key", "k" * 20)
        page.keyboard.press("Enter")
        page.wait_for_selector("#prompt")


def test_axe_finds_nothing_serious(browser: Any, server: Live, axe: str) -> None:
    found: list[str] = []
    with visit(browser, server.url) as page:

        def judge(where: str) -> None:
            page.evaluate(f"window.axe || (() => {{ {axe} }})()")
            for scheme, rules in (("dark", "{runOnly: ['color-contrast']}"), ("light", "{}")):
                page.emulate_media(color_scheme=scheme)
                violations = page.evaluate(f"axe.run({rules}).then((answer) => answer.violations)")
                found.extend(f"{where}, {scheme}: {one['impact']} {one['id']} {one['nodes'][0]['html'][:120]}" for one in violations)

        judge("empty")
        page.click("#tab-grid")
        page.fill("#count", "1")
        page.click("#send")
        page.wait_for_function("() => document.querySelectorAll('.sheet img').length === 3")
        judge("grid")
        page.click(".sheet td button >> nth=0")
        judge("enlarged")
        page.keyboard.press("Escape")
        for view in ("compare", "blind", "history"):
            page.click(f"#tab-{view}")
            page.wait_for_selector(f'#tab-{view}[aria-current="page"]')
            judge(view)
        page.click("#tab-generate")
        generated(page)
        page.click(".switch")
        page.wait_for_selector(".mask")
        judge("generated")
        page.click("#edit")
        page.wait_for_selector("#mask")
        judge("edit")
        page.click("#tab-generate")
        page.fill("#seed", "99999999999999999999")
        page.click("#send")
        page.wait_for_selector("#seed-problem")
        judge("error")
        page.fill("#seed", "7")
        page.click("#tab-compare")
        page.click("#send")
        page.wait_for_selector("#distance")
        judge("compared")
        page.keyboard.press("Escape")
        page.wait_for_selector("#send")
        page.click("#tab-blind")
        page.click("text=Start voting")
        page.wait_for_selector(".pair img >> nth=1")
        judge("ballot")
    assert found == []
