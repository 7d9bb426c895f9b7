"""Rows of different length, one after another: the layout itself, and that it changes what is run but not what comes out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nextscale import FastVAR, Method, SparseVAR, StagePlan, StageVAR
from nextscale.cache.attention import attend, attend_rows
from nextscale.engine.variants import BUCKETS, buckets
from nextscale.generate import StageOutput
from nextscale.methods import Combined
from nextscale.pipeline import Output, Preview
from nextscale.planning.cost import split_evenly
from nextscale.stage import Stage, Tokens
from nextscale.varlen import VarlenLayout
from nextscale_research.methods import LiteVAR, ScaleKV, ToMe, ZipVL
from tests.engine.test_engine import with_graphs
from tests.helpers import tiny
from tests.helpers.tape import Dispatched, play_graphs_on_the_cpu
from tests.helpers.toy_methods import keeping

STAGE = Stage(2, 2, 3, start=5, last=False)
INDEX = torch.tensor([[0, 2, 5, 5], [1, 1, 1, 1], [0, 1, 3, 4]])
COUNT = torch.tensor([3, 1, 4], dtype=torch.int32)
CELLS = [0, 2, 5, 1, 0, 1, 3, 4]


def tokens(total: int = 8, prefix: int = 0) -> Tokens:
    """Three images in two cfg branches."""
    return Tokens(STAGE, INDEX, COUNT).packed(3, total).repeat(2).with_prefix(prefix)


# --- the layout


def test_images_follow_one_another() -> None:
    packing = VarlenLayout.of(INDEX, COUNT, total=8)
    assert packing.cell.tolist() == CELLS
    assert packing.image.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert packing.place.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert packing.cu_seqlens.tolist() == [0, 3, 4, 8] and packing.cu_seqlens.dtype == torch.int32
    assert (packing.images, packing.total, packing.width) == (3, 8, 4)


def test_padding_stands_for_the_last_token_and_nobody_reads_it() -> None:
    packing = VarlenLayout.of(INDEX, COUNT, total=11)
    assert packing.cell.tolist() == [*CELLS, 4, 4, 4]
    assert packing.cu_seqlens.tolist() == [0, 3, 4, 8]
    x = torch.arange(2 * 11.0).view(2, 11, 1)
    lost = x.clone()
    lost[:, 8:] = torch.nan
    assert torch.equal(packing.unpack(lost), packing.unpack(x))
    assert packing.repeat_last(lost)[1, :, 0].tolist() == [*range(11, 19), 18, 18, 18]


def test_too_few_entries_hold_the_first_tokens() -> None:
    """Such graphs are captured and never replayed: nothing may lie outside."""
    packing = VarlenLayout.of(INDEX, COUNT, total=5)
    assert packing.cell.tolist() == CELLS[:5]
    assert packing.cu_seqlens.tolist() == [0, 3, 4, 5]
    assert packing.unpack(torch.arange(5.0)[None, :, None]).shape == (3, 4, 1)


@pytest.mark.parametrize("total", [8, 12])
def test_rows_are_the_same_packed_and_padded(total: int) -> None:
    packed = tokens(total)
    grid = torch.randn(6, STAGE.cells, 5, generator=torch.Generator().manual_seed(0))
    rows = packed.gather(grid)  # padded
    assert packed.packing is not None
    assert torch.equal(packed.packing.gather(grid), packed.pack(rows))
    assert torch.equal(packed.unpack(packed.pack(rows)), rows)
    assert packed.pack(rows).shape == (2, total, 5)
    assert packed.pack(rows[:3, :, 0]).shape == (1, total)
    assert (packed.rows_of(packed.pack(rows)), packed.branch_size(3)) == (6, 1)
    of_rows = torch.arange(6.0).view(6, 1, 1)
    assert torch.equal(packed.unpack(packed.of_rows(of_rows)), of_rows.expand(6, 4, 1))
    padded = packed.unpacked()
    assert padded.packing is None and padded.pack(rows) is rows is padded.unpack(rows)
    assert (padded.rows_of(rows), padded.branch_size(3)) == (6, 3) and padded.of_rows(of_rows) is of_rows


@pytest.mark.parametrize("total", [8, 12])
def test_a_prefix_stands_before_the_tokens_of_every_image(total: int) -> None:
    packed, grid = tokens(total, prefix=2), tokens(total)
    padded = packed.unpacked()
    make = torch.Generator().manual_seed(0)
    rows, prefix = grid.gather(torch.randn(6, STAGE.cells, 5, generator=make)), torch.randn(6, 2, 5, generator=make)
    joined = packed.prepend(prefix, grid.pack(rows))
    assert joined.shape == (2, total + 6, 5)
    assert torch.equal(packed.unpack(joined), padded.prepend(prefix, rows))
    x, without = packed.on_grid(joined)
    assert torch.equal(without.unpack(x), rows) and without.prefix == 0
    assert packed.packing is not None
    assert packed.packing.cell.tolist()[:6] == [-2, -1, 0, 2, 5, -2]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("captured", [True, False])
def test_packed_queries_attend_to_their_own_row(known: bool, captured: bool) -> None:
    """In a capture by a mask, else row by row."""
    packed, make = tokens(8), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(6, length, 2, 4, generator=make) for length in (4, 9, 9))
    lengths = torch.tensor([9, 3, 5, 1, 9, 7]) if known else None
    assert packed.packing is not None
    found = attend_rows(packed.pack(q), k, v, lengths, 0.5, packing=packed.packing, captured=captured)
    for row in range(6):
        end = 9 if lengths is None else int(lengths[row])
        alone = attend(q[row, None], k[row, None, :end], v[row, None, :end], None, 0.5)
        count = int(COUNT[row % 3])
        torch.testing.assert_close(packed.unpack(found)[row, :count], alone[0, :count])


def test_a_plan_says_how_many_tokens_are_packed() -> None:
    StagePlan(num_tokens=4, packed=8).check_num_tokens(tokens(8))
    for plan in (StagePlan(num_tokens=4, packed=9), StagePlan(num_tokens=4)):
        with pytest.raises(ValueError, match="packed tokens, and 8 entered"):
            plan.check_num_tokens(tokens(8))
    with pytest.raises(ValueError, match="planned with 8 packed tokens, and None entered"):
        StagePlan(num_tokens=4, packed=8).check_num_tokens(tokens(8).unpacked())


def test_buckets_are_those_of_all_images_or_of_one() -> None:
    packed, padded = buckets(64, 3, packed=True), buckets(64, 3, packed=False)
    assert (max(packed), max(padded)) == (192, 64)
    assert {(counts.fewest, counts.most) for counts in packed.values()} == {(0, 64)}
    assert all(counts.total == size for size, counts in packed.items())
    assert all((counts.most, counts.total) == (size, 3 * size) for size, counts in padded.items())


def test_unknown_counts_are_even() -> None:
    assert split_evenly(11, 4) == [3, 3, 3, 2]


# --- generation

RAGGED = {family: SparseVAR(tau=0.97, alpha=3, beta=0.98, blocks=0) for family in tiny.FAMILIES} | {"flexvar": SparseVAR(0.9, blocks=0)}
WHOLE_CODES = {"hart": {"smooth": False}}


def generated(family: str, method: Method, **settings: Any) -> tuple[Output, list[StageOutput]]:
    seen: list[StageOutput] = []

    def look(preview: Preview) -> None:
        seen.append(preview.done)

    settings = {"seed": 11, **WHOLE_CODES.get(family, {}), **settings}
    return tiny.shared_pipeline(family)(tiny.prompts(family, 3), method=method, on_stage=look, **settings), seen


def packed_stages(seen: list[StageOutput]) -> list[int]:
    return [done.stage.index for done in seen if done.plan.packed is not None]


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("dropped", [None, "cond", "uncond"])
def test_images_are_those_of_padded_rows(family: str, dropped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both cfg branches and with one of them gone; the mask of what was computed is the same, and less is run."""
    method: Method = RAGGED[family]
    if dropped is not None:
        method = Combined((method, keeping(dropped, len(tiny.schedule_of(family)) - 1)))
    ours, seen = generated(family, method, compute_mask=True)
    assert packed_stages(seen)
    monkeypatch.setattr("nextscale.generate.packs", lambda request, planned: False)
    theirs, padded = generated(family, method, compute_mask=True)
    assert not packed_stages(padded)
    for one, other in zip(seen, padded, strict=True):
        assert one.known_counts == other.known_counts
        assert one.tokens is not None and other.tokens is not None and one.tokens.packing is None
        assert (one.tokens.index is None and other.tokens.index is None) or torch.equal(one.tokens.index, other.tokens.index)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(ours.codes, theirs.codes, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ours.compute_mask or (), theirs.compute_mask or (), strict=True))
    torch.testing.assert_close(ours.latent, theirs.latent, rtol=0, atol=2e-4 if family == "hart" else 1e-5)
    assert ours.report.padding == 0 < theirs.report.padding
    assert ours.report.cost_share < theirs.report.cost_share


