"""What is drawn to judge a model: prompts with what is known about them, and real images of the same prompts where there are any."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ...errors import PromptError
from ...io import from_pil

CAPTIONS = "captions.jsonl"


@dataclass(frozen=True)
class EvalPrompt:
    """A prompt; style, label and the encoded real image are None where the file does not tell."""

    text: str
    style: str | None = None
    label: str | None = None
    encoded: bytes | None = None

    def image(self, side: int) -> Tensor:
        """The real image [1, 3, side, side] in [-1, 1]."""
        assert self.encoded is not None
        try:
            return from_pil(Image.open(io.BytesIO(self.encoded)), (side, side))
        except (UnidentifiedImageError, Image.DecompressionBombError, OSError) as error:
            raise PromptError(f"the image of {self.text!r} is damaged ({error}): fetch its file again") from error


def read_eval_prompts(file: str | Path, limit: int | None = None) -> list[EvalPrompt]:
    """From a text file (one prompt per line, # starts a comment), a .jsonl file whose objects have a caption and perhaps a style and a
    label, or a .tar shard of such a captions.jsonl and the images it names. With `limit`, so many of them, evenly spread over the file."""
    path = Path(file)
    try:
        if path.suffix == ".tar":
            prompts = _shard(path)
        else:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
            prompts = _from_jsonl(path, lines) if path.suffix == ".jsonl" else _from_text(lines)
    except (OSError, EOFError, UnicodeDecodeError, tarfile.TarError) as error:
        raise PromptError(f"prompts {path} cannot be read ({error}): give a text file, a .jsonl file or a .tar shard") from error
    if not prompts:
        raise PromptError(f"{path} holds no prompt: write one per line, or give a .jsonl file or a .tar shard with captions")
    return spread(prompts, limit)


def spread(prompts: Sequence[EvalPrompt], limit: int | None) -> list[EvalPrompt]:
    if limit is None or limit >= len(prompts):
        return list(prompts)
    if limit < 1:
        raise PromptError(f"limit is the number of prompts to draw, 1 or more; got {limit}")
    return [prompts[index * len(prompts) // limit] for index in range(limit)]


def _from_text(lines: Iterable[str]) -> list[EvalPrompt]:
    texts = (line.strip() for line in lines)
    return [EvalPrompt(text) for text in texts if text and not text.startswith("#")]


def _from_jsonl(path: Path, lines: Iterable[str]) -> list[EvalPrompt]:
    return [_prompt(entry) for entry in _entries(path, lines)]


def _entries(path: Path, lines: Iterable[str]) -> list[dict[str, Any]]:
    entries = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise PromptError(f"{path}, line {number} is no JSON ({error})") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("caption"), str) or not entry["caption"].strip():
            raise PromptError(f"{path}, line {number}: expected an object with a caption, a text that is not empty; got {line[:80]!r}")
        if other := [name for name in ("style", "label", "file") if not isinstance(entry.get(name), str | None)]:
            raise PromptError(f"{path}, line {number}: {other[0]} is {entry[other[0]]!r:.80}; expected a text, or nothing")
        entries.append(entry)
    return entries


def _prompt(entry: dict[str, Any], encoded: bytes | None = None) -> EvalPrompt:
    return EvalPrompt(entry["caption"], entry.get("style"), entry.get("label"), encoded)


def _shard(path: Path) -> list[EvalPrompt]:
    with tarfile.open(path) as archive:
        contents = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
        if CAPTIONS not in contents:
            raise PromptError(f"{path} has no {CAPTIONS}: give a shard of images and captions")
        data = {name: file.read() for name, file in contents.items() if file is not None}
    entries = _entries(path, data[CAPTIONS].decode("utf-8").splitlines())
    for entry in entries:
        if entry.get("file") not in data:
            raise PromptError(f"{path}: {CAPTIONS} names the image {entry.get('file')!r}, which the shard does not hold")
    return [_prompt(entry, data[entry["file"]]) for entry in entries]
