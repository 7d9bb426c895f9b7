"""The route `POST /v1/images/edits`: a form as OpenAI's clients send it, or JSON with pictures in data URLs. All of it stays in memory."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from email.message import Message
from typing import Any

from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from ..edit_inputs import EditOptions, has_alpha, mask_from_alpha, open_image, read_edit
from ..errors import Overloaded, SettingError
from .catalogue import Catalogue, ParsedRequest, about
from .errors import ApiError, refused
from .generations import media_type, read_content, respond
from .schema import EditRequest
from .service import Service

PICTURES = ("image", "mask", "mask_image")
MAX_PARTS = 82  # 18 files and 64 fields
MAX_TEXT = 64 * 1024  # bytes of a field
MAX_HEAD = 8 * 1024  # bytes of the headers of a part
MAX_OPEN = 8  # edits whose pictures are read at the same time
RETRY_SECONDS = 2.0
STRENGTHS = {"high": 0.35, "low": 0.6}  # of input_fidelity
OPTIONS = ("from_stage", "fill", "grow", "feather", "padding_mask_crop")

Fields = dict[str, Any]
Files = dict[str, list[bytes]]


class Editor:
    """Reads a limited number of edits at the same time: each holds its pictures twice, as files and decoded."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._open = 0

    async def answer(self, request: Request) -> Response:
        """Raises Overloaded if too many edits are being read."""
        catalogue, seconds = self._service.require_catalogue(), self._service.settings.limits.read_seconds
        kind = media_type(request)
        if kind not in ("multipart/form-data", "application/json"):
            raise ApiError(415, "send a form (multipart/form-data) or JSON", "unsupported_media_type")
        if self._open >= MAX_OPEN:
            raise Overloaded(f"{self._open} edits are being read: try again in {RETRY_SECONDS:.0f} s", RETRY_SECONDS)
        self._open += 1
        try:
            content = await read_content(request, seconds)
            body, parsed = await run_in_threadpool(read_request, catalogue, request.headers["content-type"], content)
        finally:
            self._open -= 1
        return await respond(request, self._service, body, parsed)


def read_request(catalogue: Catalogue, content_type: str, content: bytes) -> tuple[EditRequest, ParsedRequest]:
    """Raises ApiError, or ValidationError, with the field that cannot be honored."""
    if content_type.lower().lstrip().startswith("multipart"):
        fields, files = read_form(content_type, content)
        body = EditRequest.model_validate(fields, strict=False)
    else:
        fields, files = read_json(content)
        body = EditRequest.model_validate_json(json.dumps(fields))
    return body, parse_edit(catalogue, body, files)


# --- bodies


@dataclass(frozen=True)
class Part:
    name: str
    content: bytes
    is_file: bool


def read_form(content_type: str, content: bytes) -> tuple[Fields, Files]:
    """Returns text fields, and files by field. `name[]` collects the values of a list."""
    fields, files = Fields(), Files()
    for part in parts_of(content_type, content):
        name = part.name.removesuffix("[]")
        if part.is_file or name in PICTURES:
            if name not in PICTURES:
                raise refused(name[:80], f"{name[:80]!r} must not be a file; files are {', '.join(PICTURES)}", "unknown_parameter")
            files.setdefault(name, []).append(part.content)
            continue
        if len(part.content) > MAX_TEXT:
            raise refused(name[:80], f"{name[:80]} must have at most {MAX_TEXT} bytes", "string_above_max_length")
        try:
            text = part.content.decode()
        except UnicodeDecodeError as error:
            raise refused(name[:80], f"{name[:80]} must be UTF-8") from error
        if name in fields and not part.name.endswith("[]"):
            raise refused(name[:80], f"{name[:80]} is given twice")
        fields[name] = [*fields.get(name, []), text] if part.name.endswith("[]") else text
    return fields, files


def parts_of(content_type: str, content: bytes) -> Iterator[Part]:
    """Yields the parts of a form."""
    boundary = parameter(content_type, "boundary")
    if not boundary or len(boundary) > 200:
        raise malformed("its Content-Type has no boundary")
    chunks = (b"\r\n" + content).split(b"\r\n--" + boundary.encode("latin-1", "replace"), MAX_PARTS + 2)
    if len(chunks) > MAX_PARTS + 2:
        raise malformed(f"it has more than {MAX_PARTS} parts")
    if len(chunks) < 2 or not chunks[-1].startswith(b"--"):
        raise malformed("its end is missing")
    for chunk in chunks[1:-1]:
        head, gap, value = chunk.partition(b"\r\n\r\n")
        if not gap or len(head) > MAX_HEAD:
            raise malformed("a part has no headers, or too long ones")
        headers = dict(line.partition(":")[::2] for line in head.decode("utf-8", "replace").strip().split("\r\n"))
        disposition = next((value for name, value in headers.items() if name.strip().lower() == "content-disposition"), "")
        name = parameter(disposition, "name")
        if not name:
            raise malformed("a part has no name")
        yield Part(name, value, parameter(disposition, "filename") is not None)


