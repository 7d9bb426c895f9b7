"""`POST /v1/images/edits`: OpenAI's client, forms and JSON, hostile uploads, and that nothing stays behind."""

from __future__ import annotations

import base64
import gc
import http.client
import io
import json
import random
import resource
import struct
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
import torch
from PIL import Image

from nextscale import EditOptions
from nextscale.serve import edits
from nextscale.serve.errors import ApiError
from nextscale.serve.metrics import EDITS
from nextscale.serve.pictures import CHUNK
from tests.helpers.serving import Answer, Live, Steered, live, wait_until
from tests.helpers.tiny import INFINITY_SCHEDULE, shared_pipeline

SIZE = (6, 8)  # width, height of the tiny model's images
LAST_STAGE = 3
Form = list[tuple[str, bytes, bool]]


def picture(size: tuple[int, int] = SIZE, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def erased(size: tuple[int, int] = SIZE) -> Image.Image:
    """A mask as OpenAI's clients send it, with a transparent corner."""
    mask = Image.new("RGBA", size, (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, size[0] // 2, size[1] // 2))
    return mask


def white(size: tuple[int, int] = SIZE) -> Image.Image:
    mask = Image.new("L", size)
    mask.paste(255, (0, 0, size[0] // 2, size[1] // 2))
    return mask


def file(image: Image.Image, form: str = "PNG", **more: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, form, **more)
    return content.getvalue()


def form_of(**fields: Any) -> Form:
    """Bytes are files; several values are a list."""
    several = [(name, one) for name, value in fields.items() for one in (value if isinstance(value, list) else [value])]
    return [(name, one if isinstance(one, bytes) else str(one).encode(), isinstance(one, bytes)) for name, one in several]


def encoded(parts: Form, boundary: str = "xYzZY") -> bytes:
    heads = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"' + '; filename="upload"' * is_file for name, _, is_file in parts
    ]
    bodies = (head.encode() + b"\r\n\r\n" + content + b"\r\n" for head, (_, content, _) in zip(heads, parts, strict=True))
    return b"".join(bodies) + f"--{boundary}--\r\n".encode()


def post(server: Live, content: bytes, kind: str = "multipart/form-data; boundary=xYzZY") -> Answer:
    return server.ask(EDITS, content, {"content-type": kind})


def edit(server: Live, **fields: Any) -> Answer:
    return post(server, encoded(form_of(**{"image": file(picture()), "prompt": "a fox"} | fields)))


def opened(b64: str | None) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(b64 or "")))


def kept(image: Image.Image, original: Image.Image) -> bool:
    outside = np.asarray(white(original.size)) == 0
    return bool((np.asarray(image)[outside] == np.asarray(original)[outside]).all())


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Live, Steered]]:
    pipe = Steered(shared_pipeline("infinity"))
    with live({"tiny": pipe, "classes": shared_pipeline("var")}, aliases={"gpt-image-1": "tiny"}, batch_delay=0.0) as server:
        yield server, pipe


@pytest.fixture
def server(shared: tuple[Live, Steered]) -> Live:
    shared[1].open()
    return shared[0]


