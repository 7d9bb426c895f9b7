"""FastVAR: which tokens are run, what the others get instead, and what must not depend on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nextscale.cache import CacheView, ComputedCells, LayerCache, StageMemory
from nextscale.errors import SettingError
from nextscale.methods import DENSE, Method, SkipStages, StagePlan
from nextscale.methods.combine import Combined
from nextscale.methods.fastvar import CachedBlocks, FastVAR, PrunedBlocks
from nextscale.methods.token_ops import distance_from_mean, top_share
from nextscale.models import Hart, HartConfig, Infinity, InfinityConfig, NextScaleModel, Star, StarConfig
from nextscale.models.blocks import Sublayer
from nextscale.pipeline import Output
from nextscale.schedules import HART_1024
from nextscale.stage import Schedule, Stage, Tokens
from nextscale.text import TextFeatures
from tests.helpers import tiny
from tests.helpers.tiny import infinity_schedule
from tests.helpers.toy_methods import STAGES, KeepShare, Planned, SkipUnannounced, keeping, one_from

HARSH = FastVAR({2: 0.7, 3: 0.8})  # every tiny schedule has stages 2 and 3
# Of pixels with a standard deviation near 0.6. The largest difference seen is 9.6e-6; HART's residual may amplify rounding 20000 times.
PIXELS = {family: 2e-2 if family == "hart" else 1e-4 for family in tiny.FAMILIES}
NO_SQUARE = Schedule([(1, 1), (2, 3), (3, 5), (4, 6)])


def generated(family: str, images: int = 2, **options: Any) -> Output:
    """HART's default codes are mixtures, which nothing can be equal to; here they are numbers."""
    return generated_from(tiny.prompts(family, images), family, **options)


def generated_from(prompts: Any, family: str, **options: Any) -> Output:
    return tiny.shared_pipeline(family)(prompts, **{"seed": 11, "smooth": False, **options})


def forecast(method: Method, family: str = "var", schedule: Schedule | None = None) -> tuple[StagePlan, ...]:
    return method.forecast(tiny.shared_pipeline(family).model, schedule or tiny.schedule_of(family))


# --- by hand: a stage of 2x3 cells with one channel, and sublayers that multiply


STAGE = Stage(index=3, height=2, width=3, start=5, last=False)
COLUMNS = Stage(index=2, height=1, width=3, start=2, last=False)


@dataclass
class ToyBlock:
    """Each sublayer multiplies by its factor and remembers which cells it saw."""

    factors: tuple[float, ...]
    layer: int = 0
    seen: list[Tensor] = field(default_factory=list)
    counts: list[Tensor | None] = field(default_factory=list)

    @property
    def num_sublayers(self) -> int:
        return len(self.factors)

    def sublayers(self, ctx: object) -> tuple[Sublayer, ...]:
        return tuple(Sublayer(nn.Identity(), None, None, None, self._sublayer(factor), None) for factor in self.factors)

    def _sublayer(self, factor: float) -> Callable[..., Tensor]:
        def sublayer(x: Tensor, tokens: Tokens, ctx: Any) -> Tensor:
            self.seen.append(torch.arange(tokens.stage.cells).expand(x.shape[0], -1) if tokens.index is None else tokens.index)
            self.counts.append(tokens.count)
            return factor * x

        return sublayer


def toy_env(kept: dict[Any, Tensor], stage: Stage = COLUMNS) -> Any:
    memory = StageMemory()
    for (layer, sublayer), values in kept.items():
        memory.store(("fastvar", layer, sublayer), values, Tokens(stage))
    return SimpleNamespace(memory=memory, computed=None)


def column(*rows: Sequence[float]) -> Tensor:
    """Rows of numbers as [R, N, 1]."""
    return torch.tensor(rows, dtype=torch.float32)[..., None]


def thinned(ratio: float, **options: Any) -> PrunedBlocks:
    return PrunedBlocks(range(1), ratio, **options)


def test_tokens_far_from_the_mean_are_run_and_the_others_take_what_was_kept() -> None:
    """The mean of 1, 2, 3, 4, 5, 15 is 5: the farthest three are 15, 1 and 2. A map of 1x3 cells is repeated in both rows of 2x3."""
    block = ToyBlock((10.0,))
    out = thinned(0.5)([block], column([1, 2, 3, 4, 5, 15]), Tokens(STAGE), toy_env({(0, 0): column([100, 200, 300])}))
    assert block.seen[0].tolist() == [[0, 1, 5]]
    assert block.counts == [None]
    assert out.flatten().tolist() == [1 + 10, 2 + 20, 3 + 300, 4 + 100, 5 + 200, 15 + 150]


