"""Every table and figure of the three papers: the images that it needs, or the command that measures it, or why neither is possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from nextscale.eval.results import DENSE, Row
from nextscale.methods import Method
from nextscale.methods.registry import resolve_method

from ..quality.lists import GUIDANCE_OFF
from .suite import SUITES

MJHQ_SHARE = 3 / 10  # FastVAR shows three of the ten categories
PEOPLE = 1 / 10  # its tables of ablations show one
COCO_2017 = 1 / 6


@dataclass(frozen=True)
class PaperRun:
    """The images of some rows of a table."""

    suite: str
    model: str
    methods: tuple[str, ...]
    side: int = 1024
    share: float = 1.0  # of the benchmark's images

    @property
    def images(self) -> int:
        """Images that each method generates."""
        return round(self.share * SUITES[self.suite].images)


@dataclass(frozen=True)
class PaperItem:
    """A table or a figure, or several that show the same of other models."""

    name: str  # paper and numbers
    shows: str
    runs: tuple[PaperRun, ...] = ()  # images that a benchmark scores
    commands: tuple[str, ...] = ()  # that measure or draw it
    note: str = ""  # choices of ours, or the reason why something cannot be regenerated


def runs(
    suites: Iterable[str], models: Iterable[str], methods: Sequence[str], side: int = 1024, share: float = 1.0
) -> tuple[PaperRun, ...]:
    """Returns every model on every benchmark."""
    return tuple(PaperRun(suite, model, tuple(methods), side, share) for model, suite in product(models, suites))


def taus(values: Iterable[float], settings: str = "") -> tuple[str, ...]:
    return tuple(f"sparsevar:tau={tau}{settings}" for tau in values)


def low_rank(last: Sequence[int], alpha: float, variant: str) -> str:
    """Returns a variant of StageVAR with guidance as it was, at one alpha in these stages."""
    alphas = {stage: alpha for stage in last}
    return f"stagevar_variants:variant={variant},alphas={alphas},guidance_off=99"


INFINITY, HART, STAR = "infinity-2b", "hart-0.7b", "star-1024"
BOTH = (INFINITY, HART)
TAUS = taus((0.4, 0.5, 0.6, 0.7))
METRICS = (
    *taus((0.2, 0.3, 0.4, 0.5, 0.6, 0.7)),
    *taus((0.2, 0.3, 0.4, 0.5, 0.6, 0.7), ",metric=logits"),
    *taus((0.04, 0.05, 0.06, 0.07, 0.1, 0.2, 0.3), ",metric=image"),
)
ANCHORS = ("sparsevar:tau=0.6", *(f"sparsevar:tau=0.6,alpha={alpha}" for alpha in (2, 3, 5, "None")))
FIRST_STAGES = ("sparsevar:tau=0.6", *(f"sparsevar:tau=0.6,first_stage={stage}" for stage in (6, 8, 9, 11, 12)))
BLOCKS = tuple(f"sparsevar:tau=0.6,blocks={block}" for block in range(24))
MERGED = tuple(f"{method}:ratio={ratio}" for method in ("tome", "pitome") for ratio in (0.1, 0.2, 0.3, 0.4, 0.5))
SELECTED = tuple(f"{method}:ratio={ratio}" for method in ("sparsevit", "zipvl") for ratio in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8))
LAST_RATIOS = tuple(f"fastvar:ratios={{13:{ratio}}}" for ratio in (0.25, 0.5, 0.6, 0.75, 0.9))
SCALES = ((8, 0.75), (10, 0.5), (10, 0.75), (12, 0.5), (12, 0.75))  # first of two thinned stages of HART, and the share that is not run
THINNED = tuple(f"fastvar:ratios={{{first}:{ratio},{first + 1}:{ratio}}}" for first, ratio in SCALES)
CACHED = tuple(f"fastvar:cache_stage={stage}" for stage in (8, 9, 10))
ALPHAS = (0.999, 0.99, 0.98, 0.97, 0.96, 0.95)
SWEPT_ALPHAS = (0.999, 0.99, 0.98, 0.97, 0.96, 0.95, 0.92, 0.9, 0.85, 0.8, 0.7)
RANKS = tuple(f"stagevar:alphas={{10:{alpha},11:0,12:0}}" for alpha in SWEPT_ALPHAS)
FASTER = tuple(
    f"fastvar:ratios={{9:{a},10:{b},11:{c},12:1.0}}" for a, b, c in ((0.4, 0.5, 0.75), (0.4, 0.5, 1.0), (0.6, 0.75, 1.0), (0.75, 0.9, 1.0))
)
VARIANTS = ("vanilla", "svd_approximation", "svd", "svd_fixed", "least_squares", "representative")
LATE = (10, 11, 12)  # Infinity's 40, 48 and 64
WITHOUT_GUIDANCE = tuple(f"stagevar:guidance_off={stage},alphas=[]" for stage in range(1, 13))

OBSERVE = 'python -m nextscale_research observe -m {} "PROMPT" "PROMPT"'
DETAILS = 'python -m nextscale_research observe -m {} --details --metrics FOLDER "PROMPT" "PROMPT"'
DRAWING = "a drawing of the method"
PICTURES = "the paper's prompts and seeds are not published: prompts of your own show the same comparison"
SLOWER = "stagevar_variants"  # may take longer than dense generation, so its hours are not a bound
BESIDE = "rows of other models than VARs are quotations of their papers"
SPEED = "python -m benchmarks.suites {}"
LIST = "python -m nextscale_research quality --method {} --prompts FILE"


def compared(model: str, method: str) -> str:
    return f"nextscale compare -m {model} --prompts FILE --method {method} --sheet sheet.png"


PAPER: tuple[PaperItem, ...] = (
    PaperItem("SparseVAR Figs. 1, 4, 5", "uniform computation; overview", note=DRAWING),
    PaperItem(
        "SparseVAR Figs. 2, 9, 12, 13",
        "change of the image by late stages",
        commands=tuple(map(OBSERVE.format, (HART, "flexvar-d24", INFINITY))),
    ),
    PaperItem("SparseVAR Figs. 3, 14, 15", "where blocks act", commands=tuple(map(OBSERVE.format, BOTH))),
    PaperItem("SparseVAR Table 1", "GenEval by tau", runs(("geneval",), BOTH, (DENSE, *TAUS)), note="Infinity on rewritten prompts"),
    PaperItem("SparseVAR Table 2", "DPG-Bench by tau", runs(("dpg",), BOTH, (DENSE, *TAUS))),
    PaperItem("SparseVAR Table 3", "human preference by tau", runs(("imagereward", "hpsv2"), BOTH, (DENSE, *TAUS))),
    PaperItem("SparseVAR Table 4", "GenEval by alpha", runs(("geneval",), BOTH, ANCHORS), (LIST.format("sparsevar-anchors"),)),
    PaperItem("SparseVAR Table 5", "GenEval by P", runs(("geneval",), BOTH, FIRST_STAGES), (LIST.format("sparsevar-stages"),)),
    PaperItem(
        "SparseVAR Fig. 6",
        "three metrics by tau",
        runs(("geneval",), (INFINITY,), METRICS),
        (LIST.format("sparsevar-metrics"),),
        "the paper names neither model nor benchmark: Infinity on GenEval is chosen",
    ),
    PaperItem(
        "SparseVAR Figs. 7, 11, 19",
        "cells that are computed",
        commands=("nextscale generate -m infinity-2b --method sparsevar --compute-mask mask.png",),
        note=PICTURES,
    ),
    PaperItem(
        "SparseVAR Fig. 8",
        "GenEval by block",
        runs(("geneval",), (HART,), BLOCKS),
        (LIST.format("sparsevar-blocks"),),
        "HART's 16th block is index 15 or, counted as P is, 16",
    ),
    PaperItem(
        "SparseVAR Table 6",
        "FlexVAR at 512 px",
        runs(("imagenet",), ("flexvar-d24",), (DENSE, "sparsevar"), side=512),
        (SPEED.format("flexvar-d24-512"),),
    ),
    PaperItem(
        "SparseVAR Fig. 10",
        "GenEval of merging and selecting",
        runs(("geneval",), (HART,), (*TAUS, *MERGED, *SELECTED)),
        (LIST.format("peers-shares"),),
    ),
    PaperItem("SparseVAR Figs. 16, 17", "logits of neighbors", commands=tuple(map(DETAILS.format, BOTH))),
    PaperItem("SparseVAR Fig. 18", "attention by distance", commands=(DETAILS.format(HART),)),
    PaperItem(
        "FastVAR Figs. 1, 8, A.5 to A.7",
        "2K images",
        commands=(SPEED.format("2b-1344 2b-1920x960"), "nextscale generate -m infinity-2b --size 960x1920 --method fastvar"),
        note="memory of a 24 GB card was not measured; " + PICTURES,
    ),
    PaperItem("FastVAR Fig. 2", "time by stage and by size", commands=(SPEED.format("growth"),)),
    PaperItem(
        "FastVAR Figs. 3, A.2", "residuals, spectra, attention by stage", commands=(OBSERVE.format(INFINITY), DETAILS.format(INFINITY))
    ),
    PaperItem("FastVAR Fig. 4", "overview", note=DRAWING),
    PaperItem(
        "FastVAR Table 1", "GenEval and speed", runs(("geneval",), BOTH, (DENSE, "fastvar")), (SPEED.format("2b-1024 hart-1024"),), BESIDE
    ),
    PaperItem(
        "FastVAR Figs. 5, A.3, A.4",
        "images beside dense ones",
        commands=(compared(INFINITY, "fastvar"), compared(HART, "fastvar")),
        note=PICTURES,
    ),
    PaperItem(
        "FastVAR Table 2", "MJHQ-30K: landscape, people, food", runs(("mjhq",), BOTH, (DENSE, "fastvar"), share=MJHQ_SHARE), note=BESIDE
    ),
    PaperItem(
        "FastVAR Figs. 6, 7",
        "ratio of the last stage",
        runs(("geneval",), (HART,), (DENSE, *LAST_RATIOS)) + runs(("mjhq",), (HART,), (DENSE, *LAST_RATIOS), share=PEOPLE),
        (LIST.format("fastvar-ratios"), "nextscale generate -m hart-0.7b --method fastvar:ratios={13:0.5} --compute-mask mask.png"),
        "the paper does not name its ratios",
    ),
    PaperItem(
        "FastVAR Table 3",
        "beside ToMe",
        runs(("geneval",), (HART,), (DENSE, "tome", "tome:ratio=0.75", "fastvar", "fastvar:ratios={12:0.75,13:0.85}"))
        + runs(("mjhq",), (HART,), (DENSE, "tome", "tome:ratio=0.75", "fastvar", "fastvar:ratios={12:0.75,13:0.85}"), share=PEOPLE),
        (SPEED.format("hart-1024"),),
        "the second ratios of both (1.36x and 1.70x) are not stated: ours have 43 % and 42 % of the MACs",
    ),
    PaperItem(
        "FastVAR Table 4",
        "pairs of stages",
        runs(("geneval",), (HART,), (DENSE, *THINNED)) + runs(("mjhq",), (HART,), (DENSE, *THINNED), share=PEOPLE),
        (LIST.format("fastvar-scales"),),
    ),
    PaperItem("FastVAR Table 5", "with and without fused attention", commands=(SPEED.format("2b-1024-unfused"),)),
    PaperItem(
        "FastVAR Table A.1",
        "ImageNet at 256 px",
        runs(("imagenet",), ("var-d24",), (DENSE, "fastvar"), side=256)
        + runs(("imagenet",), ("var-d30",), (DENSE, "fastvar", "code:draft=8", "code:draft=9"), side=256),
        (SPEED.format("var-d24-256 var-d30-256"),),
        "CoDe's published pair is tuned for its stages; the files of VAR are not",
    ),
    PaperItem("FastVAR Fig. A.1", "time of a layer's parts", commands=("python -m benchmarks.layer",)),
    PaperItem(
        "FastVAR Table A.2",
        "human preference beside ToMe",
        runs(("hpsv2", "imagereward"), BOTH, (DENSE, "fastvar", "tome"))
        + runs(("hpsv2", "imagereward"), (INFINITY,), ("tome:ratio=0.75",)),
        (SPEED.format("2b-1024-tome"),),
        "ToMe's 2.3x is out of reach: its own setting has 62 % of the MACs, and merging the most it can in three stages has 45 %",
    ),
    PaperItem(
        "FastVAR Table A.3",
        "the last stage skipped on HART",
        runs(("geneval",), (HART,), (DENSE, "fastvar", "fastvar:ratios={12:0.5,13:1.0}"))
        + runs(("mjhq",), (HART,), (DENSE, "fastvar", "fastvar:ratios={12:0.5,13:1.0}"), share=PEOPLE),
    ),
    PaperItem(
        "FastVAR Table A.4",
        "stage of the cache",
        runs(("geneval",), (HART,), (DENSE, "fastvar", *CACHED)) + runs(("mjhq",), (HART,), (DENSE, "fastvar", *CACHED), share=PEOPLE),
        (LIST.format("fastvar-cache"),),
    ),
    PaperItem(
        "StageVAR Figs. 1, 13",
        "distances and spectra by stage, CLIP of image and text",
        commands=tuple(map(DETAILS.format, (INFINITY, STAR))),
    ),
    PaperItem(
        "StageVAR Fig. 2",
        "guidance dropped from a stage on",
        runs(("geneval",), (INFINITY,), (DENSE, *WITHOUT_GUIDANCE)),
        (LIST.format("stagevar-guidance"), "nextscale evaluate FOLDER --metric clip-score"),
    ),
    PaperItem(
        "StageVAR Table 1",
        "low-rank features by alpha",
        runs(("geneval", "dpg"), (INFINITY,), (DENSE, *(low_rank(LATE, alpha, "svd_approximation") for alpha in ALPHAS))),
    ),
    PaperItem(
        "StageVAR Table 2",
        "six variants",
        runs(("geneval", "dpg"), (INFINITY,), tuple(low_rank(LATE, 0.99, variant) for variant in VARIANTS)),
        (LIST.format("stagevar-variants"),),
        "the paper does not say which stages it changes: the last three",
    ),
    PaperItem("StageVAR Figs. 3, 4", "variants; overview", note=DRAWING),
    PaperItem(
        "StageVAR Table 3",
        "GenEval and DPG-Bench",
        runs(("geneval", "dpg"), (INFINITY,), (DENSE, "fastvar", "skipvar", "stagevar"))
        + runs(("geneval", "dpg"), ("infinity-8b",), (DENSE, "stagevar:as_released=true"))
        + runs(("geneval",), (STAR,), (DENSE, "stagevar")),
        (SPEED.format("2b-1024 2b-1024-peers 8b-1024 star-1024"),),
        BESIDE,
    ),
    PaperItem(
        "StageVAR Figs. 5, 9, 12",
        "images beside dense ones",
        commands=(compared(INFINITY, "stagevar"), compared(INFINITY, "stagevar --aspect 2:1")),
        note=PICTURES,
    ),
    PaperItem(
        "StageVAR Table 4",
        "COCO 2014 and 2017",
        runs(("coco",), (INFINITY,), (DENSE, "stagevar")) + runs(("coco",), (INFINITY,), (DENSE, "stagevar"), share=COCO_2017),
        note="the paper does not state guidance and temperature on COCO",
    ),
    PaperItem(
        "StageVAR Fig. 6",
        "user study",
        commands=("nextscale serve  # the studio collects blind votes",),
        note="needs people: 69 in the paper",
    ),
    PaperItem("StageVAR Fig. 7", "GenEval by rank", runs(("geneval",), (INFINITY,), RANKS), (LIST.format("stagevar-ranks"),)),
    PaperItem(
        "StageVAR Fig. 8",
        "FID and speed beside FastVAR",
        runs(("coco",), (INFINITY,), (*RANKS, *FASTER), share=COCO_2017),
        note="the paper does not state FastVAR's ratios: these span its speedups",
    ),
    PaperItem(
        "StageVAR Table 6",
        "parts, and with FastVAR",
        runs(("geneval", "dpg"), (INFINITY,), (DENSE, GUIDANCE_OFF, "stagevar", f"fastvar + {GUIDANCE_OFF}")),
    ),
    PaperItem(
        "StageVAR Tables 7 to 9",
        "ranks by group, with deviations",
        commands=("nextscale calibrate stagevar -m infinity-2b --prompts FILE -n 4 --set alphas=0.96 --set centered=true",),
    ),
    PaperItem("StageVAR Figs. 10, 11", "other projections; spectra of images", commands=(DETAILS.format(INFINITY),)),
    PaperItem(
        "StageVAR Fig. 14, Table 11",
        "STAR: guidance and low-rank features",
        runs(
            ("geneval",),
            (STAR,),
            (
                DENSE,
                *(f"stagevar:guidance_off={stage},alphas=[]" for stage in range(1, 14)),
                *(low_rank((13,), alpha, "svd_approximation") for alpha in ALPHAS),
            ),
        ),
    ),
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


def paper_work(listed: Iterable[PaperItem] = PAPER) -> list[Work]:
    """Returns every folder once, with the tables that it serves."""
    found: dict[tuple[str, str, int, int, Method], tuple[str, list[str]]] = {}
    for item in listed:
        for run in item.runs:
            for method in run.methods:
                key = (run.suite, run.model, run.side, run.images, settings_of(method))
                found.setdefault(key, (method, []))[1].append(item.name)
    return [
        Work(suite, model, side, method, images, tuple(dict.fromkeys(tables)))
        for (suite, model, side, images, _), (method, tables) in found.items()
    ]


def settings_of(method: str) -> Method:
    return resolve_method([] if method == DENSE else method)


@dataclass(frozen=True)
class Speed:
    """Images per second as measured; `exact`: with this very method, else in dense generation, which is slower."""

    images_per_second: float
    exact: bool


def measured_speed(rows: Sequence[Row], work: Work, hardware: str) -> Speed | None:
    """Returns the fastest of the batches that were measured on this hardware; None if this model and size were not."""
    known = [
        row
        for row in rows
        if row.get("model") == work.model
        and row.get("size") == [work.side, work.side]
        and row.get("hardware") == hardware
        and row.get("quantize") is None
        and "images_per_second" in row
    ]
    label = settings_of(work.method).label
    exact = [row["images_per_second"] for row in known if row["method"] == work.method or row.get("settings") == label]
    dense = [row["images_per_second"] for row in known if row["method"] == DENSE]
    rates = exact or ([] if SLOWER in work.method else dense)
    return Speed(max(rates), bool(exact)) if rates else None


def measured_hardware(rows: Iterable[Row], here: str) -> str | None:
    """Returns this machine if it was measured, else the one with most measurements; None without any."""
    names = [row["hardware"] for row in rows if "images_per_second" in row and "hardware" in row]
    if here in names or not names:
        return here if names else None
    return max(sorted(set(names)), key=names.count)