@pytest.fixture
def client(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


# --- OpenAI's client


@pytest.mark.parametrize("given", ["bytes", "file", "named", "list"])
def test_openais_client_edits_inside_its_mask(given: str, client: openai.OpenAI) -> None:
    content, mask = file(picture()), file(erased())
    image: Any = {"bytes": content, "file": io.BytesIO(content), "named": ("fox.png", content, "image/png"), "list": [content]}[given]
    answer = client.images.edit(
        model="gpt-image-1", image=image, mask=mask, prompt="a fox", n=2, input_fidelity="high", extra_body={"seed": [7, 8], "feather": 0}
    )
    assert answer.data is not None and answer.size == "6x8" and answer.output_format == "png"
    pipe = shared_pipeline("infinity")
    for seed, found in zip((7, 8), answer.data, strict=True):
        expected = pipe.edit(picture(), "a fox", mask=white(), seed=seed, options=EditOptions(feather=0)).images[0]
        assert kept(opened(found.b64_json), picture())
        assert np.abs(np.asarray(opened(found.b64_json)).astype(int) - np.asarray(expected).astype(int)).max() <= 1
        assert found.seed == seed and found.report["method"] == "NearMask"  # type: ignore[attr-defined]
    assert answer.usage is not None and answer.usage.input_tokens_details.image_tokens == INFINITY_SCHEDULE.tokens
    settings = json.loads(opened(answer.data[0].b64_json).info[CHUNK])
    assert settings["feather"] == 0 and len(settings["image_sha256"]) == len(settings["mask_sha256"]) == 64 and "image" not in settings


def test_a_stream_has_pasted_partial_images(client: openai.OpenAI) -> None:
    events: Any = client.images.edit(
        image=file(picture()),
        mask=file(erased()),
        prompt="a fox",
        n=1,
        stream=True,
        partial_images=3,
        extra_body={"seed": 7, "from_stage": 1},
    )
    *partials, last = list(events)
    assert [one.type for one in partials] == ["image_edit.partial_image"] * 3 and last.type == "image_edit.completed"
    assert [one.partial_image_index for one in partials] == [0, 1, 2]
    assert all(kept(opened(one.b64_json), picture()) for one in (*partials, last))
    assert last.usage.input_tokens > 0 and last.size == "6x8"


def test_class_models_are_edited_by_their_numbers(server: Live) -> None:
    answer = edit(server, model="classes", prompt="3", image=file(picture((8, 8))), mask_image=file(white((8, 8))), seed=1)
    assert answer.status == 200 and kept(opened(answer.json["data"][0]["b64_json"]), picture((8, 8)))


# --- forms and JSON


@pytest.mark.parametrize("form, more", [("PNG", {}), ("JPEG", {"quality": 95}), ("WEBP", {"lossless": True})])
def test_pictures_are_read_by_their_content(form: str, more: dict[str, Any], server: Live) -> None:
    content = file(picture(), form, **more)
    answer = edit(server, image=content, mask_image=file(white()), seed=1)
    assert answer.status == 200 and kept(opened(answer.json["data"][0]["b64_json"]), Image.open(io.BytesIO(content)))


def url(content: bytes) -> dict[str, str]:
    return {"image_url": f"data:image/png;base64,{base64.b64encode(content).decode()}"}


def test_json_gives_the_same_image_as_a_form(server: Live) -> None:
    body = {"images": [url(file(picture()))], "mask": url(file(erased())), "prompt": "a fox", "seed": 5, "grow": 1, "output_format": "webp"}
    ours = server.ask(EDITS, body)
    theirs = edit(server, mask=file(erased()), seed=5, grow=1, output_format="webp")
    assert ours.status == theirs.status == 200 and ours.json["data"][0]["b64_json"] == theirs.json["data"][0]["b64_json"]


def test_a_crop_around_the_mask_answers_at_the_images_own_size(server: Live) -> None:
    large = picture((30, 40))
    answer = edit(server, image=file(large), mask_image=file(white((30, 40))), padding_mask_crop=2, seed=1)
    found = opened(answer.json["data"][0]["b64_json"])
    assert answer.json["size"] == "30x40" and found.size == (30, 40) and kept(found, large)


def test_without_a_mask_the_fidelity_is_a_strength(server: Live) -> None:
    def found(**fields: Any) -> str:
        return edit(server, seed=1, **fields).json["data"][0]["b64_json"]

    pixels = [np.asarray(opened(found(**fields))) for fields in ({"input_fidelity": "high"}, {"strength": 0.35}, {"input_fidelity": "low"})]
    assert np.array_equal(pixels[0], pixels[1]) and not np.array_equal(pixels[0], pixels[2])


# --- refusals

PNG = file(picture())
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"image": []}, "image", "required"),
    ({"image": [PNG, PNG]}, "image", "one image"),
    ({"image[]": [PNG] * 17, "image": []}, "image", "one image"),
    ({"image": b"no image"}, "image", "PNG, JPEG or WEBP"),
    ({"image": PNG[:60]}, "image", "PNG, JPEG or WEBP"),
    ({"image": file(picture(), "GIF")}, "image", "PNG, JPEG or WEBP"),
    ({"image": file(picture(), "WEBP", save_all=True, append_images=[picture(seed=1)])}, "image", "2 frames"),
    ({"image": file(Image.new("L", (5000, 5000)))}, "image", "pixels"),
    ({"image": file(picture((600, 8)))}, "size", "cut off"),
    ({"mask": file(white())}, "mask", "mask_image"),
    ({"mask": file(erased((8, 8)))}, "mask", "6x8; got 8x8"),
    ({"mask": file(Image.new("RGBA", SIZE))[:45]}, "mask", "PNG, JPEG or WEBP"),
    ({"mask": file(Image.new("RGBA", SIZE, (0, 0, 0, 255)))}, "mask", "selects nothing"),
    ({"mask_image": file(Image.new("L", SIZE))}, "mask_image", "selects nothing"),
    ({"mask_image": file(white()), "mask": file(erased())}, "mask_image", "beside mask"),
    ({"mask": file(erased()), "input_fidelity": "low"}, "input_fidelity", "high"),
    ({"strength": 0.5, "from_stage": 1}, "strength", "one of them"),
    ({"strength": 0}, "strength", "greater than 0"),
    ({"strength": "nan"}, "strength", "finite"),
    ({"from_stage": 4}, "from_stage", "0 to 3"),
    ({"padding_mask_crop": 3}, "padding_mask_crop", "needs a mask"),
    ({"grow": -1}, "grow", "greater than or equal to 0"),
    ({"feather": 100000}, "feather", "less than or equal"),
    ({"fill": "gray"}, "fill", "surroundings"),
    ({"editor": "aredit"}, "editor", "unknown field"),
    ({"source_prompt": "a cat"}, "source_prompt", "unknown field"),
    ({"markup": "1"}, "markup", "unknown field"),
    ({"picture": PNG}, "picture", "must not be a file"),
    ({"prompt": []}, "prompt", "required"),
    ({"prompt": [b"\xff".decode("latin-1"), "two"]}, "prompt", "twice"),
    ({"quality": "high"}, "quality", "quality"),
    ({"background": "transparent"}, "background", "background"),
    ({"response_format": "url"}, "response_format", "response_format"),
    ({"output_format": "gif"}, "output_format", "png"),
    ({"partial_images": 2}, "partial_images", "stream"),
    ({"n": 11}, "n", "less than or equal to 10"),
    ({"method": "nearmask + sparsevar"}, "method", "combined"),
    ({"model": "dall-e-2"}, "model", "one of"),
    ({"seed": "x"}, "seed", "integer"),
]