def test_every_sublayer_and_every_row_chooses_anew() -> None:
    """The first row becomes 11, 22, 303, 104, 205, 165, with a mean of 135; the second is the first upside down."""
    block = ToyBlock((10.0, 0.0))
    ctx = toy_env({(0, 0): column([100, 200, 300], [0, 0, 0]), (0, 1): column([1, 2, 3], [0, 0, 0])})
    out = thinned(0.5)([block], column([1, 2, 3, 4, 5, 15], [15, 5, 4, 3, 2, 1]), Tokens(STAGE), ctx)
    assert block.seen[0].tolist() == [[0, 1, 5], [0, 4, 5]]
    assert block.seen[1][0].tolist() == [0, 1, 2]
    assert out[0].flatten().tolist() == [11, 22, 303, 104 + 1, 205 + 2, 165 + 3]
    assert out[1].flatten().tolist() == [165, 5, 4, 3, 22, 11]


def test_layers_keep_their_own_outputs() -> None:
    first, second = ToyBlock((0.0,), layer=0), ToyBlock((0.0,), layer=1)
    ctx = toy_env({(0, 0): column([100, 100, 100]), (1, 0): column([1000, 1000, 1000])})
    out = thinned(0.9)([first, second], column([0, 0, 0, 0, 0, 6]), Tokens(STAGE), ctx)
    assert first.seen[0].tolist() == [[5]]
    assert second.seen[0].tolist() == [[5]]  # 100 five times and 6
    assert out.flatten().tolist() == [1100] * 5 + [6]


def test_the_stage_whose_outputs_are_kept_runs_as_ever() -> None:
    block = ToyBlock((10.0, 2.0))
    ctx = SimpleNamespace(memory=StageMemory(), computed=None)
    out = CachedBlocks(range(1), 1)([block], column([1, 2, 3]), Tokens(COLUMNS), ctx)
    assert out.flatten().tolist() == [33, 66, 99]
    same = Stage(4, 1, 3, 9, False)
    assert ctx.memory.fill(("fastvar", 0, 0), Tokens(same)).flatten().tolist() == [10, 20, 30]
    assert ctx.memory.fill(("fastvar", 0, 1), Tokens(same)).flatten().tolist() == [22, 44, 66]


def test_padding_neither_counts_nor_runs_and_repeats_the_last_token_afterwards() -> None:
    """Cells 0, 2, 3, 5 of one row, cells 0, 1, 4 of the other; half of them, rounded down, are not run. The means are 4, and 8 without
    padding; with it the second would be 11, and 4 would be farther from it than 16."""
    tokens = Tokens(STAGE, torch.tensor([[0, 2, 3, 5, 5], [0, 1, 4, 4, 4]]), torch.tensor([4, 3]))
    block = ToyBlock((10.0,))
    ctx = toy_env({(0, 0): column([100, 200, 300], [100, 200, 300])})
    out = thinned(0.7)([block], column([1, 3, 4, 8, 8], [4, 4, 16, 16, 16]), tokens, ctx)
    assert block.seen[0].tolist() == [[0, 5], [4, 4]]
    assert block.counts[0].tolist() == [2, 1]
    assert out[0].flatten().tolist() == [11, 303, 104, 88, 88]
    assert out[1].flatten().tolist() == [104, 204, 176, 176, 176]


def test_a_padded_row_whose_last_token_is_not_run_ends_in_copies_of_it() -> None:
    tokens = Tokens(STAGE, torch.tensor([[1, 4, 5, 5]]), torch.tensor([3]))
    out = thinned(0.5)([ToyBlock((10.0,))], column([9, 1, 5, 5]), tokens, toy_env({(0, 0): column([100, 200, 300])}))
    assert out.flatten().tolist() == [99, 11, 305, 305]


def test_missing_outputs_are_explained() -> None:
    with pytest.raises(SettingError, match="outputs .*fastvar.* are missing"):
        thinned(0.5)([ToyBlock((1.0,))], column([1, 2, 3, 4, 5, 15]), Tokens(STAGE), toy_env({}))


# --- in general


