"""The prompts that judge a model, with what is known about them, and real images of the same prompts where there are any."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image
from torch import Tensor

from nextscale.errors import PromptError
from nextscale.eval.shards import DataError, Record, read_records, read_shard
from nextscale.io import from_pil

T = TypeVar("T")


@dataclass(frozen=True)
class EvalPrompt:
    """A prompt; style, label and the encoded real image are None where they are not known."""

    text: Any  # or a class number
    style: str | None = None
    label: str | None = None
    encoded: bytes | None = None

    @staticmethod
    def of(record: Record, encoded: bytes | None = None) -> EvalPrompt:
        return EvalPrompt(record.caption, record.style or None, record.label or None, encoded)

    def image(self, side: int) -> Tensor:
        """The real image [1, 3, side, side] in [-1, 1]."""
        assert self.encoded is not None
        try:
            return from_pil(Image.open(io.BytesIO(self.encoded)), (side, side))
        except (Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
            raise PromptError(f"the image of {self.text!r} is damaged ({error}): fetch its file again") from error


def read_eval_prompts(file: str | Path, limit: int | None = None) -> list[EvalPrompt]:
    """Prompts from a text file (one per line, # starts a comment), a .jsonl file whose objects have a caption (or prompt, text) and
    perhaps a style and a label, or a .tar shard of such captions and their images. `limit`: take this many, evenly spread over the file."""
    path = Path(file)
    try:
        prompts = _read(path)
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"prompts {path} cannot be read ({error}): give a text file, a .jsonl file or a .tar shard") from error
    except DataError as error:
        raise PromptError(f"prompts {path}: {error}") from error
    if not prompts:
        raise PromptError(f"{path} holds no prompt: write one per line, or give a .jsonl file or a .tar shard with captions")
    return evenly_spread(prompts, limit)


def evenly_spread(prompts: Sequence[T], limit: int | None) -> list[T]:
    """At most `limit` of the prompts, evenly spread over them."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    if limit < 1:
        raise PromptError(f"limit is the number of prompts to take, 1 or more; got {limit}")
    return [prompts[index * len(prompts) // limit] for index in range(limit)]


def _read(path: Path) -> list[EvalPrompt]:
    if path.suffix == ".tar":
        return [EvalPrompt.of(record, encoded) for record, encoded in zip(*read_shard(path), strict=True)]
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".jsonl":
        return [EvalPrompt.of(record) for record in read_records(text, path.name)]
    return _plain(text.splitlines())


def _plain(lines: Iterable[str]) -> list[EvalPrompt]:
    prompts = (line.strip() for line in lines)
    return [EvalPrompt(prompt) for prompt in prompts if prompt and not prompt.startswith("#")]
