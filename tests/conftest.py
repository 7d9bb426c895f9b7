"""Options and the closing table of the parity tests."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).parent.parent
COMPACT = Path(__file__).parent / "parity" / "golden"
SHARED = PROJECT.parent / "shared" / "golden"
FAMILIES = (  # folders of SHARED whose models and methods are built
    "var",
    "flexvar",
    "infinity",
    "hart",
    "star",
    "fastvar_infinity",
    "fastvar_hart",
    "stagevar_infinity",
    "sparsevar_infinity",
    "scalekv_infinity",
    "skipvar_infinity",
    "code_var",
)

SLOW = Path(__file__).with_name("slow.txt")  # folders, files and tests that `make test-fast` leaves out
STUDIO = {"tests/serve/test_studio.py", "tests/serve/test_studio_access.py"}
NEEDS = {"gpu": {"tests/gpu"}, "browser": STUDIO, "ray": {"tests/offline/test_ray.py"}}

TENSORS_COMPARED = "tensors compared"  # a property of a test's report, which reaches the closing table from every process


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden",
        action="append",
        type=Path,
        metavar="DIR",
        help="replay every case folder below DIR; repeatable (default: ../shared/golden where it exists, and the project's own cases)",
    )
    parser.addoption(
        "--write-slow",
        type=float,
        metavar="SECONDS",
        help="write tests/slow.txt after a run of all tests: all but the fastest, which take SECONDS together in one process",
    )


def golden_roots(config: pytest.Config) -> list[Path]:
    given = config.getoption("--golden")
    return given or [COMPACT, *(SHARED / family for family in FAMILIES if (SHARED / family).is_dir())]


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in the background; tests send Ctrl-C to programs, which inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the hub's package reads it; those tests that want a hub bring their own
    torch.set_num_threads(1)  # as the stored runs did; on tensors this small a second thread costs more than it brings
    if find_spec("hypothesis") is not None:
        from hypothesis import settings

        settings.register_profile("steady", derandomize=True, deadline=None)  # the same examples every time, however slow the machine is
        settings.load_profile("steady")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = {**NEEDS, "slow": set(SLOW.read_text().split())}
    for item in items:
        test = item.nodeid.partition("[")[0]
        file = test.partition("::")[0]
        places = {test, file, *map(str, Path(file).parents)}
        for name in (name for name, listed in marked.items() if places & listed):
            item.add_marker(name)


def pytest_collection_finish() -> None:
    """What is imported by now stays: full collections need not look at a million objects each time."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    studio = [report for report in terminalreporter.stats.get("skipped", ()) if "test_studio" in report.nodeid]
    if studio:
        terminalreporter.section("not tested")
        terminalreporter.write_line(f"the studio in a browser: {studio[0].longrepr[2].removeprefix('Skipped: ')}")
    if seconds := terminalreporter.config.getoption("--write-slow"):
        write_slow(terminalreporter, seconds)
    properties = [dict(report.user_properties) for report in terminalreporter.stats.get("passed", ())]
    compared = dict(sorted(found[TENSORS_COMPARED] for found in properties if TENSORS_COMPARED in found))
    if compared:
        terminalreporter.section("stored tensors compared")
        for name, count in compared.items():
            terminalreporter.write_line(f"{count:5d}  {name}")
        terminalreporter.write_line(f"{sum(compared.values()):5d}  in {len(compared)} cases")


def write_slow(terminalreporter: pytest.TerminalReporter, seconds: float) -> None:
    durations = Counter[str]()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        durations[getattr(report, "nodeid", "").partition("[")[0]] += getattr(report, "duration", 0.0)
    slow = []
    for test, duration in sorted(durations.items(), key=lambda pair: pair[1]):
        seconds -= duration
        slow += [test] if seconds < 0 else []
    SLOW.write_text("\n".join(sorted(slow)) + "\n")
