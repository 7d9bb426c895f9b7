"""Attention to lists of keys: the kernel against plain torch, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.helpers.kernel_cases import DEVICE, Maker, interpreted_as_on_a_gpu, poisoned, triton_interpreter

triton_interpreter()  # before the kernel is imported

from nextscale_research.methods.attend_lists import attend_lists_reference  # noqa: E402
from nextscale_research.methods.attend_lists_kernel import attend_lists  # noqa: E402


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with interpreted_as_on_a_gpu():
        yield


@pytest.mark.parametrize(
    ("rows", "queries", "heads", "channels", "keys", "group", "listed", "lists"),
    [
        (2, 130, 2, 16, 200, 48, 70, (1, 1)),
        (2, 130, 2, 24, 200, 64, 33, (2, 2)),
        (1, 5, 3, 64, 9, 128, 9, (1, 3)),
        (3, 70, 1, 136, 90, 96, 64, (3, 1)),
    ],
)
def test_attend_lists(
    rows: int, queries: int, heads: int, channels: int, keys: int, group: int, listed: int, lists: tuple[int, int]
) -> None:
    """Keys and values that no list names are not read."""
    dtype = torch.float16
    make = Maker(DEVICE, dtype)
    q, both = make.normal(rows, queries, heads, channels), make.normal(rows, keys, 2, heads, channels)
    groups = -(-queries // group)
    numbers = make.selection(lists[0] * lists[1] * groups, keys - 1, listed if listed < keys else keys - 1).int()
    numbers = numbers.view(*lists, groups, -1)
    counts = torch.randint(1, numbers.shape[3] + 1, numbers.shape[:3], generator=make.generator, device=DEVICE).int()
    both[:, -1] = float("nan")
    given = (numbers.contiguous(), counts, group, 0.3)
    with poisoned():
        found = attend_lists(q, both[:, :, 0], both[:, :, 1], *given)
    truth = attend_lists_reference(q.double(), both[:, :, 0].double(), both[:, :, 1].double(), *given)
    assert found.dtype == dtype and found.shape == truth.shape
    bound = torch.finfo(dtype).eps * both[:, :-1].abs().max().item()
    assert (found.double() - truth).abs().max().item() <= bound


def test_attend_lists_refuses_what_does_not_fit() -> None:
    make = Maker(DEVICE, torch.float16)
    q, keys = make.normal(2, 3, 2, 16), make.normal(2, 9, 2, 16)
    lists, counts = torch.zeros(1, 1, 2, 4, dtype=torch.int32, device=DEVICE), torch.ones(1, 1, 2, dtype=torch.int32, device=DEVICE)
    for given in ((keys[:1], keys, lists, counts), (keys, keys, lists[:, :, :1], counts), (keys, keys, lists, counts[:, :, :1])):
        with pytest.raises(ValueError, match="must have shape|expected"):
            attend_lists(q, *given, 2, 1.0)
    with pytest.raises(ValueError, match="contiguous"):
        attend_lists(q, keys, keys, lists.mT.contiguous().mT, counts, 2, 1.0)