def parameter(header: str, name: str) -> str | None:
    """Returns a parameter of a header such as `form-data; name="image"`."""
    message = Message()
    message["content-disposition"] = re.sub(r"[\r\n\0]", "", header).strip()
    found = message.get_param(name, header="content-disposition")
    return found if isinstance(found, str) else None


def malformed(reason: str) -> ApiError:
    return ApiError(400, f"the form cannot be read: {reason}", "invalid_form")


def read_json(content: bytes) -> tuple[Fields, Files]:
    """Returns the fields of a JSON body, and the files of its data URLs."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "the body must be JSON", "invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object", "invalid_json")
    images = fields.pop("images", [])
    if not isinstance(images, list):
        raise refused("images", "images must be a list of {image_url} with data URLs")
    files = Files(image=[from_url("images", one) for one in images[:MAX_PARTS]])
    for name in PICTURES[1:]:
        if (given := fields.pop(name, None)) is not None:
            files[name] = [from_url(name, given)]
    return fields, {name: several for name, several in files.items() if several}


def from_url(param: str, given: Any) -> bytes:
    """Returns the content of a data URL. Nothing is fetched."""
    url = given.get("image_url") if isinstance(given, Mapping) and len(given) == 1 else None
    if not isinstance(url, str) or not url.startswith("data:"):
        raise refused(param, f"{param} must be {{image_url: 'data:image/png;base64,...'}}: no address is fetched and no file is stored")
    try:
        return base64.b64decode(url.partition(",")[2], validate=True)
    except (binascii.Error, ValueError) as error:
        raise refused(param, f"{param} must be a data URL in base64", "invalid_image_file") from error


# --- the edit


def parse_edit(catalogue: Catalogue, request: EditRequest, files: Files) -> ParsedRequest:
    """Raises ApiError with the field that cannot be honored."""
    served, masks = catalogue.find(request.model), [name for name in PICTURES[1:] if name in files]
    if not files.get("image"):
        raise refused("image", "image is required", "missing_required_parameter")
    for name, several in files.items():
        if len(several) > 1:
            raise refused(name, f"{name} must be a single file; {served.name} edits one image at a time")
    if len(masks) > 1:
        raise refused("mask_image", "mask_image must be left out beside mask")
    image, mask = picture(catalogue, files, "image"), read_mask(catalogue, files, masks[0]) if masks else None
    if mask is not None and mask.getextrema() == (0, 0):
        raise refused(masks[0], "the mask selects nothing")
    strength = request.strength
    if request.input_fidelity is not None:
        if mask is not None and request.input_fidelity == "low":
            raise refused("input_fidelity", "input_fidelity must be high with a mask: everything else stays as it is", "unsupported_value")
        if mask is None and strength is None and request.from_stage is None:
            strength = STRENGTHS[request.input_fidelity]
    by_size = any((one or "auto") != "auto" for one in (request.size, request.aspect, request.width, request.height))
    schedule = served.schedule(request) if by_size else None
    options = EditOptions(**{name: getattr(request, name) for name in OPTIONS})
    pixels = served.pipeline.tokenizer.pixels_per_token
    try:
        source = read_edit(image, mask, strength, options, served.pipeline.settings.schedules, schedule, None, pixels)
    except SettingError as error:
        named = str(error).partition(" ")[0]  # messages begin with the name of the setting
        raise refused(named if named in {*EditRequest.model_fields, "image"} else masks[0] if masks else "image", str(error)) from error
    parsed = catalogue.parse(request, source.schedule)
    settings = {name: value for name, value in parsed.settings.items() if name != "size"}
    hashes = {f"{name}_sha256": hashlib.sha256(several[0]).hexdigest() for name, several in files.items()}
    return replace(parsed, settings=settings, size=source.size, source=source, hashes=hashes)


def picture(catalogue: Catalogue, files: Files, name: str) -> Image.Image:
    try:
        with about(name):
            return open_image(io.BytesIO(files[name][0]), name, catalogue.limits.upload_pixels)
    except ApiError as error:
        raise refused(name, error.body["error"]["message"], "invalid_image_file") from error


def read_mask(catalogue: Catalogue, files: Files, name: str) -> Image.Image:
    """Returns the mask, whose white part changes. `mask` has it in its alpha channel, as OpenAI's; `mask_image` in its levels."""
    mask = picture(catalogue, files, name)
    if name == "mask_image":
        return mask.convert("L")
    if not has_alpha(mask):
        message = "mask must have an alpha channel, whose transparent part changes. A mask whose white part changes is mask_image"
        raise refused(name, message, "invalid_image_file")
    return mask_from_alpha(mask)
