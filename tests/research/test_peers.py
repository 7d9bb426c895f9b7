"""The methods that papers compare with: what every one of them must keep, whatever it does, and their arithmetic by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nextscale import Method, Pipeline, Schedule, SkipStages, StageVAR, Tokens
from nextscale.cache import AttentionCall, CacheSpec, CacheView, Workspace
from nextscale.engine import captures
from nextscale.engine.executor import Engine
from nextscale.errors import SettingError, SizeError
from nextscale.loading.load import random_pipeline
from nextscale.loading.presets import ModelSpec, build_model, model_spec
from nextscale.methods import DENSE, resolve_method
from nextscale.planning.cost import Workload, request_cost
from nextscale.planning.memory import reserved_cache
from nextscale.schedules import INFINITY_SIZES, SquareSchedules
from nextscale.stage import Stage
from nextscale_research.methods import CoDe, LiteVAR, PiToMe, ScaleKV, SkipVAR, SparseViT, SparVAR, ToMe, ZipVL, skipvar
from nextscale_research.methods.calibrate_scalekv import measure_roles
from nextscale_research.methods.calibrate_skipvar import fit, logistic_regression, measure, most_within
from nextscale_research.methods.code import released_sampling
from nextscale_research.methods.key_lists import KeyLists, centers, key_map
from nextscale_research.methods.litevar import LiteVARCache, band
from nextscale_research.methods.pitome import energies, merged_by_energy
from nextscale_research.methods.scalekv import (
    PUBLISHED,
    PUBLISHED_SIDES,
    key_scores,
    released_window,
    ruled_budgets,
    top_as_released,
    top_keys,
    window_places,
)
from nextscale_research.methods.skipvar import features_of, gradient, high_frequencies
from nextscale_research.methods.skipvar_models import Classifier, Decisions, published_decisions
from nextscale_research.methods.sparsevit import ActiveBlocks, window_scores
from nextscale_research.methods.sparvar import carried, chosen_lists, resized, source_groups
from nextscale_research.methods.zipvl import fewest
from tests.helpers import tiny
from tests.helpers.tape import Dispatched, play_graphs_on_the_cpu
from tests.helpers.toy_methods import KeepShare

# A method that acts on the few tokens of tiny models, and the same without strength.
PEERS: dict[str, tuple[Method, Method]] = {
    "scalekv": (ScaleKV(share=0.2, window=4), ScaleKV(share=1.0)),
    "pitome": (PiToMe(), PiToMe(ratio=0)),
    "pitome, all paired": (PiToMe(0.3, form="bsm"), PiToMe(stages=())),
    "sparsevit": (SparseViT(window=2), SparseViT(ratio=0)),
    "zipvl": (ZipVL(), ZipVL(ratio=0)),
    "zipvl, tau": (ZipVL(tau=0.6, probes=0.5), ZipVL(stages=())),
    "litevar": (LiteVAR(first=1), LiteVAR(1.0, share_rows=False)),
    "litevar, released": (LiteVAR(first=1, as_released=True), LiteVAR(1.0, share_rows=False)),
    "sparvar": (SparVAR(last=2, choosing=2, windows=(1,)), SparVAR(last=0)),
}
BY_PEER = pytest.mark.parametrize("peer", PEERS)
BY_FAMILY = pytest.mark.parametrize("family", tiny.FAMILIES)
BY_BOTH = pytest.mark.parametrize(
    ("peer", "family"), [(peer, family) for peer in PEERS for family in (tiny.KINDS if "," in peer else tiny.FAMILIES)]
)
NO_SQUARE = Schedule(((1, 1), (2, 3), (3, 5), (4, 6)))
LARGE, LARGE_NO_SQUARE = Schedule((1, 4, 10, 14)), Schedule(((1, 1), (2, 3), (8, 12), (12, 16)))  # where blocks of 128 keys leave some out
WIDE = Schedule((1, 2, 4, 8, 12, 14))
CPU = torch.device("cpu")


def generated(family: str, prompt: Any, **settings: Any) -> Any:
    return tiny.shared_pipeline(family)(prompt, **settings)


def acted(peer: str, family: str, prompt: Any, **settings: Any) -> Any:
    """Generated at stages that are large enough for the peer to act."""
    return pipeline_for(peer, family)(prompt, **size_for(peer, family), **settings)


def pipeline_for(peer: str, family: str) -> Pipeline:
    spec = spec_for(peer, family)
    return tiny.shared_pipeline(family) if spec is tiny.SPECS[family] else large_pipeline(spec)


def spec_for(peer: str, family: str) -> ModelSpec:
    """The family's, but VAR knows its stages only: one that has large ones."""
    spec, sides = tiny.SPECS[family], tuple(height for height, _ in LARGE.sizes)
    if peer != "sparvar" or not family.startswith("var"):
        return spec
    model: Any = replace(spec.model, sides=sides)  # type: ignore[call-arg]
    return replace(spec, model=model, settings=replace(spec.settings, schedules=SquareSchedules((sides,))))


def size_for(peer: str, family: str, square: bool = True) -> dict[str, Any]:
    if peer != "sparvar":
        return {} if square else {"size": NO_SQUARE}
    if not square:
        return {"size": LARGE_NO_SQUARE}
    return {} if family.startswith("var") else {"size": LARGE}


def acting_size(peer: str, family: str) -> dict[str, Any]:
    """Stages at which codes change: ScaleKV often changes none of the 144 bits of a last stage of 12 cells.

    Merging compares similarities, whose near ties fall differently under other rounding: more cells have more of them.
    """
    return {"size": LARGE} if peer == "scalekv" and family in ("infinity", "flexvar") else size_for(peer, family)


@cache
def large_pipeline(spec: ModelSpec) -> Pipeline:
    return random_pipeline(spec)


def same_image(family: str, ours: Any, theirs: Any) -> bool:
    return torch.allclose(ours.pixels, theirs.pixels, rtol=0, atol=tiny.ROUNDING[family].pixels)


# --- whatever the method


@BY_BOTH
def test_no_strength_is_dense_bit_for_bit(peer: str, family: str) -> None:
    acting, idle = PEERS[peer]
    prompt = tiny.prompts(family, 2)
    dense = acted(peer, family, prompt, seed=3)
    tiny.assert_same_bits(acted(peer, family, prompt, seed=3, method=idle), dense)
    assert not torch.equal(acted(peer, family, prompt, seed=3, method=acting).pixels, dense.pixels)


@BY_BOTH
def test_a_batch_equals_its_images_alone_in_any_order(peer: str, family: str) -> None:
    method, order = PEERS[peer][0], [2, 0, 1]
    seeds = [5, 60, 700]
    together = acted(peer, family, picked(family, range(3)), seed=seeds, method=method)
    permuted = acted(peer, family, picked(family, order), seed=[seeds[image] for image in order], method=method)
    assert tiny.close_codes(family, permuted.codes, [codes[order] for codes in together.codes])
    alone, same = acted(peer, family, tiny.one_prompt(family, 2), seed=seeds[2], method=method), tiny.one_image(together, 2)
    assert tiny.close_codes(family, same.codes, alone.codes)
    assert same_image(family, same, alone)
    tiny.assert_same_bits(acted(peer, family, picked(family, range(3)), seed=seeds, method=method), together)


