"""Reads prompt files: text, JSONL, and tar shards of captioned images."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image
from torch import Tensor

from ..errors import PromptError
from ..io import from_pil, regular
from ..validation import is_int

CAPTIONS = "captions.jsonl"  # of a shard
MAX_MEMBER = 2**26  # bytes
TEXT_FIELDS = ("prompt", "caption", "text")  # the first one that a line has counts
PROMPT_FIELDS = (*TEXT_FIELDS, "class")
SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")

T = TypeVar("T")
Line = tuple[str, Mapping[str, Any]]
"""Name of a line in error messages, and its JSON object."""


@dataclass(frozen=True)
class SamplePrompt:
    """A prompt, or a class number as text; seed, size and aspect are None where the run decides. The id names its files."""

    id: str
    text: str
    seed: int | None = None  # of its first image
    size: str | None = None
    aspect: str | None = None


@dataclass(frozen=True)
class EvalPrompt:
    """A prompt of an evaluation; style, label and the encoded real image are None where they are not known."""

    text: Any  # or a class number
    style: str | None = None
    label: str | None = None
    encoded: bytes | None = None

    def image(self, side: int) -> Tensor:
        """Returns the real image [1, 3, side, side] in [-1, 1]."""
        assert self.encoded is not None
        try:
            return from_pil(Image.open(io.BytesIO(self.encoded)), (side, side))
        except (Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
            raise PromptError(f"the image of {self.text!r} is damaged ({error}): fetch its file again") from error


def read_sample_prompts(file: Path, limit: int | None = None) -> list[SamplePrompt]:
    """Reads prompts with ids. Objects of a .jsonl file have one of PROMPT_FIELDS and may have id, seed, size and aspect; other files are
    read as by `read_eval_prompts`. The default id is the number of the prompt, from 0."""
    if file.suffix == ".jsonl":
        lines = read_lines(_text(file), file.name)
        prompts = [_sample_prompt(fields, source, numbered(place, len(lines))) for place, (source, fields) in enumerate(lines)]
        if not prompts:
            raise PromptError(f"{file} holds no prompt: write one JSON object per line, such as " + '{"id": "fox", "prompt": "a red fox"}')
    else:
        texts = [prompt.text for prompt in read_eval_prompts(file)]
        prompts = [SamplePrompt(numbered(number, len(texts)), text) for number, text in enumerate(texts)]
    if twice := [name for name, times in Counter(prompt.id for prompt in prompts).items() if times > 1]:
        raise PromptError(f"{file}: the id {twice[0]!r} stands for several prompts; ids name files: give each prompt its own")
    return evenly_spread(prompts, limit)


def read_eval_prompts(file: str | Path, limit: int | None = None) -> list[EvalPrompt]:
    """Reads prompts from a text file (one per line, # starts a comment), a .jsonl file whose objects have one of TEXT_FIELDS and may have
    a style and a label, or a .tar shard. limit: take so many, evenly spread over the file."""
    path = Path(file)
    if path.suffix == ".tar":
        prompts = [_eval_prompt(line, image) for line, image in zip(*read_shard(path), strict=True)]
    elif path.suffix == ".jsonl":
        prompts = [_eval_prompt(line) for line in read_lines(_text(path), path.name)]
    else:
        stripped = (line.strip() for line in _text(path).splitlines())
        prompts = [EvalPrompt(line) for line in stripped if line and not line.startswith("#")]
    if not prompts:
        raise PromptError(f"{path} holds no prompt: write one per line, or give a .jsonl file or a .tar shard with captions")
    return evenly_spread(prompts, limit)


def evenly_spread(prompts: Sequence[T], limit: int | None) -> list[T]:
    """Returns at most `limit` of the prompts, evenly spread over them."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    if limit < 1:
        raise PromptError(f"limit must be an int of at least 1; got {limit}")
    return [prompts[index * len(prompts) // limit] for index in range(limit)]


def read_lines(text: str, source: str) -> list[Line]:
    """Reads a JSON object from every line that is not empty."""
    lines: list[Line] = []
    for number, line in enumerate(text.split("\n"), start=1):  # JSON may hold characters at which `splitlines` splits
        if line.strip():
            name = f"{source}, line {number}"
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise PromptError(f"{name} is no JSON ({error}): write one object with a prompt per line") from error
            if not isinstance(fields, dict):
                raise PromptError(f"{name}: expected an object with a prompt; got {line[:80]!r}")
            lines.append((name, fields))
    return lines


def read_shard(shard: Path) -> tuple[list[Line], list[bytes]]:
    """Reads a tar shard: the lines of its captions.jsonl, and the bytes of the image that each names."""
    try:
        with tarfile.open(regular(shard), "r:") as tar:
            members = {member.name.removeprefix("./"): member for member in tar if member.isfile()}
            if CAPTIONS not in members:
                raise PromptError(f"{shard} holds no {CAPTIONS}: expected a tar file with that and the images it names")
            lines = read_lines(_content(tar, members[CAPTIONS]).decode(), f"{CAPTIONS} of {shard}")
            files = [word_of(line, "file") or "" for line in lines]
            if absent := [file for file in files if file not in members]:
                raise PromptError(f"{shard} lacks {len(absent)} images that its {CAPTIONS} names, such as {absent[0]!r}")
            images = {name: _content(tar, members[name]) for name in {*files}}
            return lines, [images[file] for file in files]
    except UnicodeDecodeError as error:
        raise PromptError(f"{CAPTIONS} of {shard} is not UTF-8: {error}") from error
    except (OSError, tarfile.TarError) as error:
        raise PromptError(f"{shard} cannot be read as a tar file without compression: {error}") from error


def caption_of(line: Line, names: Sequence[str] = TEXT_FIELDS) -> str:
    """Returns the text under the first of the names that the line has. The field "class" holds an int."""
    source, fields = line
    text = next((fields[name] for name in names if fields.get(name) is not None), None)
    if "class" in names and is_int(text, -1):
        return str(text)
    if not isinstance(text, str) or not text.strip():
        raise PromptError(f"{source} must have a text that is not empty under one of {', '.join(names)}; got {text!r:.80}")
    return text


def word_of(line: Line, name: str) -> str | None:
    """Returns the string under a name, or None if it is empty or missing."""
    value = line[1].get(name)
    if value is not None and not isinstance(value, str):
        raise PromptError(f"{line[0]}: {name} must be a string; got {value!r:.80}")
    return value or None


def numbered(number: int, count: int) -> str:
    """Returns numbers of equal length, so that names sort as the prompts do."""
    return f"{number:0{max(5, len(str(count - 1)))}d}"


def is_unicode(text: str) -> bool:
    """Returns False if the text has surrogates, which JSON may name but no file can hold."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"prompts {path} cannot be read ({error}): give a text file, a .jsonl file or a .tar shard") from error


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.issparse() or member.size > MAX_MEMBER:  # a sparse member may be any number of times as large as its shard
        raise PromptError(
            f"{member.name!r} of {tar.name!r} must be a file of at most {MAX_MEMBER} bytes, not sparse; got {member.size} bytes. "
            "Write the shard again"
        )
    file = tar.extractfile(member)
    assert file is not None  # only regular files are read
    return file.read()


def _eval_prompt(line: Line, encoded: bytes | None = None) -> EvalPrompt:
    return EvalPrompt(caption_of(line), word_of(line, "style"), word_of(line, "label"), encoded)


def _sample_prompt(fields: Mapping[str, Any], source: str, default_id: str) -> SamplePrompt:
    seed, name = fields.get("seed"), fields.get("id")
    if seed is not None and not is_int(seed):
        raise PromptError(f"{source}: seed must be an int of at least 0; got {seed!r}")
    name = default_id if name is None else str(name) if is_int(name) else name
    if not isinstance(name, str) or not SAFE_ID.fullmatch(name):
        raise PromptError(f"{source}: id must be up to 120 letters, digits, dots, underscores and dashes, to name files; got {name!r:.80}")
    text = caption_of((source, fields), PROMPT_FIELDS)
    return SamplePrompt(name, text, seed, *(_shape(fields.get(key), f"{source}: {key}") for key in ("size", "aspect")))


def _shape(value: Any, name: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if is_int(value, 1):
        return str(value)
    if isinstance(value, Sequence) and len(value) == 2 and all(is_int(side, 1) for side in value):
        return "x".join(map(str, value))
    raise PromptError(f"{name} must be written as on the command line, such as '512x512' or '16:9'; got {value!r:.80}")
