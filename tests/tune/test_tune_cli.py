"""`nextscale tune` from the command line to the profile, on a tiny model whose times follow from its MACs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.progress import Progress
from typer.testing import Result

from nextscale.cli.show import WholePercent, share_bar
from nextscale.cli.tune import Prompts, prompts_of, read_prompts, starting_points
from nextscale.errors import NextscaleError, PromptError, SettingError
from nextscale.eval.compare import Comparison, compare, mixed_batches
from nextscale.loading import presets
from nextscale.loading.presets import NANO
from nextscale.methods import resolve_method
from nextscale.profiles import Profile
from nextscale.stage import Schedule
from nextscale.tune.budget import filling_batches, first_round, max_winners, validation_prompts
from nextscale.tune.log import FORMAT, TrialLog
from nextscale.tune.trials import Trial
from nextscale_research.__main__ import app as research
from nextscale_research.sensitivity import Sensitivities
from tests.helpers import tiny
from tests.helpers.cli import run_cli
from tests.helpers.counted_bench import CountedBench, difference
from tests.helpers.tiny_profiles import profile_of

PROFILE, TRIALS = Path("x.profile.json"), Path("x.trials.jsonl")


def timed_by_macs(*arguments: Any, **more: Any) -> Comparison:
    """Real images; the speedups are those that MACs would give."""
    found = compare(*arguments, **more)
    for row in found.rows:
        row["speedup"] = dict.fromkeys(("median", "p20", "p80"), 1 / row["cost_share"])
    return found


@pytest.fixture(autouse=True)
def tiny_nano(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tiny model under nano's name, in a folder with prompts, on a machine that has a distance of images."""
    monkeypatch.setitem(presets.MODELS, NANO.name, tiny.SPECS["infinity"])
    monkeypatch.setattr("nextscale.loading.artifacts.profile_folders", lambda *_: [tmp_path / "weights"])
    monkeypatch.setattr("nextscale.loading.load", lambda _name, **_: tiny.shared_pipeline("infinity"))
    monkeypatch.setattr("nextscale.metrics.Lpips.load", lambda *_: difference)
    monkeypatch.setattr("nextscale.tune.validate.compare", timed_by_macs)
    monkeypatch.setattr("nextscale.tune.budget.IMAGES", 2)
    monkeypatch.setattr("nextscale.tune.space.COARSE", (1.0, 0.4))  # fewer predictions
    monkeypatch.chdir(tmp_path)
    Path("train.txt").write_text("".join(f"a {thing}\n" for thing in ("bee", "cat", "cow", "dog", "elk", "fox", "hen", "owl")))
    Path("test.txt").write_text("a ship\na car\n")
    yield


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object, stop_after: int = 1000) -> tuple[Result, list[CountedBench]]:
    made: list[CountedBench] = []

    def bench(*given: Any) -> CountedBench:
        made.append(CountedBench(*given, stop_after=stop_after))
        return made[-1]

    monkeypatch.setattr("nextscale.tune.trials.Bench", bench)
    command = ["tune", "--device", "cpu", "--batch", "2", "--out", PROFILE, *arguments]
    return run_cli(*command, catch=True), made


SEARCH = ("--prompts", "train.txt", "--test", "test.txt", "--minutes", "2")


def test_a_search_that_is_stopped_continues_and_its_profile_is_validated_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    killed, _ = run(monkeypatch, *SEARCH, stop_after=30)
    assert killed.exit_code == 130
    assert killed.stderr.splitlines()[-1] == "Stopped. 30 of about 55 trials are in x.trials.jsonl; the same command continues."
    assert len(TRIALS.read_text().splitlines()) == 32  # the conditions, the foresight, and a line for each trial
    assert not PROFILE.exists()
    result, (bench,) = run(monkeypatch, *SEARCH, "--target", "speedup=1.5")
    assert result.exit_code == 0, result.output
    profile = Profile.load(PROFILE)
    assert (profile.tested, profile.seed) == (2, 0)
    assert profile.searched in (2, 4)  # the first batch, or two of them: research plug-ins add trials
    assert profile.prompts == "train.txt for the search, test.txt held out"
    taken = profile.nearest(speedup=1.5)
    assert f"Auto(speedup=1.5) takes {resolve_method(taken.method).label}: {taken.label}" in result.stdout
    _, (whole,) = run(monkeypatch, *SEARCH, "--force")
    assert whole.runs == bench.runs + 30
    assert [point.method for point in Profile.load(PROFILE).points] == [point.method for point in profile.points]

    again, _ = run(monkeypatch, "--from", PROFILE, "--test", "test.txt", "--out", "y.profile.json")
    assert again.exit_code == 0, again.output
    again_profile = Profile.load("y.profile.json")
    assert (again_profile.searched, again_profile.tested) == (0, 2)
    assert again_profile.prompts == "points of x.profile.json, validated on test.txt"
    assert "2 prompts (points of x.profile.json, validated on test.txt), seed 0." in again.stdout
    assert {point.method for point in again_profile.points} <= {point.method for point in profile.points}
    unmet, _ = run(monkeypatch, "--from", PROFILE, "--test", "test.txt", "--target", "speedup=99", "--force")
    assert unmet.exit_code == 2 and "no point with a speedup of at least 99" in unmet.stderr


