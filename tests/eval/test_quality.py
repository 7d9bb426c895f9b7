"""Judging methods: prompts, intervals, probes, and whole runs on a tiny random model."""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from nextscale.eval.judges import Judges
from nextscale.eval.quality import Batch, Evaluation, Requests, evaluate, mixed_batches
from PIL import Image
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.tables import judged_runs, quality_table
from nextscale.checkpoints import Layout, write_weights
from nextscale.cli import app
from nextscale.cli import old_options as options
from nextscale.cli import quality as quality_command
from nextscale.errors import CheckpointError, PromptError, SettingError
from nextscale.eval import summary
from nextscale.eval.results import read_rows
from nextscale.loading.presets import ModelSpec
from nextscale.loading.random_weights import random_pipeline
from nextscale.methods import Method, MethodRun, RunSetup
from nextscale.metrics import Lpips
from nextscale.metrics.intervals import mean_interval, set_interval
from nextscale.offline.prompts import EvalPrompt, read_eval_prompts
from nextscale.pipeline import Pipeline
from nextscale.stage import Schedule
from nextscale_research.metrics.efficientnet import FEATURES, EfficientNetLite0
from nextscale_research.metrics.files import EFFICIENTNET, VARIABLE
from nextscale_research.quality.agreement import Agreement, Probe, vary
from nextscale_research.quality.frontier import frontier_svg, label_spots
from nextscale_research.quality.lists import LISTS, chosen_methods
from tests.helpers.tiny import OneSchedule, infinity_spec, with_ranks

SCHEDULE = Schedule((1, 2, 4, 8, 16))  # 32 pixels a side


def spec() -> ModelSpec:
    tiny = infinity_spec()
    return replace(tiny, settings=replace(tiny.settings, schedules=OneSchedule(SCHEDULE)))


@cache
def pipeline() -> Pipeline:
    return with_ranks(random_pipeline(spec()))


class MeanColours(EfficientNetLite0):
    """Looks at the mean colour of each quarter of an image."""

    def features(self, images: Tensor) -> Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(images, 2).flatten(1)


@cache
def judges() -> Judges:
    torch.manual_seed(0)
    styles = ("dark", "light")
    features = torch.randn(40, 12)
    prompts = [EvalPrompt("", styles[number % 2], f"label {number % 7}") for number in range(40)]
    return Judges(Lpips(), MeanColours(), Agreement.train(features, prompts, features, prompts))


PROMPTS = [EvalPrompt(f"prompt number {number}", "dark" if number % 2 else "light", "label 3") for number in range(5)]


@cache
def evaluation() -> Evaluation:
    methods = {**chosen_methods(["skip:last=1", "sparsevar:tau=0", "fastvar + skip:last=2"], 5, 3), "odd": Failing()}
    with few_images_suffice():
        return evaluate(pipeline(), methods, PROMPTS, judges(), seed=3, batch=2)


