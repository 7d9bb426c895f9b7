"""The command `smaller-shard`."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Annotated

import typer

from nextscale.cli.files import require_writable
from nextscale.cli.options import Force
from nextscale.io import replacing, to_pil
from nextscale.offline.prompts import CAPTIONS, evenly_spread, read_shard

from ..program import app
from .agreement import SIDE
from .prompts import EvalPrompt


@app.command()
def smaller_shard(
    shard: Annotated[Path, typer.Argument(metavar="SHARD", help="A .tar shard of captioned images.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The .tar file to write.")],
    *,
    side: Annotated[int, typer.Option("--side", metavar="PIXELS", min=16, help="Side of the images.")] = SIDE,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, show_default="all", help="Images, evenly spread.")] = None,
    force: Force = False,
) -> None:
    """Copy a shard with images of the size at which probes see them, for machines to which little can be sent."""
    require_writable([out], force)
    entries = evenly_spread(list(zip(*read_shard(shard), strict=True)), limit)
    captions = "".join(json.dumps(fields, ensure_ascii=False) + "\n" for (_, fields), _ in entries)
    with replacing(out) as temporary, tarfile.open(temporary, "w") as tar:
        add(tar, CAPTIONS, captions.encode())
        for (_, fields), content in entries:
            add(tar, str(fields["file"]), smaller(content, side))
    typer.echo(f"wrote {len(entries)} images to {out}: {out.stat().st_size / 1e6:.1f} MB, {shard.stat().st_size / 1e6:.1f} before")


def smaller(content: bytes, side: int) -> bytes:
    [image] = to_pil(EvalPrompt("", encoded=content).image(side))
    image.save(buffer := io.BytesIO(), "WEBP", quality=70)
    return min(content, buffer.getvalue(), key=len)


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
