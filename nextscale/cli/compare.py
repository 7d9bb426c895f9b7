"""`nextscale compare`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape

from ..errors import PromptError, SettingError
from .files import default_out, require_image_name, require_results, require_writable
from .options import MACHINE, OUTPUT, Force, ModelOptions, PromptFile, Seed, SizeOptions, option, out_option
from .parse import method_name, named_profiles, parse_prompt, size_text
from .show import compared, computed_maps, percent, plain_table, result_console, share_bar, show_next

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    from ..eval.compare import Comparison
    from ..methods import Method
    from ..stage import Schedule

PROMPTS = (
    "a 3D icon of a red apple",
    "a photo of a blue t-shirt",
    "a 3D render of a fox",
    "a glossy emoji of a blue heart",
    "a flat icon of a purple eggplant",
    "an android style emoji of a cactus",
    "a twitter style icon of a green apple",
    "a photo of a red dress",
)
"""One or two of every style in which nano was trained."""
ON_CPU = 3  # of them on a CPU, one per round: dense generation of 512 px takes 16 s on two cores
ON_GPU = 8  # images per batch
TUNED = ("auto:lpips=0.05", "auto:speedup=3", "auto:lpips=1")  # the first two different ones of a profile are shown: near, fast, fastest
PUBLISHED = ("sparsevar:metric=logits,tau=0.9", "fastvar", "stagevar:alphas=[]", "stagevar")
STANDARD = "standard"
SHEET = "compare.png"
THUMBNAIL = 512  # pixels, the longer side of an image on a sheet


def compare(
    *,
    model: ModelOptions,
    prompts: PromptFile,
    method: Annotated[
        list[str] | None,
        option(
            "--method",
            "METHOD",
            f"Method to compare with dense generation; repeat for more rows. {STANDARD}: plain skipping and every method.",
            None,
            "two points of the model's profile",
        ),
    ] = None,
    size: SizeOptions,
    seed: Seed = 0,
    batch: Annotated[int | None, option("--batch", "N", "Images per batch.", MACHINE, f"{ON_GPU}, on the CPU 1", min=1)] = None,
    out: Annotated[Path | None, out_option("FILE", "Add a row per method to this .jsonl file.", "none")] = None,
    sheet: Annotated[Path | None, option("--sheet", "FILE", "Picture of the first images of all methods.", OUTPUT, SHEET)] = None,
    plot: Annotated[Path | None, option("--plot", "FILE", "Plot LPIPS against speed as .svg.", OUTPUT, "none")] = None,
    force: Force = False,
) -> None:
    """Compare methods with dense generation: speed, and distance to the dense images.

    Without options: nano, its own prompts, and two points of its largest profile.
    """
    from ..eval.compare import compare as compare_methods
    from ..eval.results import append_rows, research
    from ..io import write_image, write_text
    from ..metrics import Lpips

    spec, device = model.spec, model.torch_device
    own = PROMPTS if device.type == "cuda" else PROMPTS[:ON_CPU]
    texts = prompts.read_file()
    if not texts and spec.text_encoder is None:
        raise PromptError(f"the default prompts are text; {spec.name} takes class numbers. Pass --prompts FILE.")
    columns = [parse_prompt(text, spec) for text in texts or own]
    batch = batch or (ON_GPU if device.type == "cuda" else 1)
    picture = sheet or default_out(SHEET)
    require_image_name("--sheet", picture)
    require_writable([picture], force or sheet is None)
    require_writable([plot] if plot else [], force)
    require_results(out)
    draw = research("quality.frontier").frontier_svg if plot else None
    schedule = chosen_schedule(model, size, largest=not method)
    methods = chosen_methods(method, model, schedule, batch)
    with share_bar() as progress:
        task = progress.add_task("loading", total=1.0)

        def on_progress(name: str, share: float) -> None:
            progress.update(task, completed=share, description=f"comparing {escape(name)}")

        pipeline = model.load()
        pixels = [side * pipeline.tokenizer.pixels_per_token for side in schedule.grid]
        found = compare_methods(
            pipeline,
            methods,
            columns,
            Lpips.load_for(pixels, device),
            schedule=schedule,
            seed=seed,
            batch=batch,
            masks=True,
            on_progress=on_progress,
        )
    if out:
        append_rows(found.rows, out)
    if draw and plot:
        write_text(draw(found.rows), plot)
    write_image(picture_of(found), picture)
    show_comparison(found)
    result_console().print(f"The images, and where each method computed (yellow): {picture}", markup=False, soft_wrap=True)
    show_next(f"nextscale tune -m {spec.name}  # searches settings for this model, size and machine")


def chosen_schedule(model: ModelOptions, size: SizeOptions, largest: bool) -> Schedule:
    """Returns the schedule of the options; without a size, with `largest`, of the largest profile for this kind of device."""
    if largest and size.size is None and size.aspect is None:
        profiles = named_profiles(model.spec, model.weights).values()
        sizes = [profile.size for profile in profiles if profile.device == model.torch_device.type]
        if sizes:
            return model.spec.settings.schedules.choose(max(sizes, key=math.prod), None)
    return size.schedule(model.spec)


def chosen_methods(asked: Sequence[str] | None, model: ModelOptions, schedule: Schedule, batch: int) -> dict[str, Method]:
    """Returns the methods by their names. A named method must fit the request; of the standard list it becomes a row with an error."""
    from ..methods.registry import resolve_method, standard_methods

    if asked:
        specs = {name: text for one in asked for name, text in (standard_methods(len(schedule)) if one == STANDARD else {one: one}).items()}
        methods = {method_name(name): resolve_method(text) for name, text in specs.items()}
        for name in {method_name(one) for one in asked} - {STANDARD}:
            model.resolved(methods[name], schedule, batch)
        return methods
    points: dict[Method, str] = {}
    for text in TUNED:
        try:
            points.setdefault(model.resolved(resolve_method(text), schedule, batch)[0], text)
        except SettingError as error:
            reason = error
    if points:
        return {text: resolve_method(text) for text in list(points.values())[:2]}
    result_console().print(f"Published settings, which were found for other models: {reason}.", markup=False, soft_wrap=True)
    return {text: resolve_method(text) for text in PUBLISHED}


def show_comparison(found: Comparison) -> None:
    from ..eval.compare import UNEVEN, is_uneven

    console = result_console()
    ran = [row for row in found.rows if "error" not in row]
    table = plain_table("method", "s per image", "speedup", "MACs", "tokens", "PSNR", "LPIPS", folded=("method",))
    for row in ran:
        shares = [percent(row[name]) for name in ("cost_share", "kept")]
        psnr = "" if "psnr" not in row else "same" if row["psnr"] is None else f"{row['psnr']['value']:.1f} dB"
        lpips = "{value:.3f} ({low:.3f} to {high:.3f})".format(**row["lpips"]) if "lpips" in row else ""
        seconds = f"{row['ms_per_image']['median'] / 1000:.3g}"
        table.add_row(escape(row["method"]), seconds, with_range(row["speedup"]), *shares, psnr, lpips)
    console.print(table)
    dense, rounds = ran[0], len(found.results[ran[0]["method"]].reports)
    console.print(
        f"{dense['images']} images of {size_text(dense['size'])} per row, batch {dense['batch']}, {dense['engine']}, on"
        f" {dense['hardware']}, from the same seeds. Times are medians of {rounds} rounds, with the range of the speedups."
    )
    if any(map(is_uneven, ran)):
        console.print(f"Rounds differ by more than {UNEVEN:.0%}: other programs may be running. Measure again when the machine is idle.")
    for result in found.results.values():
        if result.reports and (reason := result.reports[0].selection_reason):
            console.print(f"{reason}, as {result.reports[0].method}", markup=False, soft_wrap=True)
    for row in (row for row in found.rows if "error" in row):
        console.print(f"{row['method']} did not run: {row['error']}", markup=False)


def with_range(found: Mapping[str, float]) -> str:
    """Returns the median, and the range if there is one."""
    middle, low, high = (f"{found[name]:.2f}" for name in ("median", "low", "high"))
    return middle if low == high else f"{middle} ({low} to {high})"


def picture_of(found: Comparison) -> Image.Image:
    """Returns a sheet: the dense images, then for each method its images and where it computed."""
    import torch

    shown: dict[str, Sequence[Any]] = {}
    for row in (row for row in found.rows if "error" not in row):
        name, result = row["method"], found.results[row["method"]]
        images = thumbnails(torch.cat(result.images))
        if not shown:
            shown[name] = images
        else:
            shares = f"{percent(row['cost_share'])} of the MACs, {percent(row['kept'])} of the tokens"
            shown[f"{row['speedup']['median']:.2f}x: {name}, {shares}"] = images
            masks = [torch.cat(parts) for parts in zip(*result.masks, strict=True)]
            shown[f"computed by {name}: yellow by all stages, blue by few"] = computed_maps(images, masks)
    return compared([str(prompt) for prompt in found.prompts[: len(images)]], shown)


def thumbnails(levels: Tensor) -> list[Image.Image]:
    """Returns images of [n, 3, H, W] in 8 bits, at most THUMBNAIL pixels a side."""
    from PIL import Image

    images = [Image.fromarray(one) for one in levels.permute(0, 2, 3, 1).contiguous().numpy()]
    for image in images:
        image.thumbnail((THUMBNAIL, THUMBNAIL))
    return images
