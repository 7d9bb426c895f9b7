"""`nextscale edit`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ..errors import SettingError
from .files import default_out, plan_pictures, require_writable
from .generate import RandomSeedOptions, show_results
from .options import Force, Methods, ModelOptions, SamplingOptions, option, out_option
from .parse import choose_schedule, parse_methods, parse_numbers, torch_dtype
from .show import result_console, show_next, token_bar

if TYPE_CHECKING:
    from PIL import Image

    from ..edit_inputs import EditOptions

SIDES = ("left", "top", "right", "bottom")
SET_HELP = (
    "from_stage: first stage that changes the image, instead of --strength. fill: surroundings or original, the content under the mask."
    " grow, feather: pixels of the mask. padding_mask_crop: edit the box around the mask with that padding, at the image's own size."
    " paste=false, near_mask=false."
)


def edit(
    *,
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="The image: .png, .jpg or .webp.", show_default=False)],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text, or a class number for class models.", show_default=False)],
    mask: Annotated[Path | None, option("--mask", "FILE", "Image of its size: the white or transparent part changes.", None, "all")] = None,
    strength: Annotated[
        float | None, option("--strength", "X", "Share of the stages that change the image.", None, "0.6, by the mask if there is one")
    ] = None,
    expand: Annotated[
        str | None, option("--expand", "L,T,R,B", "Pixels to paint beyond the left, top, right and bottom edge.", None, "none")
    ] = None,
    settings: Annotated[list[str] | None, option("--set", "KEY=VALUE", SET_HELP)] = None,
    model: ModelOptions,
    method: Methods = None,
    size: RandomSeedOptions,
    sampling: SamplingOptions,
    out: Annotated[Path | None, out_option("PATH", "Folder, or for a single image a .png, .jpg or .webp file.", "out")] = None,
    force: Force = False,
) -> None:
    """Change an image inside a mask, beyond its edges, or all over."""
    from ..edit_inputs import open_image, read_edit
    from ..io import write_image
    from ..loading.load import without_weights

    spec, options, acceleration = model.spec, parse_options(settings or ()), parse_methods(method)
    picture, area = open_image(image, "IMAGE"), None if mask is None else read_mask_file(mask)
    if expand is not None:
        if mask is not None:
            raise SettingError("--expand and --mask both set what changes: give one of them.")
        picture, area = expanded_image(picture, expand)
    chosen = None if size.size is None and size.aspect is None else choose_schedule(spec.settings.schedules, size.size, size.aspect)
    pixels = without_weights(spec, torch_dtype("float32"))[1].pixels_per_token
    inputs = read_edit(picture, area, strength, options, spec.settings.schedules, chosen, None, pixels)
    schedule = inputs.schedule
    arguments = sampling.call_arguments(spec, schedule)
    text = sampling.prompt(prompt, spec)
    seed = secrets.randbits(32) if size.seed is None else size.seed
    _, named = model.resolved(acceleration, schedule, size.num_images)
    pictures = plan_pictures([text], size.num_images, seed, out or default_out("out"), ("edit", named), force)
    require_writable([one.file for one in pictures], force)
    with token_bar() as progress:
        task = progress.add_task("loading", total=schedule.tokens)
        pipe = model.load(as_released=sampling.as_released)
        found = pipe.edit(
            inputs,
            text,
            method=acceleration,
            seed=[one.seed for one in pictures],
            on_stage=lambda preview: progress.advance(task, preview.done.stage.cells),
            **arguments,
        )
    for one, result in zip(pictures, found.images, strict=True):
        write_image(result, one.file)
        progress.note(escape(str(one.file)))
    show_results([(pictures, found.report)])
    assert found.report.edit is not None
    first, share = found.report.edit.from_stage[0], found.report.edit.mask_share[0]
    result_console().print(f"{share:.0%} of the pixels may change, from stage {first} of {len(schedule)} on.")
    show_next(f"nextscale edit {quote(str(pictures[0].file))} PROMPT --strength 0.8  # changes more: 1 starts at the first stage")


def parse_options(words: Sequence[str]) -> EditOptions:
    from ..edit_inputs import EditOptions
    from ..methods.registry import parse_value

    known, chosen = tuple(EditOptions.__dataclass_fields__), dict[str, Any]()
    for word in words:
        name, _, value = word.partition("=")
        if name not in known or not value:
            raise SettingError(f"--set must be KEY=VALUE with one of {', '.join(known)}; got {word!r}.")
        chosen[name] = parse_value(value)
    return EditOptions(**chosen)


def read_mask_file(file: Path) -> Image.Image:
    """Returns a mask whose white part changes. Where a file has transparent parts these are meant, as OpenAI's clients send them."""
    from ..edit_inputs import has_alpha, mask_from_alpha, open_image

    image = open_image(file, "--mask")
    transparent = has_alpha(image) and image.convert("RGBA").getchannel("A").getextrema()[0] < 255  # type: ignore[operator]
    result_console().print(f"{file}: the {'transparent' if transparent else 'white'} part changes.", markup=False, soft_wrap=True)
    return mask_from_alpha(image) if transparent else image.convert("L")


def expanded_image(image: Image.Image, sides: str) -> tuple[Image.Image, Image.Image]:
    from ..edit_inputs import expanded

    numbers = parse_numbers(sides)
    if len(numbers) != len(SIDES) or not all(number >= 0 and number == int(number) for number in numbers):
        raise SettingError(f"--expand must be four numbers of pixels, LEFT,TOP,RIGHT,BOTTOM, such as 256,0,256,0; got {sides!r}.")
    return expanded(image, *map(int, numbers))