@pytest.mark.parametrize("fields, param, words", BAD, ids=[f"{number}-{param}" for number, (_, param, _) in enumerate(BAD)])
def test_what_cannot_be_honored_is_refused_by_name(fields: dict[str, Any], param: str, words: str, server: Live) -> None:
    answer = edit(server, **fields)
    assert answer.status in (400, 404), answer.body
    assert answer.error["param"] == param and words in answer.error["message"], answer.error


@pytest.mark.parametrize(
    "body, param",
    [
        ({"images": [{"image_url": "https://example.com/fox.png"}]}, "images"),
        ({"images": [{"file_id": "file-1"}]}, "images"),
        ({"images": "fox.png"}, "images"),
        ({"images": [{"image_url": "data:image/png;base64,###"}]}, "images"),
        ({"mask": {"file_id": "file-1"}}, "mask"),
        ({"seed": "7"}, "seed"),
        ([], None),
    ],
)
def test_nothing_is_fetched_for_json(body: Any, param: str | None, server: Live) -> None:
    content = {"images": [url(PNG)], "prompt": "a fox"} | body if isinstance(body, dict) else body
    answer = server.ask(EDITS, content)
    assert answer.status == 400 and answer.error["param"] == param, answer.body


def test_bodies_are_limited(server: Live) -> None:
    assert server.ask(EDITS, b"x", {"content-length": str(33 * 2**20)}).status == 413
    assert post(server, b"x", "text/plain").status == 415
    large = edit(server, user="x" * 70_000)
    assert large.status == 400 and large.error["param"] == "user"
    many = post(server, encoded(form_of(**{f"field{number}": "x" for number in range(100)})))
    assert many.status == 400 and many.error["code"] == "invalid_form"
    assert server.ask(EDITS, method="GET").status == 405


