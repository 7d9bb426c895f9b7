"""Reads prompt files: text, JSONL, and tar shards of captioned images."""

import json
import re
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import PromptError
from ..io import regular
from ..validation import is_int, require

CAPTIONS = "captions.jsonl"  # of a shard
MAX_MEMBER = 2**26  # bytes
TEXT_FIELDS = ("prompt", "caption", "text")  # the first that a line has is used
PROMPT_FIELDS = (*TEXT_FIELDS, "class")
SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")

T = TypeVar("T")
Line = tuple[str, Mapping[str, Any]]
"""Name of a line in error messages, and its JSON object."""


@dataclass(frozen=True)
class SamplePrompt:
    """Prompt, or class number as text. None for seed, size or aspect means the setting of the run. The id names its files."""

    id: str
    text: str
    seed: int | None = None  # of its first image
    size: str | None = None
    aspect: str | None = None
    original: str | None = None  # the text before it was rewritten


def read_sample_prompts(file: Path, limit: int | None = None) -> list[SamplePrompt]:
    """Reads prompts with ids. Objects of a .jsonl file have one of PROMPT_FIELDS and may have id, seed, size, aspect and original;
    other files are read as by `read_prompts`. The default id is the number of the prompt, from 0."""
    if file.suffix == ".jsonl":
        lines = read_lines(_text(file), file.name)
        prompts = [_sample_prompt(line, numbered(place, len(lines))) for place, line in enumerate(lines)]
        if not prompts:
            raise PromptError(f"{file} has no prompt. Write one JSON object per line, such as " + '{"id": "fox", "prompt": "a red fox"}')
    else:
        texts = read_prompts(file)
        prompts = [SamplePrompt(numbered(number, len(texts)), text) for number, text in enumerate(texts)]
    if twice := [name for name, times in Counter(prompt.id for prompt in prompts).items() if times > 1]:
        raise PromptError(f"{file}: the id {twice[0]!r} is used for several prompts, and ids name files. Give each prompt its own id.")
    return evenly_spread(prompts, limit)


def read_prompts(file: Path, limit: int | None = None) -> list[str]:
    """Reads a text file (one prompt per line, # starts a comment), or the TEXT_FIELDS of a .jsonl file or of a .tar shard.

    limit: maximum number of prompts, evenly spread over the file.
    """
    if file.suffix in (".tar", ".jsonl"):
        prompts = [caption_of(line) for line in (read_shard(file)[0] if file.suffix == ".tar" else read_lines(_text(file), file.name))]
    else:
        stripped = (line.strip() for line in _text(file).splitlines())
        prompts = [line for line in stripped if line and not line.startswith("#")]
    if not prompts:
        raise PromptError(f"{file} has no prompt. Write one per line, or give a .jsonl file or a .tar shard with captions.")
    return evenly_spread(prompts, limit)


def evenly_spread(prompts: Sequence[T], limit: int | None) -> list[T]:
    """Returns at most `limit` of the prompts, evenly spread over them."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    require(limit >= 1, "limit", "an int of at least 1", limit, PromptError)
    return [prompts[index * len(prompts) // limit] for index in range(limit)]


def read_lines(text: str, source: str) -> list[Line]:
    """Reads a JSON object from every line that is not empty."""
    lines: list[Line] = []
    for number, line in enumerate(text.split("\n"), start=1):  # JSON may hold characters at which `splitlines` splits
        if line.strip():
            try:
                lines.append((f"{source}, line {number}", json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise PromptError(
                    f"{source}, line {number} is not valid JSON ({error}). Write one object with a prompt per line."
                ) from error
            if not isinstance(lines[-1][1], dict):
                raise PromptError(f"{source}, line {number} must be an object with a prompt; got {line[:80]!r}.")
    return lines


def read_shard(shard: Path) -> tuple[list[Line], list[bytes]]:
    """Reads a tar shard: the lines of its captions.jsonl, and the bytes of the image that each names."""
    try:
        with tarfile.open(regular(shard), "r:") as tar:
            members = {member.name.removeprefix("./"): member for member in tar if member.isfile()}
            if CAPTIONS not in members:
                raise PromptError(f"{shard} has no {CAPTIONS}. Give a tar file with that file and the images that it names.")
            lines = read_lines(_content(tar, members[CAPTIONS]).decode(), f"{CAPTIONS} of {shard}")
            files = [word_of(line, "file") or "" for line in lines]
            if absent := [file for file in files if file not in members]:
                raise PromptError(f"{shard} lacks {len(absent)} images that its {CAPTIONS} names, such as {absent[0]!r}.")
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
    require(value is None or isinstance(value, str), f"{line[0]}: {name}", "a string", value, PromptError)
    return value or None


def numbered(number: int, count: int) -> str:
    """Returns the number with leading zeros, so that names sort as the prompts do."""
    return f"{number:0{max(5, len(str(count - 1)))}d}"


def is_unicode(text: str) -> bool:
    """Returns False if the text has surrogates, which JSON may name but no file can hold."""
    return text == text.encode(errors="ignore").decode()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"prompts {path} cannot be read ({error}). Give a text file, a .jsonl file or a .tar shard.") from error


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.issparse() or member.size > MAX_MEMBER:  # a sparse member may be far larger than its shard
        raise PromptError(
            f"{member.name!r} of {tar.name!r} must be a file of at most {MAX_MEMBER} bytes, not sparse; got {member.size} bytes. "
            "Write the shard again."
        )
    file = tar.extractfile(member)
    assert file is not None  # only regular files are read
    return file.read()


def _sample_prompt(line: Line, default_id: str) -> SamplePrompt:
    source, fields = line
    seed, name = fields.get("seed"), fields.get("id")
    require(seed is None or is_int(seed), f"{source}: seed", "an int of at least 0", seed, PromptError)
    name = default_id if name is None else str(name) if is_int(name) else name
    fits = isinstance(name, str) and SAFE_ID.fullmatch(name)
    require(fits, f"{source}: id", "up to 120 letters, digits, dots, underscores and dashes, to name files", name, PromptError)
    size, aspect = (_shape(fields.get(key), f"{source}: {key}") for key in ("size", "aspect"))
    return SamplePrompt(name, caption_of(line, PROMPT_FIELDS), seed, size, aspect, word_of(line, "original"))


def _shape(value: Any, name: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    sides = value if isinstance(value, list) and len(value) == 2 else [value]
    require(all(is_int(side, 1) for side in sides), name, "written as on the command line, such as '512x512' or '16:9'", value, PromptError)
    return "x".join(map(str, sides))
