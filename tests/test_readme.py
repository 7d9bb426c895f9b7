"""What the README shows comes from the results file and from the library as it is."""

from __future__ import annotations

import re

from benchmarks.results import RESULTS
from benchmarks.table import (
    FRONTIER,
    METHODS_PAGE,
    PICTURE,
    PROJECT,
    README,
    decisions_table,
    judged_runs,
    plans_table,
    with_readme_tables,
    with_tables,
)
from nextscale import MODELS
from nextscale.lab.bench.tables import pictured_row, stages_svg
from nextscale.lab.evals.frontier import frontier_svg
from nextscale.lab.results import read_rows


def test_tables_and_picture_are_the_generated_ones() -> None:
    rows = read_rows(RESULTS)
    assert README.read_text() == with_readme_tables(README.read_text(), rows), "run python -m benchmarks.table"
    page = METHODS_PAGE.read_text()
    tables = {"plans": plans_table(), "decisions": decisions_table(read_rows(RESULTS))}
    assert page == with_tables(page, tables), "run python -m benchmarks.table"
    pictured = pictured_row(rows)
    assert FRONTIER.read_text() == frontier_svg(judged_runs(rows)[-1]), "run python -m benchmarks.table"
    assert pictured is not None and PICTURE.read_text() == stages_svg(pictured), "run python -m benchmarks.table"


def test_every_model_is_listed() -> None:
    """Names share a prefix within a row: `infinity-2b` `-8b`."""
    listed = set()
    for row in re.findall(r"^\| (`.*?) \|", README.read_text(), re.MULTILINE):
        names = re.findall(r"`([^`]+)`", row)
        family = names[0].partition("-")[0]
        listed |= {name if not name.startswith("-") else family + name for name in names}
    assert listed == set(MODELS)


def test_links_lead_somewhere() -> None:
    pages = [README, *(PROJECT / "docs").glob("*.md"), *(PROJECT / "nextscale" / "weights").glob("*/*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"
