"""`auto`: which profile and which point a request takes, and what runs then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from nextscale import Auto, Method, Pipeline, Profile, Schedule, SkipStages, loading
from nextscale.device import hardware_name
from nextscale.errors import ProfileError, SettingError
from nextscale.loading import artifacts, presets
from nextscale.methods import Combined, SelectionContext, resolve_method
from nextscale.methods.auto import fitting_profile
from tests.helpers import tiny
from tests.helpers.cli import run_cli
from tests.helpers.tape import play_graphs_on_the_cpu
from tests.helpers.tiny_profiles import FAST, NEAR, point, profile_of

ONE_OF_EACH = ("var", "flexvar", "infinity", "hart", "star")
CPU = torch.device("cpu")


def pipe_with(*profiles: Profile, family: str = "infinity", **options: Any) -> Pipeline:
    shared = tiny.shared_pipeline(family)
    pipe = Pipeline(shared.model, shared.tokenizer, shared.reader, shared.settings, shared.name, **options)
    for profile in profiles:
        pipe.add_profile(profile)
    return pipe


def tuned(family: str = "infinity", **options: Any) -> Pipeline:
    return pipe_with(profile_of(tiny.shared_pipeline(family)), family=family, **options)


# --- what runs


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_it_runs_the_point_that_meets_the_target(family: str) -> None:
    pipe, prompts = tuned(family), tiny.prompts(family, 2)
    for target, method in (("auto", FAST), ("auto:lpips=0.05", NEAR), ("auto:speedup=1.2", NEAR), ("auto:speedup=2", FAST)):
        ours, theirs = pipe(prompts, seed=3, method=target), pipe(prompts, seed=3, method=method)
        tiny.assert_same_bits(ours, theirs)
        assert ours.report.method == theirs.report.method == resolve_method(method).label
        assert theirs.report.selection_reason is None
        assert "in the profile of" in (ours.report.selection_reason or "")
    assert ours.report.selection_reason == f"Auto(speedup=2): 2.50x at LPIPS 0.090 in the profile of {pipe.profiles[0].described}"
    assert ours.report.to_dict()["selection_reason"] == ours.report.selection_reason


def test_captured_graphs_are_those_of_the_point(monkeypatch: pytest.MonkeyPatch) -> None:
    play_graphs_on_the_cpu(monkeypatch)
    pipe, prompts = tuned("var", engine="graphs"), tiny.prompts("var", 2)
    pipe.warmup(prompts, method="auto:speedup=2")
    assert len(pipe.captures) == 1
    by_name, by_target = pipe(prompts, seed=3, method=FAST), pipe(prompts, seed=3, method="auto:speedup=2")
    assert [output.report.engine for output in (by_name, by_target)] == ["graphs", "graphs"]
    assert (by_name.report.selection_reason, by_target.report.method) == (None, resolve_method(FAST).label)
    assert torch.equal(by_name.pixels, by_target.pixels)
    assert len(pipe.captures) == 1


def test_accelerate_leaves_the_choice_to_each_call() -> None:
    pipe = tuned()
    prompts = tiny.prompts("infinity", 2)
    with pipe.accelerate("auto:speedup=2"):
        assert pipe.method == Auto(speedup=2)
        assert pipe(prompts, seed=0).report.method == resolve_method(FAST).label
        assert pipe.planned_memory(2) == tuned_memory(FAST)
    assert type(pipe.method) is Method


def tuned_memory(method: str) -> int:
    pipe = tuned()
    pipe.accelerate(method)
    return pipe.planned_memory(2)


def test_accelerate_refuses_what_no_profile_meets() -> None:
    with pytest.raises(SettingError, match="profile of tiny-infinity on cpu; got .*`nextscale tune -m tiny-infinity --batch 1"):
        pipe_with().accelerate("auto")
    pipe = tuned()
    with pytest.raises(SettingError, match="no point with a speedup of at least 9: it offers"):
        pipe.accelerate("auto:speedup=9")
    assert type(pipe.method) is Method
    other = profile_of(pipe, schedule=Schedule((1, 2, 4)), points=(point("skip:last=1", 9.5, 0.5),))
    pipe.add_profile(other)
    pipe.accelerate("auto:speedup=9")  # at another size there is one


def test_a_request_without_a_fitting_profile_is_refused() -> None:
    pipe = pipe_with(profile_of(tiny.shared_pipeline("flexvar"), schedule=Schedule((1, 2, 4))), family="flexvar")
    with pytest.raises(SettingError, match=r"profile of tiny-flexvar at \d+x\d+ on cpu; got tiny-flexvar at .*, batch 2, on CPU of"):
        pipe([1, 2, 3], seed=0, method="auto")
    with pytest.raises(SettingError, match=r"`nextscale tune -m tiny-flexvar --size \d+x\d+ --batch 3 --device cpu`"):
        pipe([1, 2, 3], seed=0, method="auto")


# --- which profile


def situation(*profiles: Profile, schedule: Schedule | None = None, batch: int = 4) -> SelectionContext:
    pipe = tiny.shared_pipeline("infinity")
    return SelectionContext(pipe.name, pipe.model, CPU, 2, profiles, schedule or tiny.schedule_of("infinity"), batch)


def variant(**changes: Any) -> Profile:
    return profile_of(tiny.shared_pipeline("infinity"), **changes)


def test_the_nearest_batch_by_ratio() -> None:
    one, eight, many = (variant(batch=batch) for batch in (1, 8, 64))
    for batch, expected in ((1, one), (2, one), (3, eight), (8, eight), (20, eight), (30, many), (1000, many)):
        assert fitting_profile(situation(one, eight, many, batch=batch)) is expected
    assert fitting_profile(situation(variant(batch=10**400), eight)) is eight


def test_the_own_hardware_before_a_nearer_batch() -> None:
    own, other = variant(batch=64, hardware=hardware_name(CPU)), variant(batch=4)
    assert fitting_profile(situation(own, other)) is fitting_profile(situation(other, own)) is own


def test_never_one_of_another_kind_of_device() -> None:
    with pytest.raises(SettingError, match="auto needs a profile"):
        fitting_profile(situation(variant(device="cuda", hardware="NVIDIA H200")))


def test_the_same_grids_before_another_aspect_ratio_and_nothing_else() -> None:
    square = Schedule((1, 2, 6, 10))
    near, far = Schedule(((1, 1), (2, 2), (5, 7), (9, 12))), Schedule((1, 2, 6, 11))  # 8 % and 21 % more cells
    shorter = Schedule((1, 2, 10))
    exact, own = variant(schedule=square, batch=100), variant(schedule=near, hardware=hardware_name(CPU))
    assert fitting_profile(situation(exact, own, schedule=square)) is exact
    assert fitting_profile(situation(exact, own, schedule=near)) is own
    assert fitting_profile(situation(exact, schedule=near)) is exact
    for other in (far, shorter):
        with pytest.raises(SettingError, match="auto needs a profile"):
            fitting_profile(situation(exact, schedule=other))


def test_of_equals_the_one_that_was_added_last() -> None:
    first, second = variant(seed=1), variant(seed=2)
    pipe = pipe_with(first, second, first)
    assert pipe.profiles == (second, first)
    assert fitting_profile(situation(*pipe.profiles)) is first


def test_milliseconds_count_on_the_machine_of_the_profile_only() -> None:
    with pytest.raises(SettingError, match="ms needs a profile of CPU .*"):
        Auto(ms=50).resolve(situation(variant()))
    assert Auto(ms=50).resolve(situation(variant(hardware=hardware_name(CPU))))[0] == resolve_method(FAST)


# --- settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("auto:speedup=2,lpips=0.1", "one target: speedup, lpips or ms"),
        ("auto:speedup=0", "speedup.*above 0; got 0"),
        ("auto:lpips=-1", "lpips"),
        ("auto:ms=fast", "ms.*above 0; got 'fast'"),
        ("auto:speedup=true", "speedup"),
        ("auto:psnr=20", "settings of auto.*speedup, lpips, ms; got 'psnr=20'"),
        ("auto + skip:last=1", "Auto cannot be combined with other methods: use it alone"),
        (["fastvar", "auto:speedup=2"], r"Auto\(speedup=2\) cannot be combined"),
    ],
)
def test_settings_are_checked(text: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        resolve_method(text)


def test_other_methods_settle_to_themselves() -> None:
    both = Combined((SkipStages(1), resolve_method(NEAR)))
    assert both.resolve(situation()) == (both, None)
    assert SkipStages(1).resolve(situation()) == (SkipStages(1), None)


def test_it_stands_for_no_plan_of_its_own() -> None:
    with pytest.raises(SettingError, match="resolve"):
        Auto().forecast(tiny.shared_pipeline("var").model, tiny.schedule_of("var"))


def test_names_can_be_joined() -> None:
    assert resolve_method("skip:last=1 + dropguidance:first_stage=2") == Combined((SkipStages(1), resolve_method(NEAR)))
    assert resolve_method(["skip:last=1+dropguidance:first_stage=2"]) == resolve_method(["skip:last=1", "dropguidance:first_stage=2"])
    assert resolve_method("sparsevar:tau=1e+0").label == "SparseVAR(tau=1.0)"  # no sign between methods


def test_add_profile_takes_files_and_profiles(tmp_path: Path) -> None:
    pipe, profile = pipe_with(), variant()
    profile.save(tmp_path / "a.profile.json")
    pipe.add_profile(tmp_path / "a.profile.json")
    pipe.add_profile(str(tmp_path / "a.profile.json"))
    assert pipe.profiles == (profile,)
    with pytest.raises(ProfileError, match="other weights"):
        pipe.add_profile(replace(profile, fingerprint="0" * 64))


# --- the command line


@pytest.fixture
def tuned_nano(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model in nano's place, and the folder of its profiles."""
    pipe = tiny.shared_pipeline("infinity")
    profile_of(pipe, model="nano").save(tmp_path / "a.profile.json")
    monkeypatch.setitem(presets.MODELS, "nano", replace(tiny.SPECS["infinity"], name="nano"))
    monkeypatch.setattr(artifacts, "local_weights", lambda *_: tmp_path)
    monkeypatch.setattr(loading, "load", lambda _name, **_: pipe_with(Profile.load(tmp_path / "a.profile.json")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return run_cli(*arguments, columns=300)


def test_generate_says_what_auto_took(tuned_nano: Path) -> None:
    result = run("generate", "a cat", "a dog", "--method", "auto:speedup=2", "--seed", "1", "--device", "cpu", "--report", "report.json")
    assert result.exit_code == 0, result.stderr
    assert resolve_method(FAST).label in result.stdout
    assert "Auto(speedup=2): 2.50x at LPIPS 0.090 in the profile of nano at 6x8, batch 2, on CPU of another kind" in result.stdout
    assert '"selection_reason": "Auto(speedup=2): 2.50x at LPIPS 0.090' in (tuned_nano / "report.json").read_text()


def test_plan_takes_auto(tuned_nano: Path) -> None:
    ours, theirs = run("plan", "--method", "auto:lpips=0.05", "--json"), run("plan", "--method", NEAR, "--json")
    assert (ours.exit_code, ours.stdout) == (0, theirs.stdout)


@pytest.mark.parametrize("command", [("generate", "a cat"), ("plan",)])
def test_what_no_profile_meets_is_refused_before_weights_are_loaded(
    command: tuple[str, ...], tuned_nano: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("loaded"))
    result = run(*command, "--method", "auto:speedup=9")
    assert result.exit_code == 2
    assert "no point with a speedup of at least 9" in result.stderr
    (tuned_nano / "a.profile.json").unlink()
    assert "`nextscale tune -m nano --size 6x8 --batch 1" in run(*command, "--method", "auto").stderr.replace("--batch 4", "--batch 1")


def test_sample_chooses_for_its_own_batch(tuned_nano: Path) -> None:
    (tuned_nano / "prompts.txt").write_text("a cat\na dog\na fox\na hen\n")  # a run of one image would be a batch of one
    result = run("sample", "--prompts", "prompts.txt", "--batch", "3", "--device", "cpu", "--method", "auto:ms=1")
    assert "`nextscale tune -m nano --size 6x8 --batch 3 --device cpu`" in result.stderr


def test_where_there_are_no_weights_there_are_no_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXTSCALE_HOME", str(tmp_path))
    assert "auto needs a profile of var-d16 at 256x256" in run("plan", "-m", "var-d16", "--method", "auto").stderr
    assert "nextscale download -m var-d16" in run("models", "-m", "var-d16").stdout


def test_the_command_that_makes_a_profile_is_one_for_the_same_weights(tuned_nano: Path) -> None:
    folder = tuned_nano / "my own"
    folder.mkdir()
    for command in (("generate", "a cat"), ("compare", "--method", "dense")):
        result = run(*command, "--method", "auto", "--weights", "my own", "--device", "cpu")
        assert "`nextscale tune -m nano --weights 'my own' --size 6x8 --batch" in result.stderr
