"""Shards of captioned pictures: what is read, what is refused, and how pictures vary."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from nextscale.errors import PromptError
from nextscale.offline.prompts import CAPTIONS
from training.data import Pictures, fingerprint, read_pictures
from training.records import Record, read_records


def picture(size: tuple[int, int] = (16, 16), mode: str = "RGB", color: Any = "red", kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, color).save(file, kind)
    return file.getvalue()


def shard(path: Path, members: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def lines(*records: Any) -> bytes:
    return "\n".join(json.dumps(record) for record in records).encode()


FOX = {"file": "fox.png", "caption": "a fox"}


# --- shards


def test_pictures_and_records_of_several_shards(tmp_path: Path) -> None:
    full = {"file": "b/owl.webp", "caption": "an owl", "keywords": ["bird"], "style": "flat", "unseen": True, "tone": "dark", "alt": None}
    first = shard(tmp_path / "0.tar", {CAPTIONS: lines(FOX), "fox.png": picture()})
    second = shard(
        tmp_path / "1.tar", {f"./{CAPTIONS}": lines(full) + b"\n\n", "./b/owl.webp": picture((32, 32), color="blue", kind="WEBP")}
    )
    by_side = read_pictures([first, second], [16, 24])
    assert [(side, of_side.side) for side, of_side in by_side.items()] == [(16, 16), (24, 24)]
    assert by_side[24].pixels[:, :, 12, 12].tolist() == by_side[16].pixels[:, :, 8, 8].tolist()
    pictures = by_side[16]
    assert pictures.pixels.shape == (2, 3, 16, 16) and pictures.pixels.dtype == torch.uint8 and pictures.side == 16
    assert pictures.pixels[0, :, 0, 0].tolist() == [255, 0, 0]
    assert pictures.pixels[1, 2].float().mean() > 250 and pictures.pixels[1, 0].float().mean() < 5
    assert pictures.records == (
        Record("fox.png", "a fox"),
        Record("b/owl.webp", "an owl", style="flat", keywords=("bird",), unseen=True),
    )


def test_transparent_becomes_white(tmp_path: Path) -> None:
    clear = shard(tmp_path / "0.tar", {CAPTIONS: lines(FOX), "fox.png": picture(mode="RGBA", color=(0, 0, 0, 0))})
    assert read_pictures([clear], [16])[16].pixels.min() == 255


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"fox.png": picture()}, "captions.jsonl"),
        ({CAPTIONS: lines(FOX, FOX | {"file": "owl.png"}), "fox.png": picture()}, "lacks 1 images .* such as 'owl.png'"),
        ({CAPTIONS: b""}, "no pictures"),
        ({CAPTIONS: b"\n{"}, "captions.jsonl of .*, line 2 is not valid JSON"),
        ({CAPTIONS: b"\xff"}, "is not UTF-8"),
        ({CAPTIONS: lines(["fox.png", "a fox"])}, "line 1 must be an object"),
        ({CAPTIONS: lines({"file": "fox.png"}), "fox.png": picture()}, "line 1 must have a text"),
        ({CAPTIONS: lines({"caption": "a fox"})}, "lacks 1 images .* such as ''"),
        ({CAPTIONS: lines(FOX | {"caption": " "}), "fox.png": picture()}, "must have a text"),
        ({CAPTIONS: lines(FOX | {"caption": 3}), "fox.png": picture()}, "caption must be a string"),
        ({CAPTIONS: lines(FOX | {"file": ["fox.png"]})}, "file must be a string"),
        ({CAPTIONS: lines(FOX | {"keywords": "bird"}), "fox.png": picture()}, "keywords must be a list"),
        ({CAPTIONS: lines(FOX), "fox.png": b"not a picture"}, "fox.png must be a picture"),
        ({CAPTIONS: lines(FOX), "fox.png": picture()[:40]}, "fox.png must be a picture"),
        ({CAPTIONS: lines(FOX), "fox.png": picture((16, 20))}, "16x20 pixels; expected a square"),
    ],
)
def test_shards_that_are_refused(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        read_pictures([shard(tmp_path / "0.tar", members)], [16])


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = shard(tmp_path / "0.tar", {CAPTIONS: lines(FOX), "fox.png": 40 * picture()})
    for name, content in (("cut.tar", whole.read_bytes()[:2100]), ("zeros.tar", b"0" * 2000), ("empty.tar", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(PromptError, match=f"{name} (cannot be read as a tar|holds no|lacks)"):
            read_records(tmp_path / name)
    for missing in (tmp_path / "none.tar", tmp_path):
        with pytest.raises(PromptError, match="cannot be read as a tar"):
            read_records(missing)
    with pytest.raises(PromptError, match="name at least one shard"):
        read_pictures([], [16])


@pytest.mark.parametrize("large", [CAPTIONS, "fox.png"])
@pytest.mark.parametrize("sparse", [True, False])
def test_members_larger_than_their_shard_or_the_limit_are_refused(
    large: str, sparse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nextscale.offline.prompts.MAX_MEMBER", 1000)
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for name, content in {CAPTIONS: lines(FOX), "fox.png": picture()}.items():
            info = tarfile.TarInfo(name)
            if name == large:
                content += b" " * (500 if sparse else 1000)
                sparse_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": f"0,{len(content)}"}
                info.pax_headers = sparse_headers if sparse else {}
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    with pytest.raises(PromptError, match=f"'{large}' of '.*0.tar' must be a file of at most 1000 bytes, not sparse"):
        read_records(tmp_path / "0.tar")


def test_an_image_with_many_captions_is_read_once(tmp_path: Path) -> None:
    records, images = read_records(shard(tmp_path / "0.tar", {CAPTIONS: lines(FOX, FOX | {"caption": "a red fox"}), "fox.png": picture()}))
    assert [record.caption for record in records] == ["a fox", "a red fox"] and images[0] is images[1]


def test_fingerprint_knows_pictures_captions_and_sides() -> None:
    def of(side: int, *records: Record) -> str:
        return fingerprint({side: Pictures(torch.zeros(len(records), 3, side, side, dtype=torch.uint8), records)})

    fox, owl = Record("fox.png", "a fox"), Record("owl.png", "an owl")
    assert of(8, fox, owl) == of(8, fox, owl)
    assert len({of(8, fox, owl), of(8, owl, fox), of(8, fox), of(16, fox, owl), of(8, fox, Record("owl.png", "a bird"))}) == 5


# --- batches

SIDE = 40


def dots(count: int, **record: Any) -> Pictures:
    """A white frame around noise, larger than what a shift reaches."""
    pixels = torch.full((count, 3, SIDE, SIDE), 255, dtype=torch.uint8)
    pixels[:, :, 10:30, 10:30] = torch.randint(0, 256, (3, 20, 20), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return Pictures(pixels, [Record(f"{i}.png", "dots", **record) for i in range(count)])


def test_plain_batches_are_the_pictures() -> None:
    pictures = dots(3)
    batch = pictures.batch(torch.tensor([2, 0]))
    assert batch.dtype == torch.float32 and batch.shape == (2, 3, SIDE, SIDE)
    assert torch.equal(((batch + 1) * 127.5).round().to(torch.uint8), pictures.pixels[[2, 0]])


def test_varied_batches_stay_in_range_and_keep_a_white_border() -> None:
    batch = dots(64).batch(torch.arange(64), torch.Generator().manual_seed(1))
    assert batch.min() >= -1 and batch.max() <= 1 and batch.isfinite().all()
    assert batch[..., 0].min() > 0.999 and batch[..., -1, :].min() > 0.999
    assert len({tuple(image[0, 20].tolist()) for image in batch}) > 32
    again = dots(64).batch(torch.arange(64), torch.Generator().manual_seed(1))
    assert torch.equal(batch, again)


@pytest.mark.parametrize("mirrored", [True, False])
def test_shifts_alone_keep_pixels_exact(monkeypatch: pytest.MonkeyPatch, mirrored: bool) -> None:
    monkeypatch.setattr(Pictures, "largest_zoom", 0.0)
    pictures = dots(32, group="" if mirrored else "Flags")
    assert pictures.mirrors.all().item() is mirrored
    core = pictures.batch(torch.tensor([0]))[0, :, 10:30, 10:30]
    seen = set()
    for image in pictures.batch(torch.arange(32), torch.Generator().manual_seed(2)):
        top, left = ((image.amin(0) < 0.999).any(axis).nonzero()[0].item() for axis in (1, 0))
        found = image[:, top : top + 20, left : left + 20]
        turned = not torch.allclose(found, core, atol=1e-3)
        assert not turned or torch.allclose(found.flip(-1), core, atol=1e-3)
        assert abs(top - 10) <= 2 and abs(left - 10) <= 2  # 5 % of the side
        seen.add((top, left, turned))
    assert len({place[:2] for place in seen}) > 8
    assert {turned for *_, turned in seen} == ({True, False} if mirrored else {False})


@pytest.mark.parametrize(
    ("record", "alike"),
    [({}, True), ({"group": "Symbols"}, False), ({"group": "Flags"}, False), ({"label": "Left arrow"}, False), ({"label": "fox"}, True)],
)
def test_what_may_be_mirrored(record: dict[str, str], alike: bool) -> None:
    assert Record("a.png", "a", **record).mirrored_alike is alike