def picked(family: str, images: Sequence[int]) -> Any:
    if family in tiny.CLASS_FAMILIES:
        return [tiny.one_prompt(family, image) for image in images]
    return type(tiny.prompts(family, 1)).joined([tiny.one_prompt(family, image) for image in images])


@pytest.mark.parametrize("family", ["flexvar", "infinity", "hart", "star_refined"])
@BY_PEER
def test_images_need_not_be_square(peer: str, family: str) -> None:
    settings = size_for(peer, family, square=False)
    together = tiny.one_image(generated(family, tiny.prompts(family, 2), seed=11, method=PEERS[peer][0], **settings), 1)
    alone, logits = seen(family, tiny.one_prompt(family, 1), seed=12, method=PEERS[peer][0], **settings)
    assert [codes.shape[1] for codes in alone.codes] == [stage.cells for stage in settings["size"]]
    assert tiny.close_codes(family, together.codes, alone.codes)
    assert torch.allclose(together.latent, alone.latent, rtol=0, atol=tiny.ROUNDING[family].latents)
    assert not torch.equal(logits, seen(family, tiny.one_prompt(family, 1), seed=12, **settings)[1])


def seen(family: str, prompt: Any, **settings: Any) -> tuple[Any, Tensor]:
    """What is generated, and the logits of the last stage, which tell more than codes whether a method has acted."""
    logits: list[Tensor] = []
    return generated(family, prompt, on_stage=lambda preview: logits.append(preview.done.logits), **settings), logits[-1]


@pytest.mark.parametrize("method", [SparVAR(last=2, choosing=0, windows=(1,)), SparVAR(last=2, choosing=3)], ids=["windows", "chosen"])
@pytest.mark.parametrize("size", [LARGE, LARGE_NO_SQUARE])
def test_windows_and_chosen_keys_leave_some_out(method: Method, size: Schedule) -> None:
    dense, sparse = (seen("infinity", tiny.prompts("infinity", 1), seed=1, size=size, method=one)[1] for one in (None, method))
    assert (dense - sparse).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["var", "infinity"])