@st.composite
def late_stages(draw: st.DrawFn) -> tuple[Stage, Stage, int, float, int]:
    side = st.integers(1, 5)
    late = Stage(3, draw(side), draw(side), 9, False)
    early = Stage(2, draw(side), draw(side), 3, False)
    ratio = draw(st.sampled_from([0.0, 0.1, 0.29, 0.4, 0.5, 0.75, 0.99]))
    return late, early, draw(st.integers(1, 3)), ratio, draw(st.integers(0, 2**31))


def ragged(stage: Stage, rows: int, generator: torch.Generator) -> Tokens:
    """Some cells of every row, in raster order, at least one."""
    score = torch.rand(rows, stage.cells, generator=generator)
    keep = torch.randint(1, stage.cells + 1, (rows,), generator=generator)
    return Tokens(stage).top(score, keep, int(torch.randint(int(keep.max()), stage.cells + 1, (1,), generator=generator)))[1]


@pytest.mark.parametrize("reduced", [False, True])
@settings(deadline=None, max_examples=60)
@given(late_stages())
def test_kept_tokens_are_fresh_and_all_others_equal_the_resized_outputs(reduced: bool, case: tuple[Stage, Stage, int, float, int]) -> None:
    late, early, rows, ratio, seed = case
    generator = torch.Generator().manual_seed(seed)
    tokens = ragged(late, rows, generator) if reduced else Tokens(late)
    index = tokens.index if reduced else torch.arange(late.cells).expand(rows, -1)
    count = tokens.count if reduced else torch.full((rows,), late.cells)
    x = Tokens(late, index).gather(torch.randn(rows, late.cells, 4, generator=generator))
    ctx = toy_env({(0, 0): torch.randn(rows, early.cells, 4, generator=generator)}, early)
    block = ToyBlock((0.5,))
    out = thinned(ratio)([block], x, tokens, ctx)
    kept = ctx.memory.fill(("fastvar", 0, 0), tokens)
    for row in range(rows):
        real = int(count[row])
        cells = index[row, :real].tolist()
        chosen = set(block.seen[0][row].tolist())
        assert len(chosen) == real - int(real * ratio)
        assert block.seen[0].shape[1] == thinned(ratio).num_tokens(tokens.num_tokens)
        distance = (x[row, :real] - x[row, :real].mean(dim=0)).square().sum(dim=1)
        scores = dict(zip(cells, distance.tolist(), strict=True))
        left_out = [score for cell, score in scores.items() if cell not in chosen]
        assert not left_out or min(scores[cell] for cell in chosen) >= max(left_out) * (1 - 1e-5) - 1e-6
        for place, cell in enumerate(cells):
            update = 0.5 * x[row, place] if cell in chosen else kept[row, place]
            assert torch.equal(out[row, place], x[row, place] + update)
        assert (out[row, real:] == out[row, real - 1]).all()


@settings(deadline=None)
@given(st.integers(1, 5000), st.floats(0, 1, exclude_max=True))
def test_counts_on_the_device_are_those_of_the_host(tokens: int, ratio: float) -> None:
    computed = thinned(ratio).num_tokens(tokens)
    assert 1 <= computed <= tokens
    assert computed == tokens - int(tokens * ratio)
    _, chosen = top_share(Tokens(STAGE, torch.zeros(1, 6, dtype=torch.long), torch.tensor([6])), torch.rand(1, 6), ratio)
    assert chosen.count.tolist() == [6 - int(6 * ratio)]


def test_of_equal_scores_the_first_win_in_every_batch_and_with_any_padding() -> None:
    score = torch.tensor([[1.0] * 9, [2.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 2.0]])
    tokens = Tokens(Stage(1, 3, 3, 1, False))
    together, _ = top_share(tokens, score, 0.5)
    assert together.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 4, 8]]
    for row in range(2):
        assert torch.equal(top_share(tokens, score[row : row + 1], 0.5)[0], together[row : row + 1])
    padded = Tokens(Stage(1, 40, 50, 1, False), torch.arange(1800)[None], torch.tensor([1600]))
    many, kept = top_share(padded, torch.ones(1, 1800), 0.5)
    assert kept.count.tolist() == [800]
    assert many[0, :800].tolist() == list(range(800))


def test_scores_are_compared_in_float32() -> None:
    """In bfloat16 256 and 257 are the same number, and so would their distances from a mean be."""
    x = torch.tensor([[[256.0], [0.0], [1.0], [0.0]]], dtype=torch.bfloat16)
    distance = distance_from_mean(x, Tokens(Stage(1, 2, 2, 1, False)))
    assert distance.dtype == torch.float32
    assert distance.tolist() == [[191.75, 64.25, 63.25, 64.25]]