@contextmanager
def few_images_suffice() -> Iterator[None]:
    """For a Fréchet distance: two for each direction."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary, "IMAGES_PER_DIRECTION", 2)
        patch.setattr(summary, "FEWEST_DIRECTIONS", 1)
        yield


class Failing(Method):
    def start(self, setup: RunSetup) -> MethodRun:
        raise RuntimeError("does not work here\nat all")


# --- a whole run


def test_rows_say_what_a_method_saves_and_costs() -> None:
    dense, skip, *_ = evaluation().rows
    assert (dense["method"], skip["method"], skip["settings"]) == ("dense", "skip:last=1", "SkipStages(last=1)")
    assert dense["cost_share"] == dense["kept"] == dense["speedup"]["median"] == 1
    assert "lpips" not in dense and "psnr" not in dense
    assert skip["kept"] == pytest.approx((1 + 4 + 16 + 64) / (1 + 4 + 16 + 64 + 256), abs=1e-4)
    assert 0 < skip["cost_share"] < skip["kept"]
    assert skip["identical"] == 0 and math.isfinite(skip["psnr"]["value"])
    for name in ("psnr", "ssim", "lpips", "frechet_dense", "style", "label_top5", "style_change"):
        assert skip[name]["low"] <= skip[name]["value"] <= skip[name]["high"], name
    assert skip["style"]["value"] - dense["style"]["value"] == pytest.approx(skip["style_change"]["value"], abs=1e-5)
    assert (skip["images"], skip["batch"], skip["seed"], skip["size"]) == (5, 2, 3, [32, 32])
    assert 0 <= skip["label"]["real"] <= skip["label_top5"]["real"] <= 1
    json.dumps(evaluation().rows, allow_nan=False)


def test_a_method_of_no_strength_costs_nothing() -> None:
    row = evaluation().rows[2]
    assert row["method"] == "sparsevar:tau=0"
    assert row["identical"] == 1 and row["psnr"] is None
    assert row["lpips"]["value"] == row["lpips"]["high"] == 0
    assert row["ssim"]["value"] == pytest.approx(1, abs=1e-5)
    assert row["frechet_dense"]["value"] == pytest.approx(0, abs=1e-5)
    assert row["label_change"]["value"] == 0


def test_what_fails_is_a_row() -> None:
    row = evaluation().rows[-1]
    assert (row["method"], row["error"]) == ("odd", "RuntimeError: does not work here")
    assert "odd" not in evaluation().samples
    assert evaluation().samples["dense"].shape == (2, 3, 32, 32)
    failing = {"dense": Failing()}
    with pytest.raises(RuntimeError, match="does not work"):
        evaluate(pipeline(), failing, PROMPTS, judges())


def test_what_fails_on_the_way_is_a_row_too() -> None:
    """The first batch is drawn, the second is not."""
    methods = {**chosen_methods([], 5, 3), "odd": FailingLater([])}
    *_, row = evaluate(pipeline(), methods, PROMPTS, judges(), batch=2).rows
    assert row["error"] == "RuntimeError: enough" and "psnr" not in row


class FailingLater(Method):
    def __init__(self, calls: list[int]) -> None:
        self.calls = calls

    def start(self, setup: RunSetup) -> MethodRun:
        self.calls.append(1)
        if len(self.calls) > 1:
            raise RuntimeError("enough")
        return MethodRun()


def test_images_that_are_not_finite_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = pipeline().tokenizer
    decode, calls = tokenizer.decode, []

    def the_third_one_breaks(latent: Tensor) -> Tensor:
        calls.append(1)  # the warm-up, dense, skip
        return decode(latent) * (torch.nan if len(calls) == 3 else 1)

    monkeypatch.setattr(tokenizer, "decode", the_third_one_breaks)
    dense, skip = evaluate(pipeline(), chosen_methods(["skip:last=1"], 5, 3), PROMPTS, judges()).rows
    assert "not finite" in skip["error"] and "error" not in dense


def test_times_are_medians_of_three_rounds_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up does not count, and images of the later rounds are not judged again."""
    seconds = iter((99.0, 4.0, 2.0, 4.0, 1.0, 8.0, 2.0))  # the warm-up, then dense and skip in turns
    generate = Requests.generate

    def timed(requests: Requests, method: Method, numbers: list[int]) -> Batch:
        images, report = generate(requests, method, numbers)
        stages = tuple(replace(stage, seconds=0.0) for stage in report.stages)
        return Batch(images, replace(report, stages=stages, condition_seconds=next(seconds), decode_seconds=0.0))

    monkeypatch.setattr(Requests, "generate", timed)
    dense, skip = evaluate(pipeline(), chosen_methods(["skip:last=1"], 5, 3), PROMPTS[:2], judges()).rows
    assert next(seconds, None) is None
    assert (skip["speedup"]["median"], skip["speedup"]["low"], skip["speedup"]["high"]) == (4, 2, 4)
    assert (dense["ms_per_image"]["median"], dense["ms_per_image"]["high"]) == (2000, 4000)
    assert skip["cost_share"] == pytest.approx(evaluation().rows[1]["cost_share"], abs=1e-3)


