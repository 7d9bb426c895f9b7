"""`nextscale bench`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.markup import escape

from ..errors import SettingError
from .files import require_results
from .options import DEFAULT_MODEL, MACHINE, MODEL_HELP, Device, Dtype, Json, Quantize, option, out_option
from .parse import choose_schedule, method_name, parse_size, size_text, torch_dtype
from .show import percent, plain_table, result_console, show_next

if TYPE_CHECKING:
    from ..eval.results import Row


def bench(
    *,
    models: Annotated[list[str] | None, option("--model -m", "NAME", f"{MODEL_HELP} Can be repeated.", None, DEFAULT_MODEL)] = None,
    methods: Annotated[list[str] | None, option("--method", "METHOD", "Method to time beside dense generation; repeat for more.")] = None,
    batch: Annotated[list[int] | None, option("--batch", "N", "Images per batch; can be repeated.", MACHINE, "1", min=1)] = None,
    size: Annotated[list[str] | None, option("--size", "SIZE", "Size of images; can be repeated.", None, "model")] = None,
    repeats: Annotated[int, option("--repeats", "N", "Timed rounds, each with a request of every method.", min=1)] = 10,
    engine: Annotated[
        Literal["graphs", "eager", "both"] | None,
        option("--engine", "NAME", "graphs, eager or both.", MACHINE, "graphs, eager on the CPU"),
    ] = None,
    weights: Annotated[Path | None, option("--weights", "PATH", "File or folder of the model weights.", MACHINE, "random weights")] = None,
    device: Device = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    out: Annotated[Path | None, out_option("FILE", "Add a row per method to this .jsonl file.", "none")] = None,
    as_json: Json = False,
) -> None:
    """Measure speed and memory of models, dense and with methods, at every size and batch.

    Prompt features are random, and so are the weights without --weights: no files are needed, and the images mean nothing.
    """
    from ..device import choose_device, choose_dtype
    from ..eval.bench import bench as time_methods
    from ..eval.bench import choose_engines, release
    from ..eval.results import append_rows
    from ..loading.load import load, random_encoder, random_pipeline
    from ..loading.presets import model_spec
    from ..methods.registry import resolve_method

    place = choose_device(device)
    names = list(dict.fromkeys(models or [DEFAULT_MODEL]))
    sizes: list[str | None] = [*size] if size else [None]
    chosen = {method_name(one): resolve_method(one) for one in methods or ()}
    if weights is None and (profiled := [name for name, method in chosen.items() if "alone" in method.exclusive]):
        raise SettingError(f"--method {profiled[0]} reads profiles of trained weights. Add --weights PATH.")
    if weights is not None and len(names) > 1:
        raise SettingError("--weights belong to one model. Choose it with -m.")
    for name, wanted in product(names, sizes):
        choose_schedule(model_spec(name).settings.schedules, wanted)
    engines = choose_engines(engine, place)
    require_results(out)
    for name in names:
        common: dict[str, Any] = {"device": place, "dtype": choose_dtype(torch_dtype(dtype), place), "quantize": quantize}
        if weights is None:
            pipe = random_pipeline(name, **common)
        else:
            pipe = load(name, weights=weights, text_encoder=random_encoder(model_spec(name).model, place), **common)
        for wanted, images in product(sizes, batch or [1]):
            pixels = None if wanted is None else parse_size(wanted)
            rows = time_methods(pipe, chosen, size=pixels, batch=images, engines=engines, repeats=repeats)
            rows = [row | {"weights": "random" if weights is None else "checkpoint"} for row in rows]
            if out:
                append_rows(rows, out)
            if as_json:
                print("\n".join(json.dumps(row) for row in rows))
            else:
                show_rows(rows)
        del pipe
        release(place)
    if not as_json:
        show_next(f"nextscale compare -m {(models or [DEFAULT_MODEL])[0]}  # differences between the images")


def show_rows(rows: Sequence[Row]) -> None:
    first = rows[0]
    columns = ("generate, ms", "speedup", "decode, ms", "end to end, ms", "images/s", "MACs", "GB")
    table = plain_table("method", "engine", *columns, left=("method", "engine"))
    for row in rows:
        table.add_row(escape(row["method"]), row["engine"], *([escape(row["error"])] if "error" in row else cells(row)))
    format = f", {first['quantize']}" if first["quantize"] else ""
    console = result_console()
    console.print(f"{first['model']}{format}, {size_text(first['size'])}, batch {first['batch']}, {first['hardware']}", markup=False)
    console.print(table)


def cells(row: Row) -> list[str]:
    ratio = row["speedup"]
    return [
        f"{row['median_ms']:.1f} ({row['p20_ms']:.1f}–{row['p80_ms']:.1f})",
        "" if ratio is None else f"{ratio['median']:.2f} ({ratio['p20']:.2f}–{ratio['p80']:.2f})",
        f"{row['decode']['median_ms']:.1f}",
        f"{row['end_to_end']['median_ms']:.1f}",
        f"{row['images_per_second']:.2f}",
        percent(row["cost_share"]),
        f"{row['peak_gb']:.2f}",
    ]