class NoReads(TorchDispatchMode):
    """Fails where a value would have to come back from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_back_from_the_device() -> None:
    tokens = Tokens(STAGE, torch.tensor([[0, 2, 3, 5], [1, 4, 4, 4]]), torch.tensor([4, 2]))
    ctx = toy_env({(0, 0): column([100, 200, 300], [100, 200, 300])})
    with NoReads():
        thinned(0.5)([ToyBlock((1.0,))], column([1, 3, 4, 8], [4, 6, 6, 6]), tokens, ctx)
    with pytest.raises(AssertionError), NoReads():
        column([1]).item()


# --- settings


@pytest.mark.parametrize(
    "options",
    [
        {"ratios": {3: 1.1}},
        {"ratios": {3: -0.1}},
        {"ratios": {3: "half"}},
        {"ratios": {3: True}},
        {"ratios": {-1: 0.5}},
        {"ratios": {2.5: 0.5}},
        {"ratios": {0: 0.5}},
        {"ratios": ((3, 0.5), (3, 0.4))},
        {"ratios": (3, 0.5)},
        {"ratios": "all"},
        {"ratios": 0.5},
        {"cache_stage": -1},
        {"cache_stage": 1.5},
        {"layers": (3, 3)},
        {"layers": (-1, 3)},
        {"layers": (0, 1, 2)},
        {"as_released": True, "ratios": {3: 0.5}},
        {"as_released": True, "layers": (0, 2)},
        {"as_released": True, "cache_stage": 2},
    ],
    ids=str,
)
def test_impossible_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        FastVAR(**options)


def test_ratios_are_a_value_however_they_are_written() -> None:
    written = [FastVAR({3: 0.5, 2: 1}), FastVAR(((2, 1.0), (3, 0.5))), FastVAR([[3, 0.5], [2, 1]])]  # type: ignore[arg-type, list-item]
    assert len(set(written)) == 1
    assert written[0].ratios == ((2, 1.0), (3, 0.5))
    assert FastVAR(layers=[0, 2]).layers == (0, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (FastVAR({4: 0.5}), "ratios.*0 to 3.*got 4"),
        (FastVAR({3: 0.5}, cache_stage=3), r"cache_stage.*\[0, 1, 2\].*got 3"),
        (FastVAR({2: 1.0, 3: 0.5}, cache_stage=2), r"cache_stage.*\[0, 1\].*got 2"),
        (FastVAR(layers=(1, 4)), r"layers.*\(0, 3\).*got \(1, 4\)"),
        (FastVAR(as_released=True), "as_released.*infinity, hart; got .var"),
    ],
)
def test_conflicts_with_the_model_or_schedule_raise_before_anything_runs(method: FastVAR, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        forecast(method)
    with pytest.raises(SettingError, match=message):
        generated("var", method=method, on_stage=lambda preview: pytest.fail("a stage was run"))


def on_meta(model: type[NextScaleModel], config: Any) -> NextScaleModel:
    with torch.device("meta"):
        return model(config)  # type: ignore[call-arg]


INFINITY = on_meta(Infinity, InfinityConfig(32, 64, 4, 8, text_channels=256, longest_text=8))
HART = on_meta(Hart, HartConfig(4, 64, 4, text_channels=64, residual_dim=32, residual_depth=1))
STAR = on_meta(Star, StarConfig(4, 64, 4, HART_1024))
ONE_MEGAPIXEL = infinity_schedule(1.0, "1M")


def shape_of(plans: Sequence[StagePlan]) -> list[str]:
    """Stage by stage: "skip", "", "cache 3-27", "0.4 3-27"."""
    words = []
    for plan in plans:
        span = plan.spans[0] if plan.spans else None
        layers = "" if span is None else f" {span.layers.start}-{span.layers.stop - 1}"
        what = "" if span is None else "cache" if isinstance(span, CachedBlocks) else str(span.ratio)
        words.append("skip" if plan.skip else what + layers)
    return words


def test_published_settings() -> None:
    infinity = ["cache 3-27", "0.4 3-27", "0.5 3-27", "skip", "skip"]
    assert shape_of(FastVAR().forecast(INFINITY, ONE_MEGAPIXEL)) == [""] * 8 + infinity
    assert shape_of(FastVAR().forecast(INFINITY, infinity_schedule(1.5, "0.60M"))) == [""] * 8 + infinity[:4]
    assert shape_of(FastVAR().forecast(INFINITY, infinity_schedule(0.4, "0.25M"))) == [""] * 8 + infinity[:2]
    for model in (HART, STAR):
        assert shape_of(FastVAR().forecast(model, Schedule(HART_1024))) == [""] * 11 + ["cache 0-3", "0.5 0-3", "0.75 0-3"]


def test_settings_of_our_own_for_other_schedules() -> None:
    assert shape_of(FastVAR().forecast(INFINITY, infinity_schedule(1.0, "0.06M"))) == [""] * 4 + ["cache 3-27", "0.4 3-27", "0.5 3-27"]
    assert shape_of(FastVAR().forecast(HART, Schedule((1, 2, 3, 4)))) == ["", "cache 0-3", "0.4 0-3", "0.5 0-3"]
    assert shape_of(forecast(FastVAR(), "flexvar")) == ["", "", "cache 0-2", "0.4 0-2", "0.5 0-2"]
    assert shape_of(forecast(FastVAR(), "infinity")) == ["", "cache 0-2", "0.4 0-2", "0.5 0-2"]
    assert shape_of(forecast(FastVAR(), schedule=Schedule((1, 2, 3)))) == ["cache 0-2", "0.4 0-2", "0.5 0-2"]
    assert shape_of(forecast(FastVAR(), schedule=Schedule((1, 2)))) == ["cache 0-2", "0.5 0-2"]
    assert shape_of(forecast(FastVAR(), schedule=Schedule((1,)))) == [""]


@pytest.mark.parametrize(
    ("depth", "first", "last"), [(1, 0, 0), (2, 0, 1), (3, 0, 2), (4, 0, 3), (8, 1, 6), (12, 1, 9), (16, 2, 13), (32, 3, 27), (40, 4, 34)]
)
def test_infinity_of_any_depth_thins_the_published_share_of_its_blocks(depth: int, first: int, last: int) -> None:
    """Blocks 3 to 27 of 32; the reference implementation has these numbers for every depth."""
    model = on_meta(Infinity, InfinityConfig(depth, 64, 4, 1, text_channels=256, longest_text=8))
    assert shape_of(FastVAR().forecast(model, ONE_MEGAPIXEL))[8:10] == [f"cache {first}-{last}", f"0.4 {first}-{last}"]
    released = shape_of(FastVAR(as_released=True).forecast(model, ONE_MEGAPIXEL))[9]
    assert released == ("" if depth <= 3 else f"0.4 3-{min(depth - 1, 27)}")


def test_stages_from_which_nothing_would_be_taken_stay_dense() -> None:
    assert forecast(FastVAR({1: 0.2, 2: 0.1, 3: 0.0})) == (DENSE,) * 4  # 4, 9 and 16 tokens
    assert shape_of(forecast(FastVAR({1: 0.2, 2: 0.2}))) == ["", "cache 0-2", "0.2 0-2", ""]
    assert shape_of(forecast(FastVAR({1: 1.0, 2: 0.2}))) == ["cache 0-2", "skip", "0.2 0-2", ""]
    assert shape_of(forecast(FastVAR({2: 0.2}, cache_stage=0, layers=(1, 2)))) == ["cache 1-1", "", "0.2 1-1", ""]


@pytest.mark.parametrize("budget", ["0.25M", "0.60M", "1M"])
def test_the_reference_implementation_is_what_we_do_on_square_images(budget: str) -> None:
    schedule = infinity_schedule(1.0, budget)
    assert FastVAR(as_released=True).forecast(INFINITY, schedule) == FastVAR().forecast(INFINITY, schedule)
    assert FastVAR(as_released=True).forecast(HART, Schedule(HART_1024)) == FastVAR().forecast(HART, Schedule(HART_1024))


def test_blocks_that_are_more_than_their_sublayers_are_refused() -> None:
    chunked = on_meta(Infinity, InfinityConfig(32, 64, 4, 8, text_channels=256, longest_text=8, level_every_chunk=True))
    with pytest.raises(SettingError, match="level_every_chunk"):
        FastVAR().forecast(chunked, ONE_MEGAPIXEL)
    assert FastVAR({}).forecast(chunked, ONE_MEGAPIXEL) == (DENSE,) * 13
    with pytest.raises(SettingError, match="STAR's text attention"):
        FastVAR().forecast(on_meta(Star, StarConfig(4, 64, 4, HART_1024, as_released=True)), Schedule(HART_1024))


# --- whole images


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("ratios", [{}, {1: 0.0, 2: 0.0, 3: 0.0}])
def test_no_strength_is_dense_bit_for_bit(family: str, ratios: dict[int, float]) -> None:
    method = FastVAR(ratios)
    assert forecast(method, family) == (DENSE,) * STAGES[family]
    tiny.assert_same_bits(generated(family, method=method), generated(family))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_thinned_stages_change_and_earlier_ones_do_not(family: str) -> None:
    dense, fast = generated(family), generated(family, method=HARSH)
    same = [torch.equal(a, b) for a, b in zip(fast.codes, dense.codes, strict=True)]
    assert same == [True, True] + [False] * (STAGES[family] - 2)
    assert fast.pixels.isfinite().all()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_published_settings_run_on_every_model(family: str) -> None:
    assert not torch.equal(generated(family, method=FastVAR()).codes[-1], generated(family).codes[-1])


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("options", [{}, {"guidance": True}], ids=["guided", "not guided"])
def test_a_batch_equals_its_images_alone(family: str, options: dict[str, Any]) -> None:
    options = {"guidance": tiny.NO_GUIDANCE[family]} if options else {}
    together = generated(family, 3, method=HARSH, **options)
    for image in range(3):
        alone = generated_from(tiny.one_prompt(family, image), family, seed=11 + image, method=HARSH, **options)
        assert all(torch.equal(ours[image], theirs[0]) for ours, theirs in zip(together.codes, alone.codes, strict=True))
        assert torch.allclose(together.pixels[image], alone.pixels[0], rtol=0, atol=PIXELS[family])


def picked(family: str, images: Sequence[int]) -> Any:
    """Prompts of some images, in the order given."""
    prompts = [tiny.one_prompt(family, image) for image in images]
    return prompts if family in tiny.CLASS_FAMILIES else TextFeatures.joined(prompts)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_permuted_batch_permutes_the_images(family: str) -> None:
    order = [2, 0, 1]
    straight = generated_from(picked(family, range(3)), family, seed=[5, 60, 700], method=HARSH)
    permuted = generated_from(picked(family, order), family, seed=[700, 5, 60], method=HARSH)
    assert all(torch.equal(ours, theirs[order]) for ours, theirs in zip(permuted.codes, straight.codes, strict=True))
    assert torch.allclose(permuted.pixels, straight.pixels[order], rtol=0, atol=PIXELS[family])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_same_seed_gives_the_same_image(family: str) -> None:
    tiny.assert_same_bits(generated(family, method=HARSH), generated(family, method=HARSH))


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("first", [1, 2, 3])
def test_rows_that_guidance_does_not_need_can_leave_before_or_after_outputs_are_kept(family: str, first: int) -> None:
    both = generated(family, guidance=one_from(family, first), method=HARSH)
    dropped = generated(family, guidance=one_from(family, first), method=[HARSH, keeping("cond", first)])
    assert [stage.rows for stage in dropped.report.stages] == [4] * first + [2] * (STAGES[family] - first)
    assert all(torch.equal(a, b) for a, b in zip(both.codes, dropped.codes, strict=True))
    assert torch.allclose(both.pixels, dropped.pixels, rtol=0, atol=PIXELS[family])


@pytest.mark.parametrize("family", [family for family in tiny.FAMILIES if not family.startswith("var")])  # VAR knows squares only
def test_images_need_not_be_square(family: str) -> None:
    together = generated(family, size=NO_SQUARE, method=HARSH)
    assert [codes.shape[1] for codes in together.codes] == [1, 6, 15, 24]
    alone = generated_from(tiny.one_prompt(family, 1), family, seed=12, size=NO_SQUARE, method=HARSH)
    assert all(torch.equal(ours[1], theirs[0]) for ours, theirs in zip(together.codes, alone.codes, strict=True))
    dense = generated(family, size=NO_SQUARE)
    assert torch.equal(together.codes[1], dense.codes[1])
    assert not torch.equal(together.codes[2], dense.codes[2])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_outputs_of_the_very_first_stage_can_be_kept(family: str) -> None:
    """HART's has text before its only cell, of which nothing is kept."""
    method = FastVAR({1: 0.5, 3: 0.5})
    assert shape_of(forecast(method, family))[0].startswith("cache")
    assert not torch.equal(generated(family, method=method).codes[1], generated(family).codes[1])
    assert not torch.equal(generated(family, method=method).codes[3], generated(family, method=FastVAR({3: 0.5})).codes[3])


