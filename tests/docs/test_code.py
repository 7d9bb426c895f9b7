"""Code of the pages runs, with a model of nano's sizes and fewer layers; blocks with a title say why they do not, or name their file."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import nextscale
import nextscale.loading
from nextscale.cli import app
from tests.conftest import PROJECT
from tests.docs.test_examples import small_nano

SITE = sorted((PROJECT / "docs").rglob("*.md"))
OF_OTHERS = {"Infinity's repository", "VAR's repository", "diffusers"}  # programs of others
FENCE = re.compile(r'^ *```(python|bash)(?: title="(.*?)")?\n(.*?)^ *```', re.DOTALL | re.MULTILINE)
SNIPPET = re.compile(r'--8<-- "(.*?)"')


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """Yields language, title and code of the blocks of a page."""
    for language, title, code in FENCE.findall(page.read_text(encoding="utf-8")):
        snippet = SNIPPET.search(code)
        yield language, title, (PROJECT / snippet[1]).read_text() if snippet else dedent(code)


def python_blocks(page: Path) -> list[tuple[str, str]]:
    return [(title, code) for language, title, code in blocks(page) if language == "python"]


def run_blocks(page: Path) -> list[tuple[str, str]]:
    return [(language, code) for language, title, code in blocks(page) if not title or title.endswith(".py")]


RUN = [page for page in SITE if run_blocks(page)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (nextscale, nextscale.loading):
        monkeypatch.setattr(module, "load", lambda name, **_: small_nano(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(PROJECT / "docs")))
def test_code_runs(page: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses look their module up
    names: dict[str, Any] = vars(module)
    names |= {"torch": torch, "nextscale": nextscale}
    for language, code in run_blocks(page):
        if language == "python":
            exec(compile(code, str(page), "exec"), names)
            continue
        for line in code.splitlines():
            words = line.partition("  #")[0].split(maxsplit=1)
            if words:
                assert words[0] == "nextscale", f"{page.name}: give the block a title that says what it needs: {line}"
                run_command(words[1])


def run_command(text: str) -> None:
    found = CliRunner().invoke(app, shlex.split(text))
    assert found.exit_code == 0, f"nextscale {text}: {found.output}"


def test_most_pages_have_code_that_runs() -> None:
    assert len(RUN) > 10
