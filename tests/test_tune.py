"""The search for settings: what it predicts, what it decides, that it goes on where it was, and that it runs on every backbone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from nextscale.accel.method import Method
from nextscale.cli import app
from nextscale.errors import NextscaleError
from nextscale.lab.evals.prompts import EvalPrompt
from nextscale.lab.tune.candidate import SHARES, Candidate, adjacent
from nextscale.lab.tune.foresight import block_groups, captured, foresight
from nextscale.lab.tune.frontier import frontier, gap, near_frontier, thinned
from nextscale.lab.tune.log import TrialLog
from nextscale.lab.tune.predict import Predictor, combinations, fitted, interpolated, singles
from nextscale.lab.tune.prompts import own_prompts
from nextscale.lab.tune.prove import prove
from nextscale.lab.tune.search import Search, behind
from nextscale.lab.tune.trials import Bench, Trial
from nextscale.planning.cost import Workload, request_cost
from nextscale.profiles import Profile

from . import tiny


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Stands for LPIPS, for which tiny images are too small."""
    return (a - b).abs().mean(dim=(1, 2, 3))


def bench_of(family: str, count: int = 8, kind: type[Bench] = Bench) -> Bench:
    pipeline = tiny.shared_pipeline(family)
    return kind(pipeline, tiny.schedule_of(family), own_prompts(pipeline, count), 2, 0, difference, least=2)


def workload_of(bench: Bench) -> Workload:
    return Workload(bench.schedule, bench.batch, text_tokens=8 if bench.pipeline.model.stack[0].has_text else 0)


@dataclass(eq=False)
class CountedBench(Bench):
    """Made-up numbers that follow from the plans: a second per share of the MACs, and a distance that grows with what is left out."""

    runs: int = 0
    stop_after: int = 1000

    def run(self, text: str, method: Method, batches: int, timed: bool = True) -> Trial:
        if self.runs == self.stop_after:
            raise KeyboardInterrupt
        self.runs += 1
        model, work = self.pipeline.model, workload_of(self)
        try:
            ours = request_cost(model, work, method.forecast(model, self.schedule))
        except NextscaleError as error:
            return Trial(text, self.images(batches), took=1.0, error=str(error))
        dense = request_cost(model, work)
        times = tuple(stage.total / dense.total for stage in ours.stages)
        lost = sum(
            0.1 * (1 - stage.share(full)) ** 2 * (2 if stage.skipped else 1) for stage, full in zip(ours.stages, dense.stages, strict=True)
        )
        return Trial(text, self.images(batches), lost, sum(times), times, 0.0, sum(times), 1.0, 1.0)


# --- candidates


def test_a_candidate_is_a_method_as_the_command_line_takes_it() -> None:
    candidate = Candidate("sparse", ((3, 0.5), (4, 0.25)), 6, "blocks=[1, 2]", unguided=3, kept_rows="uncond", skipped=1)
    assert candidate.text == (
        "sparsevar:keep={3: 0.5, 4: 0.25},alpha=6,blocks=[1, 2] + dropguidance:first_stage=3,kept_rows=uncond + skip:last=1"
    )
    assert candidate.method.methods[0].keep == ((3, 0.5), (4, 0.25))
    assert Candidate().text == "dense"
    assert "ratios={4: 0.6}" in Candidate("fast", ((4, 0.4),)).text
    assert "ranks=0.02" in Candidate("rank", ((4, 0.02),)).text


def test_neighbours_differ_by_one_step() -> None:
    candidate = Candidate("sparse", ((4, 0.5),), unguided=4)
    near = set(candidate.neighbours(5))
    assert replace(candidate, amounts=((4, 0.6),)) in near
    assert replace(candidate, amounts=((4, 0.4),)) in near
    assert replace(candidate, amounts=((3, SHARES[0]), (4, 0.5))) in near
    assert replace(candidate, unguided=None) in near
    assert replace(candidate, unguided=3) in near
    assert replace(candidate, alpha=3) in near
    assert replace(candidate, amounts=(), skipped=1) in near
    assert candidate not in near
    shrunk = replace(candidate, amounts=((3, 0.5), (4, 0.5)))
    assert replace(candidate, amounts=((3, 0.4), (4, 0.4))) in set(shrunk.neighbours(5))  # shares never grow
    ranks = Candidate("rank", ((3, 0.1), (4, 0.1)))
    assert replace(ranks, amounts=((3, 0.05), (4, 0.05))) in set(ranks.neighbours(5))


