"""Keys and values per layer, outputs of earlier stages, and the rows that still run."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nextscale.cache import CacheSpec, LayerCache, NoCache, StageKeys, StageMemory, Workspace, copy_wide, in_widest
from nextscale.cache.attention import attend
from nextscale.methods import DENSE
from nextscale.models.context import Conditioning, ForwardContext
from nextscale.models.rope import RotateHalfRope
from nextscale.planning.memory import reserved_bytes
from nextscale.stage import Schedule, Stage, Tokens
from nextscale.text.prompts import Labels, Prompts
from tests.helpers import tiny

HEADS, HEAD_DIM = 2, 4


def spec(schedule: Schedule, rows: int, layers: int = 1, dtype: torch.dtype = torch.float32, prefix: int = 0) -> CacheSpec:
    return CacheSpec(layers, rows, HEADS, HEAD_DIM, schedule, dtype, torch.device("cpu"), prefix)


def numbers(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, tokens, HEADS, HEAD_DIM), torch.randn(rows, tokens, HEADS, HEAD_DIM)


def fill_memory(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """Fills memory with values that uninitialized memory may contain."""

    def allocate(self: CacheSpec, tokens: int) -> tuple[Tensor, Tensor]:
        shape = (self.rows, tokens, self.heads, self.head_dim)
        return torch.full(shape, value, dtype=self.dtype), torch.full(shape, value, dtype=self.dtype)

    monkeypatch.setattr(CacheSpec, "allocate", allocate)


# A mask hides entries after a row's end from the softmax, but 0 * NaN is NaN, so uninitialized memory must not matter.
MEMORY = pytest.mark.parametrize("memory", [0.0, float("nan")])


# --- keys and values


@settings(deadline=None)
@given(
    sides=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    rows=st.integers(1, 4),
    prefix=st.integers(0, 3),
    drop_after=st.integers(0, 5),
    data=st.data(),
)
def test_the_dense_cache_is_concatenation(sides: list[int], rows: int, prefix: int, drop_after: int, data: st.DataObject) -> None:
    schedule = Schedule((1, *sides))
    sizes = spec(schedule, rows, prefix=prefix)
    cache = LayerCache(sizes, Workspace(sizes))
    keys, values = [], []
    for stage in schedule:
        tokens = Tokens(stage, prefix=prefix if stage.index == 0 else 0)
        k, v = numbers(rows, tokens.num_tokens)
        keys, values = [*keys, k], [*values, v]
        all_keys, all_values, mask = cache.append(k, v, tokens).filled
        assert mask is None
        assert torch.equal(all_keys, torch.cat(keys, dim=1))
        assert torch.equal(all_values, torch.cat(values, dim=1))
        if stage.index == drop_after and rows > 1:
            kept = data.draw(st.sampled_from([slice(0, rows - 1), slice(1, None)]))
            cache.keep_rows(kept)
            keys, values, rows = [k[kept] for k in keys], [v[kept] for v in values], rows - 1


@pytest.mark.parametrize("prefix", [0, 2])
@settings(deadline=None)
@given(sides=st.lists(st.integers(1, 4), min_size=1, max_size=5), rows=st.integers(1, 4), drop_after=st.integers(0, 5), data=st.data())
def test_rows_of_different_length_continue_at_their_own_end(
    prefix: int, sides: list[int], rows: int, drop_after: int, data: st.DataObject
) -> None:
    schedule = Schedule((1, *sides))
    sizes = spec(schedule, rows, prefix=prefix)
    cache = LayerCache(sizes, Workspace(sizes))
    keys: list[Tensor] = [torch.empty(0, HEADS, HEAD_DIM)] * rows
    values = list(keys)
    ragged_yet = False
    for stage in schedule:
        num_tokens = data.draw(st.integers(1, stage.cells), label="num_tokens")
        counts = [data.draw(st.integers(1, num_tokens), label="count") for _ in range(rows)]
        ragged = data.draw(st.booleans(), label="ragged")
        ragged_yet |= ragged
        counts = counts if ragged else [num_tokens] * rows
        before = prefix if stage.index == 0 else 0
        k, v = numbers(rows, before + num_tokens)
        index = torch.arange(num_tokens).expand(rows, -1)
        all_keys, all_values, mask = cache.append(k, v, Tokens(stage, index, torch.tensor(counts) if ragged else None, before)).filled
        keys = [torch.cat([old, new[: before + count]]) for old, new, count in zip(keys, k, counts, strict=True)]
        values = [torch.cat([old, new[: before + count]]) for old, new, count in zip(values, v, counts, strict=True)]
        assert (mask is None) == (not ragged_yet)
        for row, (row_keys, row_values) in enumerate(zip(keys, values, strict=True)):
            length = len(row_keys)
            assert torch.equal(all_keys[row, :length], row_keys)
            assert torch.equal(all_values[row, :length], row_values)
            if mask is not None:
                assert mask.shape == (rows, 1, 1, all_keys.shape[1])
                assert mask[row, 0, 0].tolist() == [position < length for position in range(all_keys.shape[1])]
        if stage.index == drop_after and rows > 1:
            cache.keep_rows(slice(1, None))
            keys, values, rows = keys[1:], values[1:], rows - 1


@MEMORY
@pytest.mark.parametrize("sides", [(1, 2, 3), (1, 2, 3, 4)], ids=["at the last stage", "before it"])
def test_attention_over_ragged_rows_is_attention_over_each_row_alone(
    sides: tuple[int, ...], memory: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_memory(monkeypatch, memory)
    schedule, counts = Schedule(sides), torch.tensor([1, 4])
    cache = LayerCache(spec(schedule, 2), Workspace(spec(schedule, 2)))
    first, second, third = numbers(2, 1), numbers(2, 4), numbers(2, 9)
    queries = torch.randn(2, 9, HEADS, HEAD_DIM)
    cache.append(*first, Tokens(schedule[0]))
    cache.append(*second, Tokens(schedule[1], torch.arange(4).expand(2, -1), counts))
    keys, values, mask = cache.append(*third, Tokens(schedule[2])).filled
    together = attend(queries, keys, values, mask, 1.0)
    for row, count in enumerate(counts.tolist()):
        own_keys, own_values = (
            torch.cat([a[row : row + 1], b[row : row + 1, :count], c[row : row + 1]], dim=1)
            for a, b, c in zip(first, second, third, strict=True)
        )
        assert torch.allclose(together[row : row + 1], attend(queries[row : row + 1], own_keys, own_values, None, 1.0), atol=1e-5)


def test_tails_that_nothing_reads_are_not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in memory that has grown, after dropping rows, and in the workspace; a mask cannot be requested afterwards."""
    fill_memory(monkeypatch, float("nan"))
    schedule = Schedule((1, 2, 3))
    few = tuple(StageKeys(stage.index, 3, (1,)) for stage in schedule)
    cache = LayerCache(replace(spec(schedule, 3), planned=few), Workspace(spec(schedule, 3)))
    for stage, rows, new, counts in zip(schedule, (3, 3, 2), (1, 4, 9), ([1, 1, 1], [1, 4, 2], [9, 3]), strict=True):
        tokens = Tokens(stage, torch.arange(new).expand(rows, -1), torch.tensor(counts))
        slot = cache.reserve(rows, new, tokens, finite_tails=False)
        assert slot.keys[:, slot.end - new :].isnan().all() and slot.values[:, slot.end - new :].isnan().all()
        for store in slot[:2]:
            store[:, :1] = stage.index
        if stage.index == 1:
            with pytest.raises(AssertionError, match="did not clear"):
                copy(cache).reserve(rows, 9, Tokens(schedule[2]))
            cache.keep_rows(slice(1, None))
    assert slot.start.tolist() == [5, 3] and slot.lengths.tolist() == [14, 6]