def test_validation_takes_as_many_prompts_and_winners_as_it_has_time_for() -> None:
    assert validation_prompts(2, 0.1, 2, winners=6) == 30  # half a minute, ten methods with dense generation and skipping
    assert validation_prompts(2, 0.1, 0.01, winners=6) == 6
    assert max_winners(2, 0.1, 2) == 45
    assert max_winners(2, 0.1, 0.41) == 6
    assert max_winners(2, 0.1, 0.01) == 4


@pytest.mark.parametrize(("count", "batch", "taken"), [(17, 8, 16), (16, 8, 16), (23, 8, 23), (33, 32, 32), (570, 32, 570), (8, 8, 8)])
def test_validation_runs_batches_of_the_size_that_was_asked_for(count: int, batch: int, taken: int) -> None:
    assert filling_batches(count, batch) == taken
    assert len(mixed_batches(taken, batch)[0]) == batch


def test_the_first_round_is_as_long_as_the_time_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nextscale.tune.budget.IMAGES", 24)
    assert first_round(2, 0.1, 20, 100) == 24
    assert first_round(2, 0.1, 2, 100) == 10
    assert first_round(2, 0.1, 0.2, 100) == 2
    assert first_round(32, 0.1, 4, 100) == 32
    assert first_round(8, 0.1, 20, 20) == 16  # the whole batches that there are prompts for


@pytest.mark.parametrize(
    ("minutes", "seconds", "least"), [("2", 60.0, "55 min .*Pass --minutes 66"), ("2", 10.0, "10 min "), ("0.01", 0.1, "1 min ")]
)
def test_too_few_minutes_are_refused_after_one_image(minutes: str, seconds: float, least: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round has 2 images; 55 trials take 0.75 times as long as dense generation, and validation a quarter of the time."""
    monkeypatch.setattr(CountedBench, "first_look", lambda _: seconds / 2)
    result, (bench,) = run(monkeypatch, *SEARCH, "--minutes", minutes)
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 2 and re.search(least, line), line
    assert bench.runs == 0 and not TRIALS.exists() and not PROFILE.exists()


def test_a_search_whose_needed_trials_take_too_long_stops_and_can_be_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial of this bench takes a second: 45 s of --minutes 0.5 plus a third are 31 trials and what fits no more."""
    stopped, (bench,) = run(monkeypatch, *SEARCH, "--minutes", "0.5")
    assert stopped.exit_code == 2
    assert re.search(r"3\d of about 55 are kept in x.trials.jsonl. Run the same command with --minutes 1 to continue", stopped.stderr)
    assert 0.75 * 30 < bench.runs <= 1.3 * 30
    shorter = run(monkeypatch, *SEARCH, "--out", "y.profile.json", "--minutes", "0.25")[0].stderr  # the other trials take 40 s
    assert re.search(r"1\d of about 55 are kept in y.trials.jsonl. Run the same command with --minutes 1 to continue", shorter), shorter
    continued, (rest,) = run(monkeypatch, *SEARCH, "--minutes", "2")
    assert continued.exit_code == 0, continued.output
    assert rest.runs < 60 and PROFILE.exists()


def test_progress_grows_and_is_never_complete_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[float, str]] = []
    update = Progress.update

    def told(self: Progress, *given: Any, **changes: Any) -> None:
        shown.append((changes["completed"], changes["description"]))
        update(self, *given, **changes)

    monkeypatch.setattr(Progress, "update", told)
    monkeypatch.setattr("nextscale.tune.budget.LATEST", 100)  # the needed trials take longer than was asked for
    result, _ = run(monkeypatch, *SEARCH, "--minutes", "0.2")
    assert result.exit_code == 0, result.output
    shares = [share for share, _ in shown]
    assert shares == sorted(shares) and shares[0] == 0 and 0.9 < shares[-1] < 1
    assert shown[0][1].startswith("trial 1 of about 55, dense") and any(words.startswith("validation: dense") for _, words in shown)
    assert {share for share, words in shown if words.startswith("trial")} >= {0.75}, "where the time is over but the search is not"
    (percent,) = [column for column in share_bar().columns if isinstance(column, WholePercent)]
    assert percent.render(SimpleNamespace(percentage=99.9)).plain == "99 %"  # type: ignore[arg-type]


