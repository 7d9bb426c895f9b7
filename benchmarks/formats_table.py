"""What weights of eight bits cost and save, as tables of docs/quantisation.md."""

from __future__ import annotations

from collections.abc import Sequence

from nextscale.lab.bench.cells import bounded
from nextscale.lab.evals.formats import NAMES, OWN, Variant
from nextscale.lab.results import Row

ERRORS = "format errors"


def format_tables(rows: Sequence[Row]) -> dict[str, str]:
    return {"formats": images_table(rows), "format-speed": speed_table(rows), "format-errors": errors_table(rows)}


def value(row: Row, name: str, form: str) -> str:
    return format(row[name]["value"], form) if row.get(name) else ""


def images_table(rows: Sequence[Row]) -> str:
    """The newest row of every variant, for every model, size and machine."""
    found = [row for row in rows if row["benchmark"] == "formats" and "error" not in row]
    lines = [
        "| model, image, prompts | weights | GB | LPIPS | PSNR | style correct | label in top 5 | change of the last"
        " | Fréchet distance to real | to the model's own |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    newest = {(row["model"], *row["size"], row["images"], row["hardware"], row["variant"]): row for row in found}
    for (model, height, width, images, hardware, variant), row in newest.items():
        title = f"{row['dtype']}, as loaded" if variant == OWN else variant
        change = bounded(row.get("label_top5_change"), "{:+.1%}")
        shown = (
            f"{row['weights_gb']:.3f}",
            value(row, "lpips", ".3f"),
            value(row, "psnr", ".1f"),
            value(row, "style", ".1%"),
            value(row, "label_top5", ".1%"),
            change,
            value(row, "frechet_real", ".1f"),
            value(row, "frechet_dense", ".2f"),
        )
        lines.append(f"| {model}, {height}x{width}, {images}, {hardware} | {title} | {' | '.join(shown)} |")
    note = "LPIPS, PSNR and the last column are those to the images of the model as it is loaded, at the same seeds; 95 % intervals."
    return "\n".join([*lines, "", note]) if newest else ""


def speed_table(rows: Sequence[Row]) -> str:
    """Requests that were timed with weights of eight bits, beside the newest of the same kind in the model's own dtype."""
    timed = [row for row in rows if row["benchmark"] == "bench" and "median_ms" in row and row["weights"] == "random"]
    newest = {(row["model"], *row["size"], row["batch"], row["method"], row.get("quantize")): row for row in timed}
    lines = [
        "| model | image | batch | method | weights | generate, ms | against its own dtype | end to end, ms | images/s | peak"
        " | energy per image |",
        "|---|---|---:|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (model, height, width, batch, method, quantize), row in newest.items():
        own = newest.get((model, height, width, batch, method, None))
        if quantize is None:
            continue
        for one in filter(None, (own, row)):
            ratio = "" if one is own or own is None else f"**{own['median_ms'] / row['median_ms']:.2f}**"
            cells = (f"{one['median_ms']:.1f}", ratio, f"{one['end_to_end']['median_ms']:.1f}", f"{one['images_per_second']:.1f}")
            used = (f"{one['peak_gb']:.2f} GB", f"{one['joules_per_image']:.0f} J" if one.get("joules_per_image") else "")
            name = one.get("quantize") or one["dtype"]
            lines.append(f"| {model} | {height}x{width} | {batch} | {method} | {name} | {' | '.join((*cells, *used))} |")
    machines = ", ".join(sorted({f"{row['hardware']}, torch {row['torch']}" for row in newest.values() if row.get("quantize")}))
    note = f"Medians; {machines}; guided, captured graphs, random weights. Decoding runs in the model's own dtype."
    return "\n".join([*lines, "", note]) if len(lines) > 2 else ""


def errors_table(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row["benchmark"] == ERRORS and "error" not in row]
    lines = [
        "| model | weights | outliers | quantised | error of logits: first, mean, last | codes or bits changed: mean, last |",
        "|---|---|---:|---|---|---|",
    ]
    newest = {(row["model"], str(row["size"]), row["weights"], row["outliers"], row["variant"]): row for row in found}
    for (model, _, weights, outliers, variant), row in newest.items():
        logits, changed = row["logits"], row["changed"]
        numbers = f"{logits[0]:.4f}, {sum(logits) / len(logits):.4f}, {logits[-1]:.4f}"
        shares = f"{sum(changed) / len(changed):.2%}, {changed[-1]:.2%}"
        planted = f"{outliers:g}x" if outliers else ""
        lines.append(f"| {model} | {weights} | {planted} | {shown_variant(variant)} | {numbers} | {shares} |")
    where = sorted({f"{row['dtype']} on {row['hardware']}" for row in newest.values()})
    note = f"Relative errors: of the first stage, the mean, the last. Against {', '.join(where)}; on a CPU e4m3 is emulated."
    return "\n".join([*lines, "", note]) if newest else ""


def shown_variant(name: str) -> str:
    """One product by its own name, in place of all others."""
    variant = Variant.parse(name)
    quantised = [product for product in NAMES if variant.format is not None and product not in variant.keep]
    return f"{variant.format}, {quantised[0]} alone" if len(quantised) == 1 else name
