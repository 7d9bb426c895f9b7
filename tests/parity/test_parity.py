"""Every stored case of the authors' programs, replayed through the library."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ..conftest import golden_roots, tensors_compared
from .cases import Case, find_cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = []
        for root in golden_roots(metafunc.config):
            found = find_cases(root) if root.is_dir() else []
            cases += found or [Case(str(root), None)]
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the stored runs did; tensors this small gain nothing from a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_case(case: Case, request: pytest.FixtureRequest) -> None:
    request.config.stash[tensors_compared][case.name] = case.replay()
