"""Folder layouts of the scorers, as in their repositories."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from nextscale.errors import NextscaleError
from nextscale.io import grid, replacing, write_errors, write_image, write_text
from nextscale.offline.prompts import SamplePrompt

from .prompts import lines_of

LONGEST_NAME = 255  # bytes, on the usual file systems


@dataclass(frozen=True)
class Samples:
    """The images of a suite, by the id of their prompt, in the order of their seeds."""

    prompts: Sequence[SamplePrompt]
    images: Mapping[str, Sequence[Path]]
    source: Path | None = None  # the prompt set
    name: str = "model"  # of what generated them


def geneval(samples: Samples, out: Path) -> None:
    """NUMBER/samples/0000.png and NUMBER/metadata.jsonl, which is that line of the prompt set."""
    assert samples.source is not None
    for prompt, line in zip(samples.prompts, lines_of(samples.source), strict=True):
        write_text(line + "\n", out / prompt.id / "metadata.jsonl")
        for number, file in enumerate(samples.images[prompt.id]):
            put(file, out / prompt.id / "samples" / f"{number:04d}.png")


def geneval2(samples: Samples, out: Path) -> None:
    """image_paths.json, from every prompt to the path of its image."""
    paths = {}
    for prompt in samples.prompts:
        target = out / "images" / f"{prompt.id}.png"
        put(samples.images[prompt.id][0], target)
        paths[prompt.text] = str(target.resolve())
    write_text(json.dumps(paths, ensure_ascii=False, indent=1) + "\n", out / "image_paths.json")


def dpg(samples: Samples, out: Path) -> None:
    """ID.png, four images in a square: the scorer cuts it at the given resolution. No other file may be there."""
    for prompt in samples.prompts:
        images = [opened(file) for file in samples.images[prompt.id]]
        if len(images) > 4 or len({side for image in images for side in image.size}) > 1:
            raise NextscaleError(
                f"DPG-Bench cuts up to four square images of one size out of a picture; {prompt.id} has"
                f" {', '.join(f'{image.height}x{image.width}' for image in images)}: generate them so, and give --seeds 1 to 4"
            )
        write_image(grid(images), out / f"{prompt.id}.png")


def hps(samples: Samples, out: Path) -> None:
    """STYLE/00000.jpg, counted in every style."""
    for prompt in samples.prompts:
        style, _, number = prompt.id.rpartition("-")
        put(samples.images[prompt.id][0], out / style / f"{number}.jpg")


def image_reward(samples: Samples, out: Path) -> None:
    """MODEL/ID_0.png to ID_9.png, and nothing else: the scorer divides the number of files by the number of prompts."""
    for prompt in samples.prompts:
        for number, file in enumerate(samples.images[prompt.id]):
            put(file, out / samples.name / f"{prompt.id}_{number}.png")


def mjhq(samples: Samples, out: Path) -> None:
    """CATEGORY/ID.png, like the real images."""
    for prompt in samples.prompts:
        category, _, name = prompt.id.partition(".")
        put(samples.images[prompt.id][0], out / category / f"{name}.png")


def flat(samples: Samples, out: Path) -> None:
    """ID.png."""
    for prompt in samples.prompts:
        put(samples.images[prompt.id][0], out / f"{prompt.id}.png")


def imagenet(samples: Samples, out: Path) -> None:
    """samples.npz with all images as arr_0 [N, H, W, 3], 8 bits, as OpenAI's evaluator takes them. One image at a time is in memory.

    The first images of all classes come first, then the second ones: the evaluator takes the Inception Score of 5,000 images after
    another, and would find 100 classes in each part if images of a class were adjacent.
    """
    files = [file for one_of_each in zip(*(samples.images[prompt.id] for prompt in samples.prompts), strict=True) for file in one_of_each]
    first = np.asarray(opened(files[0]))
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(files), *first.shape)}
    with (
        replacing(out / "samples.npz") as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED, allowZip64=True) as archive,
        archive.open("arr_0.npy", "w", force_zip64=True) as array,
    ):
        np.lib.format.write_array_header_1_0(array, header)  # type: ignore[arg-type]
        for file in files:
            pixels = np.asarray(opened(file))
            if pixels.shape != first.shape:
                raise NextscaleError(f"{file} is {pixels.shape[:2]} pixels, others are {first.shape[:2]}: an npz holds images of one size")
            array.write(pixels.tobytes())


def compbench(samples: Samples, out: Path) -> None:
    """SET/samples/PROMPT_000000.png: the scorer reads the prompt from the name, up to the first _, and sorts by the number."""
    counts: dict[str, int] = {}
    for prompt in samples.prompts:
        group = prompt.id.rpartition("-")[0]
        for file in samples.images[prompt.id]:
            number = counts.get(group, 0)
            name = f"{prompt.text.replace('/', ' ').replace('_', ' ')}_{number:06d}.png"
            if len(name.encode()) > LONGEST_NAME or "\0" in name:
                raise NextscaleError(
                    f"the prompt {prompt.text[:60]!r}... cannot be in a file name, which T2I-CompBench needs: leave it out"
                )
            put(file, out / group / "samples" / name)
            counts[group] = number + 1


def evalscope(samples: Samples, out: Path) -> None:
    """samples.jsonl with id, prompt and image_path, for the data set general_t2i."""
    lines = []
    for prompt in samples.prompts:
        for number, file in enumerate(samples.images[prompt.id]):
            name = prompt.id if len(samples.images[prompt.id]) == 1 else f"{prompt.id}_{number}"
            lines.append({"id": name, "prompt": prompt.text, "image_path": str(file.resolve())})
    write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), out / "samples.jsonl")


def put(file: Path, target: Path) -> None:
    """The same image under another name: a link where that is possible, rewritten where the format is another."""
    if file.suffix.lower() != target.suffix.lower():
        write_image(opened(file), target)
        return
    with write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, target)
        except OSError:  # another file system
            with replacing(target) as temporary:
                shutil.copyfile(file, temporary)


def opened(file: Path) -> Image.Image:
    try:
        with Image.open(file) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError) as error:
        raise NextscaleError(f"{file} cannot be read as an image ({error}): run `nextscale sample` again, which replaces it") from error
