"""Features that need no encoder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nextscale.errors import PromptError
from nextscale.text import Encoder, RandomEncoder

CHANNELS = 6
SHORT = "a cat"
LONG = "a red dog on a mat"


def test_tokens_follow_the_words() -> None:
    features = RandomEncoder(CHANNELS)([SHORT, LONG])
    assert features.lengths == (3, 7)
    assert features.channels == CHANNELS
    assert features.pooled is None
    assert features.mask is None


def test_padded_rows_have_features_everywhere_and_a_mask() -> None:
    features = RandomEncoder(CHANNELS, tokens=5)([SHORT, LONG])
    assert features.lengths == (5, 5)
    assert features.mask is not None
    assert features.mask.tolist() == [[True, True, True, False, False], [True] * 5]
    assert features.rows[0].abs().amin() > 0


def test_pooled_vectors_and_the_empty_text() -> None:
    encoder = RandomEncoder(CHANNELS, pooled=True)
    features, empty = encoder([SHORT, LONG]), encoder.empty()
    assert features.pooled is not None
    assert features.pooled.shape == (2, CHANNELS)
    assert empty is not None
    assert empty.pooled is not None
    assert (empty.lengths, empty.pooled.shape) == ((1,), (1, CHANNELS))
    assert not torch.equal(empty.pooled[0], features.pooled[0])


def test_without_pooled_vectors_nothing_stands_for_no_prompt() -> None:
    assert RandomEncoder(CHANNELS).empty() is None


def test_features_belong_to_the_text_not_to_its_place() -> None:
    encoder: Encoder = RandomEncoder(CHANNELS, tokens=5, pooled=True)
    together, alone = encoder([SHORT, LONG]), encoder([LONG])
    assert together.pooled is not None
    assert alone.pooled is not None
    assert torch.equal(together.rows[1], alone.rows[0])
    assert torch.equal(together.pooled[1], alone.pooled[0])
    assert not torch.equal(together.rows[0], together.rows[1])


def test_same_in_every_process() -> None:
    """Python's own hash of a text changes from process to process."""
    program = f"from nextscale.text import RandomEncoder; print(RandomEncoder({CHANNELS})([{SHORT!r}]).rows[0].tolist())"
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    output = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": other},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert output == f"{RandomEncoder(CHANNELS)([SHORT]).rows[0].tolist()}\n"


def test_device() -> None:
    encoder = RandomEncoder(CHANNELS, pooled=True, device="meta")
    assert encoder([SHORT]).rows[0].device.type == "meta"
    assert encoder.to("cpu")([SHORT]).rows[0].device.type == "cpu"


@pytest.mark.parametrize("prompts", [[""], [3], [], SHORT])
def test_prompts_refused(prompts: object) -> None:
    with pytest.raises(PromptError):
        RandomEncoder(CHANNELS)(prompts)  # type: ignore[arg-type]
