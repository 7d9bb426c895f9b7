"""Cases that are measured together: named lists of models, sizes and methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...accel.method import Method
from ...accel.registry import resolve_method
from ...accel.sparsevar import SparseVAR
from ...errors import SettingError
from ...schedules import SizeLike
from ..evals.methods import DENSE, GUIDANCE_OFF

SPARSE = "SparseVAR, 30 % kept"
SPARSEVAR = SparseVAR(keep=0.25)  # random weights have detail everywhere: no threshold is typical. With one anchor in 16 cells 30 %
ALL = "all"

TIMED_METHODS: Mapping[str, tuple[Method | str, ...]] = {
    "skip the last two stages": ("skip:last=2",),
    SPARSE: (SPARSEVAR,),
    "FastVAR": ("fastvar",),
    "StageVAR": ("stagevar",),
    "StageVAR, guidance off only": (GUIDANCE_OFF,),
    "FastVAR + guidance off": ("fastvar", GUIDANCE_OFF),
    "SparseVAR, 30 % kept + guidance off": (SPARSEVAR, GUIDANCE_OFF),
    "ToMe": ("tome",),
}
PEERS: Mapping[str, tuple[Method | str, ...]] = {
    "ScaleKV": ("scalekv",),
    "SkipVAR": ("skipvar",),
    "CoDe": ("code",),
    "PiToMe": ("pitome",),
    "SparseViT": ("sparsevit",),
    "ZipVL": ("zipvl",),
    "LiteVAR": ("litevar",),
    "SparVAR": ("sparvar",),
    "SparVAR, windows alone": ("sparvar:choosing=0",),
}
"""The other methods of the papers' tables, at their own settings."""
PUBLISHED = (SPARSE, "FastVAR", "StageVAR")
SKIPPED_AND_PUBLISHED = ("skip the last two stages", *PUBLISHED)
FROM_NINE = "sparsevar:keep=0.25,first_stage=9"  # a stage earlier than its default
RANKS_ELSEWHERE = 0.177  # random weights have no ranks: the mean of Infinity-2B's at 40x40, for models without a published table


@dataclass(frozen=True)
class Case:
    """Dense generation and some methods, on requests that are alike."""

    name: str
    model: str
    size: SizeLike = None
    batch: int = 1
    methods: tuple[str, ...] = ()  # besides dense generation
    suite: str | None = None  # the suite that it belongs to
    ranks: float | None = None  # StageVAR's, where none are published for the model
    seconds: int = 30  # that it takes on an H200 with five repeats, estimated: loading, capturing, timing, metering


def _sized(*sides: int, methods: tuple[str, ...]) -> tuple[Case, ...]:
    return tuple(Case(f"2b-{side}", "infinity-2b", (side, side), methods=methods) for side in sides)


