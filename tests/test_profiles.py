"""Profiles: what they offer, what their files may hold, and which model they belong to."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import nextscale
from nextscale import Profile
from nextscale.errors import NextscaleError, ProfileError, SettingError
from nextscale.loading import artifacts, presets
from nextscale.profiles import Interval, find_profiles, fingerprint, own_profiles, profile_folder, require_own
from nextscale.serialization import MAX_BYTES
from tests.helpers import tiny
from tests.helpers.cli import run_cli
from tests.helpers.tiny_profiles import FAST, NEAR, SKIP, point, profile_of

PROFILE = profile_of(tiny.shared_pipeline("infinity"))


# --- points by target


def test_a_distance_takes_the_fastest_point_within_it() -> None:
    assert PROFILE.fastest(lpips=0.2).method == FAST
    assert PROFILE.fastest(lpips=0.09).method == FAST
    assert PROFILE.fastest(lpips=0.08).method == NEAR


def test_a_speedup_takes_the_nearest_point_that_has_it() -> None:
    assert PROFILE.nearest(speedup=1.0).method == NEAR
    assert PROFILE.nearest(speedup=1.6).method == FAST


def test_a_time_takes_the_nearest_point_within_it() -> None:
    assert PROFILE.within(ms=70).method == NEAR
    assert PROFILE.within(ms=50).method == FAST


@pytest.mark.parametrize(
    ("ask", "wanted"),
    [
        (lambda: PROFILE.fastest(lpips=0.01), "an LPIPS of at most 0.01"),
        (lambda: PROFILE.nearest(speedup=3), "a speedup of at least 3"),
        (lambda: PROFILE.within(ms=30), "at most 30 ms per image"),
    ],
)
def test_what_no_point_meets_is_answered_with_what_there_is(ask: Callable[[], object], wanted: str) -> None:
    with pytest.raises(SettingError, match=wanted) as refused:
        ask()
    assert "it offers 1.50x at LPIPS 0.030 (66.7 ms) up to 2.50x at LPIPS 0.090 (40.0 ms), dense 100.0 ms" in str(refused.value)
    assert PROFILE.described in str(refused.value)


# --- files


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    file = tmp_path / "nano.profile.json"
    PROFILE.save(file)
    assert Profile.load(file) == PROFILE
    lines = file.read_text().splitlines()
    assert sum(f'"method": "{method}"' in line for method in (NEAR, FAST, SKIP) for line in lines) == 3  # a line for each point
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def changed(**changes: Any) -> dict[str, Any]:
    return json.loads(written()) | changes


def written() -> str:
    return json.dumps({"format": "nextscale profile 1"} | asdict(PROFILE))


def changed_point(**changes: Any) -> dict[str, Any]:
    content = json.loads(written())
    content["points"][1] |= changes
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(format="nextscale profile 2"), "format must be 'nextscale profile 1'"),
        ([], "format must be"),
        ({"format": "nextscale profile 1"}, "profile lacks batch, dense_ms"),
        (changed(color="red"), "profile has unknown fields color"),
        (changed(batch=0), "batch must be .*; got 0"),
        (changed(batch=True), "batch must be .*; got True"),
        (changed(seed=1.5), "seed must be .*; got 1.5"),
        (changed(dense_ms="fast"), "dense_ms must be .*; got 'fast'"),
        (changed(dense_ms=0), "dense_ms must be .*; got 0"),
        (changed(dense_ms=10**400), "dense_ms must be .*; got 1000"),
        (changed(dtype="int8"), "dtype must be one of float32, bfloat16, float16; got 'int8'"),
        (changed(engine=["eager"]), r"engine must be .*; got \['eager'\]"),
        (changed(engine="slow"), "engine must be one of graphs, eager; got 'slow'"),
        (changed(device="tpu"), "device must be one of cuda, cpu"),
        (changed(fingerprint="abc"), "fingerprint must be 64 hexadecimal digits; got 'abc'"),
        (changed(model=""), "model must be a line of text"),
        (changed(prompts="a\nb"), "prompts must be a line of text"),
        (changed(hardware="x" * 1001), "hardware must be a line of text; got 'xxx"),
        (changed(size=[8]), r"size must be .*; got \[8\]"),
        (changed(size=8), "size must be .*; got 8"),
        (changed(size=[0, 8]), r"size must be \(height, width\) in pixels"),
        (changed(grids=[[2, 2]]), "grids: the first stage must be the single start token"),
        (changed(grids=[[1, "1"]]), r"grids\[0\]\[1\] must be int; got '1'"),
        (changed(grids=[1, 2]), r"grids\[0\] must be"),
        (changed(points=[]), "points must be a list of at least one point"),
        (changed(points={}), r"points must be .*; got \{\}"),
        (changed(points=["skip"]), r"points\[0\] must be .*; got 'skip'"),
        (changed(points=changed()["points"][::-1]), "points must be a frontier.* got 1.50x at LPIPS 0.030 after 2.50x at LPIPS 0.090"),
        (changed(points=changed()["points"][:1] * 2), "points must be a frontier"),
        (changed_point(method="skp:last=1"), r"points\[1\]: method must be one of this version; got 'skp:last=1' \(unknown method 'skp'"),
        (changed_point(method="skip:first=1"), "settings of skip.*got 'first=1'"),
        (changed_point(method="fastvar:ratios=7"), "method must be .*; got 'fastvar:ratios=7'"),
        (changed_point(method="auto"), "method must .*; got 'auto'"),
        (changed_point(method="code:draft=2"), "method must .*; got 'code:draft=2'"),
        (changed_point(method="auto + skip"), "use it alone"),
        (changed_point(method=7), "method must be str; got 7"),
        (changed_point(ms=-1), "ms must be a number above 0; got -1"),
        (changed_point(macs=-0.1), "macs must be a number of at least 0; got -0.1"),
        (changed_point(psnr=None), "psnr must be float; got None"),
        (changed_point(lpips=0.1), "lpips must be .*; got 0.1"),
        (changed_point(lpips={"value": 0.1, "low": 0.2, "high": 0.3}), "value must be in its interval, 0.2 to 0.3; got 0.1"),
        (changed_point(speedup={"value": 1, "low": 1}), "speedup lacks high"),
        (changed_point(note="good"), r"points\[1\] has unknown fields note"),
        (changed(**{"\ud800\x1b[2J": 1}), r"profile has unknown fields \\ud800\\x1b\[2J"),
        (changed(size=[10**400, 8]), r"size must be .*; got \(1000"),
        (changed(grids=[[1, 1], [2, 2], [3, 3], [10**400, 10**400]]), "grids must be at most"),
        (changed_point(method=f"sparsevar:tau={'9' * 400}"), "method must be one of this version"),
        (changed_point(method="stagevar:ranks=/etc/passwd"), "method must not name a file; got 'stagevar:ranks=/etc/passwd'"),
        (changed_point(method="stagevar:ranks=x.json"), "method must not name a file"),
        (changed_point(method="skip + skipvar:models=~/x.json"), "method must not name a file"),
    ],
)
def test_damaged_files_are_refused_by_field(content: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.profile.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match=message) as refused:
        Profile.load(file)
    assert str(refused.value).startswith(f"{file} is not a profile of this version: ")
    assert find_profiles([tmp_path]) == {}  # named in the log, and in nobody's way


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("{" * 100_000, "not valid JSON"),
        ('{"format": NaN}', "NaN is not a number"),
        ('{"format": 1, "format": 2}', "repeated keys"),
        (" " * (MAX_BYTES + 1), f"it must have at most {MAX_BYTES} bytes"),
        (written().replace("100.0", "1e999"), "dense_ms must be float; got inf"),
        ("\ud800", "not valid JSON"),
    ],
)
def test_what_is_no_json_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.profile.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ProfileError, match=message):
        Profile.load(file)


def test_nesting_of_every_depth_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.profile.json"
    for depth in (60, 70, 700, 990, 1000):
        file.write_text(written().replace('"hardware": "CPU of another kind"', f'"hardware": {"[" * depth}{"]" * depth}'))
        with pytest.raises(ProfileError, match="hardware must be|nested|not valid JSON"):
            Profile.load(file)


def test_what_never_ends_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "zeros.profile.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.profile.json")
    (tmp_path / "folder.profile.json").mkdir()
    (tmp_path / "loop.profile.json").symlink_to("loop.profile.json")
    for name, message in {"zeros": "regular file", "pipe": "regular file", "folder": "regular file", "loop": "cannot be read"}.items():
        with pytest.raises(ProfileError, match=message):
            Profile.load(tmp_path / f"{name}.profile.json")
    PROFILE.save(tmp_path / "a.json")
    (tmp_path / "good.profile.json").symlink_to("a.json")
    assert list(find_profiles([tmp_path]).values()) == [PROFILE]


def test_a_profile_may_lie_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    PROFILE.save(tmp_path / "a.profile.json")
    assert Profile.load("~/a.profile.json") == PROFILE


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"absent.profile.json is not a profile of this version: it cannot be read \(No such file"):
        Profile.load(tmp_path / "absent.profile.json")


def test_a_bound_may_miss_its_value_by_rounding() -> None:
    assert Interval(1.0, 1.0 + 1e-9, 2).low > 1
    with pytest.raises(ProfileError, match="value must be a finite number; got nan"):
        Interval(float("nan"), 0, 1)


# --- whose it is


@pytest.mark.parametrize("family", ["var", "infinity", "hart", "star"])
def test_a_fingerprint_is_the_same_in_every_float_type(family: str) -> None:
    own = fingerprint(tiny.shared_pipeline(family).model)
    assert re.fullmatch("[0-9a-f]{64}", own)
    for dtype in (torch.bfloat16, torch.float16):
        model = tiny.fresh_pipeline(family).model.to(dtype)
        assert fingerprint(model) == own


def test_other_weights_have_another_fingerprint() -> None:
    fingerprints = {fingerprint(tiny.shared_pipeline(family).model) for family in tiny.FAMILIES}
    assert len(fingerprints) == len(tiny.FAMILIES)
    model = tiny.fresh_pipeline("var").model
    with torch.no_grad():
        model.head.weight[0, 0] *= -1
    assert fingerprint(model) != fingerprint(tiny.shared_pipeline("var").model)


def test_a_model_without_weights_has_none() -> None:
    with torch.device("meta"):
        model = presets.build_model(tiny.SPECS["var"].model)
    with pytest.raises(ProfileError, match="load them first"):
        fingerprint(model)


def test_a_profile_of_other_weights_is_refused(tmp_path: Path) -> None:
    pipe = tiny.fresh_pipeline("var")
    file = tmp_path / "x.profile.json"
    PROFILE.save(file)
    with pytest.raises(ProfileError, match=r"was measured on other weights \(infinity, fingerprint .{12}\) than these \(var, fingerprint"):
        pipe.add_profile(file)
    assert pipe.profiles == ()
    require_own(PROFILE, tiny.shared_pipeline("infinity").model)


def test_profiles_lie_beside_the_weights(tmp_path: Path) -> None:
    pipe = tiny.shared_pipeline("infinity")
    PROFILE.save(tmp_path / "a.profile.json")
    profile_of(tiny.shared_pipeline("var")).save(tmp_path / "b.profile.json")
    (tmp_path / "c.profile.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.touch()
    assert profile_folder(weights) == profile_folder(tmp_path) == tmp_path
    assert own_profiles([tmp_path], pipe.model) == (PROFILE,)
    assert own_profiles([tmp_path / "absent"], pipe.model) == ()


# --- the command


def test_profiles_of_a_model_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.MODELS, "tiny-infinity", tiny.SPECS["infinity"])
    monkeypatch.setattr(artifacts, "local_weights", lambda *_: tmp_path)
    assert "Next: nextscale tune -m tiny-infinity" in run_cli("models", "-m", "tiny-infinity").stdout
    PROFILE.save(tmp_path / "a.profile.json")
    shown = run_cli("models", "-m", "tiny-infinity").stdout
    assert PROFILE.described in shown and "Next: nextscale generate -m tiny-infinity --method auto" in shown
    rows = [re.split(r" {2,}", line.strip()) for line in shown.splitlines()]
    assert ["1.50", "0.030 (0.027 to 0.033)", "20.0 dB", "66.7", "66.7%", NEAR] in rows
    assert ["1.40", "0.200 (0.180 to 0.220)", "20.0 dB", "71.4", "71.4%", f"for comparison: {SKIP}"] in rows
    assert json.loads(run_cli("models", "-m", "tiny-infinity", "--json").stdout)["profiles"] == [str(tmp_path / "a.profile.json")]
    assert "unknown model 'nono'" in run_cli("models", "-m", "nono").stderr


def test_a_profile_that_is_made_wrong_is_refused_at_once() -> None:
    with pytest.raises(NextscaleError, match="must be a frontier"):
        profile_of(tiny.shared_pipeline("infinity"), points=(point(FAST, 2.5, 0.09), point(NEAR, 1.5, 0.03)))


def test_load_finds_what_was_measured_on_these_weights(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.symlink_to(presets.NANO.weights.path)  # type: ignore[union-attr]
    pipe = nextscale.load("nano", weights=weights, device="cpu")
    shipped = pipe.profiles
    profile = profile_of(pipe)
    profile.save(tmp_path / "own.profile.json")
    PROFILE.save(tmp_path / "other.profile.json")  # of another model
    assert nextscale.load("nano", weights=weights, device="cpu", dtype=torch.bfloat16).profiles == (*shipped, profile)