@pytest.mark.parametrize("width", [80, 300])
def test_uneven_rounds_are_said(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(quality_command, "result_console", lambda: Console(width=width, highlight=False))
    dense, skip = ({**row, "ms_per_image": steady(1000.0), "speedup": steady(2.0)} for row in evaluation().rows[:2])
    quality_command.show_rows([dense, skip])
    quiet = capsys.readouterr().out
    quality_command.show_rows([dense, skip | {"speedup": {"median": 2.0, "low": 1.5, "high": 2.1}}])
    noisy = capsys.readouterr().out
    assert "differ by more than a third" not in quiet and "differ by more than a third" in " ".join(noisy.split())
    assert ("2.00 (1.50 to 2.10)" in noisy) == (width == 300)
    assert ("the rounds of a method differ by up to 40%" in noisy) == (width == 80)


def steady(value: float) -> dict[str, float]:
    return dict.fromkeys(("median", "p20", "p80", "low", "high"), value)


def test_an_unreadable_prompt_is_refused_before_anything_is_generated() -> None:
    told: list[str] = []
    with pytest.raises(PromptError):
        evaluate(
            pipeline(), chosen_methods([], 5, 3), [*PROMPTS, EvalPrompt(" ")], judges(), batch=1, on_progress=lambda n, _: told.append(n)
        )
    assert told == []


def test_progress_and_the_size_of_the_batches() -> None:
    told: list[tuple[str, float]] = []
    rows = evaluate(
        pipeline(), chosen_methods(["skip:last=1"], 5, 3), PROMPTS[:3], judges(), batch=64, on_progress=lambda *one: told.append(one)
    ).rows
    assert [name for name, _ in told] == ["dense", "skip:last=1"] * 3, "one batch is timed in three rounds, in turns"
    assert [share for _, share in told] == pytest.approx([number / 6 for number in range(6)])
    assert rows[0]["batch"] == 3, "times are those of three images at a time"
    assert "frechet_dense" not in rows[1], "three images say nothing about a set"


def test_numbers_do_not_depend_on_the_batch_and_the_order() -> None:
    methods = chosen_methods(["skip:last=1"], 5, 3)
    backwards = dict(reversed(methods.items()))
    single = evaluate(pipeline(), backwards, PROMPTS, judges(), seed=3, batch=5).rows[1]
    for name in ("psnr", "ssim", "lpips"):
        assert single[name]["value"] == pytest.approx(evaluation().rows[1][name]["value"], rel=1e-3)


def test_the_share_of_cells_is_that_of_the_compute_masks_of_all_batches() -> None:
    """Images of one batch that keep different numbers of cells run packed, so none runs padding for another."""
    methods = chosen_methods(["sparsevar:tau=0.9,first_stage=2", "fastvar", "stagevar"], 5, 3)
    rows = evaluate(pipeline(), methods, PROMPTS[:4], judges(), seed=3, batch=2).rows
    for row in rows:
        shares = []
        for numbers in ([0, 2], [1, 3]):
            texts, seeds = [PROMPTS[number].text for number in numbers], [3 + number for number in numbers]
            masks = pipeline()(texts, seed=seeds, method=methods[row["method"]], compute_mask=True).compute_mask
            assert masks is not None
            shares.append(sum(float(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks))
        assert row["kept"] == pytest.approx(sum(shares) / 2, abs=1e-4), row["method"]
    assert rows[1]["padding"] == 0 == rows[0]["padding"]
    assert rows[1]["tokens"][0] == 1 and len(rows[1]["tokens"]) == 5


def test_rows_name_the_engine_that_ran() -> None:
    assert [row["engine"] for row in evaluation().rows] == ["eager"] * 4 + [None]
    report = pipeline()("a bee", seed=0).report
    captured = replace(report, engine="graphs", device="some GPU", peak_memory=10**9)
    assert summary.engine_of([captured, captured]) == "graphs" and summary.engine_of([captured, report]) == "eager and graphs"
    assert summary.eager_peak_gb([captured, replace(captured, engine="eager", peak_memory=2 * 10**9)]) == 2
    assert summary.eager_peak_gb([captured, report]) is None, "neither captured graphs nor a process on the CPU tell"


def test_all_batches_have_one_size() -> None:
    requests = Requests(pipeline(), SCHEDULE, PROMPTS, 3, mixed_batches(5, 2))
    done = requests.generate(Method(), [2])
    assert done.images.shape[0] == 1 and done.report.seeds == (5, 5)
    assert requests.generate(Method(), [0, 3]).report.seeds == (3, 6)
    longer = [*PROMPTS[:4], EvalPrompt("a prompt of more words than the others")]
    assert replace(requests, prompts=longer).longest() == [1, 4]


def test_batches_are_mixed() -> None:
    assert mixed_batches(7, 3) == [[0, 3, 6], [1, 4], [2, 5]]
    assert mixed_batches(2, 5) == [[0, 1]]
    with pytest.raises(SettingError, match="batch"):
        mixed_batches(3, 0)


# --- which methods


@pytest.mark.parametrize("stages", [10, 13])
@pytest.mark.parametrize("name", LISTS)
def test_every_listed_method_fits_both_schedules(name: str, stages: int) -> None:
    """The numbers of stages are those of the shipped model; the sides are small here. The standard list also runs."""
    tiny = infinity_spec()
    eight_blocks = with_ranks(random_pipeline(replace(tiny, model=replace(tiny.model, depth=8))), groups=8)
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


# --- prompts


def shard(path: Path, captions: list[dict[str, str]], images: list[str]) -> Path:
    with tarfile.open(path, "w") as archive:
        contents = {"captions.jsonl": "\n".join(json.dumps(entry) for entry in captions).encode()}
        for number, name in enumerate(images):
            encoded = io.BytesIO()
            Image.new("RGB", (20, 20), (80 * number, 90, 0)).save(encoded, "WEBP")
            contents[name] = encoded.getvalue()
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def test_prompt_files(tmp_path: Path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text("# three\na bee\n\n  a cat\na dog\n")
    assert [prompt.text for prompt in read_eval_prompts(text)] == ["a bee", "a cat", "a dog"]
    assert [prompt.text for prompt in read_eval_prompts(text, limit=2)] == ["a bee", "a cat"]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "a bee", "id": "first"}\n')  # as `nextscale sample` takes them
    assert [prompt.text for prompt in read_eval_prompts(lines)] == ["a bee"]
    lines.write_text('{"caption": "a bee", "style": "noto"}\n')
    assert read_eval_prompts(lines) == [EvalPrompt("a bee", "noto")]
    entries = [{"file": f"{name}.webp", "caption": f"a {name}", "label": name} for name in ("bee", "cat")]
    bee, cat = read_eval_prompts(shard(tmp_path / "val.tar", entries, ["bee.webp", "cat.webp"]))
    assert (cat.text, cat.label, cat.image(8).shape) == ("a cat", "cat", (1, 3, 8, 8))
    assert cat.image(8)[0, 0].mean() > bee.image(8)[0, 0].mean() + 0.3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "\n# nothing\n", "no prompt"),
        ("broken.jsonl", "{", "line 1 is no JSON"),
        ("deep.jsonl", "[" * 100_000, "line 1 is no JSON"),
        ("nameless.jsonl", '{"label": "bee"}', "line 1 must have a text"),
        ("no.tar", "this is no tar", "cannot be read"),
        ("odd.jsonl", '{"caption": "a bee", "label": ["bee"]}', "line 1: label must be a string"),
    ],
)
def test_bad_prompt_files_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(PromptError, match=message):
        read_eval_prompts(tmp_path / name)