def test_few_uploads_are_read_at_once(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "MAX_OPEN", 0)
    busy = edit(server)
    assert busy.status == 429 and busy.headers["retry-after"] == "2"
    monkeypatch.undo()
    assert edit(server).status == 200


# --- hostile uploads


def bomb(side: int = 12_000) -> bytes:
    """A PNG of a few hundred kilobytes that would decode to 432 MB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(b"\0" * 2**20)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", rows)
        + chunk(b"IEND", b"")
    )


def odd_pictures() -> list[bytes]:
    """Whole files of unusual kinds, which are read."""
    gray = Image.fromarray(np.linspace(0, 65535, SIZE[0] * SIZE[1]).astype(np.uint16).reshape(SIZE[1], SIZE[0]))
    palette, turned = picture().convert("P"), Image.Exif()
    turned[0x0112] = 6
    return [
        file(gray),
        file(picture().convert("CMYK"), "JPEG"),
        file(palette, transparency=0),
        file(picture().convert("LA")),
        file(picture().convert("1")),
        file(picture().transpose(Image.Transpose.ROTATE_90), exif=turned),
    ]


def test_odd_pictures_are_edited(server: Live) -> None:
    for content in odd_pictures():
        assert edit(server, image=content, mask=file(erased()), seed=1).status == 200


def hostile(rng: random.Random) -> bytes:
    """A body that is damaged somewhere: in a picture, in a mask, or in the form."""
    parts = form_of(prompt="a fox", image=rng.choice([PNG, file(picture(), "JPEG"), file(picture(), "WEBP"), bomb(), *odd_pictures()]))
    parts += form_of(
        **{rng.choice(["mask", "mask_image", "image", "image[]", "seed[]", "n"]): rng.choice([PNG, file(erased()), file(white())])}
    )
    number = rng.randrange(len(parts))
    name, content, is_file = parts[number]
    damaged = bytearray(content)
    match rng.randrange(4):
        case 0:
            damaged = damaged[: rng.randrange(len(damaged))]
        case 1:
            for _ in range(rng.randrange(1, 40)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        case 2:
            damaged += rng.randbytes(rng.randrange(2000))
        case _:
            name = rng.choice(["", "\n", 'im"age', "image;x", "é" * 300, "../../etc/passwd", name])
    parts[number] = (name, bytes(damaged), is_file)
    body = encoded(parts)
    if rng.random() < 0.3:
        start = rng.randrange(len(body))
        body = body[:start] + rng.randbytes(rng.randrange(30)) + body[start + rng.randrange(200) :]
    return body


def test_200_hostile_uploads_get_an_answer(shared: tuple[Live, Steered], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is answered, none with an internal error; afterwards an edit works as before. Most are refused where the route reads them."""
    server, rng = shared[0], random.Random(34)
    assert server.service.catalogue is not None
    refused = 0
    for _ in range(200):
        body = hostile(rng)
        try:
            edits.read_request(server.service.catalogue, "multipart/form-data; boundary=xYzZY", body)
        except ApiError as error:
            refused += 1
            assert error.status == 400 and error.body["error"]["message"]
        except Exception as error:
            assert type(error).__name__ == "ValidationError"
            refused += 1
    assert refused > 100
    for _ in range(30):  # the same over HTTP
        answer = post(server, hostile(rng))
        assert answer.status in (200, 400), answer.body
        assert answer.status == 200 or answer.error["message"]
    assert edit(server, mask=file(erased())).status == 200