def test_dense_attention_reads_only_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    fill_memory(monkeypatch, float("nan"))
    schedule = Schedule((1, 3, 2, 4))
    cache = LayerCache(spec(schedule, 2), Workspace(spec(schedule, 2)))
    for stage in schedule:
        k, v = numbers(2, stage.cells)
        keys, values, mask = cache.append(k, v, Tokens(stage)).filled
        assert attend(k, keys, values, mask, 1.0).isfinite().all()


def test_layers_share_the_last_stage_but_nothing_else() -> None:
    schedule = Schedule((1, 2))
    sizes = spec(schedule, 1, layers=2)
    workspace = Workspace(sizes)
    caches = [LayerCache(sizes, workspace) for _ in range(2)]
    seen: list[list[Tensor]] = [[], []]
    for stage in schedule:
        for layer, cache in enumerate(caches):
            k, v = numbers(1, stage.cells)
            seen[layer].append(k)
            keys, _, _ = cache.append(k, v, Tokens(stage)).filled
            assert torch.equal(keys, torch.cat(seen[layer], dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [1, 4, 7, 8, 12, 64])
@pytest.mark.parametrize("first", [0, 1], ids=["from the first channel", "from the second"])
def test_a_wide_copy_copies_every_bit(dtype: torch.dtype, head_dim: int, first: int) -> None:
    """Copies any bit pattern and nothing else, 16 bytes at a time if the channels are a multiple of that."""
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    some = torch.iinfo(bits)
    held, room = (torch.randint(some.min, some.max, (3, tokens, 2, head_dim + first), dtype=bits) for tokens in (9, 12))
    expected = room.clone()
    expected[:2, :5, :, first:] = held[1:, :5, :, first:]
    source, target = held.view(dtype)[1:, :5, :, first:], room.view(dtype)[:2, :5, :, first:]
    assert in_widest(source) == in_widest(target) == (head_dim * dtype.itemsize % 16 == 0 and not first)
    copy_wide(target, source)
    assert torch.equal(room, expected)


def test_a_wide_copy_of_other_layouts() -> None:
    for source in (
        torch.randn(2, 8, 3, 5).transpose(1, 3),
        torch.randn(2, 1, 1, 8).expand(-1, 5, 3, -1),
        torch.randn(2, 5, 3, 16)[..., ::2],
    ):
        target = torch.zeros(2, 5, 3, 8)
        copy_wide(target, source)
        assert torch.equal(target, source)


def test_a_reduced_stage_takes_less_room() -> None:
    schedule = Schedule((1, 2, 3))
    cache = LayerCache(spec(schedule, 1), Workspace(spec(schedule, 1)))
    parts = []
    for stage, kept in zip(schedule, ([0], [0, 3], [4, 5, 8]), strict=True):
        k, v = numbers(1, len(kept))
        parts.append(v)
        _, values, _ = cache.append(k, v, Tokens(stage, torch.tensor([kept]))).filled
    assert torch.equal(values, torch.cat(parts, dim=1))


def test_blocks_without_a_cache_see_the_stage_alone() -> None:
    """Keys in the type of the values; where rows differ in length, a prefix and the real tokens."""
    stage = Schedule((1, 2))[1]
    k, v = numbers(2, 4)
    keys, values, mask = NoCache().append(k, v.bfloat16(), Tokens(stage)).filled
    assert torch.equal(keys, k.bfloat16())
    assert torch.equal(values, v.bfloat16())
    assert mask is None
    k, v = numbers(2, 5)
    ragged = Tokens(stage, torch.tensor([[0, 1, 3], [2, 2, 2]]), torch.tensor([3, 1]), prefix=2)
    cache = NoCache()
    for _ in range(2):  # nothing is kept
        keys, values, mask = cache.append(k, v, ragged).filled
        assert torch.equal(keys, k) and torch.equal(values, v)
        assert mask.shape == (2, 1, 1, 5)
        assert mask[:, 0, 0].tolist() == [[True] * 5, [True, True, True, False, False]]
        cache.keep_rows(slice(0, 1))


# --- planned memory


def storage_bytes(tensors: list[Tensor]) -> int:
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1,), (1, 2), (1, (3, 2), (5, 4))])
@pytest.mark.parametrize("prefix", [0, 7])
def test_planned_bytes_are_the_bytes_allocated(dtype: torch.dtype, sizes: tuple[int, ...], prefix: int) -> None:
    planned = spec(Schedule(sizes), rows=3, layers=5, dtype=dtype, prefix=prefix)
    workspace = Workspace(planned)
    caches = [LayerCache(planned, workspace) for _ in range(5)]
    allocated = [*workspace.pair(rows=3, tokens=0), *(tensor for cache in caches for tensor in (cache.keys, cache.values))]
    assert {tensor.dtype for tensor in allocated} == {dtype}
    assert planned.bytes == storage_bytes(allocated)