def test_bad_shards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="cannot be read"):
        read_eval_prompts(tmp_path / "absent.tar")
    with pytest.raises(PromptError, match="lacks 1 images .* such as 'cat.webp'"):
        read_eval_prompts(shard(tmp_path / "a.tar", [{"file": "cat.webp", "caption": "a cat"}], []))
    png = io.BytesIO()
    Image.effect_noise((400, 400), 50).save(png, "PNG")
    head, _, rest = png.getvalue().rpartition(b"IDAT")
    for encoded in (b"RIFF", head + b"\xffDAT" + rest):  # Pillow raises OSError and SyntaxError
        with pytest.raises(PromptError, match="damaged"):
            EvalPrompt("a bee", encoded=encoded).image(8)


# --- intervals


def test_intervals_cover_the_true_mean_about_as_often_as_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for repeat in range(200):
        found = mean_interval(torch.randn(60, generator=generator), resamples=300, seed=repeat)
        covered += found.low <= 0 <= found.high
    assert 180 <= covered <= 199


def test_intervals_are_seeded() -> None:
    values = torch.arange(20.0) ** 2
    assert mean_interval(values, seed=1) == mean_interval(values, seed=1) != mean_interval(values, seed=2)
    constant = mean_interval([0.25] * 4)
    assert (constant.value, constant.low, constant.high) == (0.25, 0.25, 0.25)
    with pytest.raises(SettingError, match="one or more images"):
        mean_interval([])