@BY_PEER
def test_replays_generate_what_eager_generation_does(peer: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    eager = pipeline_for(peer, family)
    pipe = Pipeline(eager.model, eager.tokenizer, eager.reader, eager.settings, engine="graphs")
    settings = {"method": PEERS[peer][0], **acting_size(peer, family)}
    pipe.warmup(tiny.prompts(family, 2), **settings)
    ours = pipe(tiny.prompts(family, 2), seed=[3, 4], **settings)
    with Dispatched():
        theirs, dense = (eager(tiny.prompts(family, 2), seed=[3, 4], **one) for one in (settings, settings | {"method": None}))
    assert (ours.report.engine, theirs.report.engine) == ("graphs", "eager")
    torch.testing.assert_close(ours.latent, theirs.latent, rtol=1e-3, atol=1e-3)
    assert not torch.equal(ours.pixels, dense.pixels)


@BY_PEER
def test_rows_may_leave_in_the_middle(peer: str) -> None:
    """At guidance 1 the unconditional rows change nothing, unless a method takes the map of one row for the other: there they agree."""
    guidance = [2.5, 2.5, 1.0, 1.0]
    both = acted(peer, "infinity", tiny.prompts("infinity", 2), seed=4, guidance=guidance, method=PEERS[peer][0])
    off = StageVAR(guidance_off=2, alphas=())
    negative = tiny.prompts("infinity", 2)  # so that the rows that stay, the unconditional ones, are the same
    guided = {"seed": 4, "guidance": guidance, "negative": negative}
    dropped, kept = (
        acted(peer, "infinity", tiny.prompts("infinity", 2), method=method, **guided) for method in ([PEERS[peer][0], off], PEERS[peer][0])
    )
    assert [stage.rows for stage in dropped.report.stages] == [4, 4, 2, 2]
    assert same_image("infinity", dropped, kept)
    assert both.pixels.isfinite().all()


@BY_PEER
def test_in_stages_that_another_method_reduces(peer: str) -> None:
    """Images keep different numbers of tokens. Keys that are found by where they lie cannot be, and it is said so."""
    methods = [KeepShare((0.5, 1.0, 0.7), from_stage=2), PEERS[peer][0]]
    if peer.startswith(("litevar", "sparvar")):
        with pytest.raises(SettingError, match="finds keys by position"):
            generated("infinity", tiny.prompts("infinity", 3), seed=1, method=methods)
        return
    together = generated("infinity", tiny.prompts("infinity", 3), seed=11, greedy=True, method=methods)
    for image, share in enumerate((0.5, 1.0, 0.7)):
        alone = generated(
            "infinity", tiny.one_prompt("infinity", image), seed=11, greedy=True, method=[KeepShare((share,), from_stage=2), PEERS[peer][0]]
        )
        assert same_image("infinity", tiny.one_image(together, image), alone)


@pytest.mark.parametrize("peer", ["sparvar:last=1", "sparvar:last=1,choosing=0", "litevar"])
def test_keys_that_an_earlier_stage_left_out_are_missed(peer: str) -> None:
    with pytest.raises(SettingError, match="of stage 3 or of one before it"):
        generated("infinity", tiny.prompts("infinity", 2), seed=1, method=["sparsevar:keep={2: 0.5},metric=logits", peer])


@BY_PEER
def test_beside_skipped_stages(peer: str) -> None:
    skipped = acted(peer, "infinity", tiny.prompts("infinity", 2), seed=4, method=[PEERS[peer][0], SkipStages(1)])
    whole = acted(peer, "infinity", tiny.prompts("infinity", 2), seed=4, method=PEERS[peer][0])
    assert len(skipped.codes) == 3
    if not peer.startswith("scalekv"):  # nothing is compressed for a stage that does not come
        assert tiny.same_codes(skipped.codes, whole.codes[:3])


@pytest.mark.parametrize("methods", [(ScaleKV(), ZipVL()), (SparVAR(), LiteVAR())])
def test_two_caches_of_their_own_are_refused(methods: tuple[Method, Method]) -> None:
    with pytest.raises(SettingError, match="changes cache"):
        generated("var", [1], seed=0, method=methods)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (ScaleKV, {"share": 0}),
        (ScaleKV, {"window": 0}),
        (ScaleKV, {"pooling": 4}),
        (ScaleKV, {"budgets": {7: (1, 0)}}),
        (ScaleKV, {"budgets": {7: 20}, "share": 0.5}),
        (ScaleKV, {"drafters": 3}),
        (SkipVAR, {"models": "0.5"}),
        (SkipVAR, {"most": -1}),
        (SkipVAR, {"as_released": True, "most": 1}),
        (CoDe, {"draft": 0}),
        (CoDe, {"refiner": 4}),
        (PiToMe, {"ratio": 0.6}),
        (PiToMe, {"form": "best"}),
        (PiToMe, {"margin": float("nan")}),
        (PiToMe, {"margin": 10**400}),
        (SparseViT, {"ratio": 1}),
        (SparseViT, {"window": 0}),
        (ZipVL, {"tau": 1.5}),
        (ZipVL, {"probes": 0}),
        (LiteVAR, {"width": 0}),
        (LiteVAR, {"share_rows": 1}),
        (SparVAR, {"last": -1}),
        (SparVAR, {"windows": ()}),
        (SparVAR, {"keys": 2}),
        (SparVAR, {"last": 9}),
        (ScaleKV, {"drafters": (9,)}),
        (ScaleKV, {"budgets": {9: 40}}),
        (ScaleKV, {"as_released": True}),
        (PiToMe, {"stages": (9,)}),
        (CoDe, {"draft": 9}),
        (SkipVAR, {"decide_after": 9}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_impossible_settings_are_refused_before_anything_runs(method: type[Method], settings: dict[str, Any]) -> None:
    pipe = tiny.shared_pipeline("var")
    with pytest.raises(SettingError):
        pipe([1], seed=0, method=method(**settings), on_stage=lambda preview: pytest.fail("a stage ran"))


# --- ScaleKV


def square(side: int, index: int = 7) -> Stage:
    return Stage(index, side, side, 0, False)


@pytest.mark.parametrize(
    ("side", "coordinates"),
    [
        (20, [2, 7, 12, 17]),
        (24, [2, 8, 14, 20]),
        (32, [3, 11, 19, 27]),
        (40, [4, 14, 24, 34]),
        (48, [5, 17, 29, 41]),
        (64, [7, 23, 39, 55]),
    ],
)
def test_the_window_lies_at_the_centers_of_sixteen_squares(side: int, coordinates: list[int]) -> None:
    places = window_places(Tokens(square(side)), (2, side * side), 16, CPU)
    assert places.tolist() == [[row * side + column for row in coordinates for column in coordinates]] * 2


def released_places(stage: int, cached: int, window: int) -> list[int]:
    return released_window(stage, cached, window, CPU).tolist()


def test_the_released_window_takes_every_stage_for_a_square_one() -> None:
    """At 2:1 stage 8 has 38 x 19 cells, and the last 576 entries are taken for 24 x 24 of them."""
    centers = [2, 8, 14, 20]
    assert released_places(8, 1623, 16) == [1623 - 576 + 24 * row + column for row in centers for column in centers]
    assert released_places(8, 1623, 9) == [1623 - 576 + 24 * row + column for row in (3, 11, 19) for column in (3, 11, 19)]
    assert released_places(8, 1623, 12) == list(range(1611, 1623))  # no square: the last ones
    assert released_places(8, 570, 16) == list(range(554, 570))  # fewer entries than cells, and no square
    assert released_places(8, 529, 16)[:5] == [2 * 23 + 2, 2 * 23 + 7, 2 * 23 + 12, 2 * 23 + 17, 7 * 23 + 2]  # fewer, and a square
    assert released_places(1, 5, 9) == list(range(5))
    square_stage = window_places(Tokens(square(24, 8)), (1, 576), 16, CPU)[0]
    assert released_places(8, 921 + 576, 16) == (921 + square_stage).tolist()


def test_published_budgets_of_other_schedules() -> None:
    """They begin where more than 650 keys are left; the reference implementation has none for stages before the eighth."""
    model: Any = SimpleNamespace(family="infinity", blocks=[None] * 32, text_prefix=0)
    released = ScaleKV(as_released=True)
    kept = {
        name: [plan.kept_keys and plan.kept_keys[:2] for plan in released.forecast(model, Schedule(sizes))]
        for name, sizes in {
            "0.25M": PUBLISHED_SIDES[:10],
            "0.06M": PUBLISHED_SIDES[:7],
            "2:1": INFINITY_SIZES[2.0],
        }.items()
    }
    assert kept["0.25M"] == [None] * 7 + [(920, 632), (1490, 594), None]
    assert kept["0.06M"] == [None] * 7
    assert kept["2:1"] == [None] * 7 + [(920, 632), (1490, 594), (2510, 526), (4100, 420), (6385, 465), None]
    with pytest.raises(SettingError, match="stage 6 with over 650 keys"):
        released.forecast(model, Schedule(INFINITY_SIZES[0.75]))
    with pytest.raises(SettingError, match="as_released.*Infinity"):
        released.forecast(SimpleNamespace(**vars(model) | {"family": "var"}), Schedule(PUBLISHED_SIDES))


def test_the_released_choice_runs_on_images_that_are_not_square() -> None:
    budgets = {2: 18, 1: 5}
    ours, theirs = (
        seen(
            "infinity", tiny.prompts("infinity", 2), seed=1, size=NO_SQUARE, method=ScaleKV(budgets=budgets, window=4, as_released=released)
        )[1]
        for released in (False, True)
    )
    assert theirs.isfinite().all() and not torch.equal(ours, theirs)


def test_published_budgets_follow_the_rule() -> None:
    """All but the last of the 8B model, which the files have otherwise."""
    schedule = Schedule(PUBLISHED_SIDES)
    for layers, table in PUBLISHED.items():
        for stage, (drafters, most, least) in table.items():
            ruled = ruled_budgets(schedule, layers, drafters, 650, 16)[stage]
            if (layers, stage) == (40, 11):
                assert (ruled[0], ruled[-1]) == (6348, 188) != (most, least)
            elif (layers, stage) != (32, 11):  # whose limit follows from two drafters before
                assert (ruled[drafters[0]], ruled[-1]) == (most, least)
            assert len(drafters) * most + (layers - len(drafters)) * least == 650 * layers


def test_scores_of_keys_by_hand() -> None:
    """One head of one channel: window queries 1 and 2 at places 2 and 5, so that a key k scores 3k; pooling takes the largest of three."""
    keys = torch.tensor([4.0, 1.0, 9.0, 2.0, 3.0, 9.0, 5.0]).view(1, 7, 1, 1)
    window = torch.tensor([[2, 5]])
    scores = key_scores(keys, torch.tensor([1.0, 2.0]).view(1, 2, 1, 1), window, 3)
    low = -torch.inf
    assert scores[0, 0].tolist() == [12.0, 12.0, low, 9.0, 9.0, low, 15.0]
    assert top_keys(scores, window, 4)[0, 0].tolist() == [0, 2, 5, 6]  # of the two that score 12 the first
    assert set(top_as_released(scores, window, 4)[0, 0].tolist()) >= {2, 5, 6}
    assert top_keys(scores, window, 2)[0, 0].tolist() == [2, 5]
    longer = key_scores(torch.cat([keys, 100 * keys], dim=1), torch.tensor([1.0, 2.0]).view(1, 2, 1, 1), window, 3, torch.tensor([7]))
    assert longer[0, 0, :7].tolist() == scores[0, 0].tolist() and (longer[0, 0, 7:] < -1e30).all()


@pytest.mark.parametrize("family", ["var", "hart"])
def test_compressed_caches_take_what_is_reserved(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, at every layer of every stage; and what is kept is what the budgets say."""
    from nextscale_research.methods.scalekv import ScaleKVCache

    pipe, method = tiny.shared_pipeline(family), PEERS["scalekv"][0]
    schedule, caches, held = tiny.schedule_of(family), [], {}
    spec = reserved_cache(pipe.model, schedule, method.forecast(pipe.model, schedule), 2, 4)
    attend = ScaleKVCache.attend

    def watched(cache: ScaleKVCache, seen: Any) -> Tensor:
        out = attend(cache, seen)
        caches.append(cache) if cache not in caches else None
        total = sum(one.nbytes for one in caches) + cache.workspace.nbytes
        held[seen.tokens.stage.index] = max(held.get(seen.tokens.stage.index, 0), total)
        return out

    monkeypatch.setattr(ScaleKVCache, "attend", watched)
    pipe(tiny.prompts(family, 2), seed=1, method=method)
    final = len(schedule) - 1
    for stage in range(final):
        assert held[stage] <= spec.bytes_at(stage)
    assert max(held[stage] for stage in range(final)) == max(spec.bytes_at(stage) for stage in range(final))
    dense = reserved_cache(pipe.model, schedule, (DENSE,) * len(schedule), 2, 4)
    assert spec.bytes < dense.bytes


def test_a_tenth_of_the_cache_of_the_large_models() -> None:
    for name in ("infinity-2b", "infinity-8b"):
        with torch.device("meta"):
            model = build_model(model_spec(name).model)
        schedule = model_spec(name).settings.schedules.choose(None, None)
        plans, workload = ScaleKV().forecast(model, schedule), Workload(schedule, text_tokens=64)
        kept, dense = (reserved_cache(model, schedule, plan, 1, 2).kept_bytes for plan in (plans, (DENSE,) * len(schedule)))
        assert 0.09 < kept / dense < 0.15
        assert request_cost(model, workload, plans).held < 0.15 * request_cost(model, workload).held
        assert request_cost(model, workload, plans).attention < 0.75 * request_cost(model, workload).attention


# --- SkipVAR


def test_features_by_hand() -> None:
    """A step of height 1 has gradients of 4 beside it; with zeros around the image there are more at its border."""
    step = torch.zeros(1, 3, 6, 6)
    step[..., 3:] = 1
    assert gradient(step)[0, 0, 2, 1:5].tolist() == [0, 4, 4, 0]
    assert features_of(step, step)[0, 0] == 0
    flat, checked = torch.ones(1, 3, 8, 8), torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(4, 4).expand(1, 3, 8, 8)
    assert high_frequencies(flat).item() == pytest.approx(0, abs=1e-6)
    assert high_frequencies(checked).item() == pytest.approx(1, abs=1e-5)  # all of it at the corner, beyond radius 1


def test_published_sets_have_their_classes() -> None:
    published = published_decisions()
    assert list(published) == ["0.84", "0.86", "0.88", "0.84 diff-only"]
    assert published["0.84"].uncond.classes == (1, 2, 3) and published["0.86"].uncond.classes == (0, 1, 2, 3)
    detailed, plain = torch.tensor([[0.3, 0.7]]), torch.tensor([[0.02, 0.3]])
    assert [models(detailed)[0].skipped for models in published.values()] == [0] * 4
    assert [models(plain)[0].skipped for models in published.values()] == [3] * 4


def thresholds(classes: tuple[int, ...], limits: Sequence[float]) -> Classifier:
    """The classes in order of the first feature, which changes at these limits."""
    slope = 1000.0
    sums = [sum(limits[:number]) for number in range(len(classes))]
    return Classifier((0.0,), (1.0,), classes, tuple((slope * n,) for n in range(len(classes))), tuple(-slope * one for one in sums))


def as_file(models: Decisions, path: Path) -> str:
    path.write_text(json.dumps({name: getattr(models, name)._asdict() for name in models._fields}))
    return str(path)


ROUTED = ([0, 1, 2], [2, 0, 1], [0, 1, 1], [2, 0, 0], [1, 1, 1], [0, 0, 0], [2, 2, 2])  # of the images of `three_routes`
BY_FAMILY_AND_SIZE = pytest.mark.parametrize(
    ("family", "size"),
    [*((family, None) for family in tiny.FAMILIES), *((family, NO_SQUARE) for family in ("flexvar", "infinity", "star"))],
)


def three_routes(pipe: Pipeline, family: str, size: Schedule | None, folder: Path) -> SkipVAR:
    """Of three images with the seeds 1 to 3 one stops, one goes on without guidance, and one with guidance for a stage."""
    measured: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skipvar, "features_of", lambda old, new: measured.append(features_of(old, new)) or measured[-1])
        pipe(picked(family, range(3)), seed=[1, 2, 3], size=size, method=SkipVAR())
    low, middle, high = measured[0][:, 0].sort().values.tolist()
    models = Decisions(thresholds((2, 0), [(low + middle) / 2]), thresholds((1, 2), [(middle + high) / 2]))
    return SkipVAR(as_file(models, folder / "models.json"))


@BY_FAMILY_AND_SIZE
def test_every_image_of_a_batch_takes_its_own_route(family: str, size: Schedule | None, tmp_path: Path) -> None:
    method = three_routes(tiny.shared_pipeline(family), family, size, tmp_path)
    request: dict[str, Any] = {"seed": [1, 2, 3], "size": size, "method": method}
    previews: list[Any] = []
    together = generated(family, tiny.prompts(family, 3), **request, compute_mask=True, on_stage=previews.append)
    last = len(previews) - 1
    assert [stage.rows for stage in together.report.stages[last - 2 :]] == [6, 3, 2]
    assert all(preview.latent.shape[0] == 3 for preview in previews)
    tiny.assert_same_bits(generated(family, tiny.prompts(family, 3), **request), together)
    permuted = generated(family, picked(family, [2, 0, 1]), **request | {"seed": [3, 1, 2]})
    tiny.assert_close_pixels(family, permuted.pixels, together.pixels[[2, 0, 1]])
    masks = torch.stack([mask.flatten(1).mean(dim=1) for mask in together.compute_mask[last - 1 :]])
    assert (masks == 0).sum() == 2 and set(masks.flatten().tolist()) == {0.0, 1.0}
    shares = []
    for image in range(3):
        alone = generated(family, tiny.one_prompt(family, image), **request | {"seed": 1 + image})
        assert same_image(family, tiny.one_image(together, image), alone)
        shares.append(alone.report.cost_share)
    if family in tiny.CLASS_FAMILIES:  # texts are padded to the longest of a batch, and HART has work that a group of images shares
        assert together.report.cost_share == pytest.approx(sum(shares) / 3)
    assert len(set(shares)) == 3


def test_conditional_stages_are_guidance_one_and_skipped_ones_are_not_run(tmp_path: Path) -> None:
    always = {n: Classifier((0.0,), (1.0,), (n,), ((0.0,),), (0.0,)) for n in range(4)}
    for number in (1, 2):
        unguided = SkipVAR(as_file(Decisions(always[0], always[number]), tmp_path / "uncond.json"))
        guidance = [3.0] * (4 - number) + [1.0] * number
        tiny.assert_close("infinity", generated("infinity", tiny.prompts("infinity", 2), seed=5, method=unguided),
                          generated("infinity", tiny.prompts("infinity", 2), seed=5, guidance=guidance))  # fmt: skip
        skipping = SkipVAR(as_file(Decisions(always[number], always[3]), tmp_path / "skip.json"))
        tiny.assert_same_bits(generated("infinity", tiny.prompts("infinity", 2), seed=5, method=skipping),
                              generated("infinity", tiny.prompts("infinity", 2), seed=5, method=SkipStages(number)))  # fmt: skip


@BY_FAMILY_AND_SIZE
def test_replays_route_images_as_eager_generation_does(
    family: str, size: Schedule | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in a group of its own, two together, all together, and fewer images than were captured."""
    eager = tiny.shared_pipeline(family)
    settings: dict[str, Any] = {"method": three_routes(eager, family, size, tmp_path), "size": size}
    play_graphs_on_the_cpu(monkeypatch)
    monkeypatch.setattr(captures, "HOST_SECONDS", 1e3)  # so that fewer images are padded
    pipe = Pipeline(eager.model, eager.tokenizer, eager.reader, eager.settings, engine="graphs")
    pipe.warmup(picked(family, range(3)), **settings)
    assert len(pipe.captures) in (3, 4)  # up to the decision, and one for every outcome that goes on
    taken = set()
    for images in (*ROUTED, [1, 2]):
        asked = {"prompt": picked(family, images), "seed": [1 + image for image in images], **settings}
        ours = pipe(**asked)
        with Dispatched():
            theirs = eager(**asked)
        assert (ours.report.engine, theirs.report.engine) == ("graphs", "eager")
        rows = [stage.rows for stage in theirs.report.stages]
        assert [stage.rows for stage in ours.report.stages] == rows
        taken.add(tuple(rows))
        torch.testing.assert_close(ours.latent, theirs.latent, rtol=1e-3, atol=1e-3)
        assert tiny.close_codes(family, ours.codes, theirs.codes)
        assert ours.report.cost_share == pytest.approx(theirs.report.cost_share)
    assert len(taken) > 4


@pytest.mark.parametrize("engine", ["eager", "graphs"])
@BY_FAMILY
def test_images_are_routed_past_codes_that_are_given(family: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    shared = tiny.shared_pipeline(family)
    pipe = Pipeline(shared.model, shared.tokenizer, shared.reader, shared.settings, engine=engine)
    method, seeds = three_routes(shared, family, None, tmp_path), [1, 2, 3]
    codes = shared(tiny.prompts(family, 3), seed=seeds).codes
    for stages in (2, 3):  # up to the decision, and beyond it
        together = pipe(tiny.prompts(family, 3), seed=seeds, method=method, prefix_codes=codes[:stages], warmup=True)
        assert together.report.engine == engine
        assert together.report.stages[-1].rows == 2  # one image has stopped, and two go on without guidance
        for image in range(3):
            given = [one[image : image + 1] for one in codes[:stages]]
            alone = shared(tiny.one_prompt(family, image), seed=seeds[image], method=method, prefix_codes=given)
            assert same_image(family, tiny.one_image(together, image), alone)


@pytest.mark.parametrize("codes", [None, torch.zeros(2, 1)], ids=["nothing", "too few"])
def test_revise_must_return_codes_where_images_are_routed(codes: Any, tmp_path: Path) -> None:
    pipe = tiny.shared_pipeline("var")
    with pytest.raises(SettingError, match="what revise returns for stage"):
        pipe(
            tiny.prompts("var", 3),
            seed=[1, 2, 3],
            method=three_routes(pipe, "var", None, tmp_path),
            revise=lambda stage, own: codes if stage.index == 3 else own,
        )


def test_a_decision_file_that_changes_is_another_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    shared = tiny.shared_pipeline("var")
    pipe = Pipeline(shared.model, shared.tokenizer, shared.reader, shared.settings, engine="graphs")
    found = []
    for number in (0, 2):
        always = Classifier((0.0,), (1.0,), (number,), ((0.0,),), (0.0,))
        text = f"skipvar:models={as_file(Decisions(always, always), tmp_path / 'models.json')}"
        made = pipe([1, 2], seed=1, method=text, warmup=True).report
        found.append((made.engine, [stage.skipped for stage in made.stages]))
    assert found == [("graphs", [False] * 4), ("graphs", [False, False, True, True])]


def test_a_decision_file_may_lie_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    always = Classifier((0.0,), (1.0,), (0,), ((0.0,),), (0.0,))
    as_file(Decisions(always, always), tmp_path / "models.json")
    found = resolve_method("skipvar:models=~/models.json")
    assert isinstance(found, SkipVAR) and found.decisions == Decisions(always, always)


def test_outcomes_that_come_to_the_same_are_one_group() -> None:
    schedule, outcomes = Schedule((1, 2, 3, 4, 5)), published_decisions()["0.86"].outcomes
    counts = [
        len({SkipVAR("0.86", most=most).changes(outcome, schedule, guided) for outcome in outcomes})
        for most, guided in ((3, True), (2, True), (1, True), (3, False))
    ]
    assert len(outcomes) == 7
    assert counts == [7, 5, 3, 4]


@BY_FAMILY
def test_no_stage_may_be_skipped(family: str) -> None:
    dense = generated(family, tiny.prompts(family, 2), seed=1)
    tiny.assert_same_bits(generated(family, tiny.prompts(family, 2), seed=1, method=SkipVAR(most=0)), dense)


WHOLE = {"mean": [0.1], "scale": [1.0], "classes": [0, 1], "weights": [[1.0], [2.0]], "bias": [0.0, 0.0]}
DAMAGED: list[dict[str, Any]] = [
    {"weights": [1.0, 2.0]},
    {"weights": [None, None]},
    {"weights": [[1.0], [2.0, 3.0]]},
    {"bias": [float("nan"), 0.0]},
    {"mean": [float("inf")]},
    {"bias": [10**400, 0.0]},
    {"scale": [0.0]},
    {"classes": [0, -1]},
]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"skip": 3, "uncond": 4}',
        '{"skip": {"mean": [0]}}',
        *(json.dumps({"skip": WHOLE | one, "uncond": WHOLE}) for one in DAMAGED),
    ],
)
def test_files_that_are_no_decisions_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "models.json").write_text(content)
    with pytest.raises(SettingError):
        SkipVAR(str(tmp_path / "models.json")).forecast(tiny.shared_pipeline("var").model, tiny.schedule_of("var"))


