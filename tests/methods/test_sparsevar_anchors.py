"""Anchors by content: they go where they resemble most of what is left out, and every computed cell propagates."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.errors import SettingError
from nextscale.methods.sparsevar import SparseVAR
from nextscale.methods.sparsevar_cells import MAX_BLOCKS, GridMap, anchor_cells, covering_cells, rounds, typical_cells
from nextscale.stage import Tokens
from tests.helpers.toy_methods import entered
from tests.methods.test_sparsevar import RESIDUAL_FAMILIES, TOY, NoReads, in_order, plan_of, toy, watched


def directions(*kinds: int) -> Tensor:
    """One image whose cells point along these axes, with some slack so that all lengths differ: [1, cells, 8]."""
    return F.one_hot(torch.tensor(kinds), 8).float()[None] * torch.arange(1.0, len(kinds) + 1)[None, :, None]


def cells_of(marked: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in marked]


def regions(seed: int, size: tuple[int, int], kinds: int = 12) -> Tensor:
    """Two images of blurred random regions of different sizes, [2, cells, 16]."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.rand(2, kinds, 2, generator=generator) * torch.tensor(size)
    cells = torch.tensor(list(product(range(size[0]), range(size[1])))).float()
    nearest = torch.cdist(cells.expand(2, -1, -1), centers).argmin(dim=2)
    vectors = torch.randn(2, kinds, 16, generator=generator).gather(1, nearest[..., None].expand(-1, -1, 16))
    return vectors + 0.3 * torch.randn(vectors.shape, generator=generator)


def covered(vectors: Tensor, computed: Tensor, anchors: Tensor) -> Tensor:
    """The similarity of what is left out to its most similar source, total of every image."""
    unit = F.normalize(vectors, dim=-1)
    similarity = (unit @ unit.mT).masked_fill(~(computed | anchors)[:, None], 0).amax(dim=2).relu()
    return (similarity * ~computed).sum(dim=1)


def one_at_a_time(vectors: Tensor, computed: Tensor, count: int) -> Tensor:
    """Marks always the cell that adds most, as the definition says."""
    marked = torch.zeros_like(computed)
    for image, _ in product(range(len(computed)), range(count)):
        free = (~(computed | marked)[image]).nonzero().flatten().tolist()
        trials = marked[image].repeat(len(free), 1)
        trials[range(len(free)), free] = True
        many = vectors[image].expand(len(free), -1, -1), computed[image].expand(len(free), -1)
        marked[image, free[int(covered(*many, trials).argmax())]] = True
    return marked


def test_the_largest_regions_come_first_and_those_that_a_computed_cell_resembles_last() -> None:
    vectors, computed = directions(0, 0, 0, 0, 1, 1, 1, 2, 2, 3), torch.zeros(1, 10, dtype=torch.bool)
    assert cells_of(covering_cells(vectors, computed, 3, (2, 5))) == [[0, 4, 7]]
    computed[0, 3] = True  # stands for all of the first region
    assert cells_of(covering_cells(vectors, computed, 3, (2, 5))) == [[4, 7, 9]]
    computed[0, 9] = True
    marked = covering_cells(vectors, computed, 8, (2, 5))
    assert marked.sum() == 8 and not (marked & computed).any()


def test_there_are_never_more_than_cells_that_are_left_out() -> None:
    computed = torch.ones(1, 10, dtype=torch.bool)
    vectors = directions(*range(8), 0, 1)
    assert not covering_cells(vectors, computed, 3, (2, 5)).any()
    computed[0, 4] = False
    assert cells_of(covering_cells(vectors, computed, 3, (2, 5))) == [[4]]


@pytest.mark.parametrize("count", [1, 4, 5, 17, 64, 256])
def test_rounds_add_up_and_grow_slowly(count: int) -> None:
    sizes = list(rounds(count))
    assert sum(sizes) == count
    done = [sum(sizes[:place]) for place in range(len(sizes))]
    assert all(size <= max(1, before) for size, before in zip(sizes, done, strict=True))
    assert len(sizes) <= 9