@pytest.mark.parametrize("family", ["infinity", "star"])
def test_texts_of_any_length_and_guided_hidden_states(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both rows of a pair read texts of their own; guidance after a block mixes packed rows."""
    negative = tiny.text_features(family, (2, 7, 5), seed=3)
    guidance = replace(tiny.shared_pipeline(family).settings.guidance, layers=(1,))
    for settings in ({"negative": negative}, {"guidance": guidance}):
        with monkeypatch.context() as patch:
            ours, seen = generated(family, RAGGED[family], **settings)
            patch.setattr("nextscale.generate.packs", lambda request, planned: False)
            theirs, _ = generated(family, RAGGED[family], **settings)
        assert packed_stages(seen)
        torch.testing.assert_close(ours.latent, theirs.latent, rtol=0, atol=1e-5)


def test_rows_that_agree_are_not_packed() -> None:
    for method in (SparseVAR(tau=0.0, blocks=0), SparseVAR(keep=0.4)):
        _, seen = generated("infinity", method)
        assert packed_stages(seen) == []
        assert all(isinstance(done.num_tokens, int) for done in seen)
    alone = tiny.shared_pipeline("infinity")(tiny.one_prompt("infinity", 0), seed=11, method=RAGGED["infinity"])
    assert alone.report.padding == 0


SPANS = {
    "tome": (2, ToMe(stages=(3,))),
    "fastvar": (2, FastVAR({3: 0.3}, cache_stage=1)),
    "stagevar": (3, StageVAR(99, {3: 0.96}, ranks=0.3)),
}


@pytest.mark.parametrize("name", SPANS)
def test_stages_with_spans_keep_padded_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their forecast says so before anything runs; the other stages of the request are packed, and images are those of padded rows."""
    first, spans = SPANS[name]
    method = Combined((SparseVAR(tau=0.7, alpha=3, metric="image", first_stage=first), spans))
    pipe = tiny.shared_pipeline("infinity")
    plans = method.forecast(pipe.model, tiny.schedule_of("infinity"))
    ours, seen = generated("infinity", method)
    ragged = [done.stage.index for done in seen if len(set(done.known_counts or ())) > 1]
    assert ragged == list(range(first, len(seen)))
    assert packed_stages(seen) == [stage for stage in ragged if not plans[stage].spans]
    assert plans[-1].spans and isinstance(seen[-1].num_tokens, int)
    monkeypatch.setattr("nextscale.generate.packs", lambda request, planned: False)
    theirs, _ = generated("infinity", method)
    torch.testing.assert_close(ours.latent, theirs.latent, rtol=0, atol=1e-4)


OWN_CACHES = [ScaleKV(budgets={1: 3, 2: 6}, window=2), ZipVL(), ZipVL(tau=0.9), LiteVAR(width=1)]


@pytest.mark.parametrize("beside", OWN_CACHES, ids=lambda method: method.label)
@pytest.mark.parametrize("family", ["var_shared", "infinity", "hart"])
def test_caches_of_other_methods_have_padded_rows(family: str, beside: Method) -> None:
    """Images are those of batches of one."""
    method = Combined((RAGGED[family], beside))
    ours, seen = generated(family, method)
    assert any(len(set(done.known_counts or ())) > 1 for done in seen)
    assert packed_stages(seen) == []
    settings = {"method": method, **WHOLE_CODES.get(family, {})}
    alone = [tiny.shared_pipeline(family)(tiny.one_prompt(family, image), seed=11 + image, **settings).latent for image in range(3)]
    torch.testing.assert_close(ours.latent, torch.cat(alone), rtol=0, atol=2e-4 if family == "hart" else 1e-5)


# --- captured


@pytest.mark.parametrize("family", ["infinity", "hart", "star_refined"])
def test_a_captured_stage_pays_for_the_total(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are chosen by the tokens of all images, and fewer images than were captured pay for their own."""
    play_graphs_on_the_cpu(monkeypatch, BUCKETS)
    pipe, eager, method = with_graphs(family), tiny.shared_pipeline(family), RAGGED[family]
    pipe.warmup(tiny.prompts(family, 3), method=method)
    for images in (3, 2):
        seen: list[StageOutput] = []
        prompt = tiny.prompts(family, images)
        with monkeypatch.context() as patch:
            patch.setattr("nextscale.engine.captures.HOST_SECONDS", 1e9)
            ours = pipe(prompt, seed=[11, 12, 13][:images], method=method, on_stage=lambda preview: seen.append(preview.done))  # noqa: B023
        with Dispatched():
            theirs = eager(prompt, seed=[11, 12, 13][:images], method=method)
        assert (ours.report.engine, ours.report.captured_batch) == ("graphs", 3)
        torch.testing.assert_close(ours.latent, theirs.latent, rtol=1e-3, atol=1e-2 if family == "hart" else 1e-3)
        reduced = packed_stages(seen)
        assert reduced
        for stage in reduced:
            counts, cells = seen[stage].known_counts, seen[stage].stage.cells
            assert counts is not None and len(counts) == images
            assert ours.report.stages[stage].tokens >= sum(counts) / images
            assert ours.report.stages[stage].tokens * images - sum(counts) <= 3 * cells / 16 + 1
            assert 0 <= ours.report.stages[stage].padding < 1
        assert ours.report.cost_share >= theirs.report.cost_share