def test_skipvar_goes_with_what_has_no_state_of_a_batch() -> None:
    assert generated("infinity", tiny.prompts("infinity", 2), seed=1, method=[SkipVAR(), ToMe()]).pixels.isfinite().all()
    with pytest.raises(SettingError, match="SkipVAR and KeepShare"):
        generated("infinity", tiny.prompts("infinity", 2), seed=1, method=[SkipVAR(), KeepShare((0.5, 0.5))])


def test_a_fit_finds_the_smallest_loss() -> None:
    """Where the gradient of cross-entropy and half the squared weights is zero; two clouds are told apart."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 3, (80,), generator=generator)
    features = torch.randn(80, 2, generator=generator).double() + labels[:, None] * torch.tensor([1.0, -0.5])
    found = logistic_regression(features, 2 * labels)
    assert found.classes == (0, 2, 4)
    standard = (features - torch.tensor(found.mean).double()) / torch.tensor(found.scale).double()
    surplus = found.scores(features).softmax(dim=1) - torch.nn.functional.one_hot(labels, 3)
    assert (surplus.T @ standard + torch.tensor(found.weights)).abs().max() < 1e-5
    assert surplus.sum(dim=0).abs().max() < 1e-5
    assert (torch.tensor(found(features)) == 2 * labels).float().mean() > 0.5
    assert logistic_regression(features, torch.full((80,), 3)).classes == (3,)


def test_classes_are_the_most_stages_that_stay_similar() -> None:
    similar = torch.tensor([[0.9, 0.86, 0.5], [0.8, 0.7, 0.6], [0.95, 0.94, 0.93]])
    assert most_within(similar, 0.85).tolist() == [2, 0, 3]


@pytest.mark.parametrize("family", ["infinity", "flexvar"])
def test_decisions_are_fitted_to_a_model_and_used(family: str, tmp_path: Path) -> None:
    pipe = tiny.shared_pipeline(family)
    prompts = [tiny.one_prompt(family, image) for image in range(3)]
    given = prompts if family in tiny.CLASS_FAMILIES else [features.rows[0] for features in prompts]
    measured = measure(pipe, given, WIDE, seed=5, batch=2)
    assert measured.features.shape == (3, 2) and measured.skipped.shape == measured.unguided.shape == (3, 3)
    assert (measured.skipped <= 1 + 1e-5).all() and (measured.skipped < 0.99).any() and (measured.unguided < 0.99).any()
    method = SkipVAR(as_file(fit(measured, float(measured.skipped.median())), tmp_path / "own.json"))
    assert pipe(given, seed=5, size=WIDE, method=method).pixels.isfinite().all()


def test_drafters_are_the_layers_that_lose_most() -> None:
    pipe = tiny.shared_pipeline("infinity")
    given = [tiny.one_prompt("infinity", image).rows[0] for image in range(2)]
    roles = measure_roles(pipe, given, WIDE, ScaleKV(share=0.3, window=4))
    assert len(roles.lost) == 3 and all(0 < lost < 1 for lost in roles.lost)
    assert roles.drafters == (max(range(3), key=lambda layer: roles.lost[layer]),)
    assert measure_roles(pipe, given, WIDE, ScaleKV(share=1.0)).lost == (0.0,) * 3  # the last stage leaves nothing to drop


# --- CoDe


def test_the_stages_of_both_models_are_kept() -> None:
    pipe = pair("flexvar")
    prompt, method = tiny.prompts("flexvar", 2), CoDe(refiner="small")
    latents: list[Tensor] = []
    code = pipe(prompt, seed=3, method=method, keep_stages=True)
    pipe.partners.known["small"](prompt, seed=3, prefix_codes=code.codes[:2], on_stage=lambda preview: latents.append(preview.latent))
    assert code.stages is not None and len(code.stages) == len(latents)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(code.stages.latents[:2], latents[:2], strict=True))
    assert torch.equal(code.stages.latents[-1], code.latent)


def pair(family: str, engine: str | None = None) -> Pipeline:
    """A tiny model that drafts for one with a block less."""
    spec = tiny.SPECS[family]
    small = random_pipeline(replace(spec, name="small", model=replace(spec.model, depth=2)), seed=4)
    large = tiny.shared_pipeline(family)
    made = [Pipeline(pipe.model, large.tokenizer, pipe.reader, pipe.settings, pipe.name, engine=engine) for pipe in (large, small)]
    made[0].partners.known["small"] = made[1]
    return made[0]


@BY_FAMILY_AND_SIZE
def test_a_draft_is_kept_and_the_small_model_goes_on(family: str, size: Schedule | None) -> None:
    pipe, prompt, request = pair(family), tiny.prompts(family, 3), {"seed": [3, 40, 500], "size": size}
    dense, small = pipe(prompt, **request), pipe.partners.known["small"]
    stages, method = len(dense.codes), CoDe(refiner="small")
    code = pipe(prompt, **request, method=method)
    assert tiny.same_codes(code.codes[: stages - 2], dense.codes[: stages - 2])
    forced = dict(enumerate(dense.codes[: stages - 2]))
    tiny.assert_close(family, code, small(prompt, **request, revise=lambda stage, codes: forced.get(stage.index, codes)))
    tiny.assert_same_bits(pipe(prompt, **request, method=CoDe(draft=stages, refiner="small")), dense)
    assert not torch.equal(code.latent, dense.latent)
    assert code.report.model == f"{pipe.name} + small" and code.report.cost_share < 1.3
    tiny.assert_same_bits(pipe(prompt, **request, method=method), code)
    permuted = pipe(picked(family, [2, 0, 1]), **request | {"seed": [500, 3, 40]}, method=method)
    tiny.assert_close_pixels(family, permuted.pixels, code.pixels[[2, 0, 1]])
    alone = pipe(tiny.one_prompt(family, 1), **request | {"seed": 40}, method=method)
    assert same_image(family, tiny.one_image(code, 1), alone)


def test_a_pair_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    pipe, eager = pair("infinity", "graphs"), pair("infinity", "eager")
    prompt = tiny.prompts("infinity", 2)
    for seed in (1, 2):
        ours = pipe(prompt, seed=seed, method=CoDe(refiner="small"), warmup=True)
        with Dispatched():
            theirs = eager(prompt, seed=seed, method=CoDe(refiner="small"))
        assert ours.report.engine == "graphs"
        torch.testing.assert_close(ours.latent, theirs.latent, rtol=1e-3, atol=1e-3)
    assert pipe.warmup(prompt, method="code:refiner=small").graphs == 0  # both are there
    assert len(pipe.captures) == 1


@pytest.mark.parametrize("methods", ["code + skip:last=1", [CoDe(), Method()], [["code", "tome"], "skip"]])
def test_a_pair_beside_other_methods_is_refused_where_methods_are_combined(methods: Any) -> None:
    pipe = pair("var")
    with pytest.raises(SettingError, match="cannot be combined with other methods"):
        pipe.accelerate(methods)
    assert pipe.method == Method()


def test_what_is_no_pair_is_refused() -> None:
    pipe = pair("var")
    pipe.partners.known["other"] = tiny.shared_pipeline("flexvar")
    for method, message in (
        (CoDe(refiner="other"), "do not have the same codes"),
        (CoDe(refiner="absent"), "no refiner 'absent'"),
        (CoDe(), "no smaller model is known"),
    ):
        with pytest.raises(SettingError, match=message):
            pipe([1], seed=0, method=method)
    with pytest.raises(SettingError, match="no compute_mask"):
        pipe([1], seed=0, method=CoDe(refiner="small"), compute_mask=True)


def test_a_refiner_without_these_stages_is_refused_before_anything_is_drafted() -> None:
    pipe, spec, sides = pair("var"), tiny.SPECS["var"], (1, 2, 3)
    model: Any = replace(spec.model, sides=sides)  # type: ignore[call-arg]
    fewer = replace(spec, model=model, settings=replace(spec.settings, schedules=SquareSchedules((sides,))))
    pipe.partners.known["small"] = random_pipeline(fewer)
    with pytest.raises(SizeError, match="1x1 2x2 3x3"):
        pipe([1], seed=0, method=CoDe(refiner="small"), on_stage=lambda preview: pytest.fail("a stage ran"))


def test_the_released_script_samples_hotter_at_first() -> None:
    settings = released_sampling(10)
    assert settings["temperature"] == (1.1,) * 7 + (1.0,) * 3 and settings["top_k"] == 600 and settings["guidance"] == 1.5
    pipe = pair("var")
    by_hand = pipe([1, 2], seed=1, method=CoDe(refiner="small"), **{**settings, "temperature": (1.1,) * 4})
    tiny.assert_same_bits(pipe([1, 2], seed=1, method=CoDe(refiner="small", as_released=True)), by_hand)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_given_codes_are_read_as_if_they_had_been_generated(family: str) -> None:
    prompt = tiny.prompts(family, 2)
    dense = generated(family, prompt, seed=1)
    for number in range(1, len(dense.codes)):
        again = generated(family, prompt, seed=1, prefix_codes=dense.codes[:number])
        tiny.assert_close(family, again, dense)
        assert again.report.cost_share == 1
    tiny.assert_close(family, generated(family, prompt, seed=1, prefix_codes=dense.codes[:2], method=ScaleKV(share=0.5, window=4)),
                      generated(family, prompt, seed=1, method=ScaleKV(share=0.5, window=4)))  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"greedy": True}, {"guidance": 0.0}], ids=str)
def test_refined_stages_that_are_given_leave_later_ones_their_random_numbers(settings: dict[str, Any]) -> None:
    prompt = tiny.prompts("star_refined", 2)
    full = generated("star_refined", prompt, seed=torch.Generator().manual_seed(3), **settings)
    again = generated("star_refined", prompt, seed=torch.Generator().manual_seed(3), prefix_codes=full.codes[:3], **settings)
    tiny.assert_close("star_refined", again, full)


ZEROS = torch.zeros(2, 1, dtype=torch.long)
NOT_CODES = {
    "cells": [ZEROS.repeat(1, 2)],
    "images": [ZEROS[:1]],
    "trailing dimension": [ZEROS[..., None]],
    "floats": [ZEROS.float()],
    "complex": [ZEROS.to(torch.complex64)],
    "too large": [ZEROS + 40],
    "negative": [ZEROS - 1],
    "not finite": [torch.full((2, 1, 40), torch.nan)],
    "word": ["codes"],
    "number": 5,
    "nothing": None,
    "all stages": [ZEROS] * 4,
}


@pytest.mark.parametrize("given", NOT_CODES.values(), ids=NOT_CODES)
def test_given_codes_must_fit(given: Any) -> None:
    with pytest.raises(SettingError, match="^prefix_codes"):
        generated("var", [1, 2], seed=1, prefix_codes=given)


@pytest.mark.parametrize(("family", "codes"), [("flexvar", torch.zeros(2, 1, 40)), ("infinity", torch.zeros(2, 1, 6)), ("infinity", ZEROS)])
def test_mixtures_and_bits_belong_to_their_families(family: str, codes: torch.Tensor) -> None:
    with pytest.raises(SettingError, match=r"^prefix_codes\[0\] must be an integer tensor"):
        generated(family, tiny.prompts(family, 2), seed=1, prefix_codes=[codes])


@BY_FAMILY
def test_given_codes_may_be_narrow(family: str) -> None:
    prompt = tiny.prompts(family, 2)
    codes = generated(family, prompt, seed=1, smooth=False).codes[:2]
    narrow = [one.to(torch.uint8) for one in codes]
    tiny.assert_same_bits(generated(family, prompt, seed=1, prefix_codes=narrow), generated(family, prompt, seed=1, prefix_codes=codes))


def test_filtering_before_the_temperature() -> None:
    """Probabilities .6 .3 .1: top_p 0.8 keeps two of them; a temperature of 4 first makes them .40 .34 .26, of which it keeps all."""
    from nextscale.sampling import Sampling, sample_codes

    logits = torch.tensor([0.6, 0.3, 0.1]).log().view(1, 1, 3)
    tokens = Tokens(Stage(0, 1, 1, 0, True))

    class Noise:
        exponential = staticmethod(lambda shape, device: torch.ones(tuple(shape)))

    for first, left in ((True, 2), (False, 3)):
        sampling = Sampling(top_p=0.8, temperature=4.0, filter_first=first)
        _, kept = sample_codes(sampling.prepare(logits, tokens.stage), tokens, sampling, Noise())  # type: ignore[arg-type]
        assert int(kept.isfinite().sum()) == left
        assert (kept[0, 0, 0] - kept[0, 0, 1]).item() == pytest.approx(torch.tensor(2.0).log().item() / 4)


# --- merging, ranking, probing, bands, lists: by hand


def test_energies_and_merging_by_hand() -> None:
    x = torch.tensor([[[1.0, 0.0], [0.96, 0.28], [0.6, 0.8], [-0.28, 0.96]]])
    assert energies(x @ x.mT, 0.5)[0].tolist() == pytest.approx([0.1296, 0.2166, 0.2500, -0.0838], abs=1e-4)
    tokens = Tokens(Stage(1, 2, 2, 1, False))
    expected: dict[tuple[float, Any], tuple[list[list[float]], list[int]]] = {
        (0.25, "plain"): ([[1, 0], [0.78, 0.54], [-0.28, 0.96]], [0, 1, 1, 2]),
        (0.25, "bsm"): ([[0.98, 0.14], [0.6, 0.8], [-0.28, 0.96]], [0, 0, 1, 2]),
        (0.5, "plain"): ([[0.8533, 0.36], [-0.28, 0.96]], [0, 0, 0, 1]),
        (0.5, "bsm"): ([[0.8533, 0.36], [-0.28, 0.96]], [0, 0, 0, 1]),
    }
    for (ratio, form), (means, source) in expected.items():
        merge = merged_by_energy(x, tokens, ratio, 0.5, form)
        torch.testing.assert_close(merge.merge(x)[0], torch.tensor(means), rtol=0, atol=1e-4)
        assert merge.source[0].tolist() == source
    ragged = merged_by_energy(torch.cat([x, x[:, -1:].repeat(1, 2, 1)], dim=1), Tokens(
        Stage(1, 2, 3, 1, False), torch.tensor([[0, 1, 2, 3, 3, 3]]), torch.tensor([4])), 0.25, 0.5)  # fmt: skip
    assert ragged.tokens.index is not None and ragged.tokens.count is not None
    assert ragged.tokens.index[0, :3].tolist() == [0, 1, 3] and ragged.tokens.count.tolist() == [3]


def test_windows_are_ranked_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two windows of 2 x 2 cells across and two down, with norms 5, 4, 2 and 6: half of the tokens are the fourth and the first."""
    grid, tokens = torch.tensor([[3.0, 4, 2, 2], [0, 0, 2, 2], [1, 1, 0, 0], [1, 1, 0, 6]]), Tokens(Stage(1, 4, 4, 1, False))
    scores = window_scores(grid.view(1, 16), tokens, 2).view(4, 4)
    assert scores[::2, ::2].tolist() == [[5, 4], [2, 6]]
    assert torch.equal(window_scores(grid.view(1, 16), tokens, 1), grid.view(1, 16))
    monkeypatch.setattr("nextscale_research.methods.sparsevit.run_in_order", lambda blocks, x, tokens, ctx: x + 1)
    x, ctx = grid.view(1, 16, 1) * torch.tensor([1.0, -1.0]), SimpleNamespace(computed=None)
    for ratio, ran in ((0.5, [0, 1, 4, 5, 10, 11, 14, 15]), (0.75, [10, 11, 14, 15])):
        changed = ActiveBlocks(range(2), ratio, 2)((), x, tokens, ctx) - x  # type: ignore[arg-type]
        assert changed[0, :, 0].nonzero().flatten().tolist() == ran


