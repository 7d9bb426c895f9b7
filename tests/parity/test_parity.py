"""Every stored case of the reference implementations, replayed through the library."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..conftest import TENSORS_COMPARED, golden_roots
from .cases import Case, find_cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = []
        for root in golden_roots(metafunc.config):
            found = find_cases(root) if root.is_dir() else []
            cases += found or [Case(str(root), None)]
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])


def test_case(case: Case, record_property: Callable[[str, object], None]) -> None:
    record_property(TENSORS_COMPARED, (case.name, case.replay()))
