"""The tables of the three papers, as runs: which model, size, methods and benchmark, how many images, and how long they take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from nextscale.eval.results import DENSE, Row
from nextscale.methods.registry import resolve_method

from ..quality.lists import GUIDANCE_OFF
from .suite import SUITES

MJHQ_SHARE = 3 / 10  # FastVAR shows three of the ten categories


@dataclass(frozen=True)
class PaperRun:
    """The images of some rows of a table; dense generation is among the methods."""

    table: str
    suite: str
    model: str
    side: int
    methods: tuple[str, ...]
    share: float = 1.0  # of the benchmark's images

    @property
    def images(self) -> int:
        """Images that each method generates."""
        return round(self.share * SUITES[self.suite].images)


TAUS = tuple(f"sparsevar:tau={tau}" for tau in (0.4, 0.5, 0.6, 0.7))
ANCHORS = tuple(f"sparsevar:tau=0.6,alpha={alpha}" for alpha in (2, 3, 5, "None"))
FIRST_STAGES = tuple(f"sparsevar:tau=0.6,first_stage={stage}" for stage in (6, 8, 9, 11, 12))
BOTH = ("infinity-2b", "hart-0.7b")
SCALES = ((8, 0.75), (10, 0.5), (10, 0.75), (12, 0.5), (12, 0.75))  # first of two thinned stages of HART, and the share that is not run
THINNED = tuple(f"fastvar:ratios={{{first}:{ratio},{first + 1}:{ratio}}}" for first, ratio in SCALES)
CACHED = tuple(f"fastvar:cache_stage={stage}" for stage in (8, 9, 10))
ALONE = (GUIDANCE_OFF, f"fastvar + {GUIDANCE_OFF}")


def runs(
    table: str, suites: Iterable[str], models: Iterable[str], methods: Sequence[str], side: int = 1024, share: float = 1.0
) -> list[PaperRun]:
    """Every model on every benchmark."""
    return [PaperRun(table, suite, model, side, tuple(methods), share) for model, suite in product(models, suites)]


PAPER_RUNS: tuple[PaperRun, ...] = (
    *runs("SparseVAR 1 to 3", ("geneval", "dpg", "imagereward", "hpsv2"), BOTH, (DENSE, *TAUS)),
    *runs("SparseVAR 4 and 5", ("geneval",), BOTH, (*ANCHORS, *FIRST_STAGES)),
    *runs("SparseVAR 6", ("imagenet",), ("flexvar-d24",), (DENSE, "sparsevar"), side=512),
    *runs("FastVAR 1 and A.2", ("geneval", "hpsv2", "imagereward"), BOTH, (DENSE, "fastvar", "tome")),
    *runs("FastVAR 2", ("mjhq",), BOTH, (DENSE, "fastvar"), share=MJHQ_SHARE),
    *runs("FastVAR 4", ("geneval",), ("hart-0.7b",), THINNED),
    *runs("FastVAR A.1", ("imagenet",), ("var-d24", "var-d30"), (DENSE, "fastvar"), side=256),
    *runs("FastVAR A.4", ("geneval",), ("hart-0.7b",), CACHED),
    *runs("StageVAR 3", ("geneval", "dpg"), ("infinity-2b",), (DENSE, "stagevar")),
    *runs("StageVAR 3", ("geneval", "dpg"), ("infinity-8b",), (DENSE, "stagevar:ranks=0.177")),  # no ranks of the 8B are published
    *runs("StageVAR 3", ("geneval",), ("star-1024",), (DENSE, "stagevar")),
    *runs("StageVAR 4", ("coco",), ("infinity-2b",), (DENSE, "stagevar")),
    *runs("StageVAR 4, COCO 2017", ("coco",), ("infinity-2b",), (DENSE, "stagevar"), share=1 / 6),
    *runs("StageVAR 6", ("geneval", "dpg"), ("infinity-2b",), ALONE),
)


@dataclass(frozen=True)
class Work:
    """One folder of images to generate."""

    suite: str
    model: str
    side: int
    method: str
    images: int
    tables: tuple[str, ...]


def paper_work(listed: Iterable[PaperRun] = PAPER_RUNS) -> list[Work]:
    """Every folder once, with the tables that it serves."""
    found: dict[tuple[str, str, int, str, int], list[str]] = {}
    for run in listed:
        for method in run.methods:
            found.setdefault((run.suite, run.model, run.side, method, run.images), []).append(run.table)
    return [Work(*key, tuple(dict.fromkeys(tables))) for key, tables in found.items()]


@dataclass(frozen=True)
class Speed:
    """Images per second as measured; `exact`: with this very method, else in dense generation, which is slower."""

    images_per_second: float
    exact: bool


def measured_speed(rows: Sequence[Row], work: Work, hardware: str) -> Speed | None:
    """The fastest of the batches that were measured on this hardware; None where this model and size were not."""
    known = [
        row
        for row in rows
        if row.get("model") == work.model
        and row.get("size") == [work.side, work.side]
        and row.get("hardware") == hardware
        and row.get("quantize") is None
        and "images_per_second" in row
    ]
    label = resolve_method([] if work.method == DENSE else work.method).label
    exact = [row["images_per_second"] for row in known if row["method"] == work.method or row.get("settings") == label]
    dense = [row["images_per_second"] for row in known if row["method"] == DENSE]
    rates = exact or dense
    return Speed(max(rates), bool(exact)) if rates else None


def measured_hardware(rows: Iterable[Row], here: str) -> str | None:
    """This machine where it was measured, else the one with most measurements; None without any."""
    names = [row["hardware"] for row in rows if "images_per_second" in row and "hardware" in row]
    if here in names or not names:
        return here if names else None
    return max(sorted(set(names)), key=names.count)