def test_the_last_stage_is_stored_once_for_all_layers() -> None:
    """2 (keys, values) x 3 rows x 8 channels x 4 bytes = 192 per token; 5 layers keep 1 + 4 tokens, all share 1 + 4 + 9."""
    assert spec(Schedule((1, 2, 3)), rows=3, layers=5).bytes == 192 * (5 * 5 + 14)
    assert spec(Schedule((1, 2, 3)), rows=3, layers=5, prefix=7).bytes == 192 * (5 * (7 + 5) + 7 + 14)


def two_prompts(family: str, lengths: tuple[int, int], seed: int = 0) -> Prompts:
    """Returns two prompts as the model's condition reads them: classes, or prompts of these lengths."""
    if family in tiny.CLASS_FAMILIES:
        return Labels(torch.tensor([1, 2]) + 2 * seed)
    return tiny.text_features(family, lengths, seed)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_plan_of_a_request_is_what_its_run_allocates(family: str) -> None:
    """Prompts of 8 and 16 tokens, since text is padded to a multiple of 8."""
    pipeline = tiny.shared_pipeline(family)
    schedule = tiny.schedule_of(family)
    prompts = two_prompts(family, (8, 16))
    empty = pipeline.reader.empty()
    for guided in (False, True):
        cond = pipeline.model.condition(prompts, guided, schedule, empty.repeat(2) if guided and empty else None)
        ctx = tiny.dense_env(pipeline.model, cond, schedule, 2)
        tensors = [tensor for cache in ctx.cache for tensor in (cache.keys, cache.values)]
        tensors += ctx.cache[0].workspace.pair(cond.start.shape[0], 0)
        if cond.text is not None:
            tensors += [tensor for pair in cond.text.keys_values for tensor in pair]
        plans = (DENSE,) * len(schedule)
        assert reserved_bytes(pipeline.model, schedule, plans, len(prompts), cond.start.shape[0], prompts.longest) == storage_bytes(tensors)
        assert ctx.cfg_branches == ("both" if guided else "cond")


