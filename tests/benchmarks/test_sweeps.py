"""Sweeps: which run is shown, and its table and figure."""

from __future__ import annotations

import pytest

from benchmarks.sweeps import SWEEPS, sweeps_svg, sweeps_table, swept
from nextscale.eval.results import Row
from nextscale_research.quality.lists import LISTS


def row(method: str, images: int = 500, **changes: object) -> Row:
    interval = {"value": 0.1, "low": 0.08, "high": 0.12}
    conditions = {"model": "nano", "size": [512, 512], "images": images, "seed": 0, "batch": 32, "dtype": "bfloat16", "hardware": "GPU"}
    measured = {"speedup": {"median": 2.0}, "cost_share": 0.5, "lpips": interval, "psnr": interval, "frechet_dense": interval}
    return {"benchmark": "quality", "method": method, **conditions, **measured, **changes}


def test_the_run_with_most_lists_is_shown() -> None:
    taus, ratios = (list(LISTS[name](13, 8)) for name in ("sparsevar-taus", "fastvar-ratios"))
    whole = [row(name) for name in ("dense", "skip:last=1", *taus, *ratios)]
    tried = [row(name, images=16) for name in ("dense", *taus)]
    failed = row("anchors 2", error="ValueError: no")
    dense, lists = swept([*whole, failed, *tried])
    assert dense["images"] == 500 and [*lists] == ["sparsevar-taus", "peers-shares", "fastvar-ratios"]
    assert [one["method"] for one in lists["sparsevar-taus"]] == ["skip:last=1", *taus]
    table = sweeps_table(dense, lists)
    assert "| SparseVAR: threshold (tables 1 to 3) | tau 0.4 | 2.00 | 50% | 0.100 (0.080 to 0.120) | 0.1 dB | 0.1 (0.1 to 0.1) |" in table
    svg = sweeps_svg(lists)
    assert svg.count("<svg") == 1 and "SparseVAR: threshold" in svg
    with pytest.raises(SystemExit, match="quality --method LIST"):
        swept([row("dense"), row("skip:last=1")])
    assert {*SWEEPS} <= {*LISTS}
