"""Measures the cases of the speed tables: `python -m benchmarks.suites [NAME ...]`, where NAME is a case, a suite or a model.

Rows have the columns of `nextscale bench` and additional ones: stages, predicted memory, roofline and energy. Weights are random.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from nextscale import kernels
from nextscale.device import check_quantize, choose_device, choose_dtype
from nextscale.errors import OutOfMemory
from nextscale.eval.bench import ENGINES, Runner, bench, choose_engines, release, request_prompts, text_lengths
from nextscale.eval.results import DENSE, Row, percentiles_ms, read_rows, short_error, where
from nextscale.loading.load import random_pipeline
from nextscale.methods import Method, SparseVAR, resolve_method
from nextscale.models.quantization import FORMATS, Quantize
from nextscale.offline.shard import Shard
from nextscale.pipeline import Pipeline
from nextscale.planning.cost import Workload
from nextscale.planning.memory import ASSUMED_KEPT, request_memory
from nextscale_research.quality.lists import GUIDANCE_OFF

from .energy import EnergyMeter, energy_columns
from .results import options, record
from .roofline import Rates, request_roofline

SPARSE = "SparseVAR, 30 % kept"
SPARSEVAR = SparseVAR(keep=0.25)  # a budget, because random weights have detail everywhere; 30 % with one anchor per 16 cells
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
"""The comparison methods of the papers, with their own settings."""
PUBLISHED = (SPARSE, "FastVAR", "StageVAR")
SKIPPED_AND_PUBLISHED = ("skip the last two stages", *PUBLISHED)
FROM_NINE = "sparsevar:keep=0.25,first_stage=9"  # one stage before its default
RANKS_ELSEWHERE = "stagevar:ranks=0.177"  # Infinity-2B's mean rank ratio at 40x40, for models without a published table
AS_RELEASED = "stagevar:as_released=true"  # Infinity-8B: the reference implementation has one table for both
MOST_MERGED = ("tome:ratio=0.75", "tome:ratio=0.75,sublayers=[attention,cross_attention,feed_forward]", "tome + skip:last=2")
HART_BLOCKS = ("sparsevar:keep=0.25,blocks=15", "sparsevar:keep=0.25,blocks=16")  # the paper's 16th, counted from 1 and from 0


@dataclass(frozen=True)
class Case:
    """Dense generation and other methods for one model, size and batch."""

    name: str
    model: str
    size: tuple[int, int]
    batch: int = 1
    methods: tuple[str, ...] = ()  # in addition to dense generation
    suite: str = "current"  # those of APART have separate tables
    stagevar: str = "stagevar"  # for models without published ranks
    unfused: bool = False  # attention as a product, a softmax and a product (FastVAR, table 5)
    seconds: int = 30  # estimated on an H200 with five repeats, including loading and capture


# All rows of the tables, so that they can be measured at one commit.
CASES = (
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
    Case("8b-1024", "infinity-8b", (1024, 1024), methods=PUBLISHED, stagevar=AS_RELEASED, seconds=110),
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
    Case("var-d24-256", "var-d24", (256, 256), batch=8, methods=PUBLISHED, stagevar=RANKS_ELSEWHERE, seconds=30),
    Case(
        "var-d30-256",
        "var-d30",
        (256, 256),
        batch=8,
        methods=(*PUBLISHED, "code:draft=8", "code:draft=9"),
        stagevar=RANKS_ELSEWHERE,
        seconds=55,
    ),
    Case("var-d36-512", "var-d36", (512, 512), seconds=25),
    Case("flexvar-d24-256", "flexvar-d24", (256, 256), batch=8, seconds=20),
    Case("flexvar-d24-512", "flexvar-d24", (512, 512), methods=PUBLISHED, stagevar=RANKS_ELSEWHERE, seconds=35),
    Case("nano-512-batch32", "nano", (512, 512), batch=32, seconds=15),
    Case("2b-1024-unfused", "infinity-2b", (1024, 1024), methods=("FastVAR",), suite="papers", unfused=True, seconds=50),
    Case("2b-1024-tome", "infinity-2b", (1024, 1024), methods=("ToMe", *MOST_MERGED), suite="papers", seconds=70),
    Case("2b-1920x960", "infinity-2b", (1920, 960), methods=SKIPPED_AND_PUBLISHED, suite="papers", seconds=70),
    Case("2b-1344x1008", "infinity-2b", (1344, 1008), methods=SKIPPED_AND_PUBLISHED, suite="papers", seconds=70),
    Case("8b-1024-batch4", "infinity-8b", (1024, 1024), batch=4, methods=("ScaleKV",), suite="papers", seconds=90),
    Case("hart-1024-blocks", "hart-0.7b", (1024, 1024), methods=HART_BLOCKS, suite="papers", seconds=40),
)
APART = ("growth", "throughput", "papers")  # suites with separate tables


def chosen_cases(names: Sequence[str]) -> list[Case]:
    """Returns the cases of these names, suites or models; all without names."""
    known = {word for case in CASES for word in (case.name, case.suite, case.model)}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"NAME must be one of {', '.join(sorted(known))}; got {unknown[0]!r}")
    return [case for case in CASES if not names or {case.name, case.suite, case.model} & {*names}]


def part_of(cases: Sequence[Case], part: int, parts: int) -> list[Case]:
    """Returns consecutive cases that take about one of `parts` equal shares of the time; `part` counts from 0."""
    total, begun = sum(case.seconds for case in cases), 0
    found = []
    for case in cases:
        if (begun + case.seconds / 2) * parts // total == part:
            found.append(case)
        begun += case.seconds
    return found


def left(cases: Sequence[Case], rows: Iterable[Row], here: Row) -> list[Case]:
    """Returns the cases that have no rows of this machine, commit and format."""
    known = {(row["suite"], row["case"]) for row in rows if "suite" in row and all(row.get(name) == here[name] for name in SAME)}
    return [case for case in cases if (case.suite, case.name) not in known]


SAME = ("hardware", "torch", "commit", "quantize")
LISTS: Mapping[str, Iterable[str]] = {ALL: TIMED_METHODS, "peers": PEERS}


def timed_methods(names: Iterable[str], stagevar: str = "stagevar") -> dict[str, Method]:
    """Returns methods by name, by list ("all" or "peers") or by settings such as "fastvar + skip:last=1".

    stagevar: settings of "StageVAR".
    """
    known: dict[str, tuple[Method | str, ...]] = {**TIMED_METHODS, **PEERS, "StageVAR": (stagevar,)}
    return {one: resolve_method(known.get(one, one)) for name in names for one in LISTS.get(name, (name,))}


# --- rows


@dataclass(frozen=True)
class Plan:
    """Settings that all cases of a run share."""

    device: torch.device
    dtype: torch.dtype
    engine: str | None
    repeats: int
    rates: Rates
    meter: EnergyMeter | None = None
    quantize: Quantize | None = None
    step: str | None = None  # row label in the step-by-step table


def rows_of(cases: Sequence[Case], plan: Plan) -> Iterator[Row]:
    """Measures the cases model by model. If a model cannot be created, every method gets a row with the error."""
    for model in dict.fromkeys(case.model for case in cases):
        pipe: Pipeline | Exception
        try:
            pipe = random_pipeline(model, device=plan.device, dtype=plan.dtype, quantize=plan.quantize)
        except (RuntimeError, OutOfMemory) as error:
            pipe = error
        for case in (one for one in cases if one.model == model):
            found = timed_rows(pipe, case, plan) if isinstance(pipe, Pipeline) else failed_rows(case, plan, pipe)
            constant = {"suite": case.suite, "case": case.name, "guided": True, "weights": "random", "quality": None, **plan.rates.to_row()}
            for row in found:
                yield row | constant | {"step": plan.step or step_of(row), "run": f"{row['run']} {case.name}"}
        del pipe
        release(plan.device)


def timed_rows(pipe: Pipeline, case: Case, plan: Plan) -> list[Row]:
    with sdpa_kernel(SDPBackend.MATH) if case.unfused else nullcontext():
        return bench(
            pipe,
            timed_methods(case.methods, case.stagevar),
            size=case.size,
            batch=case.batch,
            engines=choose_engines(plan.engine, plan.device),
            repeats=plan.repeats,
            measure=partial(more_columns, case=case, plan=plan),
        )


def failed_rows(case: Case, plan: Plan, error: Exception) -> list[Row]:
    shared = {
        **{"benchmark": "bench", "model": case.model, "size": [*case.size], "batch": case.batch, "dtype": None, "quantize": plan.quantize},
        **{"kernels": kernels.enabled(plan.device), **where(plan.device), "run": "not loaded", "error": short_error(error)},
    }
    methods = {DENSE: Method(), **timed_methods(case.methods, case.stagevar)}
    return [
        shared | {"engine": engine, "engine_asked": engine, "method": name, "settings": method.label}
        for engine in choose_engines(plan.engine, plan.device)
        for name, method in methods.items()
    ]


def more_columns(runner: Runner, case: Case, plan: Plan) -> Row:
    """Returns the columns in addition to `nextscale bench`."""
    pipe, reports = runner.pipe, [one.report for one in runner.timed]
    first, stages = reports[0], [*zip(*(report.stages for report in reports), strict=True)]  # reports of all rounds per stage
    workload = request_workload(pipe, case)
    method = pipe.settled(runner.method, workload.schedule, workload.images)
    plans = method.forecast(pipe.model, workload.schedule, workload.guided, ASSUMED_KEPT)
    roofline = request_roofline(pipe.model, workload, [statistics.fmean(one.cost_share for one in stage) for stage in stages], plan.rates)
    generate = statistics.median(one.generate_seconds for one in runner.timed)
    return {
        "choice": known_percentiles_ms([[stage.sampling_seconds for stage in report.stages] for report in reports]),
        "residual": known_percentiles_ms([[stage.residual_seconds for stage in report.stages] for report in reports]),
        "tokens": [stage.tokens for stage in first.stages],
        "computed": [round(stage.computed, 1) for stage in first.stages],
        "padding": [round(statistics.fmean(one.padding for one in stage), 4) for stage in stages],
        "rows": [stage.rows for stage in first.stages],
        "stage_median_ms": [percentiles_ms([one.seconds for one in stage])["median_ms"] for stage in stages],
        "predicted_gb": round(request_memory(pipe.model, pipe.tokenizer, workload, plans).peak / 1e9, 2),  # of eager generation
        "planned_gb": round(first.planned_memory / 1e9, 2),
        "roofline_ms": round(1000 * roofline.both, 3),
        "roofline_arithmetic_ms": round(1000 * roofline.arithmetic, 3),
        "roofline_reading_ms": round(1000 * roofline.reading, 3),
        "times_roofline": round(generate / roofline.both, 3),
        **energy_columns(runner, request_prompts(pipe, case.batch, plan.repeats), case.batch, plan.meter),
    }


def request_workload(pipe: Pipeline, case: Case) -> Workload:
    """Returns the workload of a case for counting MACs and memory."""
    text = max(text_lengths(pipe, case.batch)) if pipe.model.stack[0].has_text else 0
    return Workload(pipe.settings.schedules.choose(case.size, None), case.batch, text_tokens=text, refine=pipe.settings.sampling.refine)


def step_of(row: Row) -> str:
    """Returns the row label in the step-by-step table: the given name, or the engine and whether it ran without kernels."""
    return row.get("step") or (row["engine_asked"] if row["kernels"] else f"{row['engine_asked']}, plain torch")


def known_percentiles_ms(reports: Sequence[Sequence[float | None]]) -> dict[str, float] | None:
    """Returns percentiles of the sums over measured stages; None if a report has no times, as with CUDA graphs."""
    known = [[seconds for seconds in stages if seconds is not None] for stages in reports]
    return percentiles_ms([sum(stages) for stages in known]) if all(known) else None


# --- the program


def parser() -> argparse.ArgumentParser:
    parser = options(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases, suites or models; default: all")
    parser.add_argument("--shard", default="0/1", metavar="i/N", help="part of the cases, for example 0/3 to 2/3, of similar duration")
    parser.add_argument("--resume", action="store_true", help="skip cases that have rows of this commit and machine")
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="timed rounds")
    parser.add_argument("--engine", choices=ENGINES, help="default: graphs; eager on the CPU")
    parser.add_argument("--step", metavar="NAME", help="label of the rows in the step-by-step table; they appear in no other table")
    parser.add_argument("--quantize", choices=FORMATS, help="format of the weights")
    parser.add_argument("--device", help="cpu, cuda or cuda:N")
    return parser


def main(words: Sequence[str] | None = None) -> list[Row]:
    args: Any = parser().parse_args(words)
    device = choose_device(args.device)
    dtype, shard = choose_dtype(None, device), Shard.parse(args.shard)
    cases = part_of(chosen_cases(args.names), shard.index, shard.count)
    if args.resume and args.out.exists():
        cases = left(cases, read_rows(args.out), {**where(device), "quantize": args.quantize})
    quantize = check_quantize(args.quantize, device, dtype)
    rates = Rates.measured(device, dtype, quantize)
    plan = Plan(device, dtype, args.engine, args.repeats, rates, EnergyMeter.of(device), quantize, args.step)
    return record(rows_of(cases, plan), args.out)


if __name__ == "__main__":
    main()