def test_steps_on_a_scale() -> None:
    assert adjacent(SHARES, None) == [SHARES[0]]
    assert adjacent(SHARES, SHARES[0]) == [None, SHARES[1]]
    assert adjacent(SHARES, SHARES[-1]) == [SHARES[-2]]


# --- frontiers


PLACES = [(1.5, 0.02), (2.0, 0.05), (1.9, 0.06), (3.0, 0.2), (2.5, 0.2)]


def test_the_frontier() -> None:
    def of(place: tuple[float, float]) -> tuple[float, float]:
        return place

    assert frontier(PLACES, of) == [(1.5, 0.02), (2.0, 0.05), (3.0, 0.2)]
    assert gap((1.9, 0.06), PLACES) == pytest.approx(0.95)
    assert gap((3.0, 0.2), PLACES) == 1
    assert sorted(near_frontier(PLACES, of, 10)) == sorted(PLACES)
    assert set(near_frontier(PLACES, of, 3)) == {(1.5, 0.02), (2.0, 0.05), (3.0, 0.2)}
    assert thinned([(1.0, 0.0), (1.1, 0.1), (2.0, 0.2), (4.0, 0.3)], of, 3) == [(1.0, 0.0), (2.0, 0.2), (4.0, 0.3)]
    assert behind(0.035, PLACES) == pytest.approx(1.75)
    assert behind(9.0, PLACES) == 3.0


# --- predictions


def test_lines_through_measurements() -> None:
    assert fitted([(1.0, 3.0), (2.0, 5.0), (3.0, 7.0)]) == pytest.approx((1.0, 2.0))
    assert fitted([(1.0, 3.0), (2.0, 2.0)]) == pytest.approx((2.5, 0.0))  # more work is never faster
    assert fitted([(1.0, 0.5), (2.0, 3.0)])[0] == pytest.approx(0.0)  # overhead is never negative
    assert fitted([(2.0, 4.0)]) == pytest.approx((4.0, 0.0))
    assert interpolated({1.0: 0.0, 0.5: 0.1, 0.2: 0.4}, 0.35) == pytest.approx(0.25)
    assert interpolated({1.0: 0.0, 0.5: 0.1, 0.2: 0.4}, 0.1) == pytest.approx(0.5)
    assert interpolated({1.0: 0.0}, 0.3) == 0


def test_predictions_of_single_knobs_are_their_measurements() -> None:
    bench = bench_of("infinity", kind=CountedBench)
    candidates = [Candidate(), *singles(len(bench.schedule), True, "blocks=[1, 2]")]
    trials = [(candidate, bench.run(candidate.text, candidate.method, 1)) for candidate in candidates]
    predictor = Predictor(bench.pipeline.model, workload_of(bench), trials)
    for candidate, trial in trials:
        if trial.error is None and candidate.reducer == "sparse":
            assert predictor.distance(candidate) == pytest.approx(trial.lpips)
            assert predictor.seconds(candidate) == pytest.approx(trial.seconds, rel=0.02)
    together = Candidate("sparse", ((len(bench.schedule) - 1, 0.5),), change="blocks=[1, 2]", unguided=len(bench.schedule) - 1)
    assert predictor.seconds(together) == pytest.approx(bench.run(together.text, together.method, 1).seconds, rel=0.05)
    assert predictor.distance(together) > max(predictor.distance(Candidate(unguided=together.unguided)), 0)