SUITES: Mapping[str, tuple[Case, ...]] = {
    # What a visitor asks first. Decoding, memory and the time from prompt features to pixels are in the same rows.
    "required": (
        Case("2b-1024", "infinity-2b", (1024, 1024), methods=PUBLISHED),
        Case("2b-1024-batch4", "infinity-2b", (1024, 1024), batch=4),
        Case("8b-1024", "infinity-8b", (1024, 1024)),
    ),
    "growth": _sized(256, 512, 1024, 2048, methods=SKIPPED_AND_PUBLISHED),
    "large": _sized(1344, 2048, methods=("FastVAR",)),  # beyond the size of training, as in the paper of FastVAR
    "throughput": (Case("2b-1024-batch8", "infinity-2b", (1024, 1024), batch=8, methods=PUBLISHED),),
    "families": (
        Case("hart-1024", "hart-0.7b", (1024, 1024), methods=PUBLISHED),
        Case("star-1024", "star-1024", (1024, 1024), methods=PUBLISHED),
        Case("var-d30-256", "var-d30", (256, 256), batch=8, methods=PUBLISHED, ranks=RANKS_ELSEWHERE),
        Case("8b-1024", "infinity-8b", (1024, 1024), methods=PUBLISHED, ranks=RANKS_ELSEWHERE),
    ),
    "dense": (
        Case("2b-1024", "infinity-2b", (1024, 1024)),
        Case("2b-1024-batch4", "infinity-2b", (1024, 1024), batch=4),
        Case("2b-2:1", "infinity-2b", (1440, 720)),
        Case("8b-1024", "infinity-8b", (1024, 1024)),
        Case("8b-512", "infinity-8b-512", (512, 512)),
        Case("var-d30-256", "var-d30", (256, 256), batch=8),
        Case("var-d36-512", "var-d36", (512, 512)),
        Case("flexvar-d24-256", "flexvar-d24", (256, 256), batch=8),
        Case("hart-1024", "hart-0.7b", (1024, 1024)),
        Case("hart-1024-batch4", "hart-0.7b", (1024, 1024), batch=4),
        Case("star-256", "star-256", (256, 256)),
        Case("star-512", "star-512", (512, 512)),
        Case("star-1024", "star-1024", (1024, 1024)),
        Case("star-1024-batch4", "star-1024", (1024, 1024), batch=4),
        Case("star-1024-sampler", "star-1024-sampler", (1024, 1024)),
    ),
    "methods": (
        Case("2b-1024", "infinity-2b", (1024, 1024), methods=(ALL,)),
        Case("2b-1024-batch4", "infinity-2b", (1024, 1024), batch=4, methods=(ALL,)),
        Case("2b-2:1", "infinity-2b", (1440, 720), methods=(ALL,)),
        Case("hart-1024", "hart-0.7b", (1024, 1024), methods=(ALL,)),
        Case("star-1024", "star-1024", (1024, 1024), methods=(ALL,)),
    ),
    # Every row of the tables, so that all can be measured on one commit.
    "current": (
        Case("2b-1024", "infinity-2b", (1024, 1024), methods=(ALL,), seconds=110),
        Case("2b-1024-peers", "infinity-2b", (1024, 1024), methods=("peers", FROM_NINE), seconds=120),
        Case("2b-2:1", "infinity-2b", (1440, 720), methods=(ALL,), seconds=110),
        Case("2b-1024-batch4", "infinity-2b", (1024, 1024), batch=4, methods=PUBLISHED, seconds=70),
        Case("2b-1024-batch8", "infinity-2b", (1024, 1024), batch=8, methods=PUBLISHED, suite="throughput", seconds=90),
        Case("growth-256", "infinity-2b", (256, 256), methods=SKIPPED_AND_PUBLISHED, suite="growth", seconds=40),
        Case("growth-512", "infinity-2b", (512, 512), methods=SKIPPED_AND_PUBLISHED, suite="growth", seconds=40),
        Case("growth-1024", "infinity-2b", (1024, 1024), methods=SKIPPED_AND_PUBLISHED, suite="growth", seconds=60),
        Case("growth-2048", "infinity-2b", (2048, 2048), methods=SKIPPED_AND_PUBLISHED, suite="growth", seconds=100),
        Case("2b-1344", "infinity-2b", (1344, 1344), methods=PUBLISHED, seconds=70),
        Case("8b-1024", "infinity-8b", (1024, 1024), methods=PUBLISHED, ranks=RANKS_ELSEWHERE, seconds=110),
        Case("8b-512", "infinity-8b-512", (512, 512), seconds=40),
        Case("hart-1024", "hart-0.7b", (1024, 1024), methods=(ALL,), seconds=80),
        Case("hart-1024-batch4", "hart-0.7b", (1024, 1024), batch=4, seconds=20),
        Case("star-1024", "star-1024", (1024, 1024), methods=(ALL,), seconds=100),
        Case("star-1024-batch4", "star-1024", (1024, 1024), batch=4, seconds=25),
        Case("star-256", "star-256", (256, 256), seconds=20),
        Case("star-512", "star-512", (512, 512), seconds=20),
        Case("star-1024-sampler", "star-1024-sampler", (1024, 1024), seconds=40),
        Case("var-d16-256", "var-d16", (256, 256), batch=8, seconds=15),
        Case("var-d20-256", "var-d20", (256, 256), batch=8, seconds=15),
        Case("var-d24-256", "var-d24", (256, 256), batch=8, seconds=15),
        Case("var-d30-256", "var-d30", (256, 256), batch=8, methods=PUBLISHED, ranks=RANKS_ELSEWHERE, seconds=45),
        Case("var-d36-512", "var-d36", (512, 512), seconds=25),
        Case("flexvar-d24-256", "flexvar-d24", (256, 256), batch=8, seconds=20),
        Case("flexvar-d24-512", "flexvar-d24", (512, 512), seconds=20),
        Case("nano-512-batch32", "nano", (512, 512), batch=32, seconds=15),
    ),
}
APART = ("growth", "throughput")  # suites with tables of their own


def suite(name: str) -> tuple[Case, ...]:
    """The cases of a suite; those that belong to another's table say so."""
    if name not in SUITES:
        raise SettingError(f"--suite {name!r}: choose one of {', '.join(SUITES)}")
    return tuple(case if case.suite else replace(case, suite=name) for case in SUITES[name])


def part_of(cases: Sequence[Case], part: int, parts: int) -> list[Case]:
    """Neighbouring cases, about as long as those of every other part; parts count from 0."""
    total, begun = sum(case.seconds for case in cases), 0
    found = []
    for case in cases:
        if (begun + case.seconds / 2) * parts // total == part:
            found.append(case)
        begun += case.seconds
    return found


LISTS: Mapping[str, Iterable[str]] = {ALL: TIMED_METHODS, "peers": PEERS}


def timed_methods(names: Iterable[str], ranks: float | None = None) -> dict[str, Method]:
    """Dense generation first, then those asked for: names of the tables above, "all" or "peers" for one of them, or methods such as
    "fastvar + skip:last=1".

    ranks: StageVAR's, in place of those that are published for the model.
    """
    known: dict[str, tuple[Method | str, ...]] = {**TIMED_METHODS, **PEERS}
    if ranks is not None:
        known["StageVAR"] = (f"stagevar:ranks={ranks}",)
    chosen: dict[str, Method] = {DENSE: Method()}
    for name in names:
        for one in LISTS.get(name, (name,)):
            chosen[one] = resolve_method(known.get(one, one))
    return chosen
