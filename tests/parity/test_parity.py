"""Every stored case of the authors' programs, replayed through the library."""

from __future__ import annotations

import pytest

from ..conftest import golden_roots, tensors_compared
from .cases import Case, find_cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = []
        for root in golden_roots(metafunc.config):
            found = find_cases(root) if root.is_dir() else []
            cases += found or [Case(str(root), None)]
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])


def test_case(case: Case, request: pytest.FixtureRequest) -> None:
    request.config.stash[tensors_compared][case.name] = case.replay()