def test_what_does_not_combine_is_not_predicted() -> None:
    bench = bench_of("infinity", kind=CountedBench)
    dense = Candidate()
    predictor = Predictor(bench.pipeline.model, workload_of(bench), [(dense, bench.run("dense", dense.method, 1))])
    assert predictor.possible(Candidate(skipped=1))
    assert not predictor.possible(Candidate(skipped=99))
    assert len(list(combinations(len(bench.schedule), True, "", "cond"))) > 100


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


def searched(bench: Bench, log: TrialLog, seconds: float = 60) -> tuple[list[str], Search]:
    search = Search(bench, log, seconds, workload_of(bench))
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
        searched(stopped, TrialLog.open(file, conditions))
    with file.open("a") as torn:
        torn.write('{"text": "half a li')  # as a machine that dies while it writes leaves it
    again = bench_of("infinity", kind=CountedBench)
    assert isinstance(again, CountedBench)
    resumed, _ = searched(again, TrialLog.open(file, conditions))
    assert resumed == winners
    assert again.runs == whole.runs - 20
    with pytest.raises(NextscaleError, match="other conditions.*batch: 2 there, 4 here"):
        TrialLog.open(file, conditions | {"batch": 4})
    file.write_text("no json\n")
    with pytest.raises(NextscaleError, match="cannot be read as trials"):
        TrialLog.open(file, conditions)


def test_winners_are_a_frontier_and_beat_skipping() -> None:
    bench = bench_of("infinity", kind=CountedBench)
    winners, search = searched(bench, TrialLog(), seconds=150)
    trials = [search.trial(search.tried[text], 4) for text in winners]
    assert len(trials) > 3
    assert all(a.speedup < b.speedup and a.lpips < b.lpips for a, b in pairwise(trials))
    skip = search.trial(Candidate(skipped=1))
    assert any(trial.lpips <= skip.lpips and trial.speedup > skip.speedup for trial in trials)


@pytest.mark.parametrize("family", ["var", "flexvar", "infinity", "hart", "star"])
def test_a_real_search_and_its_proof_on_every_backbone(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With little time it still measures what it must; the profile is written and read."""
    monkeypatch.setattr("nextscale.lab.evals.judges.ssim", difference)  # tiny images have no window
    bench = bench_of(family, count=4)
    winners, search = searched(bench, TrialLog.open(tmp_path / "x.trials.jsonl", {}), seconds=1e-3)
    assert all(trial.error is None or "Error" in trial.error for trial in search.seen.values())
    told: list[str] = []
    proof = [EvalPrompt(prompt) for prompt in own_prompts(bench.pipeline, 6)[4:]]
    profile = prove_faster(bench, [*winners, "skip:last=1"], proof, lambda what, share: told.append(what))
    assert profile.tested == 2 and profile.searched == 4
    assert told
    profile.save(tmp_path / "x.profile.json")
    assert Profile.load(tmp_path / "x.profile.json") == profile


def prove_faster(bench: Bench, winners: list[str], proof: list[EvalPrompt], on_progress: Callable[[str, float], None]) -> Profile:
    """On so small a model a method may take longer than dense generation by chance; skipping stages hardly does."""
    for _ in range(5):
        try:
            return prove(
                bench.pipeline, winners, proof, difference,
                schedule=bench.schedule, batch=2, seed=0, searched=4, source="ours", on_progress=on_progress,
            )  # fmt: skip
        except NextscaleError as error:
            assert "nothing that was searched is faster" in str(error)
    pytest.fail("skipping a stage is never faster than dense generation")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "speed=2"], "give one of speedup=2, lpips=0.08, ms=50"),
        (["--target", "lpips=-1"], "give a number above 0"),
        (["--out", "x.json"], "ends in .profile.json"),
        (["--prompts", "one.txt", "--batch", "2"], "0 prompts for batches of 2|1 prompts for batches of 2"),
    ],
)
def test_what_the_command_refuses(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nextscale.cli.tune.metric_file", lambda *_: None)
    monkeypatch.setattr("nextscale.cli.tune.Lpips.load", lambda *_: difference)
    Path("one.txt").write_text("a bee\n")
    result = CliRunner().invoke(app, ["tune", "nano", "--device", "cpu", "--size", "128", *arguments])
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]