def test_a_search_that_goes_on_has_the_first_round_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--prompts", "train.txt", "--test", "test.txt", "--minutes", "2")
    monkeypatch.setattr("nextscale.tune.budget.IMAGES", 4)
    run(monkeypatch, *given, stop_after=5)
    monkeypatch.setattr("nextscale.tune.budget.IMAGES", 8)  # the machine has become faster
    run(monkeypatch, *given, stop_after=5)
    assert {trial.images for trial in TrialLog.read(TRIALS).trials.values()} == {4}


# --- prompts


@pytest.mark.parametrize("file", ["train.txt", "test.txt"])
def test_prompts_that_cannot_be_read_are_refused_before_the_search(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = tiny.shared_pipeline("infinity").reader
    read = reader.read

    def limited(prompts: Any) -> Any:
        if any(len(prompt) > 99 for prompt in prompts):
            raise PromptError("too many words")
        return read(prompts)

    monkeypatch.setattr(reader, "read", limited)
    with Path(file).open("a") as lines:
        lines.write(f"a {'very ' * 50}large ship\n")
    result, benches = run(monkeypatch, *SEARCH, stop_after=0)
    assert result.exit_code == 2 and "too many words" in result.stderr, result.output
    assert not benches and not TRIALS.exists()


def prompts_read(prompts: Sequence[str] | None = None, test: Sequence[str] | None = None, **given: Any) -> Prompts:
    for file, lines in (("a.txt", prompts), ("b.txt", test)):
        Path(file).write_text("".join(f"{line}\n" for line in lines or ()))
    files = Path("a.txt") if prompts else None, Path("b.txt") if test else None
    return read_prompts(*files, given.get("start"), tiny.SPECS["infinity"], tiny.shared_pipeline("infinity"))


def test_no_held_out_prompt_is_one_of_the_search() -> None:
    again = prompts_read(["a bee", "a cat", "a cow", "a bee", "a cat", "a cow", "a dog"])
    assert (again.search, again.held_out) == (["a bee", "a cow", "a bee", "a cow"], ["a cat", "a cat", "a dog"])
    overlapping = prompts_read(["a bee", "a cat", "a cow"], ["a cat", "a ship"])
    assert (overlapping.search, overlapping.held_out) == (["a bee", "a cow"], ["a cat", "a ship"])
    own = prompts_read()
    assert len(own.search) == len(own.held_out) == 128
    assert len({*own.search, *own.held_out}) == 256


def test_points_that_are_validated_later_meet_prompts_that_no_search_saw() -> None:
    searched, later = prompts_read(test=["a ship", "a car"]), prompts_read(start=Path("x.profile.json"))
    assert len(searched.search) == len(later.held_out) == 128
    assert not {*searched.search} & {*later.held_out}


def test_trials_of_another_torch_or_format_of_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, *SEARCH, stop_after=3)
    kept = TRIALS.read_text()
    for changes in ({"torch": "1.0"}, {"quantize": "int8"}, {"kv_dtype": "int8"}):
        head, *lines = kept.splitlines()
        TRIALS.write_text("\n".join([json.dumps(json.loads(head) | changes), *lines]) + "\n")
        refused, _ = run(monkeypatch, *SEARCH)
        assert refused.exit_code == 2 and re.search(f"other conditions .{next(iter(changes))}: ", refused.stderr), refused.output


@pytest.mark.parametrize(
    "line",
    [
        {"text": 7},
        {"images": 0},
        {"lpips": "near"},
        {"seconds": -1.0},
        {"stages": [None]},
        {"error": 3},
        {"took": float("inf")},
        {"took": 10**400},
        {"seconds": 1.0, "stages": [0.5]},
    ],
)
def test_trials_that_no_search_writes_are_refused(line: dict[str, Any]) -> None:
    head = {"format": FORMAT, "grids": [[1, 1], [2, 2]]}
    TRIALS.write_text(json.dumps(head) + "\n" + json.dumps(asdict(Trial("dense", 2)) | line) + "\n")
    with pytest.raises(NextscaleError, match="cannot be read as trials of a search"):
        TrialLog.read(TRIALS)
    TRIALS.write_text("[]\n")
    with pytest.raises(NextscaleError, match="cannot be read as trials"):
        TrialLog.read(TRIALS)
    TRIALS.write_text(json.dumps(head) + "\n" + json.dumps(asdict(Trial("dropguidance:first_stage=9", 2))) + "\n")
    with pytest.raises(NextscaleError, match="has trials of stages up to 9, and grids of 2"):
        Sensitivities.of(TrialLog.read(TRIALS))