def test_another_stage_to_keep_gives_another_image() -> None:
    images = {stage: generated("var", method=FastVAR({3: 0.8}, cache_stage=stage)) for stage in (0, 1, 2)}
    tiny.assert_same_bits(images[2], generated("var", method=FastVAR({3: 0.8})))
    assert not torch.equal(images[1].latent, images[2].latent)
    assert not torch.equal(images[0].latent, images[1].latent)


def test_other_blocks_give_another_image() -> None:
    images = [generated("infinity", method=FastVAR({3: 0.8}, layers=layers)) for layers in ((0, 3), (1, 3), (0, 1))]
    tiny.assert_same_bits(images[0], generated("infinity", method=FastVAR({3: 0.8})))
    assert not torch.equal(images[0].latent, images[1].latent)
    assert not torch.equal(images[1].latent, images[2].latent)


@pytest.mark.parametrize("family", ["infinity", "hart"])
def test_half_precision(family: str) -> None:
    pipeline = tiny.shared_pipeline(family, torch.bfloat16)
    assert pipeline(tiny.prompts(family, 2), seed=1, method=HARSH).pixels.isfinite().all()


# --- what is left in the cache


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """How many keys every layer saw last; caches are numbered in the order of their first use, which is that of the layers."""
    seen: dict[int, int] = {}
    caches: list[LayerCache] = []
    append = LayerCache.append

    def counted(self: LayerCache, k: Tensor, v: Tensor, tokens: Tokens) -> CacheView:
        if self not in caches:
            caches.append(self)
        view = append(self, k, v, tokens)
        seen[caches.index(self)] = view.end
        return view

    monkeypatch.setattr(LayerCache, "append", counted)
    return seen


