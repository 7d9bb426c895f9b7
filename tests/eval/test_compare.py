"""Comparisons: whole runs on a tiny random model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from nextscale.errors import PromptError, SettingError
from nextscale.eval.compare import Batch, Comparison, MethodResult, Requests, compare, mixed_batches
from nextscale.loading.load import random_pipeline
from nextscale.loading.presets import ModelSpec
from nextscale.methods import Method, MethodRun, RunSetup, resolve_method
from nextscale.metrics import Lpips
from nextscale.pipeline import Pipeline
from nextscale.stage import Schedule
from tests.helpers.tiny import OneSchedule, infinity_spec, with_ranks

SCHEDULE = Schedule((1, 2, 4, 8, 16))  # 32 pixels a side
PROMPTS = [f"prompt number {number}" for number in range(5)]
SKIP = {"skip:last=1": resolve_method("skip:last=1")}


def spec() -> ModelSpec:
    tiny = infinity_spec()
    return replace(tiny, settings=replace(tiny.settings, schedules=OneSchedule(SCHEDULE)))


@cache
def pipeline() -> Pipeline:
    return with_ranks(random_pipeline(spec()))


@cache
def lpips() -> Lpips:
    torch.manual_seed(0)
    return Lpips()


@cache
def comparison() -> Comparison:
    texts = ("skip:last=1", "sparsevar:tau=0", "fastvar + skip:last=2")
    methods = {text: resolve_method(text) for text in texts} | {"odd": Failing()}
    return compare(pipeline(), methods, PROMPTS, lpips(), schedule=SCHEDULE, seed=3, batch=2, masks=True)


class Failing(Method):
    def start(self, setup: RunSetup) -> MethodRun:
        raise RuntimeError("does not work here\nat all")


def test_rows_say_what_a_method_saves_and_costs() -> None:
    dense, skip, *_ = comparison().rows
    assert (dense["method"], skip["method"], skip["settings"]) == ("dense", "skip:last=1", "SkipStages(last=1)")
    assert dense["cost_share"] == dense["kept"] == dense["speedup"]["median"] == 1
    assert "lpips" not in dense and "psnr" not in dense
    assert skip["kept"] == pytest.approx((1 + 4 + 16 + 64) / (1 + 4 + 16 + 64 + 256), abs=1e-4)
    assert 0 < skip["cost_share"] < skip["kept"]
    assert skip["identical"] == 0 and math.isfinite(skip["psnr"]["value"])
    for name in ("psnr", "ssim", "lpips"):
        assert skip[name]["low"] <= skip[name]["value"] <= skip[name]["high"], name
    assert (skip["images"], skip["batch"], skip["seed"], skip["size"]) == (5, 2, 3, [32, 32])
    json.dumps(comparison().rows, allow_nan=False)


def test_a_method_of_no_strength_costs_nothing() -> None:
    row = comparison().rows[2]
    assert row["method"] == "sparsevar:tau=0"
    assert row["identical"] == 1 and row["psnr"] is None
    assert row["lpips"]["value"] == row["lpips"]["high"] == 0
    assert row["ssim"]["value"] == pytest.approx(1, abs=1e-5)


def test_what_fails_is_a_row() -> None:
    row = comparison().rows[-1]
    assert (row["method"], row["error"]) == ("odd", "RuntimeError: does not work here")
    results = comparison().results
    assert not results["odd"].images
    assert torch.cat(results["dense"].images).shape == (5, 3, 32, 32)
    assert [len(shares) for shares in results["skip:last=1"].masks[0]] == [2] * 5, "compute masks of the first batch, stage by stage"
    failing = {"dense": Failing()}
    with pytest.raises(RuntimeError, match="does not work"):
        compare(pipeline(), failing, PROMPTS, lpips(), schedule=SCHEDULE)


def test_what_fails_on_the_way_is_a_row_too() -> None:
    """The first batch is drawn, the second is not."""
    methods = {"odd": FailingLater([])}
    *_, row = compare(pipeline(), methods, PROMPTS, lpips(), schedule=SCHEDULE, batch=2).rows
    assert row["error"] == "RuntimeError: enough" and "psnr" not in row


def test_images_that_are_not_finite_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = pipeline().tokenizer
    decode, calls = tokenizer.decode, []

    def the_third_one_breaks(latent: Tensor) -> Tensor:
        calls.append(1)  # the warm-up, dense, skip
        return decode(latent) * (torch.nan if len(calls) == 3 else 1)

    monkeypatch.setattr(tokenizer, "decode", the_third_one_breaks)
    dense, skip = compare(pipeline(), SKIP, PROMPTS, lpips(), schedule=SCHEDULE).rows
    assert "not finite" in skip["error"] and "error" not in dense


def test_times_are_medians_of_three_rounds_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up does not count, and images of the later rounds are not compared again."""
    seconds = iter((99.0, 4.0, 2.0, 4.0, 1.0, 8.0, 2.0))  # the warm-up, then dense and skip in turns
    generate = Requests.generate

    def timed(requests: Requests, method: Method, numbers: list[int], masks: bool) -> Batch:
        images, masks, report = generate(requests, method, numbers)
        stages = tuple(replace(stage, seconds=0.0) for stage in report.stages)
        return Batch(images, masks, replace(report, stages=stages, condition_seconds=next(seconds), decode_seconds=0.0))

    monkeypatch.setattr(Requests, "generate", timed)
    dense, skip = compare(pipeline(), SKIP, PROMPTS[:2], lpips(), schedule=SCHEDULE).rows
    assert next(seconds, None) is None
    assert (skip["speedup"]["median"], skip["speedup"]["low"], skip["speedup"]["high"]) == (4, 2, 4)
    assert (dense["ms_per_image"]["median"], dense["ms_per_image"]["high"]) == (2000, 4000)
    assert skip["cost_share"] == pytest.approx(comparison().rows[1]["cost_share"], abs=1e-3)


