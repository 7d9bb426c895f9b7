"""The ComfyUI nodes, against a stand-in of ComfyUI's contract: ComfyUI itself is on no package index."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import nextscale
from nextscale.errors import ProfileError, SettingError
from nextscale.methods import SparseVAR, resolve_method
from tests.helpers import tiny, tiny_profiles
from tests.helpers.comfy_stand_in import Comfy, InterruptProcessing, nodes_of, run_node, run_workflow

PROJECT = Path(__file__).parents[2]
FOLDER = PROJECT / "integrations" / "comfyui"
WORKFLOWS = sorted((FOLDER / "workflows").glob("*.json"))
SMALL = "128"
STAGES = 4  # of the tiny model
HEIGHT, WIDTH = (tiny.CELL_PIXELS * side for side in tiny.INFINITY_SCHEDULE.grid)


@pytest.fixture
def comfy() -> Comfy:
    return Comfy()


@pytest.fixture
def nodes(comfy: Comfy, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with nodes_of(FOLDER, comfy) as found:
        yield found


def loaded(nodes: dict[str, Any], pipeline: nextscale.Pipeline | None = None) -> Any:
    """Returns the output of the node Load for a tiny pipeline that reads prompts."""
    package = nodes["NextScaleLoad"].__module__.rpartition(".")[0]
    return sys.modules[f"{package}.values"].Loaded(pipeline or tiny.shared_pipeline("infinity"))


def generate(nodes: dict[str, Any], pipeline: Any, prompt: str = "an apple", images: int = 1, mask: bool = False, **more: Any) -> Any:
    values = {"negative": "", "seed": 7, "aspect": "model's own", "size": "", "guidance": -1.0, "preview": True} | more
    widgets = [prompt, values["negative"], values["seed"], "fixed", images]
    widgets += [values["aspect"], values["size"], values["guidance"], values["preview"], mask]
    return run_node(nodes["NextScaleGenerate"], {"pipeline": pipeline}, widgets)


def test_all_nodes_are_there(nodes: dict[str, Any]) -> None:
    shown = {node.define_schema().display_name.removesuffix(" (nextscale)") for node in nodes.values()}
    assert shown == {"Load", "Accelerate", "Generate", "Edit", "Stages", "Compute mask"}
    assert all(name.startswith("NextScale") for name in nodes), "names are global in ComfyUI"


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_example_workflows_run(file: Path, nodes: dict[str, Any]) -> None:
    workflow = json.loads(file.read_text())
    for node in workflow["nodes"]:
        names = [socket["name"] for socket in node["inputs"] if "widget" in socket]
        if node["type"] in nodes:
            schema = nodes[node["type"]].define_schema()
            assert names == [one.id for one in schema.inputs if one.is_widget]
            assert [output["name"] for output in node["outputs"]] == [output.display_name for output in schema.outputs]
        if node["type"] == "NextScaleGenerate" and file.stem != "first_image":
            node["widgets_values"][names.index("preview") + 1] = False  # after the seed's second widget; decoding takes time
        node["widgets_values"] = [SMALL if value == "256" else value for value in node["widgets_values"]]
    made = run_workflow(workflow, nodes)
    pictures = [value for node in workflow["nodes"] if node["type"] not in nodes for value in made[node["id"]]]
    assert pictures
    for picture in pictures:
        assert picture.shape[1:] == (128, 128, 3) and picture.dtype == torch.float32
        assert picture.min() >= 0 and picture.max() <= 1


def test_an_image_is_that_of_the_library(nodes: dict[str, Any]) -> None:
    image, _, report = generate(nodes, loaded(nodes), images=2, guidance=3.0)
    expected = tiny.shared_pipeline("infinity")(["an apple"] * 2, seed=7, guidance=3.0)
    shown = [Image.fromarray((one.numpy() * 255).astype("uint8")) for one in image]
    assert [one.tobytes() for one in shown] == [one.tobytes() for one in expected.images]
    assert report.startswith("tiny-infinity, dense: ") and report.endswith("100% of the MACs of dense generation")


def test_an_edit_changes_the_mask_alone(nodes: dict[str, Any], comfy: Comfy) -> None:
    levels = torch.randint(0, 256, (2, HEIGHT, WIDTH, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    image, mask = levels.float() / 255, torch.zeros(1, HEIGHT, WIDTH)
    mask[:, :4, :3] = 1

    def edited(strength: float = 0.0, **linked: Any) -> tuple[Any, ...]:
        widgets = ["an apple", 7, "fixed", strength, 0, True, True]
        return run_node(nodes["NextScaleEdit"], {"pipeline": loaded(nodes), "image": image} | linked, widgets)

    found, result, report = edited(mask=mask)
    kept = mask[0] == 0
    assert torch.equal((found * 255).to(torch.uint8)[:, kept], levels[:, kept])
    assert not torch.equal((found * 255).to(torch.uint8), levels)
    assert "NearMask" in report and len(comfy.progress) == STAGES
    [stages] = run_node(nodes["NextScaleStages"], {"result": result}, [])
    assert stages.shape[0] == 2 * STAGES and torch.equal((stages * 255).to(torch.uint8)[:2, kept], levels[:, kept])
    everywhere = edited(strength=1.0, mask=torch.zeros(1, 64, 64))[0]  # what Load Image gives without alpha
    assert torch.equal(everywhere, edited(strength=1.0)[0]) and not torch.equal(everywhere, found)


def test_every_stage_is_shown(nodes: dict[str, Any], comfy: Comfy) -> None:
    generate(nodes, loaded(nodes))
    assert [(value, total) for value, total, _ in comfy.progress] == [(stage + 1, STAGES) for stage in range(STAGES)]
    assert all(picture is not None and picture.size == (WIDTH, HEIGHT) for *_, picture in comfy.progress)
    comfy.progress.clear()
    generate(nodes, loaded(nodes), preview=False)
    assert len(comfy.progress) == STAGES and all(picture is None for *_, picture in comfy.progress)


def test_a_run_can_be_interrupted_between_stages(nodes: dict[str, Any], comfy: Comfy) -> None:
    comfy.interrupt_after = 3
    with pytest.raises(InterruptProcessing):
        generate(nodes, loaded(nodes), preview=False)
    assert len(comfy.progress) == 3
    comfy.interrupt_after = None
    generate(nodes, loaded(nodes), preview=False)


def test_stages_are_one_batch_that_ends_with_the_image(nodes: dict[str, Any]) -> None:
    image, result, _ = generate(nodes, loaded(nodes), images=2, preview=False)
    [stages] = run_node(nodes["NextScaleStages"], {"result": result}, [])
    assert stages.shape == (2 * STAGES, HEIGHT, WIDTH, 3)
    assert torch.equal(stages[-2:], image) and not torch.equal(stages[:2], image)


def test_the_compute_mask_shows_where_a_method_saved(nodes: dict[str, Any]) -> None:
    [accelerated] = run_node(nodes["NextScaleAccelerate"], {"pipeline": loaded(nodes)}, ["skip", "last=1", "", 0])
    image, result, report = generate(nodes, accelerated, mask=True)
    assert "SkipStages(last=1)" in report
    mask, picture = run_node(nodes["NextScaleComputeMask"], {"result": result}, [-1])
    assert mask.shape == (1, HEIGHT, WIDTH) and mask.max() == 0 and torch.allclose(picture, 0.25 * image)
    mask, picture = run_node(nodes["NextScaleComputeMask"], {"result": result}, [0])
    assert mask.min() == 1 and torch.equal(picture, image)
    with pytest.raises(SettingError, match="must be 0 to 3"):
        run_node(nodes["NextScaleComputeMask"], {"result": result}, [4])
    _, without, _ = generate(nodes, accelerated)
    with pytest.raises(SettingError, match="compute_mask"):
        run_node(nodes["NextScaleComputeMask"], {"result": without}, [-1])


def test_methods_combine_and_leave_the_shared_pipeline_alone(nodes: dict[str, Any], tmp_path: Path) -> None:
    accelerate = nodes["NextScaleAccelerate"]
    [first] = run_node(accelerate, {"pipeline": loaded(nodes)}, ["skip", "last=1", "", 0])
    [second] = run_node(accelerate, {"pipeline": first}, ["tome", "", "", 0])
    assert second.methods == ("skip:last=1", "tome") and second.pipeline.method.label == "dense"
    [dense] = run_node(accelerate, {"pipeline": second}, ["dense", "", "", 0])
    assert dense.methods == ()
    [sparse] = run_node(accelerate, {"pipeline": dense}, ["sparsevar", "tau=1e+0,metric=logits", "", 0])
    assert resolve_method(sparse.methods) == SparseVAR(tau=1.0, metric="logits")
    [dense] = run_node(accelerate, {"pipeline": dense}, ["profile", "", tuned_profile(tmp_path, "dense", "skip:last=2 + tome"), 0])
    assert dense.methods == ()


def tuned_profile(folder: Path, *methods: str, **changes: Any) -> str:
    """The file of a profile with these methods, of the tiny pipeline unless `changes` say otherwise."""
    points = tuple(tiny_profiles.point(method, 1.0 + index, 0.1 * index) for index, method in enumerate(methods))
    file = folder / "tiny.profile.json"
    tiny_profiles.profile_of(tiny.shared_pipeline("infinity"), points=points, **changes).save(file)
    return str(file)


def test_a_point_of_a_profile_is_a_method(nodes: dict[str, Any], tmp_path: Path) -> None:
    file = tuned_profile(tmp_path, "skip:last=1", "skip:last=2 + tome")
    [tuned] = run_node(nodes["NextScaleAccelerate"], {"pipeline": loaded(nodes)}, ["profile", "", file, 1])
    report = generate(nodes, tuned)[2]
    assert "SkipStages(last=2)" in report and "ToMe" in report


@pytest.mark.parametrize(
    ("widgets", "error", "message"),
    [
        (["profile", "", "FILE", 2], SettingError, "^point must be"),
        (["profile", "tau=1", "FILE", 0], SettingError, "^settings must be"),
        (["profile", "", " ", 0], SettingError, "^profile must be"),
        (["profile", "", "OTHER", 0], ProfileError, "measured on other weights"),
        (["profile", "", "NAMES_A_FILE", 0], ProfileError, "file"),
        (["profile", "", "NESTED", 0], ProfileError, "is not a profile"),
        (["profile", "", "nowhere.json", 0], ProfileError, "cannot be read"),
        (["profile", "", "~nobody-of-this-name/x.json", 0], ProfileError, "cannot be read"),
    ],
)
def test_profiles_are_checked(nodes: dict[str, Any], tmp_path: Path, widgets: list[Any], error: type[Exception], message: str) -> None:
    match widgets[2]:
        case "FILE":
            widgets[2] = tuned_profile(tmp_path, "skip:last=1", "skip:last=2")
        case "OTHER":
            widgets[2] = tuned_profile(tmp_path, "skip:last=1", fingerprint="0" * 64)
        case "NAMES_A_FILE":
            widgets[2] = tuned_profile(tmp_path, "skip:last=1")
            Path(widgets[2]).write_text(Path(widgets[2]).read_text().replace("skip:last=1", "skipvar:models=/etc/no.json"))
        case "NESTED":
            (tmp_path / "nested.json").write_text("[" * 5000)
            widgets[2] = str(tmp_path / "nested.json")
    with pytest.raises(error, match=message):
        run_node(nodes["NextScaleAccelerate"], {"pipeline": loaded(nodes)}, widgets)


@pytest.mark.parametrize(
    ("widgets", "message"),
    [
        (["skip", "last=99999", "", 0], "cannot skip 99999"),
        (["skip", "color=3", "", 0], "color"),
    ],
)
def test_methods_that_there_are_not(nodes: dict[str, Any], widgets: list[Any], message: str) -> None:
    with pytest.raises(nextscale.NextscaleError, match=message):
        [accelerated] = run_node(nodes["NextScaleAccelerate"], {"pipeline": loaded(nodes)}, widgets)
        generate(nodes, accelerated)


@pytest.mark.parametrize(
    ("asked", "message"),
    [({"size": "big"}, "WIDTHxHEIGHT"), ({"size": "1x2x3"}, "WIDTHxHEIGHT"), ({"size": "77"}, "size"), ({"prompt": " "}, "visible")],
)
def test_refusals(nodes: dict[str, Any], asked: dict[str, Any], message: str) -> None:
    with pytest.raises(nextscale.NextscaleError, match=message):
        generate(nodes, loaded(nodes, nextscale.load("nano", device="cpu")), **asked)


def test_class_models_take_numbers(nodes: dict[str, Any]) -> None:
    pipeline = loaded(nodes, tiny.shared_pipeline("var"))
    image, *_ = generate(nodes, pipeline, prompt="1, 2", images=2, size="")
    expected = tiny.shared_pipeline("var")([1, 2], seed=7).pixels
    assert torch.allclose(image, ((expected.clamp(-1, 1) + 1) / 2).permute(0, 2, 3, 1))
    image, *_ = generate(nodes, pipeline, prompt="1", negative="5, 6", images=2, size="")
    expected = tiny.shared_pipeline("var")([1, 1], seed=7, negative=[5, 6]).pixels
    assert torch.allclose(image, ((expected.clamp(-1, 1) + 1) / 2).permute(0, 2, 3, 1))
    for text in ("a fox", "1, 2"):
        with pytest.raises(SettingError, match="^prompt must be a class number"):
            generate(nodes, pipeline, prompt=text, images=3)
        with pytest.raises(SettingError, match="^negative must be a class number"):
            generate(nodes, pipeline, prompt="1", negative=text, images=3)


@pytest.mark.parametrize("family", ["infinity", "var"])
def test_a_blank_negative_prompt_is_none(nodes: dict[str, Any], family: str) -> None:
    pipeline = loaded(nodes, tiny.shared_pipeline(family))
    assert torch.equal(generate(nodes, pipeline, prompt="1", negative=" \n")[0], generate(nodes, pipeline, prompt="1")[0])


def test_a_negative_prompt_is_that_of_the_library(nodes: dict[str, Any]) -> None:
    image, *_ = generate(nodes, loaded(nodes), negative="a fox", images=2)
    expected = tiny.shared_pipeline("infinity")(["an apple"] * 2, seed=7, negative="a fox").pixels
    assert torch.equal(image, ((expected.clamp(-1, 1) + 1) / 2).permute(0, 2, 3, 1))


def test_load_takes_a_name_or_a_saved_folder(nodes: dict[str, Any], tmp_path: Path) -> None:
    [by_name] = run_node(nodes["NextScaleLoad"], {}, ["nano", "bfloat16", False, False, ""])
    assert by_name.pipeline.model.dtype == torch.bfloat16 and by_name.methods == ()
    by_name.pipeline.save_pretrained(tmp_path)
    [saved] = run_node(nodes["NextScaleLoad"], {}, ["nano", "default", False, False, str(tmp_path)])
    assert saved.pipeline.weights_folder == tmp_path and saved.pipeline.model.dtype == torch.bfloat16
    options = nodes["NextScaleLoad"].define_schema().inputs[0].options["options"]
    assert "infinity-2b" in options and "infinity-20b" not in options, "only what is released"


def test_the_package_says_what_comfyui_asks_for() -> None:
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())
    assert project["tool"]["comfy"]["PublisherId"] and project["tool"]["comfy"]["DisplayName"]
    assert any(need.startswith("nextscale") for need in project["project"]["dependencies"])


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_are_drawn(file: Path) -> None:
    import runpy

    drawn = runpy.run_path(str(FOLDER / "draw.py"))["draw_workflow"](json.loads(file.read_text()))
    with Image.open(PROJECT / "docs" / "pictures" / f"comfyui-{file.stem}.webp") as shown:
        assert shown.size == drawn.size
    assert len(drawn.resize((64, 32)).getcolors(64 * 32) or ()) > 20
