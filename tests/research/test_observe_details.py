"""`nextscale observe --details`: what it measures, on tiny models and on numbers that one can follow."""

from __future__ import annotations

import json
import re
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
from nextscale_research.observe.attention import CalledAttention, received_mass
from nextscale_research.observe.command import DETAIL_SHEETS, FigureOptions
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
from nextscale_research.observe.distances import available_distances, boundary, stage_distances
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
    return observe_details(pipeline, SAMPLE, SCHEDULE, {"lpips": rms}, methods, projected=LOW_RANK, projections=2)


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
    torch.testing.assert_close(received_mass(q, k, 0.3), weights.mean(dim=0).sum(dim=0))
    calls = CalledAttention()
    with calls:
        F.scaled_dot_product_attention(q[None], k[None], k[None], scale=0.3)
    ((queries, keys, scale),) = calls.taken()
    assert torch.equal(queries[0], q) and torch.equal(keys[0], k) and scale == 0.3 and not calls.taken()


def test_attention_goes_to_earlier_stages_and_its_own_alone(observed: tuple[Details, Pictures]) -> None:
    shares = torch.tensor([[float(value or 0) for value in row] for row in observed[0].attention])
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(len(SCHEDULE)))
    assert shares.triu(1).abs().max() == 0
    assert shares[0, 0] == pytest.approx(1)


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
    model = random_pipeline(tiny.infinity_spec()).model
    schedule = type(SCHEDULE)([1, 2, 3, 4, 5, 6, 7, 8])
    for label, method in chosen_methods([name], len(schedule), len(model.blocks)).items():
        assert len(method.forecast(model, schedule)) == len(schedule), label