def test_an_unreadable_prompt_is_refused_before_anything_is_generated() -> None:
    told: list[str] = []
    with pytest.raises(PromptError):
        compare(pipeline(), {}, [*PROMPTS, " "], lpips(), schedule=SCHEDULE, batch=1, on_progress=lambda n, _: told.append(n))
    with pytest.raises(SettingError, match="prompts"):
        compare(pipeline(), {}, [], lpips(), schedule=SCHEDULE)
    assert told == []


def test_progress_and_the_size_of_the_batches() -> None:
    told: list[tuple[str, float]] = []
    seen: list[tuple[str, int]] = []
    rows = compare(
        pipeline(),
        SKIP,
        PROMPTS[:3],
        lpips(),
        schedule=SCHEDULE,
        on_progress=lambda *one: told.append(one),
        on_images=lambda name, images: seen.append((name, len(images))),
    ).rows
    assert [name for name, _ in told] == ["dense", "skip:last=1"] * 3, "one batch is timed in three rounds, in turns"
    assert [share for _, share in told] == pytest.approx([number / 6 for number in range(6)])
    assert rows[0]["batch"] == 3, "times are those of three images at a time"
    assert seen == [("dense", 3), ("skip:last=1", 3)]


def test_numbers_do_not_depend_on_the_batch() -> None:
    single = compare(pipeline(), SKIP, PROMPTS, lpips(), schedule=SCHEDULE, seed=3, batch=5).rows[1]
    for name in ("psnr", "ssim", "lpips"):
        assert single[name]["value"] == pytest.approx(comparison().rows[1][name]["value"], rel=1e-3)


def test_small_images_have_fewer_measures() -> None:
    result = MethodResult()
    result.measure(torch.zeros(1, 3, 8, 6), torch.ones(1, 3, 8, 6), None)
    assert list(result.pairs) == ["psnr"]


def test_the_share_of_cells_is_that_of_the_compute_masks_of_all_batches() -> None:
    """Images of one batch that keep different numbers of cells run packed, so none runs padding for another."""
    texts = ("sparsevar:tau=0.9,first_stage=2", "fastvar", "stagevar")
    methods = {text: resolve_method(text) for text in texts}
    rows = compare(pipeline(), methods, PROMPTS[:4], lpips(), schedule=SCHEDULE, seed=3, batch=2).rows
    for row in rows:
        shares = []
        for numbers in ([0, 2], [1, 3]):
            prompts, seeds = [PROMPTS[number] for number in numbers], [3 + number for number in numbers]
            masks = pipeline()(prompts, seed=seeds, method=methods.get(row["method"]), compute_mask=True).compute_mask
            assert masks is not None
            shares.append(sum(float(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks))
        assert row["kept"] == pytest.approx(sum(shares) / 2, abs=1e-4), row["method"]
    assert rows[1]["padding"] == 0 == rows[0]["padding"]


def test_rows_name_the_engine_that_ran() -> None:
    assert [row["engine"] for row in comparison().rows] == ["eager"] * 4 + [None]
    report = pipeline()("a bee", seed=0).report
    captured = replace(report, engine="graphs", device="some GPU", peak_memory=10**9)
    assert MethodResult(reports=[captured] * 2).row(MethodResult(reports=[report] * 2))["engine"] == "graphs"
    assert MethodResult(reports=[captured, report]).row(MethodResult(reports=[report] * 2))["engine"] == "eager and graphs"


def test_all_batches_have_one_size() -> None:
    requests = Requests(pipeline(), SCHEDULE, PROMPTS, 3, mixed_batches(5, 2))
    done = requests.generate(Method(), [2])
    assert done.images.shape[0] == 1 and done.report.seeds == (5, 5)
    assert requests.generate(Method(), [0, 3]).report.seeds == (3, 6)
    longer = [*PROMPTS[:4], "a prompt of more words than the others"]
    assert replace(requests, prompts=longer).longest() == [1, 4]


def test_batches_are_mixed() -> None:
    assert mixed_batches(7, 3) == [[0, 3, 6], [1, 4], [2, 5]]
    assert mixed_batches(2, 5) == [[0, 1]]
    with pytest.raises(SettingError, match="batch"):
        mixed_batches(3, 0)


class FailingLater(Method):
    def __init__(self, calls: list[int]) -> None:
        self.calls = calls

    def start(self, setup: RunSetup) -> MethodRun:
        self.calls.append(1)
        if len(self.calls) > 1:
            raise RuntimeError("enough")
        return MethodRun()
