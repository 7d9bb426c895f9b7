"""Torch's flags for attention kernels belong to the whole process, and a process may use several GPUs. No GPU is needed."""

from __future__ import annotations

from threading import Event, Thread

import pytest
import torch

from nextscale.cache import attention
from nextscale.engine.memory import OPTION, expandable_segments
from tests.engine.test_allocator import Allocator

CUDA = torch.device("cuda")


def flags() -> list[bool]:
    return [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "cudnn", "mem_efficient", "math")]


def test_stages_that_overlap_leave_the_flags_as_they_were() -> None:
    before, first, second = flags(), Event(), Event()

    def small() -> None:
        with attention.attention_backend(100, CUDA, captured=False):
            first.set()
            assert second.wait(10)

    thread = Thread(target=small)
    thread.start()
    assert first.wait(10)
    with attention.attention_backend(600, CUDA, captured=False):
        second.set()
        thread.join()
    assert flags() == before


@pytest.mark.parametrize(
    ("queries", "captured", "expected"),
    [
        (512, False, [False, False, True, True]),
        (513, False, [True, False, True, True]),
        (2049, False, [True] * 4),
        (100, True, [True] * 4),
    ],
)
def test_a_stage_runs_with_its_own_flags_beside_another_one(queries: int, captured: bool, expected: list[bool]) -> None:
    found = []

    def other() -> None:
        with attention.attention_backend(queries, CUDA, captured), attention.sdpa_backends(CUDA):
            found.append(flags())

    thread = Thread(target=other)
    with attention.attention_backend(100, CUDA, captured=False), attention.sdpa_backends(CUDA):
        thread.start()
        thread.join(0.2)  # it waits, or it has found the flags of this thread
    thread.join()
    assert found == [expected] and flags() == [True] * 4


def test_captures_on_two_gpus_take_turns_with_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    found = []

    def other() -> None:
        with expandable_segments():
            found.append(allocator.heard[-1])

    thread = Thread(target=other)
    with expandable_segments():
        thread.start()
        thread.join(0.2)
        assert not found
    thread.join()
    assert found == [f"{OPTION}:True"] and allocator.heard[-1] == ""
