"""What the pages show comes from the results file and from the library as it is."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.cells import shown_method, with_tables
from benchmarks.pictures import quality_svg, stage_times_svg
from benchmarks.results import RESULTS
from benchmarks.speed_tables import SUMMARY_METHODS, pictured_row
from benchmarks.tables import FRONTIER, PICTURE, PROJECT, README, TUNED, judged_runs, page_tables
from nextscale import MODELS
from nextscale.eval.results import read_rows
from nextscale.methods import method_names
from nextscale.profiles import Profile

PAGES = [
    README,
    PROJECT / "CHANGELOG.md",
    PROJECT / "ARCHITECTURE.md",
    PROJECT / "training" / "README.md",
    *(PROJECT / "docs").rglob("*.md"),
    *(PROJECT / "research").glob("*.md"),
    *(PROJECT / "research" / "notes").glob("*.md"),
    *(PROJECT / "nextscale" / "assets").glob("*/*.md"),
]
LONGEST_README = 110


def test_tables_and_pictures_are_the_generated_ones() -> None:
    rows = read_rows(RESULTS)
    for page, tables in page_tables(rows).items():
        assert all(tables.values()), f"{page.name}: a table has no rows"
        assert page.read_text() == with_tables(page.read_text(), tables), f"{page.name}: run python -m benchmarks.tables"
    pictured = pictured_row(rows)
    assert FRONTIER.read_text() == quality_svg(judged_runs(rows)[-1]), "run python -m benchmarks.tables"
    assert pictured is not None and PICTURE.read_text() == stage_times_svg(pictured), "run python -m benchmarks.tables"


def test_the_readme_is_short_and_shows_every_method_beside_plain_skipping() -> None:
    page = README.read_text()
    assert len(page.splitlines()) <= LONGEST_README
    for name in SUMMARY_METHODS:
        assert f"\n| {shown_method(name)} |" in page, f"{name} has no row"


def test_what_the_readme_says_of_quality_is_what_was_measured() -> None:
    """At published settings no method is nearer to dense images than skipping at its speed, intervals apart; a tuned point is."""
    found = {row["method"]: row for row in judged_runs(read_rows(RESULTS))[-1]}
    skipped = [(row["speedup"]["median"], row["lpips"]["low"]) for name, row in found.items() if name.startswith("skip the last")]
    for name in ("SparseVAR", "FastVAR", "StageVAR"):
        row = found[name]
        assert row["lpips"]["high"] >= between(sorted(skipped), row["speedup"]["median"])
    profile = Profile.load(TUNED)
    beaten = [one for one in profile.skipping if one.speedup.high <= profile.points[-1].speedup.value]
    assert len(beaten) == 2
    for skipping in beaten:
        better = profile.nearest(speedup=skipping.speedup.high)
        assert better.lpips.high < skipping.lpips.low
        assert "sparsevar:keep" in better.method and "dropguidance" in better.method


def between(line: list[tuple[float, float]], place: float) -> float:
    """What a line of points has there."""
    (low, first), (high, last) = next(pair for pair in pairwise(line) if pair[1][0] >= place)
    return first + (last - first) * (place - low) / (high - low)


def test_every_model_and_method_is_listed() -> None:
    """Names share a prefix within a row: `infinity-2b` `-8b`."""
    listed = set()
    others = (README.parent / "docs" / "methods" / "others.md").read_text().partition("## Plug-ins")[2]
    for row in re.findall(r"^\| (`[^`,]+`(?: `[^`]+`)*) \|", README.read_text() + others, re.MULTILINE):
        names = re.findall(r"`([^`]+)`", row)
        family = names[0].partition("-")[0]
        listed |= {name if not name.startswith("-") else family + name for name in names}
    assert listed == (set(MODELS) | set(method_names())) - {"dense"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
