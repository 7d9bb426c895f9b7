"""The block for diffusers' modular pipelines, loaded and run by diffusers itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import nextscale
from nextscale.errors import PromptError

PROJECT = Path(__file__).parents[2]
FOLDER = PROJECT / "integrations" / "diffusers"
SMALL = {"height": 128, "width": 128}


@pytest.fixture(scope="module")
def diffusers() -> Any:
    """Imported where it is used: that takes two seconds."""
    return pytest.importorskip("diffusers", minversion="0.42")


@pytest.fixture(scope="module")
def pipe(diffusers: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """nano, on the CPU. diffusers copies the code of a block into a cache of its own."""
    home = tmp_path_factory.mktemp("modules")
    from diffusers.utils import dynamic_modules_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(home))
        patch.setitem(os.environ, "HF_MODULES_CACHE", str(home))
        loaded = diffusers.ModularPipeline.from_pretrained(str(FOLDER), trust_remote_code=True)
        loaded.load_components(device="cpu")
        yield loaded


def test_code_of_a_folder_is_not_run_without_leave(diffusers: Any) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        diffusers.ModularPipeline.from_pretrained(str(FOLDER), trust_remote_code=False)


def test_diffusers_loads_the_block_and_nano(pipe: Any) -> None:
    assert type(pipe.blocks).__name__ == "NextScaleBlock"
    assert isinstance(pipe.next_scale, nextscale.Pipeline) and pipe.next_scale.name == "nano"
    assert pipe.blocks.output_names == ["images", "report"] and "prompt" in pipe.blocks.input_names


def test_images_are_those_of_the_library(pipe: Any) -> None:
    images = pipe(prompt="a 3D icon of a red apple", seed=7, guidance_scale=3.0, **SMALL, output="images")
    expected = pipe.next_scale("a 3D icon of a red apple", seed=7, guidance=3.0, size=(128, 128)).images
    assert [image.tobytes() for image in images] == [image.tobytes() for image in expected]


def test_the_state_carries_what_was_asked_and_made(pipe: Any) -> None:
    state = pipe(prompt=["an apple", "a fox"], num_images_per_prompt=2, seed=[1, 2, 3, 4], method="skip:last=2", **SMALL)
    report = state.get("report")
    assert len(state.get("images")) == 4 and report.seeds == (1, 2, 3, 4) and report.stages[-1].skipped
    assert state.get("prompt") == ["an apple", "a fox"]


def test_a_generator_is_taken(pipe: Any) -> None:
    images = pipe(prompt="an apple", generator=torch.Generator().manual_seed(3), aspect="1:1", method="skip:last=3", output="images")
    assert images[0].size == (256, 256)


def bytes_of(images: list[Image.Image]) -> list[bytes]:
    return [image.tobytes() for image in images]


@pytest.mark.parametrize(
    ("negative", "expected"), [(["red", "gray"], ["red", "red", "gray", "gray"]), (["red"], "red"), ("red", "red"), (None, None)]
)
def test_negative_prompts_are_repeated_like_prompts(pipe: Any, negative: Any, expected: Any) -> None:
    asked = {"seed": 1, "method": "skip:last=3"}
    images = pipe(prompt=["an apple", "a fox"], negative_prompt=negative, num_images_per_prompt=2, **asked, **SMALL, output="images")
    alone = pipe.next_scale(["an apple", "an apple", "a fox", "a fox"], negative=expected, size=(128, 128), **asked)
    assert bytes_of(images) == bytes_of(alone.images)


def test_prompts_may_be_features(pipe: Any) -> None:
    asked = {"seed": 1, "method": "skip:last=3", **SMALL, "output": "images"}
    features = pipe.next_scale.reader.read(["an apple", "a fox"])
    expected = bytes_of(pipe(prompt=["an apple", "a fox"], negative_prompt=["red", "gray"], **asked))
    for same in (features, list(features.rows)):
        assert bytes_of(pipe(prompt=same, negative_prompt=["red", "gray"], **asked)) == expected


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"seed": 1, "generator": torch.Generator()}, "seed and generator"),
        ({"generator": [torch.Generator()] * 2}, "^generator must be"),
        ({"generator": 7}, "^generator must be"),
        ({"height": 128}, "height and width"),
        ({"height": "128", "width": "128"}, "size"),
        ({"num_images_per_prompt": 0}, "^num_images_per_prompt must be"),
        ({"num_images_per_prompt": True}, "^num_images_per_prompt must be"),
        ({"num_images_per_prompt": 2.0}, "^num_images_per_prompt must be"),
        ({"negative_prompt": ["a", "b", "c"]}, "negative must be"),
        ({"negative_prompt": ["a", "b", "c"], "num_images_per_prompt": 2}, "^negative_prompt must be"),
        ({"negative_prompt": []}, "prompt"),
        ({"negative_prompt": 5}, "prompt"),
        ({"method": "faster"}, "faster"),
        ({"method": 5}, "method"),
        ({"guidance_scale": "strong"}, "guidance"),
        ({"seed": "7"}, "seed"),
        ({"aspect": "wide"}, "aspect"),
    ],
)
@pytest.mark.parametrize("prompt", ["an apple", ["an apple", "a fox"]], ids=["one", "two"])
def test_refusals(pipe: Any, prompt: Any, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(nextscale.NextscaleError, match=message):
        pipe(prompt=prompt, **asked)


@pytest.mark.parametrize("prompt", ["", [], [""], 5, ["an apple", 5], b"an apple", {"a": 1}, [None]], ids=repr)
@pytest.mark.parametrize("images", [1, 2])
def test_prompts_of_other_kinds(pipe: Any, prompt: Any, images: int) -> None:
    with pytest.raises(PromptError):
        pipe(prompt=prompt, num_images_per_prompt=images)


def test_other_models_and_saved_folders_take_its_place(pipe: Any, tmp_path: Path) -> None:
    nano = pipe.next_scale
    nano.save_pretrained(tmp_path / "saved")
    try:
        pipe.load_components("next_scale", pretrained_model_name_or_path=str(tmp_path / "saved"), device="cpu")
        assert pipe.next_scale is not nano and pipe.next_scale.weights_folder == tmp_path / "saved"
        images = pipe(prompt="an apple", seed=1, **SMALL, output="images")
        assert images[0].tobytes() == nano("an apple", seed=1, size=(128, 128)).images[0].tobytes()
    finally:
        pipe.update_components(next_scale=nano)


def test_without_a_model_it_says_how_to_load_one(diffusers: Any) -> None:
    bare = diffusers.ModularPipeline.from_pretrained(str(FOLDER), trust_remote_code=True)
    with pytest.raises(nextscale.NextscaleError, match=r"load_components\(\)"):
        bare(prompt="an apple")
