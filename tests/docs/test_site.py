"""The site builds without warnings, and loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs"), pytest.importorskip("material"), pytest.importorskip("mkdocstrings")
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(target)]
    found = subprocess.run(command, cwd=PROJECT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    return target


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > 30
    for page in pages:
        loaded = re.findall(r'<(?:script|img|iframe|link)[^>]*?(?:src|href)="(https?://[^"]*)"', page.read_text(encoding="utf-8"))
        assert loaded == [], page


def test_reference_pages_come_from_the_program(site: Path) -> None:
    text = {name: (site / "reference" / f"{name}.html").read_text(encoding="utf-8") for name in ("cli", "http", "python")}
    assert "--kv-dtype" in text["cli"] and 'id="calibrate"' in text["cli"]
    assert "stop_after_stage" in text["http"] and "/v1/models" in text["http"]
    assert 'id="nextscale.Pipeline.accelerate"' in text["python"] and "guidance_off" in text["python"]
    assert "<!-- " not in re.sub(r"<!-- (?!commands|http|readme).*?-->", "", "".join(text.values()), flags=re.DOTALL)