def test_thinned_blocks_keep_fewer_keys(lengths: dict[int, int]) -> None:
    """The numbers of the reference implementation at one megapixel: 1497 tokens up to 24x24, then 1024 and 1600, or 615 and 800."""
    done = []
    method = FastVAR(layers=(1, 2))
    plans = method.forecast(tiny.shared_pipeline("infinity").model, ONE_MEGAPIXEL)
    tiny.shared_pipeline("infinity")(
        tiny.prompts("infinity", 1), seed=0, size=ONE_MEGAPIXEL, method=method, on_stage=lambda preview: done.append(preview.done)
    )
    assert lengths == {0: 4121, 1: 2912, 2: 4121}
    assert [stage.skipped for stage in done] == [False] * 11 + [True] * 2
    assert [stage.plan for stage in done] == list(plans)
    assert [plan.spans[0].num_tokens(stage.cells) for plan, stage in zip(plans, ONE_MEGAPIXEL, strict=True) if plan.spans] == [
        576,
        615,
        800,
    ]


def test_one_megapixel_of_hart(lengths: dict[int, int]) -> None:
    """Its text has 12 tokens here and 300 in the published model, hence 5526 there. The very last stage is thinned, too."""
    sides = (1, 2, 3, 4, 5, 7, 9, 12, 16, 21, 27, 36, 48, 64)
    tiny.shared_pipeline("hart")(tiny.prompts("hart", 1), seed=0, size=Schedule(sides), method=FastVAR(), smooth=False, top_k=0)
    assert set(lengths.values()) == {5526 - 300 + tiny.HART_TEXT}


