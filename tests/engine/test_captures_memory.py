"""Memory that CUDA graphs read and write: live tensors are not overwritten, and tensors that graphs read are not freed.

Graphs are emulated on the CPU in memory that behaves like a GPU's capture pool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nextscale import DropGuidance, FastVAR, Method, SkipStages, SparseVAR, StageVAR
from nextscale.engine import captures
from nextscale.loading.load import random_pipeline
from nextscale.methods.combine import Combined
from nextscale.pipeline import Pipeline
from nextscale_research.methods import ToMe, litevar, sparvar
from tests.helpers import tiny
from tests.helpers.pooled_tape import play_pooled_graphs_on_the_cpu
from tests.helpers.tape import Dispatched
from tests.research.test_peers import PEERS, ROUTED, picked, pipeline_for, size_for, three_routes

METHODS: dict[str, Method] = {
    "dense": Method(),
    "skip": SkipStages(last=1),
    "fastvar": FastVAR(),
    "stagevar": StageVAR(guidance_off=2, ranks=0.3, kept_rows="cond"),
    "tome": ToMe(random=True),
    "sparsevar": SparseVAR(tau=0.95, first_stage=2),
    "sparsevar, content": SparseVAR(keep=0.3, first_stage=2, alpha=3, anchors="content"),
    "sparsevar, fading": Combined((SparseVAR(tau=0.95, first_stage=2), DropGuidance(2, fade=1))),
    **{name: method for name, (method, _) in PEERS.items()},
}


def with_graphs(pipe: Pipeline) -> Pipeline:
    return Pipeline(pipe.model, pipe.tokenizer, pipe.reader, pipe.settings, pipe.name, engine="graphs")


def forget_tables(pipe: Pipeline) -> None:
    """Fills the caches of tables with other sizes."""
    pipe._tables._tables.clear()
    litevar.band_mask.cache_clear()
    sparvar.visible_lists.cache_clear()


def assert_replayed(pipe: Pipeline, eager: Pipeline, prompt: Any, **asked: Any) -> None:
    """Requires a replay with the images of eager generation."""
    ours = pipe(prompt, **asked)
    with Dispatched():
        theirs = eager(prompt, **asked)
    assert ours.report.engine == "graphs"
    for mine, other in zip(ours.codes, theirs.codes, strict=True):
        if mine.shape == other.shape:  # buckets pad tokens to other numbers
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-3)
    torch.testing.assert_close(ours.latent, theirs.latent, rtol=1e-3, atol=1e-2 if "hart" in pipe.name else 1e-3)
    torch.testing.assert_close(ours.pixels, theirs.pixels, rtol=1e-2, atol=1e-2)


def test_a_replay_overwrites_what_was_not_alive_when_it_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the emulated pool: tensors created later, freed before, or without owners."""
    pool = play_pooled_graphs_on_the_cpu(monkeypatch)
    first, second, third = (torch.cuda.CUDAGraph() for _ in range(3))
    given = torch.ones(4)
    with first:
        kept = given + 1
        freed = kept * 2
    address = freed.untyped_storage()
    with second:
        later = kept + freed
    del freed
    assert pool.lost() == []
    alias = address.data_ptr()
    del address, given
    with third:
        last = later * 2
    assert pool.lost() == [[4]]
    for graph in (first, second, third):
        graph.replay()
    assert (kept[0].item(), later[0].item(), last[0].item()) == (2, 6, 12)
    dead = [memory.tensor for memory in pool.known.values() if memory.tensor.data_ptr() == alias]
    assert dead[0].isnan().all()  # overwritten by the third
    first.replay()
    assert later.isnan().all() and last.isnan().all() and kept.eq(2).all()


@pytest.mark.parametrize(
    ("name", "family"), [(name, family) for name in METHODS for family in (("infinity", "hart") if "," in name else tiny.KINDS)]
)
def test_replays_need_nothing_that_others_overwrite(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays two captures of one pool alternately."""
    pool = play_pooled_graphs_on_the_cpu(monkeypatch)
    eager = pipeline_for(name, family)
    pipe, settings = with_graphs(eager), size_for(name, family)
    for method in (METHODS[name], Method()):
        pipe.warmup(tiny.prompts(family, 2), method=method, **settings)
    forget_tables(pipe)
    assert pool.lost() == []
    for method, seed in ((METHODS[name], 3), (Method(), 4), (METHODS[name], 5)):
        assert_replayed(pipe, eager, tiny.prompts(family, 2), seed=seed, method=method, **settings)


@pytest.mark.parametrize(
    ("family", "beside"), [*((family, "alone") for family in tiny.KINDS), ("infinity", "scalekv"), ("infinity", "kv int8")]
)
def test_routes_need_nothing_that_others_overwrite(family: str, beside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routes are plain requests, whose captures are tested with every method above; here several are replayed alternately."""
    eager = tiny.shared_pipeline(family) if beside != "kv int8" else random_pipeline(tiny.SPECS[family], kv_dtype="int8")
    method = Combined((three_routes(eager, family, None, tmp_path), METHODS.get(beside, Method())))
    pool = play_pooled_graphs_on_the_cpu(monkeypatch)
    monkeypatch.setattr(captures, "HOST_SECONDS", 1e3)  # so that fewer images are padded
    pipe = with_graphs(eager)
    for chosen in (method, Method()):
        pipe.warmup(picked(family, range(3)), method=chosen)
    forget_tables(pipe)
    assert pool.lost() == []
    for images in (*ROUTED, [1, 2], [0]):
        asked = {"seed": [1 + image for image in images], "method": method}
        assert_replayed(pipe, eager, picked(family, images), **asked)
        assert_replayed(pipe, eager, picked(family, range(3)), seed=7)


FILLED = ([0, 0, 0, 0, 0, 1], [0, 1, 2, 2, 2, 2, 2], [2, 1, 2, 1, 1, 2, 1], [1, 1, 1, 1, 0, 1, 2], [0, 2, 0, 0, 0, 0])
"""Images of `three_routes`, of which five or six take one route: of six images all are run then, of seven a group is filled up."""


@pytest.mark.parametrize(("batch", "family"), [(6, "infinity"), (7, "hart")])
def test_groups_that_are_filled_up_change_no_image(batch: int, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = tiny.shared_pipeline(family)
    method = three_routes(eager, family, None, tmp_path)
    pool = play_pooled_graphs_on_the_cpu(monkeypatch)
    monkeypatch.setattr(captures, "HOST_SECONDS", 1e3)
    pipe = with_graphs(eager)
    pipe.warmup(picked(family, [0] * batch), method=method)
    assert pool.lost() == []
    rows = set()
    for images in FILLED:
        if len(images) <= batch:
            asked: dict[str, Any] = {"seed": [1 + image for image in images], "method": method}
            assert_replayed(pipe, eager, picked(family, images), **asked)
            ours, theirs = (one(picked(family, images), **asked).report for one in (pipe, eager))
            assert [stage.rows for stage in ours.stages] == [stage.rows for stage in theirs.stages]
            rows.add(tuple(stage.rows for stage in ours.stages))
    assert len(rows) > 1
