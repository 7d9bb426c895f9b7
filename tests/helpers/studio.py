"""The studio in chromium, driven headless."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.helpers.serving import SECONDS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
MARKS = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: install it (apt-get install chromium) to test the studio in a browser"),
]
EXPECTED = ("status of 400", "status of 401", "ERR_CONNECTION")  # browser messages about responses that the page shows
SIZE, STAGES = "128x128", 7
PROMPT = "a 3D icon of a red apple"


@contextmanager
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@contextmanager
def visit(browser: Any, url: str, **context: Any) -> Iterator[Any]:
    """Opens the studio at the smallest size of squares. Complaints of the page fail the test."""
    where = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, "accept_downloads": True} | context)
    page = where.new_page()
    page.set_default_timeout(1000 * SECONDS)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console",
        lambda message: (
            complaints.append(message.text) if message.type == "error" and not any(text in message.text for text in EXPECTED) else None
        ),
    )
    page.goto(url)
    page.wait_for_selector("#prompt, #key")
    if page.locator("#prompt").count():
        page.fill("#prompt", PROMPT)
        page.locator("#size").evaluate(
            "node => { node.closest('details').open = true; node.value = 0; node.dispatchEvent(new Event('input', {bubbles: true})); }"
        )
        assert page.inner_text("#size-text") == f"128 × 128, {STAGES} stages"
    yield page
    where.close()
    assert not complaints


def method(page: Any, text: str) -> None:
    """Writes a method into the form."""
    if not page.locator("#method").count():
        page.check("input[name=speed][value=more]")
    page.fill("#method", text)


def generated(page: Any, text: str | None = None) -> None:
    """Generates a picture, which is the first of the page."""
    if text is not None:
        method(page, text)
    page.click("#send")
    page.wait_for_selector("#send")
    page.wait_for_selector("#used-seed")
