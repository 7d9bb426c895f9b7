"""The table of docs/guides/memory.md: predicted memory of the recipes, and peaks measured by `benchmarks.memory`."""

from __future__ import annotations

from collections.abc import Sequence

from nextscale.eval.results import Row

from .cells import table
from .memory import GIB, RECIPES, Recipe, predicted

ENGINES = ("eager", "graphs")


def memory_table(rows: Sequence[Row]) -> str:
    measured = {(row["recipe"], row["engine_asked"]): row for row in rows if row["benchmark"] == "memory" and "error" not in row}
    lines = []
    for name, recipe in RECIPES.items():
        turns = predicted(recipe)
        taken = [peak(measured.get((name, engine))) for engine in ENGINES]
        lines.append([f"{recipe.card} GB", f"`{command(recipe)}`", gib(turns["encoding"]), gib(turns["generating"]), *taken])
    heads = ["card", "command", "encoding", "generating, decoding", *(f"measured, {engine}" for engine in ENGINES)]
    note = "One image of 1024 x 1024 pixels with CFG, bfloat16. Columns 3 and 4 are predicted; the larger peak is measured."
    where = sorted({f" {row['hardware']}, torch {row['torch']}, {row['weights']} weights." for row in measured.values()})
    return table(heads, "ll" + "r" * (2 + len(ENGINES)), lines, note + "".join(where))


def command(recipe: Recipe) -> str:
    options = [f"--{name.replace('_', '-')} {value}" for name, value in recipe.options.items()]
    method = [] if recipe.method == "dense" else [f"--method {recipe.method}"]
    return " ".join(["nextscale generate -m", recipe.model, *options, *method, "--offload-text"])


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def peak(row: Row | None) -> str:
    return "" if row is None else gib(row["peak_gb"] * 1e9)