# --- outputs of earlier stages


def test_memory_is_resized_by_averaging_and_gathered() -> None:
    memory = StageMemory()
    grid = torch.arange(16.0).view(1, 16, 1)
    memory.store("attention", grid, Tokens(Stage(1, 4, 4, 1, False)))
    coarse = Stage(2, 2, 2, 17, False)
    assert memory.fill("attention", Tokens(coarse)).flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert memory.fill("attention", Tokens(coarse, torch.tensor([[3, 0]]))).flatten().tolist() == [12.5, 2.5]
    finer = memory.fill("attention", Tokens(Stage(2, 8, 8, 17, True)))
    assert torch.equal(finer.view(8, 8), grid.view(4, 4).repeat_interleave(2, 0).repeat_interleave(2, 1))


def test_memory_keeps_the_grid_without_a_prefix() -> None:
    memory, stage = StageMemory(), Stage(0, 1, 2, 0, False)
    memory.store("x", torch.tensor([[[9.0], [8.0], [1.0], [2.0]]]), Tokens(stage, prefix=2))
    assert memory.fill("x", Tokens(stage)).flatten().tolist() == [1.0, 2.0]


def test_memory_of_a_wide_grid_keeps_rows_and_columns_apart() -> None:
    memory = StageMemory()
    memory.store("x", torch.tensor([[[1.0], [2], [3], [4], [5], [6]]]), Tokens(Stage(1, 2, 3, 1, False)))
    assert memory.fill("x", Tokens(Stage(2, 1, 3, 7, False))).flatten().tolist() == [2.5, 3.5, 4.5]
    assert memory.fill("x", Tokens(Stage(2, 2, 1, 7, False))).flatten().tolist() == [2.0, 5.0]


def test_the_latest_store_counts_and_keys_are_apart() -> None:
    memory, stage = StageMemory(), Tokens(Stage(0, 1, 1, 0, False))
    for value in (1.0, 2.0):
        memory.store("a", torch.full((1, 1, 1), value), stage)
    memory.store(("b", 3), torch.full((1, 1, 1), 7.0), stage)
    assert memory.fill("a", stage).item() == 2
    assert memory.fill(("b", 3), stage).item() == 7


def test_memory_takes_whole_grids_only() -> None:
    stage = Stage(3, 2, 2, 5, False)
    with pytest.raises(ValueError, match="stage 3 must be run on all of its .*got 2"):
        StageMemory().store("part", torch.zeros(1, 2, 1), Tokens(stage, torch.tensor([[0, 1]])))