def test_interval_of_a_set_holds_its_value_even_if_resamples_are_shifted() -> None:
    """The share of different images is 1 in the set and about 0.63 in every resample."""
    found = set_interval(lambda part: torch.tensor([len(set(row.tolist())) / 50 for row in part]), 50, 100)
    assert found.low < found.value == 1 < found.high < 1.3


# --- probes


def clusters(count: int, seed: int) -> tuple[Tensor, list[str]]:
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(4, 10, generator=torch.Generator().manual_seed(9))
    numbers = torch.randint(4, (count,), generator=generator)
    return centres[numbers] + torch.randn(count, 10, generator=generator), [f"class {number}" for number in numbers.tolist()]


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
    with pytest.raises(CheckpointError, match="is no file of probes"):
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


# --- pictures and the command


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
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_frontier_command(tmp_path: Path) -> None:
    results, picture = tmp_path / "results.jsonl", tmp_path / "frontier.svg"
    other = [row | {"size": [64, 64]} for row in evaluation().rows]
    results.write_text("".join(json.dumps(row) + "\n" for row in [{"benchmark": "dense"}, *other, *evaluation().rows]))
    assert command("frontier", results, "--out", picture) == (0, "")
    assert picture.read_text() == frontier_svg(evaluation().rows)
    assert "--force" in command("frontier", results, "--out", picture)[1]
    for size in ("64", "64x64"):
        assert command("frontier", results, "--size", size, "--out", tmp_path / f"{size}.svg") == (0, "")
    assert (tmp_path / "64.svg").read_text() == (tmp_path / "64x64.svg").read_text() == frontier_svg(other)
    assert "--size '0.25M': give HEIGHTxWIDTH" in command("frontier", results, "--size", "0.25M", "--out", tmp_path / "b.svg")[1]
    assert "tiny-infinity at 32x32, tiny-infinity at 64x64" in command("frontier", results, "--size", "128", "--out", tmp_path / "b.svg")[1]


def test_frontier_does_not_mix_runs(tmp_path: Path) -> None:
    results, picture = tmp_path / "results.jsonl", tmp_path / "frontier.svg"
    earlier = [row | {"images": 99, "method": f"{row['method']} of another run"} for row in evaluation().rows]
    results.write_text("".join(json.dumps(row) + "\n" for row in [*earlier, *evaluation().rows]))
    assert command("frontier", results, "--out", picture) == (0, "")
    assert "of another run" not in picture.read_text()
    results.write_text("[1, 2]\n")
    assert "expected one JSON object per line" in command("frontier", results, "--out", tmp_path / "b.svg")[1]