def test_the_fewest_tokens_that_receive_a_share_of_the_attention() -> None:
    received = torch.tensor([[2.4, 1.6, 0.6, 0.25, 0.15]])
    assert [fewest(received, tau).item() for tau in (0.9, 0.96, 0.975, 1.0)] == [3, 4, 5, 5]


def test_bands_by_hand() -> None:
    assert band(16, 9, 2)[8].nonzero().flatten().tolist() == [3, 4, 5, 6]
    schedule = Schedule(((1, 1), (1, 3)))  # the band of the last stage's first query has two of its three keys
    keys, values = torch.tensor([-1e4, 2.0, 0.5, -1.0]).view(1, 4, 1, 1), torch.eye(4).view(1, 4, 1, 4)  # nothing goes to the start token
    spec, view = CacheSpec(1, 1, 1, 1, schedule, torch.float32, CPU), CacheView(keys, values, 1, 4)
    seen = AttentionCall(torch.ones(1, 3, 1, 1), view, Tokens(schedule[1]), 1.0, lambda: pytest.fail("projected"))
    for released, weights in ((False, [0, 0.818, 0.182, 0]), (True, [0, 0.736, 0.164, 0.100])):
        cache = LiteVARCache(spec, Workspace(spec), LiteVAR(0.5, first=1, as_released=released), {})
        assert cache.attend(seen)[0, 0].tolist() == pytest.approx(weights, abs=1e-3)


