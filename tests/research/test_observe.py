"""What is measured on cases with known answers, that a measurement disturbs nothing, and the command."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import Result

from benchmarks.cells import with_tables
from benchmarks.observations import NOT_YET, NUMBERS, PAGE, blocks_of_page
from nextscale.errors import MissingExtra, SettingError
from nextscale.eval.calibrate_ranks import energies
from nextscale.eval.probe import FeatureProbe
from nextscale.loading import presets
from nextscale.methods.method import Method, Plans, StagePlan
from nextscale.methods.stagevar_ranks import energy_ranks
from nextscale.models import NextScaleModel
from nextscale.pipeline import Output, Pipeline
from nextscale.stage import Schedule
from nextscale_research.__main__ import app
from nextscale_research.observe import Observations, Sample, observe, read_observations, to_json, verdicts
from nextscale_research.observe.blocks import BlockWatcher, block_relations
from nextscale_research.observe.detail import extreme_quarters, local_detail, rank_correlation, ranks
from nextscale_research.observe.frequency import EDGES, band_power, stage_changes
from nextscale_research.observe.numbers import Curve, Effect
from nextscale_research.observe.plots import FIGURES, SIZE, STYLE, figures
from nextscale_research.observe.prompt import (
    Baseline,
    Replacement,
    changed_codes,
    generate_again,
    keeping_until,
    other_prompts,
    replacements,
    spread_switches,
)
from nextscale_research.observe.ranks import spread_layers
from nextscale_research.observe.verdicts import late_stages
from tests.helpers import tiny
from tests.helpers.cli import run_cli

GRID = Schedule([1, 2, 4])


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- detail and correlation


def test_equal_values_share_a_rank() -> None:
    assert ranks(torch.tensor([[5.0, 1.0, 5.0, 7.0]])).tolist() == [[1.5, 0.0, 1.5, 3.0]]


def test_rank_correlation() -> None:
    a = torch.arange(8.0)[None]
    assert rank_correlation(a, a.exp()).item() == pytest.approx(1)
    assert rank_correlation(a, -a).item() == pytest.approx(-1)
    assert rank_correlation(a, torch.tensor([[0.0, 1, 2, 3, 7, 6, 5, 4]])).item() == pytest.approx(1 - 6 * 20 / (8 * 63))
    assert math.isnan(rank_correlation(a, torch.ones(1, 8)).item())
    assert math.isnan(rank_correlation(a[:, :3], a[:, :3]).item())


def textured_corner(strength: float = 1.0) -> Tensor:
    """Stripes in the top left quarter of a gray image."""
    image = torch.zeros(1, 3, 32, 32)
    image[:, :, :16, :16:2] = strength
    return image


def test_detail_is_where_the_texture_is() -> None:
    detail = local_detail(textured_corner(), (4, 4)).view(4, 4)
    assert detail[:2, :2].min() > 10 * detail[2:, 2:].max()
    assert detail[2:, 2:].max() == 0


def test_quarters_are_by_detail() -> None:
    detail, values = torch.tensor([[4.0, 1, 2, 3, 8, 7, 6, 5]]), torch.tensor([[0.0, 10, 20, 0, 3, 5, 0, 0]])
    assert [side.item() for side in extreme_quarters(detail, values)] == [15, 4]


# --- spectra and changes


@pytest.mark.parametrize(("period", "band"), [(90, 0), (48, 1), (20, 2), (12, 3), (6, 4), (2.5, 5)])
def test_a_sine_has_one_frequency(period: float, band: int) -> None:
    wave = (torch.arange(360) * 2 * math.pi / period).sin() * 10
    for gray in (wave[None, None, :].expand(1, 240, -1), wave[None, :, None].expand(1, -1, 240)):
        power = band_power(gray)[0]
        assert power[band] == pytest.approx(50, rel=0.05)
        assert power.sum() - power[band] < 0.01 * power[band]


def test_brightness_is_coarse_and_noise_is_everywhere() -> None:
    assert band_power(torch.full((1, 128, 192), 3.0))[0].tolist() == pytest.approx([9, 0, 0, 0, 0, 0], abs=1e-3)
    power = band_power(noise(1, 256, 256))[0]
    assert power.sum().item() == pytest.approx(1, rel=0.05)
    area = math.pi * (EDGES[4] ** 2 - EDGES[3] ** 2)  # of the ring, of a square of side 1
    assert power[4].item() == pytest.approx(area, rel=0.05)


def test_changes_of_stages() -> None:
    """Gray, then texture in a corner, then brightness everywhere."""
    images = [torch.zeros(1, 3, 32, 32), textured_corner(0.5), textured_corner(0.5) + 0.2]
    changes, maps = stage_changes(images, images[-1], (4, 4))
    assert changes.smooth[0, 0].isnan()
    assert changes.smooth[0, 1] == 0
    assert changes.detailed[0, 1].item() == pytest.approx(0.5 / 2 * 127.5)
    assert changes.smooth[0, 2].item() == pytest.approx(0.2 * 127.5, rel=1e-5)
    assert changes.detailed[0, 2].item() == pytest.approx(0.2 * 127.5, rel=1e-5)
    assert changes.correlation[0, 1] > 0.8
    assert changes.foreseen[0, 1].isnan()  # the image before was flat
    share = changes.power[0] / changes.power[0].sum(dim=1, keepdim=True)
    assert share[1, 5] > 0.4
    assert share[2, 3:].sum() < 1e-6
    assert maps[0].abs().max() == 0
    assert maps[1].view(4, 4)[2:, 2:].abs().max() == 0


def test_growing_images_are_compared_at_the_final_size() -> None:
    images = [torch.full((1, 3, side, side), 0.25) for side in (8, 16, 32)]
    changes, _ = stage_changes(images, images[-1], (4, 4))
    assert changes.detailed[0, 1:].tolist() == pytest.approx([0, 0], abs=1e-4)


# --- blocks


def corner_watched(inside: float, outside: float) -> BlockWatcher:
    """One block, which changes tokens in the top left quarter and elsewhere by these amounts."""
    watched = BlockWatcher(1)
    for stage in GRID:
        change = torch.full(stage.size, outside)
        change[: (stage.height + 1) // 2, : (stage.width + 1) // 2] = inside
        before = noise(1, stage.cells, 8)
        watched.watch(stage, 0, before, before + change.flatten()[None, :, None])
    return watched


def test_a_block_that_acts_on_the_texture() -> None:
    corner = torch.zeros(1, 4, 4)
    corner[:, :2, :2] = 1.0
    image_changes = [torch.zeros(1, 16), corner.flatten(1), corner.flatten(1)]
    image = torch.zeros(1, 3, 32, 32)
    image[:, :, :15, :15:2] = 1.0  # inside the corner's cells
    for inside, outside, expected in ((2.0, 0.0, 1.0), (0.0, 2.0, -1.0)):
        found = block_relations(corner_watched(inside, outside), GRID, image, image_changes)
        assert found["correlation"][0, 0, 2].item() == pytest.approx(expected, abs=0.1)
        assert found["foresight"][0, 0, 2].item() == pytest.approx(expected, abs=0.25)  # 2 x 2 cells enlarged to 4 x 4
        assert found["correlation"][0, 0, 0].isnan()  # a single token


# --- ranks


def test_rank_of_three_directions() -> None:
    directions, _ = torch.linalg.qr(noise(40, 3))
    x = noise(2, 100, 3, seed=1) @ directions.T
    assert energy_ranks(energies(x), 0.999999).tolist() == [3, 3]
    spectrum = energies(x + 5)  # what all tokens have in common is one direction more
    assert energy_ranks(spectrum, 0.999999).tolist() == [4, 4]
    assert spectrum[:, 4:].max() < 1e-9 * spectrum[:, 0].min()


@pytest.mark.parametrize("shape", [(2, 30, 12), (2, 9, 16)])
def test_energies_are_squared_singular_values(shape: tuple[int, int, int]) -> None:
    x = noise(*shape)
    assert torch.allclose(energies(x).float(), torch.linalg.svdvals(x).square(), rtol=1e-4, atol=1e-3)


def test_few_layers_are_spread() -> None:
    assert spread_layers(3) == [0, 1, 2]
    assert spread_layers(32) == [0, 4, 8, 12, 16, 20, 24, 28]


# --- prompts


def test_switches_and_other_prompts() -> None:
    assert spread_switches(13, 13) == list(range(13))
    assert spread_switches(10, 3) == [0, 4, 8]  # 8 and 9 are late
    assert spread_switches(13, 3) == [0, 5, 10]
    assert spread_switches(10, 1) == [0]
    assert spread_switches(4, 99) == [0, 1, 2, 3]
    assert other_prompts(["a", "a", "b"]) == ["b", "b", "a"]
    assert other_prompts(["a", "a"]) is None


def test_changed_codes() -> None:
    first = [torch.zeros(1, 2, 2, dtype=torch.long), torch.eye(2)[None]]
    again = [torch.tensor([[[0, 1], [0, 0]]]), torch.eye(2).flip(0)[None]]
    assert changed_codes(first, again).tolist() == [3 / 6]


def texts(family: str) -> list[object]:
    return [3, 7] if family in tiny.CLASS_FAMILIES else ["a red cat", "two dogs"]


def baseline(family: str) -> Baseline:
    prompts, seeds = texts(family), [5, 6]
    return Baseline(prompts, seeds, tiny.shared_pipeline(family)(prompts, seed=seeds))


def again(family: str, first: Baseline, replacement: Replacement, switch: int) -> Output:
    return generate_again(tiny.shared_pipeline(family), first, first.prompts[::-1], replacement, switch, tiny.schedule_of(family))


@pytest.mark.parametrize("family", ["infinity", "var", "flexvar", "star"])
@pytest.mark.parametrize("replacement", ["none", "unguided", "other", "seed"])
def test_stages_before_the_switch_stay(family: str, replacement: Replacement) -> None:
    first = baseline(family)
    output = again(family, first, replacement, 2)
    assert tiny.same_codes(first.output.codes[:2], output.codes[:2])
    if (family, replacement) != ("flexvar", "seed"):  # whose late stages are greedy
        assert not tiny.same_codes(first.output.codes[2:], output.codes[2:])


class DropLate(Method):
    """What StageVAR does: both branches until stage 2, one of them from there on."""

    def __init__(self, branch: str) -> None:
        self.branch = branch

    def forecast(self, model: NextScaleModel, schedule: Schedule, guided: bool = True, kept: float = 1.0) -> Plans:
        return tuple(StagePlan(cfg_branches=self.branch if stage.index >= 2 else "both") for stage in schedule)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["infinity", "var", "hart"])
@pytest.mark.parametrize(("replacement", "branch"), [("none", "uncond"), ("unguided", "cond")])
def test_one_branch_with_given_codes_is_a_branch_dropped_late(family: str, replacement: Replacement, branch: str) -> None:
    first = baseline(family)
    dropped = tiny.shared_pipeline(family)(first.prompts, seed=first.seeds, method=DropLate(branch))
    tiny.assert_close(family, again(family, first, replacement, 2), dropped)


def test_another_prompt_from_the_start_is_that_prompt() -> None:
    first = baseline("infinity")
    tiny.assert_same_bits(again("infinity", first, "other", 0), tiny.shared_pipeline("infinity")(first.prompts[::-1], seed=first.seeds))


def test_codes_are_kept_until_the_switch() -> None:
    kept, sampled = [torch.zeros(1), torch.zeros(1)], torch.ones(1)
    revise = keeping_until(1, kept)
    assert [revise(stage, sampled) is sampled for stage in Schedule([1, 2])] == [False, True]
    assert keeping_until(0, kept) is None, "a plain call, which can be captured"


def test_without_guidance_there_is_no_branch_to_drop() -> None:
    family = "infinity"
    pipeline = tiny.fresh_pipeline(family, guidance=replace(tiny.SPECS[family].settings.guidance, strength=1.0))  # type: ignore[call-arg]
    assert replacements(pipeline, tiny.schedule_of(family), others=False) == ["seed"]
    assert replacements(tiny.shared_pipeline(family), tiny.schedule_of(family), others=True) == ["none", "unguided", "other", "seed"]


# --- the whole


@pytest.mark.parametrize("family", ["infinity", "var", "hart"])
def test_watching_changes_nothing(family: str) -> None:
    seen: list[tuple[int, int, torch.Size]] = []
    probe = FeatureProbe((lambda stage, layer, before, after: seen.append((stage.index, layer, before.shape)),))
    pipeline = tiny.shared_pipeline(family)
    tiny.assert_same_bits(pipeline(texts(family), seed=5, method=probe), pipeline(texts(family), seed=5))
    assert not probe.capturable, "a captured graph would call no watcher"
    expected = [(stage.index, layer, (4, stage.cells, tiny.WIDTH)) for stage in tiny.schedule_of(family) for layer in range(tiny.DEPTH)]
    assert seen == expected


def observed(family: str, batch: int = 2) -> Observations:
    sample = Sample.of(texts(family), 3, seed=1)
    return observe(tiny.shared_pipeline(family), sample, tiny.schedule_of(family), batch=batch, switches=2)[0]


@pytest.fixture(scope="module")
def found() -> Observations:
    return observed("infinity")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_is_observed(family: str, tmp_path: Path) -> None:
    numbers = observed(family)
    file = tmp_path / "numbers.json"
    file.write_text(to_json(numbers))
    assert read_observations(file) == numbers
    stages = len(tiny.schedule_of(family))
    assert numbers.about["images"] == 3
    assert len(numbers.blocks.correlation) == tiny.DEPTH
    assert len(numbers.frequency.power) == stages
    assert numbers.prompt.switches == [0, stages - 1]
    assert list(numbers.prompt.effects) == ["none", "unguided", "other", "seed"]
    assert len(verdicts(numbers)) == 8
    assert all(verdict.holds is not None for verdict in verdicts(numbers))


def test_numbers_do_not_depend_on_the_batch(found: Observations) -> None:
    alone = observed("infinity", batch=1)
    for ours, theirs in (
        (alone.frequency.detailed, found.frequency.detailed),
        (alone.prompt.effects["none"].rms, found.prompt.effects["none"].rms),
    ):
        assert [value for value in ours.mean if value is not None] == pytest.approx([v for v in theirs.mean if v is not None], abs=1e-2)
    assert alone.prompt.effects["other"].codes.mean == pytest.approx(found.prompt.effects["other"].codes.mean)


def test_a_single_prompt_has_no_other() -> None:
    numbers, _ = observe(tiny.shared_pipeline("infinity"), Sample.of(["one"], 2, 0), tiny.schedule_of("infinity"), switches=2)
    assert "other" not in numbers.prompt.effects
    assert [verdict.holds for verdict in verdicts(numbers) if "another prompt" in verdict.claim] == [None]


def test_images_take_the_prompts_in_turn() -> None:
    assert Sample.of(["a", "b"], 3, 7) == Sample(["a", "b", "a"], [7, 8, 9])
    assert Sample.of(["a", "b", "c"], 2, 0).prompts == ["a", "b"]
    with pytest.raises(SettingError, match="2 prompts and 1 seeds"):
        Sample(["a", "b"], [1])


def test_curves_leave_out_what_has_no_value() -> None:
    curve = Curve.of(torch.tensor([[1.0, math.nan, math.nan], [3.0, 5.0, math.nan]]))
    assert curve == Curve([2.0, 5.0, None], [1.0, None, None])


# --- verdicts


def constant(value: float, number: int) -> Curve:
    return Curve([value] * number, [0.0] * number)


def holds(found: Observations, claim: str) -> bool | None:
    (verdict,) = [verdict for verdict in verdicts(found) if claim in verdict.claim]
    return verdict.holds


def test_late_is_the_last_quarter() -> None:
    assert [list(late_stages(stages)) for stages in (13, 10, 4, 2)] == [[10, 11, 12], [8, 9], [3], [1]]


@pytest.mark.parametrize("true", [True, False])
def test_every_claim_can_fail(found: Observations, true: bool) -> None:
    stages, bands = len(found.stages), len(EDGES) + 1
    frequency = replace(
        found.frequency,
        smooth=constant(1.0, stages),
        detailed=constant(3.0 if true else 1.2, stages),
        power=[[0.01, 0.01, 0.1, 0.5, 0.5, 0.5] if true else [0.5] * bands] * stages,
        image_power=[1.0] * bands,
    )
    low, high = (constant(value, stages) for value in ((-0.3, 0.6) if true else (0.1, 0.2)))
    blocks = replace(found.blocks, correlation=[low, high, high])
    effect = Effect(Curve([50.0, 5.0 if true else 30.0], [0.0, 0.0]), constant(0.1, 2), None)
    prompt = replace(found.prompt, effects=dict.fromkeys(("none", "unguided", "other", "seed"), effect))
    rank = replace(found.rank, ranks=[[constant(1.0 if true else 10.0, stages)] * 3] * 3, full=[10] * stages)
    changed = replace(found, frequency=frequency, blocks=blocks, prompt=prompt, rank=rank)
    assert {verdict.claim: verdict.holds for verdict in verdicts(changed)} == {verdict.claim: true for verdict in verdicts(changed)}


def test_lpips_is_preferred(found: Observations) -> None:
    moved = Effect(constant(40.0, 2), constant(0.1, 2), Curve([0.5, 0.05], [0.0, 0.0]))
    changed = replace(found, prompt=replace(found.prompt, effects=dict.fromkeys(("none", "unguided", "other", "seed"), moved)))
    assert holds(changed, "without the prompt")
    assert "LPIPS" in next(verdict.text for verdict in verdicts(changed) if verdict.topic == "prompt")


# --- figures and page


def test_figures_say_what_they_need(found: Observations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match="pip install matplotlib"):
        figures(found)


def test_the_page_is_filled_from_the_numbers(found: Observations, tmp_path: Path) -> None:
    page = with_tables(PAGE.read_text(), blocks_of_page(found, tmp_path))
    assert NOT_YET not in page
    assert all(f"{tmp_path.name}/{name}.svg" in page for name in FIGURES)
    assert all(verdict.text in page for verdict in verdicts(found))


def test_the_page_shows_the_numbers_beside_it() -> None:
    numbers = read_observations(NUMBERS) if NUMBERS.exists() else None
    page = PAGE.read_text()
    assert page == with_tables(page, blocks_of_page(numbers)), "run python -m benchmarks.observations"


@pytest.mark.parametrize("name", FIGURES)
def test_names_of_stages_do_not_overlap(name: str) -> None:
    """Those of the page, which has 13 stages."""
    matplotlib = pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        FIGURES[name](figure, read_observations(NUMBERS))
        FigureCanvasAgg(figure).draw()
    panels = [axes for axes in figure.axes if "tokens a side" in axes.get_xlabel()]
    assert panels
    for axes in panels:
        boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


# --- the command


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    spec = tiny.SPECS["var"]
    monkeypatch.setitem(presets.MODELS, spec.name, spec)

    def load(name: str, **options: object) -> Pipeline:
        assert name == spec.name
        return tiny.shared_pipeline("var")

    monkeypatch.setattr("nextscale.loading.load", load)
    monkeypatch.delenv("NEXTSCALE_METRICS", raising=False)
    monkeypatch.setenv("NEXTSCALE_HOME", "nowhere")
    return lambda *arguments: run_cli("observe", *arguments, program=app, catch=True)


def test_the_command_writes_numbers_and_pictures(run: Callable[..., Result], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run("-m", "tiny-var", 1, 2, 3, "--batch", 2, "--switches", 2, "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    written = {file.name for file in tmp_path.iterdir()}
    assert written == {"observations.json", "stages.png", "blocks.png", "prompts.png", *(f"{name}.svg" for name in FIGURES)}
    stages = len(tiny.schedule_of("var"))
    stages_sheet, prompts_sheet = (Image.open(tmp_path / f"{name}.png") for name in ("stages", "prompts"))
    assert stages_sheet.height == 21 + 6 * 132  # names, then three images and what changed
    assert prompts_sheet.height == 21 + 9 * 132
    assert stages_sheet.width > stages * 132 and prompts_sheet.width > 3 * 132  # names at the left
    assert "late stages change mostly detailed regions: " in result.output
    labels = ("another seed", "another prompt", "no prompt", "no guidance")
    assert all(label in (tmp_path / "prompt.svg").read_text() for label in labels)
    again = tmp_path / "again"
    assert run("--plot", tmp_path / "observations.json", "--out", again).exit_code == 0
    for name in FIGURES:
        assert (again / f"{name}.svg").read_text() == (tmp_path / f"{name}.svg").read_text()
    refused = run("-m", "tiny-var", 1, 2, "--device", "cpu", "--out", tmp_path)
    assert refused.exit_code == 2
    assert "--force" in refused.output


def test_without_matplotlib_the_numbers_are_written(run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("-m", "tiny-var", 1, 2, "--switches", 1, "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".png"}
    assert "pip install matplotlib" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "tiny-var"], "no prompt"),
        (["-m", "tiny-var", "cat"], "'cat'"),
        (["-m", "tiny-var", "1", "--size", "99"], "got 99x99"),
        (["-m", "tiny-var", "1", "--metrics", "absent"], "Add --details"),
        (["--plot", "absent.json"], "absent.json cannot be read"),
        (["--plot", "absent.json", "--seed", "3"], "leave out --seed"),
    ],
)
def test_refusals(run: Callable[..., Result], arguments: list[str], message: str, tmp_path: Path) -> None:
    result = run(*arguments, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["[]", "{}", "no json", json.dumps({"format": 1, "about": {}}), json.dumps({"format": 99})])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "observations.json"
    file.write_text(content)
    with pytest.raises(SettingError, match="nextscale_research observe"):
        read_observations(file)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["stages"].pop(),
        lambda content: content["frequency"]["power"][1].pop(),
        lambda content: content["blocks"]["foresight"].pop(),
        lambda content: content["blocks"]["strength"][0]["mean"].pop(),
        lambda content: content["prompt"]["effects"].pop("seed"),
        lambda content: content["prompt"]["switches"].pop(),
        lambda content: content["rank"]["alphas"].pop(),
    ],
)
def test_incomplete_numbers_are_refused(change: Callable[[dict[str, Any]], object], found: Observations, tmp_path: Path) -> None:
    content = json.loads(to_json(found))
    change(content)
    file = tmp_path / "observations.json"
    file.write_text(json.dumps(content))
    with pytest.raises(SettingError, match="lacks numbers or holds others"):
        read_observations(file)


def test_what_has_no_value_is_not_measured(found: Observations) -> None:
    nothing = Curve([None] * len(found.stages), [None] * len(found.stages))
    blind = [nothing, *found.blocks.correlation[1:]]
    some = replace(found, blocks=replace(found.blocks, correlation=blind))
    assert [verdict.holds is None for verdict in verdicts(some)[2:4]] == [False, False], "a block without values does not count"
    none = replace(
        found, blocks=replace(found.blocks, correlation=[nothing] * len(blind)), frequency=replace(found.frequency, smooth=nothing)
    )
    holds = [verdict.holds for verdict in verdicts(none)]
    assert (holds[0], holds[2], holds[3]) == (None, None, None)
