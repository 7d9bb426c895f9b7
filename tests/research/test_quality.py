"""Studies of quality: sets of images, probes, lists of methods, pictures, and the commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.tables import judged_runs, quality_table
from nextscale.checkpoints import Layout, write_weights
from nextscale.cli import options, parse
from nextscale.errors import CheckpointError, SettingError
from nextscale.eval.compare import Comparison
from nextscale.eval.results import read_rows
from nextscale.loading.load import random_pipeline
from nextscale.stage import Schedule
from nextscale_research.__main__ import app
from nextscale_research.metrics.efficientnet import FEATURES, EfficientNetLite0
from nextscale_research.metrics.files import EFFICIENTNET, VARIABLE
from nextscale_research.metrics.judges import set_interval
from nextscale_research.quality import judge as judging
from nextscale_research.quality.agreement import Agreement, Probe, vary
from nextscale_research.quality.command import newest_run
from nextscale_research.quality.frontier import frontier_svg, label_spots
from nextscale_research.quality.judge import SetJudge, judge
from nextscale_research.quality.lists import LISTS, chosen_methods
from nextscale_research.quality.prompts import EvalPrompt, read_eval_prompts
from tests.eval.test_compare import SCHEDULE, Failing, lpips, pipeline
from tests.helpers.cli import run_cli
from tests.helpers.tiny import infinity_spec, with_ranks
from tests.offline.test_prompts import shard


class MeanColors(EfficientNetLite0):
    """Looks at the mean color of each quarter of an image."""

    def features(self, images: Tensor) -> Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(images, 2).flatten(1)


def set_judge() -> SetJudge:
    torch.manual_seed(0)
    styles = ("dark", "light")
    features = torch.randn(40, 12)
    prompts = [EvalPrompt("", styles[number % 2], f"label {number % 7}") for number in range(40)]
    return SetJudge(MeanColors(), Agreement.train(features, prompts, features, prompts))


PROMPTS = [EvalPrompt(f"prompt number {number}", "dark" if number % 2 else "light", "label 3") for number in range(5)]


@cache
def evaluation() -> Comparison:
    methods = {**chosen_methods(["skip:last=1", "sparsevar:tau=0", "fastvar + skip:last=2"], 5, 3), "odd": Failing()}
    with few_images_suffice():
        return judge(pipeline(), methods, PROMPTS, lpips(), set_judge(), schedule=SCHEDULE, seed=3, batch=2)


@contextmanager
def few_images_suffice() -> Iterator[None]:
    """For a Fréchet distance: two for each direction."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "IMAGES_PER_DIRECTION", 2)
        patch.setattr(judging, "FEWEST_DIRECTIONS", 1)
        yield


# --- sets


def test_rows_judge_sets_of_images() -> None:
    dense, skip, same, *_, odd = evaluation().rows
    for name in ("frechet_dense", "style", "label_top5", "style_change"):
        assert skip[name]["low"] <= skip[name]["value"] <= skip[name]["high"], name
    assert skip["style"]["value"] - dense["style"]["value"] == pytest.approx(skip["style_change"]["value"], abs=1e-5)
    assert 0 <= skip["label"]["real"] <= skip["label_top5"]["real"] <= 1
    assert same["frechet_dense"]["value"] == pytest.approx(0, abs=1e-5) and same["label_change"]["value"] == 0
    assert "style" not in odd and "frechet_dense" not in dense
    json.dumps(evaluation().rows, allow_nan=False)


def test_few_images_say_nothing_about_a_set() -> None:
    rows = judge(pipeline(), chosen_methods(["skip:last=1"], 5, 3), PROMPTS[:3], lpips(), set_judge(), schedule=SCHEDULE).rows
    assert "frechet_dense" not in rows[1] and "style" in rows[1]


def test_interval_of_a_set_holds_its_value_even_if_resamples_are_shifted() -> None:
    """The share of different images is 1 in the set and about 0.63 in every resample."""
    found = set_interval(lambda part: torch.tensor([len(set(row.tolist())) / 50 for row in part]), 50, 100)
    assert found.low < found.value == 1 < found.high < 1.3


# --- which methods