# --- skipped stages


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_share_of_one_skips_the_stage(family: str) -> None:
    last = STAGES[family] - 1
    tiny.assert_same_bits(generated(family, method=FastVAR({last: 1.0})), generated(family, method=SkipStages(1)))


# --- together with other methods


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_with_skipped_stages(family: str) -> None:
    last = STAGES[family] - 1
    both = generated(family, method=[FastVAR({last - 1: 0.5, last: 0.8}), SkipStages(1)])
    tiny.assert_same_bits(both, generated(family, method=FastVAR({last - 1: 0.5, last: 1.0})))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_inside_stages_that_another_method_reduces(family: str) -> None:
    """Images that keep different numbers of tokens equal those images alone; the thinned blocks run a share of what is left."""
    shares = (0.5, 1.0, 0.7)  # three tokens or more: two are equally far from their mean but for rounding
    together = generated(family, 3, greedy=True, method=[KeepShare(shares, from_stage=2), HARSH])
    whole = generated(family, 3, greedy=True, method=KeepShare(shares, from_stage=2))
    assert not torch.equal(together.codes[2], whole.codes[2])
    for image, share in enumerate(shares):
        prompt = tiny.one_prompt(family, image)
        alone = generated_from(prompt, family, seed=11 + image, greedy=True, method=[KeepShare((share,), from_stage=2), HARSH])
        for ours, theirs in zip(together.codes, alone.codes, strict=True):
            assert torch.equal(ours[image, : theirs.shape[1]], theirs[0])
            assert (ours[image, theirs.shape[1] :] == theirs[0, -1]).all()
        assert torch.allclose(together.pixels[image], alone.pixels[0], rtol=0, atol=PIXELS[family])


