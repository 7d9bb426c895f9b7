"""The parity tests can fail: damaged cases and unknown folders are told apart from good ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from .cases import find_cases, replay
from .make_compact import TARGET as COMPACT

INFINITY = "infinity/dense"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A damaged copy is made of this one."""
    shutil.copytree(COMPACT / INFINITY, tmp_path / INFINITY)
    return tmp_path / INFINITY


def change_one_value(path: Path, key: str, by: float) -> None:
    tensors = load_file(path)
    flat = tensors[key].flatten()
    flat[flat.numel() // 2] += by
    tensors[key] = flat.view(tensors[key].shape)
    save_file(tensors, path)


def test_the_undamaged_copy_passes(copy: Path) -> None:
    assert replay(copy / "case.json") > 40


@pytest.mark.parametrize(
    "key",
    [
        "block_chunks.0.module.0.sa.mat_qkv.weight",
        "block_chunks.1.module.1.ffn.fc2.bias",
        "head.weight",
        "lvl_embed.weight",
        "cfg_uncond",
        "text_proj_for_sos.ca.v_bias",
    ],
)
def test_one_changed_weight_fails(copy: Path, key: str) -> None:
    path = copy / "weights_transformer.safetensors"
    tensors = load_file(path)
    position = 0 if key in ("lvl_embed.weight", "cfg_uncond") else tensors[key].numel() // 2  # later rows of these are not read
    tensors[key].view(-1)[position] += 0.25
    save_file(tensors, path)
    with pytest.raises(AssertionError):
        replay(copy / "case.json")


@pytest.mark.parametrize(
    "key", ["s1.logits", "s3.bits", "s6.bits", "s2.summed_codes", "s0.block0.sa_out", "final_codes", "gss", "s5.next_tokens"]
)
def test_one_changed_expectation_fails(copy: Path, key: str) -> None:
    change_one_value(copy / "case.safetensors", key, 1 if key.endswith("bits") else 1e-2)
    with pytest.raises(AssertionError, match=key):
        replay(copy / "case.json")


def test_a_changed_salt_fails(tmp_path: Path) -> None:
    shutil.copytree(COMPACT / "var" / "plain", tmp_path / "plain")
    path = tmp_path / "plain" / "case.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"salt": "another"}))
    with pytest.raises(AssertionError):
        replay(path)


def test_an_expectation_nobody_reads_fails(copy: Path) -> None:
    tensors = load_file(copy / "case.safetensors")
    save_file(tensors | {"s0.unheard_of": torch.zeros(1)}, copy / "case.safetensors")
    with pytest.raises(AssertionError, match=r"not compared.*s0\.unheard_of"):
        replay(copy / "case.json")


def test_a_case_of_an_unknown_kind_fails(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "case.json").write_text('{"config": {"model": "something else"}}')
    save_file({"x": torch.zeros(1)}, tmp_path / "new" / "case.safetensors")
    (case,) = find_cases(tmp_path)
    with pytest.raises(AssertionError, match="no reader understands"):
        case.replay()


def test_a_folder_without_a_case_fails(tmp_path: Path) -> None:
    (tmp_path / "stray").mkdir()
    (tmp_path / "stray" / "weights.bin").write_bytes(b"?")
    (case,) = find_cases(tmp_path)
    with pytest.raises(AssertionError, match="no case here"):
        case.replay()


def test_nothing_in_a_case_folder_is_executed(tmp_path: Path) -> None:
    shutil.copytree(COMPACT / "infinity" / "rope", tmp_path / "rope")
    (tmp_path / "rope" / "recipe.py").write_text("raise SystemExit('executed')")
    (case,) = find_cases(tmp_path)
    assert case.replay() == 5