@pytest.mark.parametrize("stages", [10, 13])
@pytest.mark.parametrize("name", LISTS)
def test_every_listed_method_fits_both_schedules(name: str, stages: int) -> None:
    """The numbers of stages are those of the shipped model; the sides are small here. The standard list also runs."""
    tiny = infinity_spec()
    eight_blocks = with_ranks(random_pipeline(replace(tiny, model=replace(tiny.model, depth=8))), groups=8)
    table = eight_blocks.model.rank_table
    assert table is not None
    eight_blocks.model.rank_table = replace(table, rows=(*table.rows, replace(table.rows[0], alpha=0.99)))
    schedule = Schedule((1, *range(2, stages + 1)))
    methods = chosen_methods([name], stages, 8)
    assert len({method.label for method in methods.values()}) == len(methods), "no two do the same"
    for method in methods.values():
        for kept in (1.0, 0.5):
            assert len(method.forecast(eight_blocks.model, schedule, kept)) == stages
        if name == "standard" and stages == 10:
            assert eight_blocks(["a bee"], seed=0, size=schedule, method=method).report.stages[0].tokens == 1


def test_methods_are_chosen_by_name() -> None:
    assert list(chosen_methods(["skip:last=1", "dense"], 5, 3)) == ["dense", "skip:last=1"]
    with pytest.raises(SettingError, match="unknown method 'stnadard'.*standard"):
        chosen_methods(["stnadard"], 5, 3)
    joined = [chosen_methods([text], 5, 3)[text].label for text in ("tome + skip:last=1", "tome+skip:last=1")]
    assert joined[0] == joined[1] == "ToMe + SkipStages(last=1)"


# --- probes


def clusters(count: int, seed: int) -> tuple[Tensor, list[str]]:
    generator = torch.Generator().manual_seed(seed)
    centers = 3 * torch.randn(4, 10, generator=torch.Generator().manual_seed(9))
    numbers = torch.randint(4, (count,), generator=generator)
    return centers[numbers] + torch.randn(count, 10, generator=generator), [f"class {number}" for number in numbers.tolist()]


def test_probe_learns_what_can_be_told_apart() -> None:
    probe = Probe.train(*clusters(300, seed=0))
    features, labels = clusters(100, seed=1)
    first, among_three = probe.hits(features, labels), probe.hits(features, labels, top=3)
    assert first.float().mean() > 0.95
    assert (among_three | ~first).all() and probe.hits(features, labels, top=4).all()
    assert not probe.hits(features, [*labels[1:], labels[0]]).all()
    assert probe.knows(["class 1", "class 9", None]).tolist() == [True, False, False]
    with pytest.raises(SettingError, match="two or more classes"):
        Probe.train(features, ["one"] * 100)


def test_probes_are_stored(tmp_path: Path) -> None:
    features, labels = clusters(300, seed=0)
    features = torch.nn.functional.pad(features, (0, FEATURES - features.shape[1]))
    prompts = [EvalPrompt("", label[:-1], label) for label in labels]
    with pytest.raises(SettingError, match="two or more classes"):
        Agreement.train(features, prompts, features, prompts)
    prompts = [EvalPrompt("", label, label) for label in labels]
    trained = Agreement.train(features, prompts, features, prompts)
    trained.save(tmp_path / "probe.safetensors")
    again = Agreement.load(tmp_path / "probe.safetensors")
    assert again.real == trained.real and again.real["style"] > 0.95
    unknown = [*prompts[:3], EvalPrompt("", "class 77", "class 77")]
    for name, (flags, numbers) in again.hits(features[:4], unknown).items():
        assert torch.equal(flags, trained.hits(features[:4], unknown)[name][0])
        assert numbers.tolist() == [0, 1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["probe.safetensors"]
    (tmp_path / "other").write_text("nothing")
    with pytest.raises(CheckpointError, match="must be a file of probes"):
        Agreement.load(tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": ("one",)}, "1 classes of 1280 features were expected"),
        ({"mean": torch.zeros(7)}, "'mean': \\(7,\\)"),
        ({"bias": torch.full((2,), torch.nan)}, "not finite"),
        ({"scale": torch.zeros(FEATURES)}, "scale"),
    ],
)
def test_probes_that_could_not_judge_are_refused_when_they_are_loaded(tmp_path: Path, change: dict[str, object], message: str) -> None:
    whole = Probe(("one", "two"), torch.zeros(FEATURES), torch.ones(FEATURES), torch.zeros(2, FEATURES), torch.zeros(2))
    Agreement({"style": whole}, {"style": 0.5}).save(tmp_path / "whole")
    assert Agreement.load(tmp_path / "whole").probes["style"].classes == ("one", "two")
    Agreement({"style": replace(whole, **change)}, {"style": 0.5}).save(tmp_path / "broken")
    with pytest.raises(CheckpointError, match=message):
        Agreement.load(tmp_path / "broken")
    Agreement({"style": whole}, {"style": "half"}).save(tmp_path / "broken")  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match="shares"):
        Agreement.load(tmp_path / "broken")


