"""The pictures of docs/serving.md: the studio of a running server, in chromium.

nextscale serve --port 8000 &
python -m benchmarks.studio_pictures http://127.0.0.1:8000
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parent.parent / "docs"
MINUTES = 5 * 60_000  # milliseconds: a CPU takes its time


def picture(page: Any, name: str) -> None:
    shot = Image.open(io.BytesIO(page.screenshot()))
    shot.save(DOCS / f"{name}.webp", quality=80, method=6)


def generate(page: Any) -> None:
    page.click("aside button.primary")
    page.wait_for_selector("aside button.primary:not([disabled])")


def main(address: str) -> None:
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 640})
        page.set_default_timeout(MINUTES)
        page.goto(address)
        page.fill("#prompt", "a 3D icon of a red apple")
        generate(page)  # dense, so that the bars can be compared
        page.fill("#method", "fastvar:ratios={8: 0.4, 9: 0.5}")
        generate(page)
        page.check("text=darker where less of the network ran")
        picture(page, "studio-stages")
        page.click("#tab-compare")
        page.fill("#method", "skip:last=2")
        page.click("text=Compare with dense")
        page.wait_for_function("() => document.querySelector('#psnr')?.innerText.endsWith('dB')")
        picture(page, "studio-compare")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
