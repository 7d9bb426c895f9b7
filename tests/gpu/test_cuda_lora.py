"""Adapters on a GPU: captured graphs see new weights, and unloading restores every bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nextscale
from tests.helpers.tiny import assert_same_bits
from tests.test_lora import assert_equal, bits, targets, updates, write

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
PROMPT, SIZE = "a red apple", 256


@pytest.mark.parametrize("quantize", [None, "int8", "fp8"])
def test_captured_graphs_see_adapters(quantize: str | None, tmp_path: Path) -> None:
    if quantize == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    whole = nextscale.load("nano", device="cpu")
    for seed, name in enumerate(("ink", "toy")):
        write(tmp_path / name, updates(whole, targets(whole), seed=seed, size=0.1))
    pipe = nextscale.load("nano", device="cuda", quantize=quantize)  # type: ignore[arg-type]
    base, plain = bits(pipe), pipe(PROMPT, seed=1, size=SIZE, warmup=True)
    graphs = pipe.captures.graphs
    pipe.load_lora(tmp_path / "ink")
    pipe.load_lora(tmp_path / "toy", scale=0)
    ink = pipe(PROMPT, seed=1, size=SIZE)
    toy = pipe(PROMPT, seed=1, size=SIZE, lora={"toy": 1.0})
    assert {one.report.engine for one in (plain, ink, toy)} == {"graphs"} and pipe.captures.graphs == graphs
    assert not torch.equal(plain.latent, ink.latent) and not torch.equal(ink.latent, toy.latent)
    assert_same_bits(pipe(PROMPT, seed=1, size=SIZE), ink)
    assert_same_bits(pipe(PROMPT, seed=1, size=SIZE, lora={}), plain)
    pipe.unload_lora("ink")
    pipe.unload_lora("toy")
    assert_equal(bits(pipe), base)
    fresh = nextscale.load("nano", device="cuda", quantize=quantize, engine="eager")  # type: ignore[arg-type]
    fresh.load_lora(tmp_path / "ink")
    assert_same_bits(fresh(PROMPT, seed=1, size=SIZE, lora={}), fresh(PROMPT, seed=1, size=SIZE, lora={}))
