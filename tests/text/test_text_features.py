"""The form in which models take encoded prompts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nextscale.errors import PromptError
from nextscale.text import TextFeatures


def test_features_of_every_accepted_shape() -> None:
    one = torch.randn(3, 8)
    equal = torch.randn(2, 4, 8)
    assert TextFeatures.of(one).lengths == (3,)
    assert TextFeatures.of(equal).lengths == (4, 4)
    torch.testing.assert_close(TextFeatures.of(equal).rows[1], equal[1])
    ragged = TextFeatures.of([torch.randn(3, 8), torch.randn(5, 8)])
    assert (ragged.lengths, len(ragged), ragged.channels) == ((3, 5), 2, 8)
    assert TextFeatures.of(ragged) is ragged


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(3, 8, dtype=torch.int64), "int64"),
        (torch.zeros(8), r"\[8\]"),
        (torch.zeros(0, 8), r"\[0, 8\]"),
        (torch.zeros(0, 4, 8), "no prompt"),
        (torch.zeros(2, 0, 8), r"\[0, 8\]"),
        ([], "no prompt"),
        ([torch.zeros(2, 3, 8)], r"\[2, 3, 8\]"),
        ([torch.zeros(3, 8), torch.zeros(3, 9)], r"channels; got \[8, 9\]"),
        ([torch.zeros(3, 8), torch.full((1, 8), float("nan"))], "prompt 1 must be finite"),
        (torch.full((1, 8), float("inf")), "prompt 0 must be finite"),
        ([[0.0, 1.0]], "got list"),
        ("a cat", "got str"),
        (7, "got int"),
    ],
)
def test_features_refuse(value: object, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        TextFeatures.of(value)  # type: ignore[arg-type]


@settings(deadline=None)  # the first call pays for torch's start
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_compact_splits_back_into_the_prompts(lengths: list[int]) -> None:
    features = TextFeatures.of([torch.full((length, 3), float(index)) for index, length in enumerate(lengths)])
    rows, split = features.compact()
    assert rows.shape == (sum(lengths), 3)
    assert split == tuple(lengths)
    for original, part in zip(features.rows, rows.split(split), strict=True):
        assert torch.equal(original, part)


def test_repeat_is_for_one_prompt() -> None:
    one = TextFeatures.of(torch.randn(3, 8))
    repeated = one.repeat(4)
    assert repeated.lengths == (3, 3, 3, 3)
    assert all(torch.equal(row, one.rows[0]) for row in repeated.rows)
    with pytest.raises(PromptError, match="got 4 prompts"):
        repeated.repeat(2)
    with pytest.raises(PromptError, match="0 times"):
        one.repeat(0)


def test_features_move() -> None:
    moved = TextFeatures.of([torch.zeros(1, 2), torch.zeros(3, 2)]).to("meta")
    assert {row.device.type for row in moved.rows} == {"meta"}


# --- pooled vectors and masks -----------------------------------------------------------------------------------------------------


def padded_features(prompts: int = 3) -> TextFeatures:
    """Rows of four tokens, pooled vectors of their own size, and i + 1 real tokens in prompt i."""
    mask = torch.arange(4) <= torch.arange(prompts)[:, None]
    return TextFeatures(torch.randn(prompts, 4, 8).unbind(0), torch.randn(prompts, 5), mask)


def assert_same(features: TextFeatures, expected: TextFeatures) -> None:
    assert len(features) == len(expected)
    assert all(torch.equal(row, other) for row, other in zip(features.rows, expected.rows, strict=True))
    for name in ("pooled", "mask"):
        value, other = getattr(features, name), getattr(expected, name)
        assert (value is None) == (other is None)
        assert value is None or torch.equal(value, other)


def test_fields_are_optional() -> None:
    features = TextFeatures((torch.zeros(3, 8),))
    assert features.pooled is None
    assert features.mask is None


def test_lengths_and_compact_count_padding() -> None:
    features = padded_features()
    rows, lengths = features.compact()
    assert (features.lengths, features.longest, lengths) == ((4, 4, 4), 4, (4, 4, 4))
    assert rows.shape == (12, 8)


@pytest.mark.parametrize(
    ("pooled", "message"),
    [
        ([[0.0]], "pooled text features must .*; got list"),
        (torch.zeros(5), r"\[2, channels\] tensor; got torch.float32 \[5\]"),
        (torch.zeros(3, 5), r"got torch.float32 \[3, 5\]"),
        (torch.zeros(2, 0), r"got torch.float32 \[2, 0\]"),
        (torch.zeros(2, 5, dtype=torch.int32), "int32"),
        (torch.tensor([[1.0], [float("nan")]]), "pooled text features must be finite"),
    ],
)
def test_pooled_refused(pooled: object, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        TextFeatures.of(TextFeatures((torch.zeros(3, 8), torch.zeros(4, 8)), pooled))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[True]], "mask must .*; got list"),
        (torch.ones(2, 3, dtype=torch.int64), "mask must be a torch.bool tensor .*; got torch.int64"),
        (torch.ones(2, 4, dtype=torch.bool), r"\[2, 3\].*; got torch.bool \[2, 4\]"),
        (torch.ones(1, 3, dtype=torch.bool), r"got torch.bool \[1, 3\]"),
        (torch.ones(3, dtype=torch.bool), r"got torch.bool \[3\]"),
        (torch.tensor([[True, False, False], [False, False, False]]), "mask must .*prompt 1"),
    ],
)
def test_mask_refused(mask: object, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        TextFeatures((torch.zeros(3, 8), torch.zeros(3, 8)), mask=mask)  # type: ignore[arg-type]


def test_mask_needs_rows_of_one_length() -> None:
    with pytest.raises(PromptError, match=r"as many tokens; got \[3, 4\]"):
        TextFeatures((torch.zeros(3, 8), torch.zeros(4, 8)), mask=torch.ones(2, 4, dtype=torch.bool))


@pytest.mark.parametrize("position", [0, 2, -1])
def test_one_prompt(position: int) -> None:
    features = padded_features()
    assert features.pooled is not None
    assert features.mask is not None
    alone = features.one(position)
    assert len(alone) == 1
    assert_same(alone, TextFeatures((features.rows[position],), features.pooled[[position]], features.mask[[position]]))


@pytest.mark.parametrize(
    "features", [padded_features(), TextFeatures((torch.randn(2, 8), torch.randn(5, 8)))], ids=["all fields", "rows only"]
)
def test_joined_prompts_are_the_request_again(features: TextFeatures) -> None:
    assert_same(TextFeatures.joined([features.one(position) for position in range(len(features))]), features)
    assert_same(TextFeatures.joined([features, features.one(1)]).one(len(features)), features.one(1))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (TextFeatures((torch.zeros(4, 8),), mask=torch.ones(1, 4, dtype=torch.bool)), "`pooled` .* got 1 of 2"),
        (TextFeatures((torch.zeros(4, 8),), torch.zeros(1, 5)), "`mask` .* got 1 of 2"),
        (TextFeatures((torch.zeros(4, 8),), torch.zeros(1, 6), torch.ones(1, 4, dtype=torch.bool)), r"`pooled` .*sizes \[5, 6\]"),
        (TextFeatures((torch.zeros(3, 8),), torch.zeros(1, 5), torch.ones(1, 3, dtype=torch.bool)), r"`mask` .*sizes \[3, 4\]"),
        (
            TextFeatures((torch.zeros(4, 9),), torch.zeros(1, 5), torch.ones(1, 4, dtype=torch.bool)),
            r"channels; got \[8, 9\]",
        ),
    ],
)
def test_features_of_different_encoders_do_not_join(other: TextFeatures, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        TextFeatures.joined([padded_features(), other])


def test_nothing_to_join() -> None:
    with pytest.raises(PromptError, match="no prompt"):
        TextFeatures.joined([])


def test_repeat_carries_all_fields() -> None:
    one = padded_features().one(1)
    assert_same(one.repeat(3), TextFeatures.joined([one, one, one]))


@pytest.mark.parametrize("copy", [TextFeatures.clone, lambda features: features.to("cpu")], ids=["clone", "to"])
def test_copies_carry_all_fields(copy: Callable[[TextFeatures], TextFeatures]) -> None:
    features = padded_features()
    assert_same(copy(features), features)


def test_clone_does_not_share_memory() -> None:
    features = padded_features()
    clone = features.clone()
    assert clone.pooled is not None
    assert clone.mask is not None
    kept = features.clone()
    for tensor in (*clone.rows, clone.pooled, clone.mask):
        tensor.zero_()
    assert_same(features, kept)


def test_pooled_vectors_move() -> None:
    moved = TextFeatures((torch.zeros(1, 2),), torch.zeros(1, 2)).to("meta")
    assert moved.pooled is not None
    assert moved.pooled.device.type == "meta"