def test_varied_images_stay_alike() -> None:
    image = torch.zeros(1, 3, 32, 32)
    image[:, :, 8:24, 8:24] = 1
    varied = vary(image, torch.Generator().manual_seed(0))
    assert varied.shape == image.shape and not torch.equal(varied, image)
    assert (varied - image).abs().mean() < 0.3


# --- pictures and the commands


def test_frontier_shows_every_method_that_ran() -> None:
    drawn = frontier_svg(evaluation().rows)
    assert all(row["method"] in drawn for row in evaluation().rows[:4])
    assert "odd" not in drawn and "MACs against dense" in drawn
    on_gpu = [row | {"hardware": "some GPU"} for row in evaluation().rows]
    assert "speedup over dense" in frontier_svg(on_gpu)
    assert "MACs against dense" in frontier_svg([row | {"speedup": None} for row in on_gpu])
    with pytest.raises(SettingError, match="nothing to draw"):
        frontier_svg(evaluation().rows[-1:])


def test_numbers_in_the_frontier_do_not_hide_each_other() -> None:
    points = [(50.0, 50.0)] * 6 + [(52.0, 50.0), (95.0, 50.0)]
    spots = label_spots(points, right_edge=100)
    for place, (x, y) in enumerate(spots):
        assert x < 100
        assert all(abs(x - a) >= 12 or abs(y - b) >= 11 for a, b in spots[:place])


def command(*arguments: str | Path) -> tuple[int, str]:
    result = run_cli(*arguments, program=app, catch=True)
    return result.exit_code, result.output


def test_frontier_command_draws_the_newest_run(tmp_path: Path) -> None:
    results, picture = tmp_path / "results.jsonl", tmp_path / "frontier.svg"
    earlier = [row | {"images": 99, "method": f"{row['method']} of another run"} for row in evaluation().rows]
    other = [row | {"model": "other"} for row in evaluation().rows]
    results.write_text("".join(json.dumps(row) + "\n" for row in [{"benchmark": "dense"}, *other, *earlier, *evaluation().rows]))
    assert command("frontier", results, "--out", picture) == (0, "")
    assert picture.read_text() == frontier_svg(evaluation().rows)
    assert "--force" in command("frontier", results, "--out", picture)[1]
    assert newest_run(read_rows(results), "other") == other
    with pytest.raises(SettingError, match="no row"):
        newest_run(read_rows(results), "absent")
    results.write_text("[1, 2]\n")
    assert command("frontier", results, "--out", tmp_path / "b.svg")[0] == 2


def test_quality_refuses_before_anything_is_loaded(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a bee\n")
    assert "pass --prompts" in command("quality")[1].lower()
    assert "unknown method 'nothing'" in command("quality", "--prompts", prompts, "--method", "nothing")[1]
    assert "cannot skip 10 of 10 stages" in command("quality", "--prompts", prompts, "--method", "skip:last=10")[1]
    assert "var-d16 takes class numbers" in command("quality", "-m", "var-d16", "--prompts", prompts)[1]
    for needs in (("--metrics", tmp_path), ("--probe", tmp_path / "probe")):
        assert EFFICIENTNET in command("quality", "--prompts", prompts, *needs)[1]


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nextscale.loading.load", lambda *_, **__: pipeline())
    monkeypatch.setattr(parse, "choose_schedule", lambda *_: SCHEDULE)
    monkeypatch.setattr(options.ModelOptions, "resolved", lambda *_: None)


def test_quality_goes_on_without_the_network_of_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: None) -> None:
    monkeypatch.setenv("NEXTSCALE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(VARIABLE, raising=False)
    prompts, out = tmp_path / "prompts.txt", tmp_path / "results.jsonl"
    prompts.write_text("a bee\na cat\n")
    fixed = ("quality", "--prompts", prompts, "--method", "skip:last=1", "--out", out, "--device", "cpu")
    result = run_cli(*fixed, program=app, catch=True)
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.stderr.splitlines() if EFFICIENTNET in line)
    assert VARIABLE in line and "Fréchet" in line
    dense, skip = read_rows(out)
    assert skip["lpips"]["value"] > 0 and "frechet_dense" not in skip and "lpips" not in dense
    quality_table([row | {"hardware": "some GPU"} for row in read_rows(out)])


