"""Turns a folder of `nextscale sample` into the folder that a scorer reads."""

from __future__ import annotations

from pathlib import Path

from nextscale.errors import NextscaleError
from nextscale.offline.manifest import read_folder

from .layouts import Samples
from .prompts import rewritten
from .suite import Suite


def export(
    suite: Suite, folder: Path, out: Path, prompt_set: Path | None = None, seeds: int | None = None, texts: Path | None = None
) -> int:
    """Arranges the images of `folder` for the suite's scorer; returns their number.

    Scorers see the original prompts. Images of rewritten ones are taken if their manifest names the original, or `texts` has them.

    Args:
        seeds: images per prompt, if not the published number.
        texts: the file of rewritten prompts, as `prompts.rewritten` reads it.
    """
    if out.exists() and not out.is_dir():
        raise NextscaleError(f"{out} is a file: give a new folder")
    if out.is_dir() and any(out.iterdir()):
        raise NextscaleError(f"{out} is not empty, and some scorers count files: give a new folder")
    prompts = suite.prompts(prompt_set)
    wanted = suite.seeds if seeds is None else seeds
    found: dict[str, list[tuple[int, Path]]] = {}
    shown = {prompt.id: prompt for prompt in (prompts if texts is None else rewritten(prompts, texts))}
    for entry in read_folder(folder).values():
        asked = shown.get(entry.id)
        if asked is not None and str(entry.prompt) != asked.text and (texts is not None or entry.original != asked.text):
            raise NextscaleError(
                f"{folder / entry.file} shows {entry.prompt!r:.80}, and {entry.id} of {suite.title} is {asked.text!r:.80}: give the"
                f" folder that was generated from the prompts of `python -m nextscale_research suite {suite.name} --write-prompts FILE`,"
                " or for rewritten prompts --rewritten FILE"
            )
        if (folder / entry.file).is_file() and entry.matches(folder):
            found.setdefault(entry.id, []).append((entry.seed, folder / entry.file))
    if lacking := [prompt.id for prompt in prompts if len(found.get(prompt.id, ())) < wanted]:
        raise NextscaleError(
            f"{folder} lacks images of {len(lacking)} of the {len(prompts)} prompts, such as {lacking[0]!r}, or they differ from its"
            f" manifest: run `nextscale sample -n {wanted}` with the prompts of `python -m nextscale_research suite {suite.name}"
            f" --write-prompts FILE`"
        )
    images = {prompt.id: [file for _, file in sorted(found[prompt.id])[:wanted]] for prompt in prompts}
    suite.layout(Samples(prompts, images, prompt_set, folder.resolve().name), out)
    return wanted * len(prompts)
