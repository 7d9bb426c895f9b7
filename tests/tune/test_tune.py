"""The search for settings: what it predicts, what it decides, that it goes on where it was, and that it runs on every backbone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nextscale.errors import NextscaleError
from nextscale.methods import SkipStages, resolve_method
from nextscale.methods.method import Method
from nextscale.profiles import Profile
from nextscale.report import Report
from nextscale.tune.candidate import Candidate
from nextscale.tune.foresight import block_groups, captured, foresight
from nextscale.tune.frontier import frontier, near_frontier, speed_by_distance
from nextscale.tune.log import TrialLog
from nextscale.tune.predict import Predictor, fitted, interpolated
from nextscale.tune.prompts import own_prompts
from nextscale.tune.search import Search
from nextscale.tune.space import ALPHAS, LADDERS, SHARES, Space, adjacent, ladders
from nextscale.tune.trials import Bench
from nextscale.tune.validate import validate
from tests.helpers import tiny
from tests.helpers.counted_bench import CountedBench, difference, workload_of


def bench_of(family: str, count: int = 8, kind: type[Bench] = Bench) -> Bench:
    pipeline = tiny.shared_pipeline(family)
    return kind(pipeline, tiny.schedule_of(family), own_prompts(pipeline, count), 2, 0, difference)


# --- candidates


def test_a_candidate_is_a_method_as_the_command_line_takes_it() -> None:
    candidate = Candidate(((3, 0.5), (4, 0.25)), 6, "blocks=[1, 2]", "fastvar:as_released=True", 3, skipped=1, left_out=(1,))
    assert candidate.text == (
        "sparsevar:keep={3: 0.5, 4: 0.25},alpha=6,blocks=[1, 2] + fastvar:as_released=True + dropguidance:first_stage=3"
        " + skip:last=1,stages=[1]"
    )
    assert resolve_method(candidate.text).methods[0].keep == ((3, 0.5), (4, 0.25))
    assert candidate.knobs == 6
    assert Candidate().text == "dense" and Candidate().knobs == 0
    assert resolve_method(Candidate(left_out=(2,)).text) == SkipStages(stages=(2,))
    assert Candidate(((3, 0.5),), left_out=(2,)).text == "sparsevar:keep={2: 1.0, 3: 0.5},alpha=4 + skip:stages=[2]"
    assert Candidate(((1, 0.8), (3, 0.5)), left_out=(2,)).text == "sparsevar:keep={1: 0.8, 3: 0.5},alpha=4 + skip:stages=[2]"
    assert tiny.shared_pipeline("infinity")("a bee", seed=1, method=Candidate(((3, 0.5),), left_out=(2,)).text).pixels.isfinite().all()


def test_shares_never_grow_unless_a_whole_stage_lies_between() -> None:
    assert Candidate().with_amounts({2: 0.4, 3: 0.8}).amounts == ((2, 0.4), (3, 0.4))
    assert Candidate().with_amounts({2: 0.4, 4: 0.8}).amounts == ((2, 0.4), (4, 0.8))
    assert Candidate(((3, 0.5), (4, 0.2)), alpha=6).without_stages(1, (3,), 5) == Candidate(skipped=1, left_out=(3,))


MILD_AND_BOLD = ("fastvar:ratios={4: 0.3}", "fastvar:ratios={4: 0.5}")


def test_neighbors_differ_by_one_step() -> None:
    space = Space(5, True, change="blocks=[0, 1]", changes=("metric=logits",), peers={"fastvar": MILD_AND_BOLD})
    candidate = Candidate(((4, 0.5),), unguided=4, change="blocks=[0, 1]")
    near = set(space.neighbors(candidate))
    for changed in (
        {"amounts": ((4, 0.6),)},
        {"amounts": ((4, 0.4),)},
        {"amounts": ((3, SHARES[1]), (4, 0.5))},
        {"unguided": None},
        {"unguided": 3},
        {"alpha": 3},
        {"change": "metric=logits"},
        {"amounts": (), "change": "", "skipped": 1},
        {"left_out": (3,)},
        {"peer": MILD_AND_BOLD[0]},
    ):
        assert replace(candidate, **changed) in near
    assert candidate not in near
    assert replace(candidate, amounts=((4, 0.55),)) not in near
    assert replace(candidate, amounts=((4, 0.55),)) in set(space.neighbors(candidate, fine=True))
    shrunk = replace(candidate, amounts=((3, 0.5), (4, 0.5)))
    assert replace(candidate, amounts=((3, 0.4), (4, 0.4))) in set(space.neighbors(shrunk))
    bold = set(space.neighbors(replace(candidate, peer=MILD_AND_BOLD[1])))
    assert replace(candidate, peer=MILD_AND_BOLD[0]) in bold and candidate not in bold
    assert candidate in set(space.neighbors(replace(candidate, peer=MILD_AND_BOLD[0])))


def test_an_unguided_model_has_no_guidance_to_drop() -> None:
    space = Space(5, guided=False)
    candidates = [*space.combinations(), *(c for c, _ in space.singles()), *space.neighbors(Candidate(skipped=1))]
    assert candidates and all(candidate.unguided is None for candidate in candidates)


def test_steps_on_a_scale() -> None:
    assert adjacent(SHARES, 1.0) == [0.9]
    assert adjacent(SHARES, 0.9) == [1.0, 0.8]
    assert adjacent(SHARES, SHARES[-1]) == [SHARES[-2]]
    assert adjacent(SHARES, 0.45) == [0.5, 0.4]  # found in finer steps
    assert adjacent(ALPHAS, 4) == [5, 3]


def test_other_methods_are_named_with_their_stages() -> None:
    assert all(resolve_method(text) for rungs in ladders(13).values() for text in rungs)
    assert "fastvar:ratios={11: 0.4, 12: 0.6}" in ladders(13)["fastvar"]


# --- frontiers


PLACES = [(1.5, 0.02), (2.0, 0.05), (1.9, 0.06), (3.0, 0.2), (2.5, 0.2)]


def test_the_frontier() -> None:
    places = {place: place for place in PLACES}
    assert frontier(places) == [(1.5, 0.02), (2.0, 0.05), (3.0, 0.2)]
    assert sorted(near_frontier(places, 10)) == sorted(PLACES)
    assert set(near_frontier(places, 3)) == {(1.5, 0.02), (2.0, 0.05), (3.0, 0.2)}
    fastest = speed_by_distance(PLACES)
    assert [fastest(distance) for distance in (0.01, 0.035, 9.0)] == pytest.approx([1.25, 1.75, 3.0])
    slow, fast = [(1.3, gap / 10) for gap in range(1, 9)], (3.5, 0.9)
    assert near_frontier({place: place for place in [*slow, fast]}, 4)[1] == fast  # all ranges of speed have their turn
    assert near_frontier({}, 4) == []


# --- predictions


def test_lines_through_measurements() -> None:
    assert fitted([(1.0, 3.0), (2.0, 5.0), (3.0, 7.0)]) == pytest.approx((1.0, 2.0))
    assert fitted([(1.0, 3.0), (2.0, 2.0)]) == pytest.approx((2.5, 0.0))  # more work is never faster
    assert fitted([(1.0, 0.5), (2.0, 3.0)])[0] == pytest.approx(0.0)  # overhead is never negative
    assert fitted([(2.0, 4.0)]) == pytest.approx((4.0, 0.0))
    assert interpolated({1.0: 0.0, 0.5: 0.1, 0.2: 0.4}, 0.35) == pytest.approx(0.25)
    assert interpolated({1.0: 0.0, 0.5: 0.1, 0.2: 0.4}, 0.1) == pytest.approx(0.5)
    assert interpolated({1.0: 0.0}, 0.3) == 0


def predictor_of(bench: Bench, *more: Candidate) -> Predictor:
    candidates = [Candidate(), *(c for c, _ in Space(len(bench.schedule), True, "blocks=[1, 2]").singles()), *more]
    trials = [(candidate, bench.run(candidate.text, 2)) for candidate in candidates]
    return Predictor(bench.pipeline.model, workload_of(bench), trials)


def test_predictions_of_single_knobs_are_their_measurements() -> None:
    bench = bench_of("infinity", kind=CountedBench)
    peers = [Candidate(peer=rungs[0]) for rungs in ladders(len(bench.schedule)).values()]
    predictor = predictor_of(bench, *peers)
    for candidate, trial in predictor.trials:
        if trial.error is None:
            assert predictor.distance(candidate) == pytest.approx(trial.lpips)
            assert predictor.seconds(candidate) == pytest.approx(trial.seconds, rel=0.02)
    last = len(bench.schedule) - 1
    together = Candidate(((last, 0.5),), change="blocks=[1, 2]", unguided=last, peer=ladders(last + 1)["fastvar"][0])
    assert predictor.distance(Candidate(peer="zipvl:ratio=0.5")) == math.inf  # it did not run
    assert predictor.distance(together) > predictor.distance(replace(together, peer=""))
    assert predictor.distance(replace(together, peer="")) > predictor.distance(Candidate(unguided=last))


def test_what_does_not_combine_is_not_predicted() -> None:
    bench = bench_of("infinity", kind=CountedBench)
    predictor = Predictor(bench.pipeline.model, workload_of(bench), [(Candidate(), bench.run("dense", 2))])
    assert predictor.possible(Candidate(skipped=1))
    assert not predictor.possible(Candidate(skipped=99))
    assert not predictor.possible(Candidate(((3, 0.5),), peer="auto:speedup=2"))
    assert len(list(Space(len(bench.schedule), True).combinations())) > 100


class LoadedBench(Bench):
    """On a machine where a dense batch takes as many seconds as other programs leave it."""

    load, clock = 1.0, 0.0

    def _generate(self, method: Method, number: int, timed: bool) -> tuple[Tensor, Report]:
        images, report = super()._generate(method, number, timed)
        seconds = self.load * report.cost_share
        self.clock += seconds
        stages = tuple(replace(stage, seconds=0.0) for stage in report.stages)
        return images, replace(report, stages=stages, condition_seconds=0.0, decode_seconds=seconds)


def test_speedups_are_those_of_the_same_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of("infinity", kind=LoadedBench)
    assert isinstance(bench, LoadedBench)
    monkeypatch.setattr("nextscale.tune.trials.time.perf_counter", lambda: bench.clock)
    before = [bench.run("skip:last=1", 2) for _ in range(30)]
    spent = bench.clock
    bench.load = 3.0
    after = [bench.run("skip:last=1", 2) for _ in range(90)][-10:]
    assert all(trial.speedup == pytest.approx(1 / trial.cost_share) for trial in (*before, *after))
    alone = sum(trial.seconds for trial in before)
    assert spent < 1.2 * alone + 3  # the images to compare with, and two dense batches at the start


# --- where change is measured


def test_a_map_that_foresees_captures_all() -> None:
    moved = torch.zeros(1, 10)
    moved[0, :4] = 1.0
    assert captured(moved, moved) == 1.0
    assert captured(-moved, moved) == 0.0
    assert block_groups(8)[:3] == [(0, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize("family", ["var", "flexvar", "infinity", "hart", "star"])
def test_foresight_of_every_backbone(family: str) -> None:
    pipeline = tiny.shared_pipeline(family)
    found = foresight(pipeline, tiny.schedule_of(family), own_prompts(pipeline, 2), [0, 1], 2)
    assert set(found) == set(block_groups(len(pipeline.model.blocks)))
    assert all(0 < share <= 1 for share in found.values())


# --- the search


def started(file: Path, conditions: dict[str, Any]) -> TrialLog:
    log = TrialLog.read(file)
    log.start(conditions)
    return log


def searched(bench: Bench, log: TrialLog, seconds: float = 60) -> tuple[list[str], Search]:
    search = Search(bench, log, 2, seconds, workload_of(bench))
    return [candidate.text for candidate in search.run()], search


def test_a_stopped_search_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = bench_of("infinity", kind=CountedBench)
    winners, _ = searched(whole, TrialLog())
    assert winners
    stopped = bench_of("infinity", kind=CountedBench)
    assert isinstance(stopped, CountedBench) and isinstance(whole, CountedBench)
    stopped.stop_after = 20
    file, conditions = tmp_path / "x.trials.jsonl", {"model": "tiny", "batch": 2}
    with pytest.raises(KeyboardInterrupt):
        searched(stopped, started(file, conditions))
    with file.open("a") as torn:
        torn.write('{"text": "half a li')  # as a machine that dies while it writes leaves it
    again = bench_of("infinity", kind=CountedBench)
    assert isinstance(again, CountedBench)
    resumed, _ = searched(again, started(file, conditions))
    assert resumed == winners
    assert again.runs == whole.runs - 20
    with pytest.raises(NextscaleError, match="other conditions.*batch: 2 there, 4 here"):
        started(file, conditions | {"batch": 4})
    file.write_text("no json\n")
    with pytest.raises(NextscaleError, match="cannot be read as trials"):
        started(file, conditions)


def test_winners_are_a_frontier_and_beat_skipping() -> None:
    bench = bench_of("infinity", kind=CountedBench)
    winners, search = searched(bench, TrialLog(), seconds=150)
    by_text = {candidate.text: candidate for candidate, _, _ in search.seen}
    trials = [search.trial(by_text[text], 4) for text in winners]
    assert any(trial.predicted > 0 for trial in trials)
    assert len(trials) > 3
    assert all(a.speedup < b.speedup and a.lpips < b.lpips for a, b in pairwise(trials))
    skip = search.trial(Candidate(skipped=1))
    assert any(trial.lpips <= skip.lpips and trial.speedup > skip.speedup for trial in trials)


@pytest.mark.parametrize("family", ["var", "flexvar", "infinity", "hart", "star"])
def test_a_real_search_and_its_validation_on_every_backbone(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With little time it still measures what it must; the profile is written and read."""
    monkeypatch.setattr("nextscale.tune.space.COARSE", (1.0, 0.4))  # fewer predictions
    monkeypatch.setattr("nextscale.tune.search.MIN_PREDICTED", 3)
    bench = bench_of(family, count=4)
    winners, search = searched(bench, started(tmp_path / "x.trials.jsonl", {}), seconds=1e-3)
    assert all(trial.error is None or "Error" in trial.error for trial in search.seen.values())
    peers = {candidate.peer_name: trial for (candidate, _, _), trial in search.seen.items() if trial.error is None}
    assert set(peers) - {""} == set(LADDERS)
    told: list[str] = []
    held_out = own_prompts(bench.pipeline, 6)[4:]
    profile = validate_faster(bench, [*winners[:3], "skip:last=1"], held_out, lambda what, share: told.append(what))
    assert profile.tested == 2 and profile.searched == 4
    assert told
    profile.save(tmp_path / "x.profile.json")
    assert Profile.load(tmp_path / "x.profile.json") == profile


def validate_faster(bench: Bench, winners: list[str], held_out: list[Any], on_progress: Callable[[str, float], None]) -> Profile:
    """On so small a model a method may take longer than dense generation by chance; skipping stages hardly does."""
    for _ in range(5):
        try:
            return validate(
                bench.pipeline, winners, held_out, difference,
                schedule=bench.schedule, batch=2, seed=0, searched=4, source="ours", on_progress=on_progress,
            )  # fmt: skip
        except NextscaleError as error:
            assert "no candidate is faster" in str(error)
    pytest.fail("skipping a stage is never faster than dense generation")