def test_lists_run_one_after_another_and_a_stopped_run_goes_on(tmp_path: Path, tiny_model: None) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "results.jsonl"
    prompts.write_text("a bee\na cat\n")
    fixed = ("quality", "--prompts", prompts, "--out", out, "--device", "cpu", "--resume")
    lists = ("--method", "sparsevar-taus", "--method", "fastvar-layers")
    assert command(*fixed, *lists[:2])[0] == 0
    taus = [row["method"] for row in read_rows(out)]
    assert taus == ["dense", *LISTS["sparsevar-taus"](10, 3)]
    assert command(*fixed, *lists, "--method", "skip:last=1")[0] == 0
    later = [row["method"] for row in read_rows(out)][len(taus) :]
    assert later == ["dense", *LISTS["fastvar-layers"](10, 3), "dense", "skip:last=1"]
    assert command(*fixed, *lists)[0] == 0 and len(read_rows(out)) == len(taus) + len(later)
    assert command(*fixed, *lists[:2], "--seed", "7")[0] == 0 and len(read_rows(out)) == 2 * len(taus) + len(later)  # another run


def test_a_shard_becomes_smaller_and_keeps_its_captions(tmp_path: Path) -> None:
    entries = [{"file": f"{number}.webp", "caption": f"a {number}", "style": "a", "label": str(number)} for number in range(2)]
    given = shard(tmp_path / "large.tar", entries, ["0.webp", "1.webp"])
    status, shown = command("smaller-shard", given, tmp_path / "small.tar", "--side", "16")
    assert status == 0 and "wrote 2 images" in shown
    assert (
        command("smaller-shard", given, tmp_path / "one.tar", "--limit", "1")[0] == 0 and len(read_eval_prompts(tmp_path / "one.tar")) == 1
    )
    before, after = (read_eval_prompts(file) for file in (given, tmp_path / "small.tar"))
    assert [replace(one, encoded=None) for one in before] == [replace(one, encoded=None) for one in after]
    for one, other in zip(before, after, strict=True):
        assert (one.image(8) - other.image(8)).abs().mean() < 0.1 and len(other.encoded or b"") <= len(one.encoded or b"")


def test_quality_trains_probes_and_adds_rows(tmp_path: Path, tiny_model: None) -> None:
    torch.manual_seed(0)
    write_weights(EfficientNetLite0(), tmp_path / EFFICIENTNET, Layout())
    entries = [{"file": f"{number}.webp", "caption": f"a {number}", "style": "ab"[number % 2], "label": str(number)} for number in range(3)]
    held, training = (shard(tmp_path / name, entries, ["0.webp", "1.webp", "2.webp"]) for name in ("val.tar", "train.tar"))
    out, probe = tmp_path / "results.jsonl", tmp_path / "probe.safetensors"
    fixed = ("quality", "--prompts", held, "--metrics", tmp_path, "--method", "skip:last=1", "--out", out, "--batch", "2")
    status, shown = command(*fixed, "--data", training, "--probe", probe, "--device", "cpu")
    assert status == 0 and "skip:last=1" in shown and "accuracy on held-out real images" in shown
    dense, skip = (json.loads(line) for line in out.read_text().splitlines())
    assert dense["style"]["images"] == 3
    assert "frechet_real" not in skip and "Fréchet" not in shown, "three images say nothing about a set"
    assert "in --data and in --prompts" in command(*fixed, "--data", held, "--probe", tmp_path / "new")[1]
    assert "must be a file of probes" in command(*fixed, "--probe", tmp_path / "new")[1]
    assert command(*fixed, "--limit", "1", "--device", "cpu")[0] == 0
    assert len(out.read_text().splitlines()) == 4, "rows are added"


def test_readme_table_shows_the_newest_rows_of_the_most_prompts_on_a_gpu() -> None:
    on_gpu = [row | {"hardware": "some GPU"} for row in evaluation().rows]
    assert quality_table(evaluation().rows) == ""
    table = quality_table([*on_gpu, *on_gpu, on_gpu[1] | {"images": 2, "method": "of few prompts"}])
    lines = [line for line in table.splitlines() if line.startswith("| 32x32 |")]
    assert [line.split(" | ")[1] for line in lines] == [row["method"] for row in on_gpu]
    assert lines[0].startswith("| 32x32 | dense | **1.00** (1.00–1.00) | 100% | 100% |  |  |")
    assert lines[-1].startswith("| 32x32 | odd | RuntimeError: does not work here |")
    assert "real held-out images" in table


def test_captured_rows_take_the_place_of_eager_ones() -> None:
    """Whole runs: a method that cannot be captured was timed beside those that can."""
    on_gpu = [row | {"hardware": "some GPU", "commit": "old"} for row in evaluation().rows]
    captured = [row | {"commit": "new", "engine": "graphs"} for row in on_gpu[:2]]
    uncaptured = on_gpu[2] | {"commit": "new"}
    later = on_gpu[3] | {"commit": "newest"}
    ((*found,),) = judged_runs([*on_gpu, *captured, uncaptured, later])
    assert found == [*captured, uncaptured]
