"""The results file: what a row must tell."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks.results import RESULTS
from nextscale.eval.results import read_rows
from tests.conftest import PROJECT


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=PROJECT, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(not (PROJECT / ".git").exists(), reason="not a checkout")
def test_every_row_names_a_commit_of_the_history() -> None:
    """Rows of the models' reference implementations ran none of ours."""
    if git("rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("the checkout has no history")
    rows = [row for row in read_rows(RESULTS) if row["benchmark"] != "reference"]
    history = git("rev-list", "HEAD").splitlines()
    named = {row.get("commit") for row in rows}
    absent = {name for name in named if not name or not any(commit.startswith(name) for commit in history)}
    assert not absent, "measure these rows again, or remove them"


def test_every_row_tells_its_machine() -> None:
    for row in read_rows(RESULTS):
        assert row["benchmark"] and row["hardware"] and row["date"], row
