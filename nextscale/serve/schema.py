"""Bodies of requests, with the fields of OpenAI's endpoint and our extensions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..sampling import MIN_TEMPERATURE

MAX_IMAGES = 10
MAX_PARTIALS = 32  # OpenAI's clients send 0 to 3; more show every stage
MAX_SEED = 2**63 - 1
MAX_METHOD = 200  # characters
MAX_LIST = 64
MAX_LORAS = 8

Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Scale = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
MAX_SIDE = 16384
MAX_PADDING = 512  # pixels

Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]


class LoraChoice(BaseModel):
    """An adapter of the server."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    name: Annotated[str, Field(min_length=1, max_length=64)]
    scale: Annotated[float, Field(ge=-10, le=10, allow_inf_nan=False)] = 1.0


class ImageRequest(BaseModel):
    """Body of a request for images. Some fields of other servers are accepted only to be refused with a remedy."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True, use_attribute_docstrings=True)

    prompt: Annotated[str, Field(min_length=1)]
    """Text, or a class number as text, such as '207', for class models."""
    model: Annotated[str, Field(max_length=200)] | None = None
    """Name or alias of /v1/models; default: the first."""
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES)] | None = 1
    """Number of images."""
    size: Annotated[str, Field(max_length=32)] | None = "auto"
    """'auto', 'WIDTHxHEIGHT', or a pixel budget of the model, such as '0.25M'."""
    quality: Literal["auto", "standard", "low", "medium", "high", "hd"] | None = "auto"
    """'auto' or 'standard'; use method to choose between speed and quality."""
    background: Literal["auto", "opaque", "transparent"] | None = "auto"
    """'transparent' is refused."""
    output_format: Literal["png", "jpeg", "webp"] | None = "png"
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    """Quality of jpeg and webp; 95 by default."""
    moderation: Literal["auto", "low"] | None = "auto"
    """Ignored."""
    stream: bool | None = False
    partial_images: Annotated[int, Field(ge=0, le=MAX_PARTIALS)] | None = 0
    """Number of partial images in a stream; each is the canvas after a stage."""
    user: Annotated[str, Field(max_length=512)] | None = None
    """Ignored."""
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    """Ignored."""
    response_format: Literal["b64_json", "url"] | None = "b64_json"
    """'url' is refused: no image is stored."""
    style: Literal["vivid", "natural"] | None = None
    """Refused: describe it in the prompt."""

    seed: Seed | Annotated[list[Seed], Field(min_length=1, max_length=MAX_IMAGES)] | None = None
    """Seed of the first image, plus 1 for each further image, or a list of seeds. Default: random."""
    negative_prompt: Annotated[str, Field(min_length=1)] | None = None
    """Negative prompt, which needs guidance."""
    guidance_scale: Scale | Annotated[list[Scale], Field(min_length=1, max_length=MAX_LIST)] | None = None
    """A number, applied in the model's published form, or one number per stage."""
    num_inference_steps: int | None = None
    """Refused: the size sets the stages; see stop_after_stage and method."""
    width: Side | None = None
    """With height: replaces size."""
    height: Side | None = None
    aspect: Annotated[str, Field(max_length=16)] | None = None
    """Aspect ratio such as '16:9', with 'auto' or a budget."""
    method: Annotated[str, Field(max_length=MAX_METHOD)] | None = None
    """Acceleration, such as 'skip:last=2 + fastvar', or 'dense'. Default: the server's."""
    masks: bool | None = False
    """Return the share of the network that ran per cell and stage."""
    stop_after_stage: Annotated[int, Field(ge=0, le=MAX_LIST)] | None = None
    """Decode the image after this stage, counted from 0."""
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=100, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    greedy: bool | None = None
    lora: Annotated[list[LoraChoice], Field(max_length=MAX_LORAS)] | None = None
    """Adapters of /v1/models, with their scales."""


class EditRequest(ImageRequest):
    """Fields of a request to change an image, besides its pictures."""

    input_fidelity: Literal["high", "low"] | None = None
    """Without a mask and strength: 'high' is strength 0.35, 'low' 0.6. With a mask only 'high', which changes nothing."""
    strength: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    """Share of the stages that change the image. Default: 0.6; with a mask, by the mask."""
    from_stage: Annotated[int, Field(ge=0, le=MAX_LIST)] | None = None
    """First stage that changes the image, instead of strength."""
    fill: Literal["surroundings", "original"] | None = None
    """Pixels under the mask when the image is encoded; default: surroundings."""
    grow: Annotated[int, Field(ge=0, le=MAX_PADDING)] = 0
    """Pixels by which the mask grows."""
    feather: Annotated[int, Field(ge=0, le=MAX_PADDING)] | None = None
    """Width in pixels of the ramp inside the mask; default: one token."""
    padding_mask_crop: Annotated[int, Field(ge=0, le=MAX_SIDE)] | None = None
    """Edit the box around the mask and this number of pixels more, and answer at the image's own size."""


class Comparison(BaseModel):
    """Two images to compare, PNG in base64."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    a: str = Field(min_length=1)
    b: str = Field(min_length=1)


def openapi_body(model: type[BaseModel]) -> dict[str, Any]:
    """Returns the entry in /openapi.json of a route that reads its body itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


def openapi_form(model: type[BaseModel], *files: str) -> dict[str, Any]:
    """Returns the entry of a route that reads a form with these files."""
    schema = model.model_json_schema()
    schema["properties"] |= {name: {"type": "string", "format": "binary"} for name in files}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
