"""Takes the pictures of docs/guides/serve.md: the studio of a running server, in chromium.

nextscale serve --port 8000 &
python -m benchmarks.studio_pictures http://127.0.0.1:8000
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).parent.parent / "docs" / "studio"
CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
MINUTES = 5 * 60_000  # milliseconds
LAPTOP, DESKTOP, PHONE = (1280, 800), (1920, 1080), (390, 844)
TRIES = 4  # of a comparison, until its rounds agree
FASTER = "input[name=speed][value='auto:speedup=2']"


def shot(page: Any, size: tuple[int, int], scheme: str) -> Image.Image:
    page.set_viewport_size({"width": size[0], "height": size[1]})
    page.emulate_media(color_scheme=scheme)
    page.mouse.move(0, 0)
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(300)
    return Image.open(io.BytesIO(page.screenshot()))


def store(name: str, picture: Image.Image) -> None:
    picture.save(FOLDER / f"{name}.webp", quality=72, method=6)


def beside(pictures: list[Image.Image], gap: int = 24) -> Image.Image:
    row = Image.new("RGB", (sum(picture.width + gap for picture in pictures) - gap, pictures[0].height), (128, 132, 140))
    for place, picture in enumerate(pictures):
        row.paste(picture, (place * (picture.width + gap), 0))
    return row


def run(page: Any, done: str) -> None:
    page.click("#send")
    page.wait_for_selector("#stop")
    page.wait_for_selector("#send")
    page.wait_for_selector(done)


def pictures(page: Any) -> None:
    empty = shot(page, PHONE, "light")
    page.set_viewport_size({"width": LAPTOP[0], "height": LAPTOP[1]})
    page.fill("#prompt", "a 3D icon of a red apple")
    run(page, "#used-seed")  # at best quality, as the reference of the next one
    page.check(FASTER, force=True)
    run(page, "#likeness:not(:text('–'))")
    store("generate", shot(page, LAPTOP, "light"))
    page.click(".switch")
    page.wait_for_selector(".mask")
    store("computed", shot(page, LAPTOP, "dark"))
    shot(page, PHONE, "dark")
    page.click("summary >> nth=0")
    store("phone", beside([empty, shot(page, PHONE, "dark")]))
    page.set_viewport_size({"width": LAPTOP[0], "height": LAPTOP[1]})
    page.click("#tab-compare")
    page.fill("#prompt", "a green frog")
    for _ in range(TRIES):
        run(page, "#rounds:text('3 of 3')")
        if not page.locator(".result .note").count():
            break
    store("compare", shot(page, DESKTOP, "light"))
    page.click("#tab-grid")
    page.fill("#prompt", "a flat icon of a red car")
    run(page, ".sheet img >> nth=8")
    store("grid", shot(page, DESKTOP, "dark"))
    page.set_viewport_size({"width": LAPTOP[0], "height": LAPTOP[1]})
    page.click("#tab-blind")
    page.click("text=Start voting")
    page.wait_for_selector(".pair img >> nth=1")
    store("blind", shot(page, LAPTOP, "light"))


def main(address: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": PHONE[0], "height": PHONE[1]})
        page.set_default_timeout(MINUTES)
        page.goto(address)
        page.wait_for_selector("#prompt")
        pictures(page)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