def test_a_validation_that_ran_partly_without_its_graphs_is_an_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(*arguments: Any, **more: Any) -> Comparison:
        found = timed_by_macs(*arguments, **more)
        for row in found.rows:
            row["engine"] = "eager and graphs"
        return found

    monkeypatch.setattr("nextscale.tune.validate.compare", mixed)
    profile_of(tiny.shared_pipeline("infinity")).save("start.profile.json")
    result, _ = run(monkeypatch, "--from", "start.profile.json", "--test", "test.txt")
    assert result.exit_code == 0, result.output
    assert Profile.load(PROFILE).engine == "eager"


def test_trials_are_kept_and_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    kept = TRIALS
    result, _ = run(monkeypatch, *SEARCH)
    assert result.exit_code == 0, result.output
    found = Sensitivities.of(TrialLog.read(kept))
    assert set(found.unguided) == {"cond"}
    assert [stage for stage, _ in found.skipped] == [stage for stage, _ in found.left_out] == [1, 2, 3]
    assert found.skipped[-1] == found.left_out[-1]
    assert set(found.shares) == {1, 2, 3} and {"StageVAR", "FastVAR"} <= set(found.peers)
    assert all(line == sorted(line) for line in found.unguided.values())
    assert found.foresight and len(found.predicted) > 20
    drawn = run_cli("sensitivity", kept, "--out", "s.svg", program=research, catch=True)
    assert drawn.exit_code == 0, drawn.output
    picture = Path("s.svg").read_text()
    for words in ("guidance dropped from a stage on", "stages left out", "other methods alone", "predicted and measured"):
        assert words in picture
    refused = run_cli("sensitivity", kept, "--out", "s.svg", program=research, catch=True)
    assert refused.exit_code == 2 and "--force" in refused.stderr
    kept.write_text(json.dumps({"format": "of tomorrow"}) + "\n")
    with pytest.raises(NextscaleError, match="its format must be"):
        TrialLog.read(kept)


def test_points_of_other_stages_are_not_validated(tmp_path: Path) -> None:
    pipe = tiny.shared_pipeline("infinity")
    profile_of(pipe).save(tmp_path / "a.profile.json")
    with pytest.raises(SettingError, match="has settings for 4 stages, and this size has 2. Add --size 6x8"):
        starting_points(tmp_path / "a.profile.json", pipe, Schedule([1, 2]))
    with pytest.raises(NextscaleError, match="tiny-infinity .* was measured on other weights"):
        starting_points(tmp_path / "a.profile.json", tiny.shared_pipeline("var"), Schedule([1, 2]))


@pytest.mark.parametrize("line", ["9999", "a cat"])
def test_held_out_classes_are_refused_before_the_search(line: str) -> None:
    Path("classes.txt").write_text(f"1\n{line}\n")
    with pytest.raises(PromptError, match="classes.txt must have one class number per line for tiny-var"):
        prompts_of(Path("classes.txt"), tiny.SPECS["var"])
    Path("classes.txt").write_text("1\n2\n")
    assert prompts_of(Path("classes.txt"), tiny.SPECS["var"]) == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "speed=2"], "--target"),
        (["--target", "lpips=-1"], "lpips"),
        (["--out", "x.json"], "end in .profile.json"),
        (["--prompts", "test.txt", "--test", "test.txt"], "holds all prompts of the search"),
        (["--prompts", "test.txt"], "1 prompts do not fill a batch of 2"),
        (["--prompts", "train.txt", "--test", "test.txt", "--batch", "3"], "2 held-out prompts do not fill a batch of 3"),
        (["--from", "a.profile.json", "--minutes", "3"], "--minutes would have no effect"),
        (["--from", "a.profile.json", "--prompts", "train.txt", "--minutes", "2"], "--prompts and --minutes would have no effect"),
        (["--from", "absent.profile.json"], "absent.profile.json is not a profile"),
    ],
)
def test_what_the_command_refuses(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = run(monkeypatch, *arguments)
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test.txt", "train.txt"]