# --- rows that leave


def running_env(family: str) -> tuple[ForwardContext, Schedule]:
    """Returns the context of two images in both CFG branches after the first stage; the values identify the rows."""
    model, schedule = tiny.shared_pipeline(family).model, tiny.schedule_of(family)
    prompts, negative = two_prompts(family, (3, 5)), two_prompts(family, (7, 2), seed=1)  # no two rows have the same text mask
    ctx = tiny.dense_env(model, model.condition(prompts, True, schedule, negative), schedule, 2)
    x, tokens = model.with_text(model.embed(None, schedule[0], ctx), Tokens(schedule[0]), ctx)
    for block in model.blocks:
        x = block(x, tokens, ctx)
    ctx.memory.store("row", torch.arange(4.0).view(4, 1, 1).expand(-1, tokens.num_tokens, -1), tokens)
    return ctx, schedule


def conditioning_tensors(cond: Conditioning) -> list[Tensor]:
    """Returns all tensors of the condition that have one entry per row."""
    tensors = [cond.start, *(part for modulation in cond.modulation for part in modulation), *(cond.head or ())]
    if cond.prefix is not None:
        tensors.append(cond.prefix)
    if cond.text is not None:
        tensors += [*(tensor for pair in cond.text.keys_values for tensor in pair), cond.text.mask]
    if isinstance(cond.rope, RotateHalfRope):
        tensors += [tensor for table in cond.rope.tables for tensor in table]
    return tensors + (conditioning_tensors(cond.refiner) if cond.refiner is not None else [])


def row_tensors(ctx: ForwardContext) -> list[Tensor]:
    """Returns all tensors that have one entry per row, including stage 0 of the caches."""
    written = ctx.cache[0].length
    caches = [tensor[:, :written] for cache in ctx.cache for tensor in (cache.keys, cache.values)]
    return [tensor.clone() for tensor in (*conditioning_tensors(ctx.cond), *caches)]


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize(("cfg_branches", "rows"), [("cond", [0, 1]), ("uncond", [2, 3])])
def test_keeping_one_cfg_branch_keeps_its_rows_of_everything(family: str, cfg_branches: str, rows: list[int]) -> None:
    ctx, schedule = running_env(family)
    before = row_tensors(ctx)
    assert all(len(tensor) == 4 and len(tensor.flatten(1).unique(dim=0)) == 4 for tensor in before)
    ctx.keep("both")
    assert ctx.cfg_branches == "both"
    ctx.keep(cfg_branches)
    assert ctx.cfg_branches == cfg_branches
    for old, new in zip(before, row_tensors(ctx), strict=True):
        assert torch.equal(new, old[rows])
    assert ctx.memory.fill("row", Tokens(schedule[0])).flatten().tolist() == rows
    ctx.keep("both")  # means those that still run
    ctx.keep(cfg_branches)
    assert ctx.cfg_branches == cfg_branches
    assert ctx.cond.start.shape[0] == 2


@pytest.mark.parametrize(("left", "wanted"), list(pairwise(("cond", "uncond", "cond"))))
def test_rows_never_return(left: str, wanted: str) -> None:
    ctx, _ = running_env("var")
    ctx.keep(left)
    with pytest.raises(ValueError, match=f"cfg_branches must be .{left}.*got .{wanted}."):
        ctx.keep(wanted)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_blocks_go_on_after_rows_have_left(family: str) -> None:
    """The remaining rows compute the same as with all rows."""
    outcomes = []
    for cfg_branches in ("both", "cond", "uncond"):
        ctx, schedule = running_env(family)
        ctx.keep(cfg_branches)
        rows = {"both": slice(0, 4), "cond": slice(0, 2), "uncond": slice(2, 4)}[cfg_branches]
        x = F.normalize(torch.arange(4 * 4 * tiny.WIDTH).float().sin().view(4, 4, tiny.WIDTH), dim=-1)[rows]
        for block in tiny.shared_pipeline(family).model.blocks:
            x = block(x, Tokens(schedule[1]), ctx)
        outcomes.append(x)
    both, cond, uncond = outcomes
    assert torch.allclose(both, torch.cat([cond, uncond]), atol=1e-5)
    assert (cond - uncond).abs().max() > 0.1