def test_the_stage_whose_outputs_are_kept_must_be_whole() -> None:
    with pytest.raises(SettingError, match="stage 1 must be run on all of its 4 cells.*got 2"):
        generated("var", method=[KeepShare((0.5, 0.5)), HARSH])
    earlier = generated("var", method=[KeepShare((0.5, 0.5)), FastVAR({2: 0.7, 3: 0.8}, cache_stage=0)])
    assert len(earlier.codes) == 4


def test_two_methods_that_run_the_same_blocks_are_refused_before_anything_runs() -> None:
    both = Combined((HARSH, FastVAR({3: 0.5}, layers=(0, 1))))
    with pytest.raises(SettingError, match="at stage 2 both change block"):
        generated("var", method=both, on_stage=lambda preview: pytest.fail("a stage was run"))


def test_a_stage_to_keep_that_another_method_skips_is_refused_before_anything_runs() -> None:
    skipping = Planned(lambda stage: StagePlan(skip=stage.index == 1))
    with pytest.raises(SettingError, match=r"at stage 2 the span .* needs what stage 1 computes, and another method skips"):
        generated("var", method=[HARSH, skipping], on_stage=lambda preview: pytest.fail("a stage was run"))


def test_a_stage_to_keep_that_a_run_skips_unannounced_is_named() -> None:
    with pytest.raises(SettingError, match="outputs .*fastvar.* are missing"):
        generated("var", method=[HARSH, SkipUnannounced(1)])


# --- what was run


@pytest.mark.parametrize("rows", [1, 2])
def test_the_share_of_the_network_that_ran_for_every_cell(rows: int) -> None:
    """Three blocks of two sublayers, of which blocks 1 and 2 are thinned: 2 sublayers for all cells, up to 6 for some."""
    method = FastVAR({2: 0.7, 3: 0.8}, layers=(1, 3))
    options = {"method": method} | ({} if rows == 2 else {"guidance": tiny.NO_GUIDANCE["var"]})
    output = generated("var", compute_mask=True, **options)
    assert output.compute_mask is not None
    assert {stage.cfg_branches for stage in output.report.stages} == {rows}
    tiny.assert_same_bits(output, generated("var", **options))
    assert [tuple(share.shape) for share in output.compute_mask] == [(2, side, side) for side in tiny.VAR_SIDES]
    assert all((share == 1).all() for share in output.compute_mask[:2])
    for share, cells, run in ((output.compute_mask[2], 9, 9 - 6), (output.compute_mask[3], 16, 16 - 12)):
        times = share * 6
        assert torch.equal(rows * times, (rows * times).round())  # the mean over the rows of an image
        assert times.min() >= 2
        assert times.max() <= 6
        assert times.sum(dim=(1, 2)).tolist() == pytest.approx([2 * cells + 4 * run] * 2, abs=1e-5)
        assert not torch.equal(share[0], share[1])


def test_skipped_stages_ran_nowhere() -> None:
    output = generated("var", method=FastVAR({3: 1.0}), compute_mask=True)
    assert (output.compute_mask[3] == 0).all()
    assert (output.compute_mask[2] == 1).all()


def test_the_compute_mask_is_the_mean_over_the_rows_of_an_image() -> None:
    """Rows 0 and 2 are those of the first image. Padding counts once, and two more sublayers were run for all cells."""
    computed = ComputedCells(2)
    for index in ([[0, 0], [1, 2], [3, 3], [4, 4]], [[0, 5], [1, 1], [3, 3], [4, 4]]):
        tokens = Tokens(STAGE, torch.tensor(index))
        computed.add(tokens, torch.zeros(4, 2, 7), sublayers=1)
    computed.add(Tokens(STAGE), torch.zeros(4, 6, 7), sublayers=2)
    assert (computed.take(4) * 4).tolist() == [[3, 2, 2, 3, 2, 2.5], [2, 3, 2.5, 2, 3, 2]]
    assert computed.take(4) is None
