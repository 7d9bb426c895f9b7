"""`nextscale observe --details`: what it measures, on tiny models and on numbers that one can follow."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cells import with_tables
from benchmarks.details import block_of
from benchmarks.observations import FOLDER, PAGE
from nextscale.loading.load import random_pipeline
from nextscale.methods import Method
from nextscale.methods.registry import resolve_method
from nextscale.pipeline import Pipeline
from nextscale.request import Randomness
from nextscale.sampling import ImageRng, method_rng
from nextscale.stage import Schedule, Stage
from nextscale_research.observe.attention import AttentionWatcher, CalledAttention, attended, nearby
from nextscale_research.observe.command import DETAIL_SHEETS, FigureOptions, near_line
from nextscale_research.observe.detail_plots import DETAIL_FIGURES
from nextscale_research.observe.details import (
    Details,
    Pictures,
    has_low_rank,
    observe_details,
    reprojected,
    spectrum,
    to_json,
    watch,
)
from nextscale_research.observe.distances import available_distances, available_text_score, boundary, stage_distances, text_scores
from nextscale_research.observe.measure import Sample
from nextscale_research.observe.numbers import Curve
from nextscale_research.quality.lists import LISTS, chosen_methods
from tests.helpers import tiny

SCHEDULE = tiny.INFINITY_SCHEDULE
SAMPLE = Sample(["one", "two words", "three little words"], [3, 4, 5])
LOW_RANK = resolve_method("stagevar:guidance_off=2,alphas={3:0.9},ranks=0.5")


def rms(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().mean(dim=(1, 2, 3)).sqrt()


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return random_pipeline(tiny.infinity_spec())


@pytest.fixture(scope="module")
def observed(pipeline: Pipeline) -> tuple[Details, Pictures]:
    methods = {"dense": Method(), "skip": resolve_method("skip:last=1")}

    def brightness(images: Tensor, prompts: Sequence[str]) -> Tensor:
        assert list(prompts) == SAMPLE.prompts
        return images.mean(dim=(1, 2, 3))

    return observe_details(pipeline, SAMPLE, SCHEDULE, {"lpips": rms}, methods, projected=LOW_RANK, projections=2, text_score=brightness)


def test_watching_changes_no_image(pipeline: Pipeline) -> None:
    plain = pipeline(SAMPLE.prompts, seed=SAMPLE.seeds, size=SCHEDULE)
    watched = watch(pipeline, SAMPLE, SCHEDULE)
    assert torch.equal(watched.output.pixels, plain.pixels)
    torch.testing.assert_close(watched.images[-1], plain.pixels)


def test_distances_end_at_nothing(observed: tuple[Details, Pictures]) -> None:
    curve = observed[0].distances["lpips"]
    assert len(curve.mean) == len(SCHEDULE) and curve.mean[-1] == pytest.approx(0, abs=1e-6)
    assert (curve.mean[0] or 0) > 0


def test_the_boundary_is_where_a_tenth_is_left() -> None:
    assert boundary(Curve([1.0, 0.5, 0.1, 0.05, 0.0], [None] * 5)) == 2
    assert boundary(Curve([1.0, 0.5, 0.2, 0.0], [None] * 4)) is None
    assert boundary(Curve([None, 0.5, 0.0], [None] * 3)) is None


def test_smaller_images_are_enlarged_before_they_are_compared() -> None:
    final = torch.zeros(1, 3, 8, 8)
    found = stage_distances([torch.full((1, 3, 4, 4), 0.5), final], final, {"rms": rms})
    assert found["rms"].tolist() == [[0.5, 0.0]]


def test_spectra_are_against_dense_images(observed: tuple[Details, Pictures], pipeline: Pipeline) -> None:
    found = observed[0]
    present = [number for number, power in enumerate(spectrum(watch(pipeline, SAMPLE, SCHEDULE).output.pixels)) if power > 0]
    assert [found.method_power["dense"][number] for number in present] == pytest.approx([1] * len(present))
    assert [found.stage_power[-1][number] for number in present] == pytest.approx([1] * len(present), rel=1e-4)
    assert found.method_power["skip"] != found.method_power["dense"]


def test_attention_is_what_softmax_gives() -> None:
    q, k = (torch.randn(2, number, 4, generator=torch.Generator().manual_seed(number)) for number in (5, 7))
    weights = (q @ k.mT * 0.3).softmax(dim=-1)
    [(places, found)] = attended(q, k, 0.3)
    torch.testing.assert_close(found, weights.mean(dim=0))
    assert places.tolist() == [0, 1, 2, 3, 4]
    calls = CalledAttention()
    with calls:
        F.scaled_dot_product_attention(q[None], k[None], k[None], scale=0.3)
    ((queries, keys, scale),) = calls.taken()
    assert torch.equal(queries[0], q) and torch.equal(keys[0], k) and scale == 0.3 and not calls.taken()


def test_cells_nearby_are_those_around_the_covering_one() -> None:
    _, two, four = Schedule((1, 2, 4))
    assert nearby(four, two, torch.arange(16)).all()  # 3 x 3 covers a grid of 2 x 2
    corner, inner = nearby(four, four, torch.tensor([0, 5])).view(2, 4, 4)
    assert corner.nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert inner.sum() == 9 and inner[0, 0] and inner[2, 2] and not inner[3].any()
    wide = Schedule(((1, 1), (2, 6), (4, 12)))
    marked = nearby(wide[2], wide[1], torch.tensor([11])).view(2, 6)  # the upper right corner
    assert marked.nonzero().tolist() == [[0, 4], [0, 5], [1, 4], [1, 5]]


@pytest.mark.parametrize(("sharp", "as_even"), [(0.0, True), (60.0, False)])
def test_attention_by_place_can_turn_out_either_way(sharp: float, as_even: bool) -> None:
    """Queries and keys are places, so that a sharp head looks at its own one, and one with the scale 0 anywhere."""
    schedule, calls = Schedule((1, 4, 8)), CalledAttention()
    watcher = AttentionWatcher(calls, schedule)

    def places(stage: Stage) -> Tensor:
        cells = torch.arange(stage.cells)
        y, x = (cells // stage.width + 0.5) / stage.height, (cells % stage.width + 0.5) / stage.width
        return torch.stack([y, x, -(y.square() + x.square()) / 2, torch.ones_like(x)], dim=1)  # q . k is largest where they are one place

    for stage in schedule:
        keys = torch.cat([places(one) for one in schedule.stages[: stage.index + 1]])[None, None]
        queries = places(stage)[None, None][..., [0, 1, 3, 2]]
        with calls:
            F.scaled_dot_product_attention(queries, keys, keys, scale=sharp * 10)
        watcher.watch(stage, 0, keys, keys)
    near, chance = watcher.near_matrix(), watcher.chance_matrix()
    assert near[2, 0] == pytest.approx(1) and chance[2, 0] == 1  # a single cell is near to all
    assert torch.allclose(near, chance, atol=1e-5) == as_even
    assert as_even or ((near[2, 1:] > 0.9).all() and (chance[2, 1:] < 0.5).all())


def test_attention_goes_to_earlier_stages_and_its_own_alone(observed: tuple[Details, Pictures]) -> None:
    shares = torch.tensor([[float(value or 0) for value in row] for row in observed[0].attention])
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(len(SCHEDULE)))
    assert shares.triu(1).abs().max() == 0
    assert shares[0, 0] == pytest.approx(1)
    matrices = observed[0].attention_near, observed[0].attention_chance
    near, chance = (torch.tensor([[float(value or 0) for value in row] for row in rows]) for rows in matrices)
    assert (near <= 1 + 1e-5).all() and (near.tril() > 0).sum() == (chance > 0).sum()
    assert re.search(r"[\d.]+ times as much as .* in its own stage, [\d.]+ times in earlier ones", near_line(observed[0]))


def test_images_are_compared_with_their_prompts_after_every_stage(observed: tuple[Details, Pictures], pipeline: Pipeline) -> None:
    curve = observed[0].text_score
    assert curve is not None and len(curve.mean) == len(SCHEDULE)
    final = watch(pipeline, SAMPLE, SCHEDULE).output.pixels.clamp(-1, 1)
    assert curve.mean[-1] == pytest.approx(float(final.mean()), abs=1e-4)
    scores = text_scores([torch.zeros(2, 3, 4, 4), torch.ones(2, 3, 4, 4)], ["a", "b"], lambda images, prompts: images[:, 0, 0, 0])
    assert scores.tolist() == [[0, 1], [0, 1]]


def test_no_score_without_the_weights_of_clip(tmp_path: Path) -> None:
    assert available_text_score(tmp_path, torch.device("cpu")) is None


def test_likeness_of_logits_is_a_cosine(observed: tuple[Details, Pictures]) -> None:
    values = [value for value in observed[0].similarity.mean[1:] if value is not None]
    assert len(values) == len(SCHEDULE) - 1 and all(-1 <= value <= 1 for value in values)


def test_change_maps_are_followed_over_the_stages(observed: tuple[Details, Pictures]) -> None:
    found = observed[0].change_stability
    assert len(found) == tiny.DEPTH and all(len(curve.mean) == len(SCHEDULE) and curve.mean[0] is None for curve in found)


def test_another_projection_changes_nothing_but_the_projection(pipeline: Pipeline) -> None:
    first, again, other = (reprojected(pipeline, SAMPLE, SCHEDULE, LOW_RANK, number) for number in (0, 0, 1))
    usual = pipeline(SAMPLE.prompts, seed=SAMPLE.seeds, size=SCHEDULE, method=LOW_RANK)
    assert torch.equal(first.pixels, usual.pixels) and torch.equal(first.pixels, again.pixels)
    assert all(torch.equal(a, b) for a, b in zip(first.codes[:3], other.codes[:3], strict=True))  # stages before the low-rank one
    assert not torch.equal(first.latent, other.latent)
    assert has_low_rank(LOW_RANK, pipeline, SCHEDULE) and not has_low_rank(Method(), pipeline, SCHEDULE)


def test_image_and_method_can_have_streams_of_their_own(pipeline: Pipeline) -> None:
    device = pipeline.model.device
    given = Randomness(ImageRng([7], device), method_rng([7], device), (7,))
    output = pipeline("one", seed=given, size=SCHEDULE)
    assert output.report.seeds == (7,) and torch.equal(output.pixels, pipeline("one", seed=7, size=SCHEDULE).pixels)


def test_projections_are_compared(observed: tuple[Details, Pictures]) -> None:
    found = observed[0].projection
    assert found is not None and found.seeds == 2 and len(found.to_dense["lpips"].mean) == 2
    assert found.between["lpips"] > 0 and found.deviation > 0


def test_numbers_figures_and_sheets_are_written(observed: tuple[Details, Pictures], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    FigureOptions(out=tmp_path).write_details(*observed)
    assert json.loads((tmp_path / "details.json").read_text()) == json.loads(to_json(observed[0]))
    names = {*(f"{name}.svg" for name in DETAIL_FIGURES), *(f"{name}.png" for name in DETAIL_SHEETS)}
    assert names <= {file.name for file in tmp_path.iterdir()}


def test_the_page_shows_the_numbers_beside_it() -> None:
    page, found = PAGE.read_text(), json.loads((FOLDER / "details.json").read_text())
    assert page == with_tables(page, {"observe-details": block_of(found)}), "run python -m benchmarks.details RUN"
    assert all((PAGE.parent / link).exists() for link in re.findall(r"\]\((observations/[^)]+)\)", page))


def test_lpips_is_never_left_out(tmp_path: Path) -> None:
    assert [*available_distances(tmp_path, torch.device("cpu"))] == ["lpips"]


@pytest.mark.parametrize("name", [name for name in LISTS if name not in ("standard", "sparsevar-decisions")])
def test_sweeps_fit_models_of_many_and_few_stages(name: str) -> None:
    model = tiny.with_ranks(random_pipeline(tiny.infinity_spec())).model
    assert model.rank_table is not None
    rows = model.rank_table.rows
    model.rank_table = replace(model.rank_table, rows=(*rows, replace(rows[0], alpha=0.99)))
    schedule = type(SCHEDULE)([1, 2, 3, 4, 5, 6, 7, 8])
    for label, method in chosen_methods([name], len(schedule), len(model.blocks)).items():
        assert len(method.forecast(model, schedule)) == len(schedule), label