@pytest.mark.parametrize("seed", range(4))
def test_rounds_cover_nearly_what_one_at_a_time_does_and_more_than_the_grid(seed: int) -> None:
    size, count = (12, 10), 9
    vectors = regions(seed, size)
    computed = torch.rand(2, 120, generator=torch.Generator().manual_seed(seed + 9)) < 0.15
    marked = covering_cells(vectors, computed, count, size)
    assert marked.sum(dim=1).tolist() == [count] * 2 and not (marked & computed).any()
    bare = covered(vectors, computed, torch.zeros_like(computed))
    gained, best = (covered(vectors, computed, anchors) - bare for anchors in (marked, one_at_a_time(vectors, computed, count)))
    grid = torch.zeros_like(computed).index_fill_(1, anchor_cells(size, 4, vectors.device), True)
    assert (gained >= 0.9 * best).all()
    assert (gained > covered(vectors, computed, grid) - bare).all()


def test_a_large_grid_has_one_anchor_in_a_block_at_most() -> None:
    size, count = (40, 36), 90
    assert MAX_BLOCKS < 40 * 36 < 4 * MAX_BLOCKS
    vectors, computed = regions(1, size), torch.zeros(2, 40 * 36, dtype=torch.bool)
    computed[:, :720] = torch.rand(2, 720, generator=torch.Generator().manual_seed(0)) < 0.5
    marked = covering_cells(vectors, computed, count, size)
    assert marked.sum(dim=1).tolist() == [count] * 2 and not (marked & computed).any()
    blocks = marked.view(2, 20, 2, 18, 2).sum(dim=(2, 4))
    assert blocks.max() == 1
    grid = torch.zeros_like(computed).index_fill_(1, anchor_cells(size, 4, vectors.device), True)
    assert (covered(vectors, computed, marked) > covered(vectors, computed, grid)).all()


def test_the_typical_cell_of_a_block() -> None:
    """Blocks of 2x2 on a grid of 3x3; what lies beyond the edge does not count."""
    unit = directions(0, 1, 2, 1, 1, 2, 3, 4, 5)
    unit = F.normalize(unit, dim=-1)
    among = torch.ones(1, 9, dtype=torch.bool)
    assert typical_cells(unit, among, (3, 3), 2).tolist() == [[1, 2, 6, 8]]
    among[0, [1, 2, 5, 8]] = False
    assert typical_cells(unit, among, (3, 3), 2).tolist() == [[3, -1, 6, -1]]


def test_a_budget_has_as_many_tokens_as_with_the_grid_and_the_host_reads_nothing() -> None:
    run, _ = toy(alpha=2, keep=0.25, anchors="content")
    run.logits = GridMap(directions(0, 0, 0, 0, 0, 1, 2, 2, 1), (3, 3))
    with NoReads():
        plan = plan_of(run, TOY[3])
        _, tokens = entered(run, torch.zeros(2, 16, 1), Tokens(TOY[3]))
        run.observe(0, torch.zeros(2, plan.num_tokens, 1), torch.ones(2, plan.num_tokens, 1), tokens)
        run.restore(torch.ones(1, plan.num_tokens, 8), tokens.rows(slice(0, 1)))
    assert plan.num_tokens == tokens.num_tokens == 7
    assert {3, 7, 11} <= set(tokens.index[0].tolist())  # the most changed cells, as without anchors
    assert run.cells.excluded[0, tokens.index[0]].sum() == 4  # the anchors lie in what is left out


@pytest.mark.parametrize("family", RESIDUAL_FAMILIES)
@pytest.mark.parametrize("keep", [None, 0.3])
def test_every_cell_has_the_logits_of_a_computed_one_or_none(family: str, keep: float | None) -> None:
    method = SparseVAR(tau=0.97, alpha=3, beta=0.98, blocks=0, keep=keep, anchors="content")
    output, seen = watched(family, method, compute_mask=True)
    copied = 0
    for stage in (stage for stage in seen if stage.restored is not None):
        mask = output.compute_mask[stage.done.stage.index].flatten(1) == 1
        for image in range(3):
            computed, cells = set(mask[image].nonzero().flatten().tolist()), in_order(stage.done.tokens, image)
            assert computed <= set(cells)
            logits = dict(zip(cells, stage.done.logits[image], strict=False))
            for cell in set(cells) - computed:
                assert any(torch.equal(logits[cell], logits[source]) for source in computed)
                copied += 1
    assert copied > 0


@pytest.mark.parametrize("fields", [{"alpha": None}, {"as_released": True}], ids=str)
def test_settings_that_have_no_meaning_by_content_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(SettingError, match="anchors"):
        SparseVAR(anchors="content", **fields)  # type: ignore[arg-type]
