"""The backbone of docs/extend/backbone.md runs, and takes every method."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nextscale import Pipeline, Schedule, SkipStages
from nextscale.checkpoints import published_tensors, write_weights
from nextscale.errors import SizeError, WeightsMismatch
from nextscale.loading import presets, saved
from nextscale.loading.load import fill_random, load_module, random_encoder
from nextscale.planning.cost import Workload
from nextscale.planning.memory import request_memory
from nextscale_research.quality.prompts import from_pil
from tests.helpers.tiny import assert_same_bits

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs" / "extend" / "backbone.md"
EXAMPLE = PROJECT / "examples" / "backbone" / "pebble.py"
CPU = torch.device("cpu")


@cache
def example() -> Any:
    spec = spec_from_file_location("pebble", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@cache
def pipeline() -> Pipeline:
    made = example()
    with torch.device("meta"):
        model, tokenizer = made.Pebble(made.PebbleConfig()), made.PebbleTokenizer(made.PebbleConfig())
    for module in (model, tokenizer):
        fill_random(module, torch.Generator().manual_seed(0), torch.float32, module.float32)
    return made.pebble_pipeline(model, tokenizer)


def test_it_generates() -> None:
    out = pipeline()([3, 7], seed=1, size=128)
    assert out.images[0].size == (128, 128) and out.report.model == "pebble"
    assert pipeline()(3, seed=1, size=Schedule([1, 2, (3, 5)])).images[0].size == (80, 48)
    with pytest.raises(SizeError, match="schedule must have"):
        pipeline()(3, size=Schedule(range(1, 10)))


def test_a_batch_equals_its_images_alone() -> None:
    together = pipeline()([3, 7], seed=[5, 9], size=128)
    for image, (label, seed) in enumerate(((3, 5), (7, 9))):
        alone = pipeline()(label, seed=seed, size=128)
        assert all(torch.equal(codes[image], own[0]) for codes, own in zip(together.codes, alone.codes, strict=True))


def test_prompts_and_guidance_count() -> None:
    one, other = pipeline()(3, seed=1).codes, pipeline()(4, seed=1).codes
    assert any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))
    no_class, unguided = pipeline()(-1, seed=1, guidance=2), pipeline()(-1, seed=1, guidance=0)
    assert all(torch.equal(a, b) for a, b in zip(no_class.codes, unguided.codes, strict=True)), "both rows read the same"


def test_the_page_names_every_registration() -> None:
    text = PAGE.read_text().partition("## Into the package")[2]
    places = {
        presets: ("ModelConfig", "TokenizerConfig", "MODEL_CLASSES", "TOKENIZER_CLASSES", "ModelSpec"),
        sys.modules["nextscale.loading.load"]: ("random_encoder",),
        saved: ("ENCODERS", "EncoderEntry"),
    }
    for module, names in places.items():
        assert f"{module.__name__.removeprefix('nextscale.').replace('.', '/')}.py" in text
        assert [name for name in names if not hasattr(module, name) or f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", presets.MODELS)
def test_every_model_has_its_registrations(name: str) -> None:
    spec = presets.MODELS[name]
    assert (random_encoder(spec.model, CPU) is None) == (spec.text_encoder is None)
    assert type(spec.model) in presets.MODEL_CLASSES and type(spec.tokenizer) in presets.TOKENIZER_CLASSES


def test_both_parts_know_their_configuration() -> None:
    assert pipeline().model.config == pipeline().tokenizer.config == example().PebbleConfig()


METHODS = ("skip:last=1", "sparsevar:metric=logits,tau=0.9", "fastvar:ratios={3: 0.5},cache_stage=2", "stagevar:alphas=[]", "tome")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_on_it(method: str) -> None:
    out = pipeline()([3, 7], seed=1, size=128, method=method)
    assert out.report.cost_share < 1 and torch.isfinite(out.pixels).all()


def test_its_cost_and_memory_are_planned() -> None:
    """Of a decoder that the library does not know, the pixels alone are counted: in its dtype, and in float32."""
    pipe, found = pipeline(), []
    for images in (1, 3):
        workload = Workload(pipe.settings.schedules.choose(128, None), images)
        plans = SkipStages(1).forecast(pipe.model, workload.schedule, guided=True)
        found.append(request_memory(pipe.model, pipe.tokenizer, workload, plans))
    parameters = [*pipe.model.parameters(), *pipe.tokenizer.parameters(), *pipe.model.buffers(), *pipe.tokenizer.buffers()]
    assert [peak.weights for peak in found] == [sum(one.nbytes for one in parameters)] * 2
    assert [peak.decoding for peak in found] == [images * 3 * 128 * 128 * (4 + 4) for images in (1, 3)]
    assert found[0].cache > 0 and found[1].generating > found[0].generating


def test_zero_strength_is_dense() -> None:
    for method in ("skip:last=0", "tome:ratio=0", "sparsevar:tau=0"):
        assert_same_bits(pipeline()(3, seed=1, method=method), pipeline()(3, seed=1))


def test_its_files_are_read_strictly(tmp_path: Path) -> None:
    made, pipe = example(), pipeline()
    for module, fresh in ((pipe.model, made.Pebble), (pipe.tokenizer, made.PebbleTokenizer)):
        path = tmp_path / f"{fresh.__name__}.safetensors"
        write_weights(module, path, module.layout, torch.float32)
        with torch.device("meta"):
            loaded = fresh(made.PebbleConfig())
        load_module(loaded, path, CPU, torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), module.state_dict().values(), strict=True))
    assert {"labels.weight", "layers.0.attention.qkv.weight"} <= set(published_tensors(pipe.model, pipe.model.layout))
    tensors = load_file(path)
    tensors["vae.tea"] = tensors.pop("vae.codebook")
    save_file(tensors, path)
    with pytest.raises(WeightsMismatch, match="vae.codebook"):
        load_module(loaded, path, CPU, torch.float32)


def test_images_are_encoded_and_decoded() -> None:
    pipe = pipeline()
    schedule = Schedule([1, 2, 4])
    pixels = from_pil(pipe(3, seed=1, size=64).images[0], (64, 64))
    codes = pipe.tokenizer.encode(pixels, schedule)
    assert [tuple(one.shape) for one in codes] == [(1, 1), (1, 4), (1, 16)]
    forced = pipe(3, seed=1, size=schedule, revise=lambda stage, _: codes[stage.index])
    assert all(torch.equal(a, b) for a, b in zip(forced.codes, codes, strict=True))
