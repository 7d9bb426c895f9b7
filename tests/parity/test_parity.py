"""Every stored case of the reference implementations, replayed through the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.conftest import COMPACT, TENSORS_COMPARED, golden_roots
from tests.parity.cases import Case, find_cases

OWN = f"{COMPACT.name}/"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = []
        for root in golden_roots(metafunc.config):
            found = find_cases(root) if root.is_dir() else []
            cases += found or [Case(str(root), None)]
        cases = cases if metafunc.config.getoption("--golden") else without_twins(cases)
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])


def without_twins(cases: Sequence[Case]) -> list[Case]:
    """Drops the project's own cases if the full ones are available, which compute the same and compare more."""
    names = {case.name for case in cases}
    return [case for case in cases if not case.name.startswith(OWN) or case.name.removeprefix(OWN) not in names]


def test_own_cases_are_left_out_where_the_whole_ones_are_there() -> None:
    own, cut, whole, other = (Case(name, None) for name in ("golden/var/plain", "golden/infinity/dense", "infinity/dense", "infinity/rope"))
    assert without_twins([own, cut, whole, other]) == [own, whole, other]
    assert without_twins([own, cut]) == [own, cut]


def test_case(case: Case, record_property: Callable[[str, object], None]) -> None:
    record_property(TENSORS_COMPARED, (case.name, case.replay()))
