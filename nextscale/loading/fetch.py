"""Finds the published parts of a model on this machine, and fetches those that are missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from ..errors import CheckpointError, DownloadError, MissingExtra, SettingError
from ..hub import Folder, HubCache, download, listing
from ..hub.remote import hub_package
from ..io import home
from .artifacts import Part, Weights, encoder_part, weight_parts
from .conversion import convert_beside, is_pickled
from .presets import ModelSpec, model_spec


def locate(part: Part) -> Path | None:
    """Below NEXTSCALE_HOME, or in the hub's cache; None where it is not on this machine."""
    return part.below(home()) or part.cached()


def fetch(parts: Sequence[Part], to: Path | None = None, with_room_for: float = 1.0) -> None:
    """Fetches the parts into the hub's cache, or below `to`. `with_room_for`: times their size that must be free before anything starts."""
    hub_package()
    for part in parts:
        part.require_known()
    listings = {repository: listing(repository) for repository in dict.fromkeys(part.repository for part in parts)}
    wanted = [one for part in parts for one in part.select(listings[part.repository])]
    extra = int((with_room_for - 1) * sum(one.file.size for one in wanted))
    download(wanted, HubCache() if to is None else Folder(to), extra)


def require_parts(spec: ModelSpec, needed: Sequence[Weights], with_encoder: bool) -> None:
    """Fetches what is missing of a model that is loaded by its name; its text encoder with it, where there is a program to read it."""
    encoder = encoder_part(spec) if with_encoder else None
    absent: list[Part] = [part for part in needed if locate(part) is None]
    if absent and encoder is not None and locate(encoder) is None and find_spec("transformers") is not None:
        absent.append(encoder)
    if not absent:
        return
    try:
        fetch(absent)
    except (DownloadError, MissingExtra) as error:
        raise type(error)(f"{error}. {by_hand(needed)}") from error


def by_hand(parts: Iterable[Weights]) -> str:
    places = [f"{part.source.url} to {home() / part.source.local}" for part in parts if part.source.file]
    return f"By hand: {', and '.join(places)}" if places else ""


def download_model(name: str, to: Path | None = None, convert: bool = False, offline: bool = False) -> dict[str, Path]:
    """Everything that a model needs, by what it is: found, or fetched into the hub's cache or below `to`.

    convert: pickled weights are also written as safetensors, beside them; those are what `load` then reads.
    offline: nothing is fetched; what is missing is an error.

    Files below `to` are compared with the hub's once, and fetched again where their content differs.
    """
    spec = model_spec(name)
    if spec.weights is None:
        raise CheckpointError(f"the weights of {name} have not been released: there is nothing to download")
    weights, encoder = weight_parts(spec), encoder_part(spec)
    parts: list[Part] = [*weights, *([encoder] if encoder else [])]
    if not parts:
        return {}
    if to is not None and to.exists() and not to.is_dir():
        raise SettingError(f"--to {to} is a file: give a folder")
    found = {part: part.below(to) if to is not None else locate(part) for part in parts}
    needed = [
        part for part, path in found.items() if path is None or (to is not None and not _is_whole_below(Folder(to), part, path, offline))
    ]
    if needed and offline:
        raise DownloadError(
            f"not on this machine, or changed since the download: {', '.join(part.what for part in needed)}. "
            "Leave out --offline to fetch them"
        )
    if needed:
        fetch(needed, to, with_room_for=2.0 if convert else 1.0)
    paths = {part: _found_after(part, to) for part in parts}
    if convert:
        for part in weights:
            if is_pickled(paths[part]):
                paths[part] = convert_beside(spec, paths[part], is_model=part.source is spec.weights)
    return {part.what: path for part, path in paths.items()}


def _is_whole_below(folder: Folder, part: Part, path: Path, offline: bool) -> bool:
    """Returns True if the files of a part need not be compared with those of the hub. Offline, files that were put there by hand pass."""
    if isinstance(part, Weights) and (not part.source.file or path != folder.root / part.source.local):
        return True  # the hub names no such file, or the package wrote it
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    states = {folder.is_as_fetched(file.relative_to(folder.root).as_posix()) for file in files}
    return states <= ({True, None} if offline else {True})


def _found_after(part: Part, to: Path | None) -> Path:
    path = part.below(to) if to is not None else locate(part)
    if path is None:
        raise DownloadError(f"{part.what} was fetched but is not whole. See what is published at https://huggingface.co/{part.repository}")
    return path