def test_one_map_for_both_rows_is_the_conditional_one() -> None:
    """With the prompt itself to steer away from both rows are alike, and sharing changes nothing."""
    prompt = tiny.prompts("infinity", 2)
    shared, own = (
        generated("infinity", prompt, negative=prompt, seed=2, method=LiteVAR(0.5, share_rows=share, first=1)) for share in (True, False)
    )
    tiny.assert_close("infinity", shared, own)


def test_published_windows_open_as_many_blocks() -> None:
    schedule, method = Schedule(PUBLISHED_SIDES), SparVAR()
    for stage, keys, blocks in ((10, 884, 90), (11, 1189, 168), (12, 1734, 435)):
        lists = method.window_lists(key_map(schedule, schedule[stage], 0), schedule, CPU)
        assert round(lists.mean(schedule[stage].cells)) == keys
        assert sum(-(-int(count) // 128) for count in lists.counts.flatten()) == blocks
    assert [method.listed_keys(schedule, schedule[stage], 0) for stage in (10, 11, 12)] == [832, 832 + 512, 832 + 512 + 704]


def test_places_on_other_maps_and_groups_of_earlier_stages() -> None:
    assert centers(torch.arange(4), 4, 2).tolist() == [0, 0, 1, 2]  # the last falls off the grid
    assert source_groups(torch.arange(12), 12, 9).tolist() == [0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8]
    assert source_groups(torch.arange(4), 4, 3).tolist() == [0, 1, 1, 2]


def test_chosen_keys_by_hand() -> None:
    """Two queries with weights .6 .3 .1 and .1 .2 .7: sums .7 .5 .8, so that two keys are the first and the last."""
    weights = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7]])
    q, keys = weights.log().view(1, 2, 1, 3), torch.eye(3).view(1, 3, 1, 3)
    assert chosen_lists(q, keys, 1.0, 2).numbers.flatten().tolist() == [0, 2]
    values = torch.tensor([4.0, 2.0, 0.0])
    dense, sparse = (weights[0] * values).sum(), (weights[0, :2] * values[:2]).sum() / weights[0, :2].sum()
    assert (dense.item(), sparse.item(), (dense - sparse).item()) == pytest.approx((3.0, 10 / 3, -1 / 3))
    assert resized(torch.tensor([[[0.0], [1.0], [0.0], [1.0]]]), (2, 2), (4, 4))[0, :4, 0].tolist() == [0, 0.25, 0.75, 1]