def test_a_bomb_is_refused_before_it_is_decoded(server: Live) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = edit(server, image=bomb())
    assert answer.status == 400 and "pixels" in answer.error["message"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


# --- batches, and clients that leave


def test_edits_of_one_shape_share_a_batch(shared: tuple[Live, Steered]) -> None:
    server, pipe = shared
    pipe.open()
    pipe.hold_after(0)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(edit, server, mask=file(erased()), seed=1)
        assert pipe.holding.wait(60)
        rest = [threads.submit(edit, server, image=file(picture(seed=seed)), mask=file(erased()), seed=seed) for seed in (2, 3)]
        batcher = server.service._batcher
        assert batcher is not None
        wait_until(lambda: batcher.waiting == 2)
        pipe.go.set()
        assert [one.result().status for one in (first, *rest)] == [200] * 3
    assert [len(call) for call in pipe.calls] == [1, 2]
    for seed, one in zip((2, 3), rest, strict=True):
        assert kept(opened(one.result().json["data"][0]["b64_json"]), picture(seed=seed))
        assert one.result().json["data"][0]["report"]["batch"] == 2


def test_a_client_that_leaves_stops_its_edit(shared: tuple[Live, Steered]) -> None:
    server, pipe = shared
    pipe.open()
    pipe.hold_after(1)
    body = encoded(form_of(image=PNG, prompt="a fox", mask=file(erased())))
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", EDITS, body, {"content-type": "multipart/form-data; boundary=xYzZY"})
    assert pipe.holding.wait(60)
    connection.close()
    batcher = server.service._batcher
    assert batcher is not None
    wait_until(lambda: not batcher._handles)
    pipe.go.set()
    wait_until(lambda: batcher.running == 0)
    assert pipe.stages[-1] < LAST_STAGE
    pipe.open()
    assert edit(server).status == 200


written: list[str] | None = None  # files that are opened for writing, while a test looks


def watch_files(event: str, arguments: tuple[Any, ...]) -> None:
    if written is not None and event == "open":
        path, mode, flags = arguments
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (mode is None and flags & 3):
            written.append(str(path))


def tensors() -> int:
    gc.collect()
    return sum(type(one) is torch.Tensor for one in gc.get_objects())


def test_many_edits_leave_nothing_in_memory_or_on_disk(server: Live) -> None:
    """1,000 edits: no tensor stays. The peak may grow by what allocators keep for each thread: it was 100 MB at most, and falls again."""
    global written
    sys.addaudithook(watch_files)
    large, mask = file(picture((600, 800))), file(erased((600, 800)))  # more than what form readers keep in memory
    assert len(large) > 2**20
    written, before, peak = [], 0, 0
    try:
        with ThreadPoolExecutor(6) as threads:  # so that they share batches
            for hundred in range(10):
                jobs = [threads.submit(edit, server, mask=file(erased()), seed=number) for number in range(99)]
                assert {job.result().status for job in jobs} == {200}
                assert edit(server, image=large, mask=mask).status == 200
                if hundred == 2:
                    before, peak = tensors(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        jobs.clear()
        grown, left = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak, tensors() - before
    finally:
        found, written = written, None
    assert not [path for path in found if not path.startswith("/dev/")]
    assert left < 50 and grown < 200 * 1024, f"{left} tensors are left, and the peak has grown by {grown} KiB"
    assert server.service._batcher is not None and not server.service._batcher._handles