@pytest.mark.parametrize("width", [80, 300])
def test_table_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(quality_command, "result_console", lambda: Console(width=width, highlight=False))
    quality_command.show_rows(evaluation().rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    skip = next(line for line in lines if line.startswith("skip:last=1"))
    assert (" to " in skip) == (width == 300), "intervals where there is room"
    assert "odd did not run: RuntimeError: does not work here" in lines


def test_command_refuses_before_anything_is_loaded(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a bee\n")
    assert "pass --prompts" in command("quality")[1]
    assert "unknown method 'nothing'" in command("quality", "--prompts", prompts, "--method", "nothing")[1]
    assert "cannot skip 10 of 10 stages" in command("quality", "--prompts", prompts, "--method", "skip:last=10")[1]
    assert "cannot skip 12 of 10" in command("quality", "--prompts", prompts, "--method", "tome+skip:last=12")[1]
    assert "var-d16 takes class numbers: choose a text model" in command("quality", "-m", "var-d16", "--prompts", prompts)[1]
    captions = tmp_path / "captions.jsonl"
    captions.write_text('{"caption": "a bee"}\n')
    assert "holds other things than results" in command("quality", "--prompts", captions, "--method", "skip:last=1", "--out", captions)[1]
    assert captions.read_text() == '{"caption": "a bee"}\n'
    for needs in (("--metrics", tmp_path), ("--probe", tmp_path / "probe")):
        assert f"{EFFICIENTNET}: nothing at" in command("quality", "--prompts", prompts, *needs)[1]


def test_command_goes_on_without_the_network_of_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXTSCALE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(options, "load", lambda *_, **__: pipeline())
    monkeypatch.setattr(options, "choose_schedule", lambda *_: SCHEDULE)
    prompts, out, plot = tmp_path / "prompts.txt", tmp_path / "results.jsonl", tmp_path / "frontier.svg"
    prompts.write_text("a bee\na cat\n")
    fixed = ("quality", "--prompts", prompts, "--method", "skip:last=1", "--out", out, "--device", "cpu")
    with few_images_suffice():
        result = CliRunner().invoke(app, [str(argument) for argument in fixed])
    assert result.exit_code == 0, result.output
    (line,) = result.stderr.splitlines()
    assert EFFICIENTNET in line and VARIABLE in line and "Fréchet" in line
    assert "LPIPS" in result.stdout and "Fréchet" not in result.stdout
    dense, skip = read_rows(out)
    assert skip["lpips"]["value"] > 0 and "frechet_dense" not in skip and "lpips" not in dense
    assert command("frontier", out, "--out", plot) == (0, "")
    quality_table([row | {"hardware": "some GPU"} for row in read_rows(out)])


def test_command_judges_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    write_weights(EfficientNetLite0(), tmp_path / EFFICIENTNET, Layout())
    entries = [{"file": f"{number}.webp", "caption": f"a {number}", "style": "ab"[number % 2], "label": str(number)} for number in range(3)]
    held, training = (shard(tmp_path / name, entries, ["0.webp", "1.webp", "2.webp"]) for name in ("val.tar", "train.tar"))
    monkeypatch.setattr(options, "load", lambda *_, **__: pipeline())
    monkeypatch.setattr(options, "choose_schedule", lambda *_: SCHEDULE)
    out, sheet, probe = tmp_path / "results.jsonl", tmp_path / "sheet.png", tmp_path / "probe.safetensors"
    fixed = ("quality", "--prompts", held, "--metrics", tmp_path, "--method", "skip:last=1", "--out", out, "--batch", "2")
    status, shown = command(*fixed, "--sheet", sheet, "--data", training, "--probe", probe, "--device", "cpu")
    assert status == 0 and "skip:last=1" in shown and "accuracy on held-out real images" in shown
    dense, skip = (json.loads(line) for line in out.read_text().splitlines())
    assert dense["style"]["images"] == 3
    assert "frechet_real" not in skip and "Fréchet" not in shown, "three images say nothing about a set"
    assert Image.open(sheet).height == 60 + 2 * (30 + 32)  # two lines of prompts, then for each method its name and its images
    assert "not overwriting" in command(*fixed, "--sheet", sheet)[1]
    assert "in --data and in --prompts" in command(*fixed, "--data", held, "--probe", tmp_path / "new")[1]
    assert "is no file of probes" in command(*fixed, "--probe", tmp_path / "new")[1]
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
