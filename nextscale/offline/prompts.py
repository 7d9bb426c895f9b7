"""The prompts of a long run: every one has an id, which names its images."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PromptError
from ..eval.prompts import evenly_spread, read_eval_prompts
from ..eval.shards import TEXT_FIELDS
from ..validation import is_int

PROMPT_FIELDS = (*TEXT_FIELDS, "class")
SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


@dataclass(frozen=True)
class SamplePrompt:
    """A prompt, or the number of a class as text; seed, size and aspect are None where the run decides."""

    id: str
    text: str
    seed: int | None = None  # of its first image
    size: str | None = None
    aspect: str | None = None


def read_sample_prompts(file: Path, limit: int | None = None) -> list[SamplePrompt]:
    """Prompts of a .jsonl file whose objects have a prompt (or caption, text, class) and perhaps id, seed, size and aspect; or of the
    other files that `read_eval_prompts` takes. Where there is no id it is the number of the prompt, from 0."""
    if file.suffix == ".jsonl":
        prompts = _read_lines(file)
    else:
        texts = [prompt.text for prompt in read_eval_prompts(file)]
        prompts = [SamplePrompt(numbered(number, len(texts)), text) for number, text in enumerate(texts)]
    if twice := [name for name, times in Counter(prompt.id for prompt in prompts).items() if times > 1]:
        raise PromptError(f"{file}: the id {twice[0]!r} stands for several prompts; ids name files: give each prompt its own")
    return evenly_spread(prompts, limit)


def numbered(number: int, count: int) -> str:
    """Numbers of equal length, so that names sort as the prompts do."""
    return f"{number:0{max(5, len(str(count - 1)))}d}"


def _read_lines(file: Path) -> list[SamplePrompt]:
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # JSON may hold what `splitlines` takes for the end of a line
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"prompts {file} cannot be read ({error}): give a .jsonl file, one object with a prompt per line") from error
    found = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise PromptError(f"{file} holds no prompt: write one JSON object per line, such as " + '{"id": "fox", "prompt": "a red fox"}')
    return [_read_line(line, f"{file.name}, line {number}", numbered(place, len(found))) for place, (number, line) in enumerate(found)]


def _read_line(line: str, source: str, default_id: str) -> SamplePrompt:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{source} is no JSON ({error}): write one object with a prompt per line") from error
    if not isinstance(fields, dict):
        raise PromptError(f"{source} is {line[:80]!r}; expected an object with a prompt")
    seed = fields.get("seed")
    if seed is not None and not is_int(seed):
        raise PromptError(f"{source}: seed {seed!r} is no whole number from 0 on")
    return SamplePrompt(
        _id(fields.get("id"), source, default_id),
        _text(fields, source),
        seed,
        *(_word(fields, name, source) for name in ("size", "aspect")),
    )


def _text(fields: Mapping[str, Any], source: str) -> str:
    text = next((fields[name] for name in PROMPT_FIELDS if fields.get(name) is not None), None)
    if is_int(text, -1):
        return str(text)
    if not isinstance(text, str) or not text.strip():
        raise PromptError(
            f"{source} has no prompt: expected text that is not empty under one of {', '.join(PROMPT_FIELDS)}; got {text!r:.80}"
        )
    return text


def is_unicode(text: str) -> bool:
    """Whether it can be written: JSON may name halves of characters."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _id(given: Any, source: str, default: str) -> str:
    name = default if given is None else str(given) if is_int(given) else given
    if not isinstance(name, str) or not SAFE_ID.fullmatch(name):
        raise PromptError(
            f"{source}: the id {name!r:.80} cannot name files: use up to 120 letters, digits, dots, underscores and dashes, or leave it out"
        )
    return name


def _word(fields: Mapping[str, Any], name: str, source: str) -> str | None:
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    if is_int(value, 1):
        return str(value)
    if isinstance(value, Sequence) and len(value) == 2 and all(is_int(side, 1) for side in value):
        return "x".join(map(str, value))
    raise PromptError(f"{source}: {name} {value!r:.80} is written as on the command line, such as '512x512' or '16:9'")