def test_lists_are_carried_to_a_later_stage_with_the_rows_around() -> None:
    """384 queries of a 16 x 24 stage are two groups of twelve rows; one of the two earlier ones lies where each does."""
    earlier = KeyLists(torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.int32), torch.full((1, 1, 2), 2, dtype=torch.int32), 192)
    lists = carried(earlier, Stage(5, 24, 16, 500, True), 500, 3, 256)
    assert lists.numbers[0, 0, :, :2].tolist() == [[1, 2], [3, 4]]
    assert lists.numbers[0, 0, :, 2].tolist() == [500, 500 + 384 - 256]  # pulled back so that the run fits
    assert (lists.numbers[0, 0, :, 2:].diff(dim=1) == 1).all()
    assert lists.counts.unique().tolist() == [258]


def test_all_keys_visible_is_dense_to_rounding() -> None:
    for family in ("infinity", "flexvar"):
        prompt, logits = tiny.prompts(family, 2), dict[str, list[Tensor]](dense=[], sparse=[])
        dense = generated(
            family, prompt, seed=1, size=WIDE, on_stage=lambda preview, seen=logits["dense"]: seen.append(preview.done.logits)
        )
        generated(
            family,
            prompt,
            seed=1,
            size=WIDE,
            method=SparVAR(choosing=0, sinks=10**6),
            revise=lambda stage, _, codes=dense.codes: codes[stage.index],  # so that rounding flips no code
            on_stage=lambda preview, seen=logits["sparse"]: seen.append(preview.done.logits),
        )
        for ours, theirs in zip(logits["sparse"], logits["dense"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)


def test_plans_count_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = build_model(model_spec("infinity-2b").model)
    schedule = Schedule(PUBLISHED_SIDES)
    workload = Workload(schedule, text_tokens=64)
    dense = request_cost(model, workload)
    for method, low, high in ((SparVAR(choosing=0), 0.2, 0.4), (SparVAR(), 0.2, 0.5), (ZipVL(), 0.3, 0.6), (LiteVAR(), 0.3, 0.6)):
        planned = request_cost(model, workload, method.forecast(model, schedule))
        assert low < planned.attention / dense.attention < high, method.label
        assert planned.linear == dense.linear
