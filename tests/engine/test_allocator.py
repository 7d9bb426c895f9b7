"""Segments that grow, around a capture alone. No GPU is needed to ask for them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from nextscale.engine import memory as module
from nextscale.engine.memory import VARIABLES, allocator_setter, expandable_segments
from tests.engine.test_engine import with_graphs
from tests.helpers.tape import play_graphs_on_the_cpu
from tests.helpers.tiny import prompts


class Allocator:
    """Replaces torch's allocator settings and records them."""

    def __init__(self, patch: pytest.MonkeyPatch, settings: str = "") -> None:
        self.heard = [settings]
        allocator_setter.cache_clear()  # another test may have found torch's own
        patch.setattr(module.sys, "platform", "linux")
        patch.setattr(torch.version, "hip", None)
        patch.setattr(torch._C, "_accelerator_setAllocatorSettings", self.heard.append, raising=False)
        patch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: self.heard[-1], raising=False)


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    allocator_setter.cache_clear()
    yield
    allocator_setter.cache_clear()


@pytest.mark.parametrize("before", ["", "max_split_size_mb:100,roundup_power2_divisions:[256:1,512:2]"])
def test_segments_grow_inside_and_not_after(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch, before)
    for _ in range(2):  # earlier settings are not repeated with every capture
        with pytest.raises(KeyError), expandable_segments():
            assert allocator.heard[-1] == (f"{before},expandable_segments:True" if before else "expandable_segments:True")
            raise KeyError
        assert allocator.heard[-2:] == ["expandable_segments:False", before]


@pytest.mark.parametrize("before", ["expandable_segments:False", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_a_choice_of_the_user_stays(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch, before)
    with expandable_segments():
        pass
    assert allocator.heard == [before]


@pytest.mark.parametrize("variable", VARIABLES)
def test_older_versions_have_another_name_for_it_and_the_environment_for_what_was_chosen(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = Allocator(monkeypatch)
    for name in ("set", "get"):
        monkeypatch.delattr(torch._C, f"_accelerator_{name}AllocatorSettings")
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", allocator.heard.append, raising=False)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with expandable_segments():
        assert allocator.heard == ["", "expandable_segments:True"]
    monkeypatch.setenv(variable, "expandable_segments:False")
    allocator.heard.clear()
    with expandable_segments():
        assert not allocator.heard


@pytest.mark.parametrize("missing", ["platform", "name", "hip"])
def test_where_segments_cannot_grow_that_is_said_once(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allocator = Allocator(monkeypatch)
    if missing == "platform":
        monkeypatch.setattr(module.sys, "platform", "win32")
    elif missing == "hip":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    else:
        monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
        monkeypatch.delattr(torch.cuda.memory, "_set_allocator_settings", raising=False)
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        for _ in range(2):
            with expandable_segments():
                assert allocator.heard == [""]
    assert len(caplog.records) == 1
    assert "no expandable segments" in caplog.text


def test_captures_are_made_with_them_and_replays_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    play_graphs_on_the_cpu(monkeypatch)
    settings: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: settings.append(allocator.heard[-1]))
    pipe = with_graphs("infinity")
    pipe.warmup(prompts("infinity", 1))
    assert settings == ["", "expandable_segments:True"]  # before it all, and between the warm-up runs and the capture
    assert allocator.heard[-1] == ""
    before = len(allocator.heard)
    pipe(prompts("infinity", 1), seed=0)
    assert len(allocator.heard) == before
