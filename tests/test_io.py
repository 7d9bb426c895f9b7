"""Files that are opened: what never ends is refused, whoever reads it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nextscale.errors import NextscaleError
from nextscale.io import regular
from nextscale.methods.stagevar_ranks import read_rank_table
from nextscale.offline.prompts import read_sample_prompts
from nextscale.tune.log import TrialLog
from nextscale_research.methods.skipvar_models import decisions_named

READERS: dict[str, Callable[[Path], Any]] = {
    "ranks.json": read_rank_table,
    "models.json": lambda file: decisions_named(str(file)),
    "shard.tar": lambda file: list(read_sample_prompts(file)),
    "x.trials.jsonl": TrialLog.read,
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(NextscaleError, match="a pipe or a device|a regular file"):
        READERS[name](tmp_path / name)


def test_files_links_and_what_is_absent_are_left_to_the_reader(tmp_path: Path) -> None:
    (tmp_path / "a.json").touch()
    (tmp_path / "link.json").symlink_to("a.json")
    (tmp_path / "loop.json").symlink_to("loop.json")
    for name in ("a.json", "link.json", "loop.json", "absent.json", "."):
        assert regular(tmp_path / name) == tmp_path / name
    with pytest.raises(OSError, match="a pipe or a device"):
        regular(Path("/dev/null"))
