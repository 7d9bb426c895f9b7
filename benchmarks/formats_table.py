"""Tables of 8-bit weights, in docs/guides/memory.md and research/notes/eight-bit-weights.md."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from nextscale.eval.results import DENSE, Row
from nextscale_research.quality.formats import NAMES, OWN, Variant

from .cells import BATCH, ENERGY, IMAGE, MEMORY, METHOD, MODEL, Column, bounded, machines, table_of
from .shown_rows import case_of, image
from .suites import step_of

ERRORS = "format errors"
SHOWN = (DENSE, "StageVAR", "FastVAR")  # methods of the table of speed


def format_tables(rows: Sequence[Row]) -> dict[str, str]:
    return {"formats": images_table(rows), "format-errors": errors_table(rows)}


def number(head: str, name: str, form: str) -> Column:
    """Returns a column with the value of a measure; empty without one."""
    return Column(head, lambda row: format(row[name]["value"], form) if row.get(name) else "")


def images_table(rows: Sequence[Row]) -> str:
    """Returns a table with the newest row of every variant, model, size and machine."""
    found = [row for row in rows if row["benchmark"] == "formats" and "error" not in row]
    newest = {(row["model"], *row["size"], row["images"], row["hardware"], row["variant"]): row for row in found}
    columns = (
        MODEL,
        IMAGE,
        Column("prompts", lambda row: str(row["images"])),
        Column("machine", lambda row: row["hardware"], "l"),
        Column("weights", lambda row: f"{row['dtype']}, as loaded" if row["variant"] == OWN else row["variant"], "l"),
        Column("GB", lambda row: f"{row['weights_gb']:.3f}"),
        number("LPIPS", "lpips", ".3f"),
        number("PSNR", "psnr", ".1f"),
        number("style correct", "style", ".1%"),
        number("label in top 5", "label_top5", ".1%"),
        Column("change of the last", lambda row: bounded(row.get("label_top5_change"), "{:+.1%}")),
        number("Fréchet distance to real", "frechet_real", ".1f"),
        number("to the model's own", "frechet_dense", ".2f"),
    )
    note = "LPIPS, PSNR and the last column compare with images of the model as loaded, at the same seeds; 95 % intervals."
    return table_of(columns, newest.values(), note) if newest else ""


def speed_table(rows: Sequence[Row]) -> str:
    """Returns a table of captured requests with 8-bit weights, each below the same request in the model's own dtype.

    The latter is the newest of the same commit, which ran in the same session, or the newest of all.
    """
    timed = [row for row in rows if row["benchmark"] == "bench" and "median_ms" in row and row["weights"] == "random"]
    timed = [row for row in timed if row["method"] in SHOWN]
    captured = [row for row in timed if row["engine"] == step_of(row) == "graphs"]  # other steps lack kernels or are experiments
    own = [row for row in captured if row.get("quantize") is None]
    newest, newest_of_commit = {kind(row): row for row in own}, {(row["commit"], *kind(row)): row for row in own}
    shown = []
    for row in {(row["quantize"], *kind(row)): row for row in captured if row.get("quantize") is not None}.values():
        before = newest_of_commit.get((row["commit"], *kind(row)), newest.get(kind(row)))
        if before is not None:
            shown += [before, row | {"against_own": before["median_ms"] / row["median_ms"]}]
    columns = (
        MODEL,
        BATCH,
        METHOD,
        Column("weights", lambda row: row.get("quantize") or row["dtype"], "l"),
        Column("generate, ms", lambda row: f"{row['median_ms']:.0f}"),
        Column("speedup", lambda row: f"**{row['against_own']:.2f}**" if "against_own" in row else ""),
        MEMORY,
        ENERGY,
    )
    note = (
        f"Medians; {machines(shown)}; guided images of 1024x1024, captured graphs, random weights. Decoding runs in the model's own dtype."
    )
    assert {image(row) for row in shown} <= {"1024x1024"}
    return table_of(columns, shown, note) if shown else ""


def kind(row: Row) -> tuple[Hashable, ...]:
    """Returns the properties that comparable requests share."""
    return row["hardware"], *case_of(row), row["method"]


def errors_table(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row["benchmark"] == ERRORS and "error" not in row]
    newest = {(row["model"], str(row["size"]), row["weights"], row["outliers"], row["variant"]): row for row in found}
    columns = (
        MODEL,
        Column("weights", lambda row: row["weights"], "l"),
        Column("outliers", lambda row: f"{row['outliers']:g}x" if row["outliers"] else ""),
        Column("quantized", lambda row: shown_variant(row["variant"]), "l"),
        Column("error of logits: first, mean, last", lambda row: ", ".join(f"{one:.4f}" for one in over_stages(row["logits"])), "l"),
        Column("codes or bits changed: mean, last", lambda row: ", ".join(f"{one:.2%}" for one in over_stages(row["changed"])[1:]), "l"),
    )
    where = sorted({f"{row['dtype']} on {row['hardware']}" for row in newest.values()})
    note = f"Relative errors of the first stage, the mean and the last stage, against {', '.join(where)}. On a CPU e4m3 is emulated."
    return table_of(columns, newest.values(), note) if newest else ""


def over_stages(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the first value, the mean and the last value."""
    return values[0], sum(values) / len(values), values[-1]


def shown_variant(name: str) -> str:
    """Returns the name of a variant; if only one layer is quantized, names that layer."""
    variant = Variant.parse(name)
    quantized = [product for product in NAMES if variant.format is not None and product not in variant.keep]
    return f"{variant.format}, {quantized[0]} alone" if len(quantized) == 1 else name
