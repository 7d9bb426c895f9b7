"""One compressed shard of all training pictures, small enough to travel to a machine for a few hours."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from nextscale.errors import PromptError
from nextscale.io import replacing
from nextscale.offline.prompts import CAPTIONS, read_shard

from .sprites import PHOTO


def pack(shards: Sequence[Path], target: Path, quality: int) -> int:
    """Writes the pictures of all shards with their captions to one .tar.gz; returns its bytes.

    Photographs are encoded again as WebP of this quality. Icons stay as they are: training learns their edges.
    """
    found = [read_shard(shard) for shard in shards]
    lines = [line for of_shard, _ in found for _, line in of_shard]
    files = [file for _, of_shard in found for file in of_shard]
    contents: dict[str, bytes] = {}
    for line, file in zip(lines, files, strict=True):
        name = str(line["file"])
        contents[name] = smaller(name, file, quality) if line.get("style") == PHOTO else file
    with replacing(target) as temporary, tarfile.open(temporary, "w:gz", compresslevel=6) as tar:
        for name, content in members(lines, contents):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return target.stat().st_size


def members(lines: Sequence[Mapping[str, Any]], contents: dict[str, bytes]) -> Iterable[tuple[str, bytes]]:
    yield CAPTIONS, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    yield from contents.items()


def smaller(name: str, content: bytes, quality: int) -> bytes:
    """Returns the picture as WebP, or as it was if that is not smaller."""
    encoded = io.BytesIO()
    try:
        Image.open(io.BytesIO(content)).convert("RGB").save(encoded, "WEBP", quality=quality, method=4)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise PromptError(f"{name} is not a picture that Pillow can read: {error}") from error
    return min(content, encoded.getvalue(), key=len)
