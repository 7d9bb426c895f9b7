"""What `nextscale plan` has found, as a table and in words."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..planning.memory import ASSUMED_KEPT
from .plan_forecast import Forecast

NOT_COUNTED = (
    "Not counted: text encoder and prompt, canvas, decoding, and how a method selects and restores tokens, such as SparseVAR's search for"
    " anchors; the matrix products with which StageVAR, ToMe and PiToMe reduce tokens are counted."
)


def show(forecast: Forecast) -> None:
    console = Console(highlight=False)
    workload = forecast.workload
    rows = "guided (two rows per image)" if workload.guided else "unguided"
    console.print(f"[bold]{forecast.model}[/bold], batch {workload.images}, {rows}; method: {escape(forecast.method)}")
    if forecast.keep_ratio is not None:
        share = percent(forecast.keep_ratio)
        console.print(f"Assumed: {share} of the tokens are computed where the method is data-dependent (--keep-ratio).")
    if workload.text_tokens:
        console.print(f"Assumed: {workload.text_tokens} text tokens (--text-tokens).")
    console.print(stage_table(forecast))
    if forecast.thinned:
        console.print("Computed is the mean over all sublayers: some run fewer tokens than enter, and the head sees those that entered.")
    dense, planned = forecast.dense, forecast.planned
    parts = [("linear layers", planned.linear, dense.linear), ("attention", planned.attention, dense.attention)]
    shares = [f"{name} {percent(part / whole)}" for name, part, whole in [*parts, ("heads", planned.head, dense.head)]]
    console.print(f"Dense, planned: MACs of this request. Planned relative to dense: {', '.join(shares)}.")
    console.print(NOT_COUNTED)
    memory = forecast.memory
    console.print(
        f"KV cache: {gib(memory.reserved)} are reserved, text included; later stages read {gib(memory.planned)} of it,"
        f" with dense generation {gib(memory.dense)}."
    )
    if forecast.keep_ratio is not None:
        console.print(f"It is reserved for {percent(ASSUMED_KEPT)} of the tokens where the method is data-dependent, and grows if needed.")
    peak = memory.method_peak
    console.print(
        f"Peak memory: about {gib(peak.peak)}, dense {gib(memory.dense_peak.peak)}: weights {gib(peak.weights)} without the text encoder,"
        f" and the larger of {gib(peak.generating)} for the stages (KV cache and activations) and {gib(peak.decoding)} for decoding."
    )
    if memory.text_encoder:
        console.print(
            f"Text encoder: {gib(memory.text_encoder)}. Beside it the peak is {gib(memory.resident_peak)}. With --offload-text it is there"
            f" only while it encodes, when weights take {gib(memory.encoding)}, and the peak is {gib(memory.offloaded_peak)}."
        )


def stage_table(forecast: Forecast) -> Table:
    table = Table("stage", box=None, pad_edge=False, padding=(0, 2, 0, 0), show_footer=True)
    dense, planned = forecast.dense, forecast.planned
    early = [(stage.keys, same.keys) for stage, same in zip(planned.stages, dense.stages, strict=True) if not stage.stage.last]
    later_keys, all_keys = (sum(keys) for keys in zip(*early, strict=True)) if early else (0, 0)
    totals = {
        "grid": "",
        "tokens": str(sum(stage.stage.cells for stage in planned.stages)),
        "computed": str(round(sum(stage.computed for stage in planned.stages))),
        "rows": "",
        "keys": percent(later_keys / all_keys) if all_keys else "",
        "dense": short(dense.total),
        "planned": short(planned.total),
        "share": percent(planned.share(dense)),
    }
    table.columns[0].footer = "all"
    for heading, total in totals.items():
        table.add_column(heading, total, justify="right")
    for stage, same in zip(planned.stages, dense.stages, strict=True):
        size = stage.stage
        table.add_row(
            str(size.index),
            f"{size.height}x{size.width}",
            str(size.cells),
            "skipped" if stage.skipped else str(round(stage.computed)),
            str(stage.rows),
            "" if size.last else percent(stage.keys / same.keys),  # nothing reads the last stage's keys again
            short(same.total),
            short(stage.total),
            percent(stage.share(same)),
        )
    return table


def short(number: int) -> str:
    """Three digits and a unit."""
    if number == 0:
        return "0"
    value, units = float(number), ["", "k", "M", "G", "T", "P"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{f'{value:#.3g}'.rstrip('.')} {units[0]}".strip()


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
