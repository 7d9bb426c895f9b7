"""What a client gets for its images: the JSON answer, and the events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from ..batching import GeneratedImage, Partial
from .catalogue import Asked
from .metrics import tokens
from .pictures import encoded, mask_picture
from .schema import ImageRequest

PARTIAL, COMPLETED = "image_generation.partial_image", "image_generation.completed"

NO_SETTINGS = (
    *("n", "stream", "partial_images", "user", "safety_identifier", "output_format", "output_compression", "masks"),
    *("aspect", "width", "height"),  # the size says it
)


class Answer:
    """Encodes what belongs to one request. Its methods take time and run outside of the event loop."""

    def __init__(self, request: ImageRequest, asked: Asked) -> None:
        self._request, self._asked = request, asked
        self._created = int(time.time())
        self._form = request.output_format or "png"

    @property
    def _common(self) -> dict[str, Any]:
        height, width = self._asked.size
        return {"background": "opaque", "output_format": self._form, "quality": "auto", "size": f"{width}x{height}"}

    def whole(self, images: Sequence[GeneratedImage]) -> dict[str, Any]:
        """The answer without a stream."""
        return {
            "created": self._created,
            "data": [self._image(image) for image in images],
            **self._common,
            "model": self._asked.model,
            "usage": usage(images),
        }

    def partial(self, partial: Partial, number: int) -> str:
        """`number`: which of the partial images of its image it is."""
        event = {
            "type": PARTIAL,
            "b64_json": self._encode(partial.image),
            "partial_image_index": number,
            "created_at": self._created,
            **self._common,
            "image_index": partial.position,
            "seed": self._asked.seeds[partial.position],
            "stage": partial.stage,
            "stages": len(self._asked.schedule),
        }
        return event_text(PARTIAL, event)

    def completed(self, position: int, image: GeneratedImage) -> str:
        event = {
            "type": COMPLETED,
            "created_at": self._created,
            **self._common,
            **self._image(image),
            "image_index": position,
            "model": self._asked.model,
            "usage": usage([image]),
        }
        return event_text(COMPLETED, event)

    def _image(self, image: GeneratedImage) -> dict[str, Any]:
        answer = {"b64_json": self._encode(image.image, self._settings(image.seed)), "seed": image.seed, "report": report_of(image)}
        if image.masks is not None:
            answer["masks"] = [
                {"stage": stage, "height": mask.shape[0], "width": mask.shape[1], "b64_json": encoded(mask_picture(mask))}
                for stage, mask in enumerate(image.masks)
            ]
        return answer

    def _encode(self, image: Image.Image, settings: Mapping[str, Any] | None = None) -> str:
        height, width = self._asked.size
        if image.size != (width, height):  # FlexVAR's images grow with the stage
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        return encoded(image, self._form, self._request.output_compression, settings)

    def _settings(self, seed: int) -> dict[str, Any]:
        """What has to be asked for to get this image again: the fields of the request, resolved."""
        given = self._request.model_dump(exclude_none=True, exclude_defaults=True)
        for name in NO_SETTINGS:
            given.pop(name, None)
        height, width = self._asked.size
        return given | {"model": self._asked.model, "seed": seed, "size": f"{width}x{height}", "method": self._asked.method_text}


def event_text(name: str, content: Mapping[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n"


def usage(images: Sequence[GeneratedImage]) -> dict[str, Any]:
    """Tokens of the prompt, and those that the network ran for the images, each cfg branch counted."""
    text = images[0].prompt_tokens
    run = sum(round(tokens(image.report)[0]) for image in images)
    details = {"text_tokens": text, "image_tokens": 0}
    return {"input_tokens": text, "input_tokens_details": details, "output_tokens": run, "total_tokens": text + run}


def report_of(image: GeneratedImage) -> dict[str, Any]:
    """What happened, stage by stage; times are those of the batch in which the image was generated."""
    report = image.report
    return {
        "method": report.method,
        "engine": report.engine,
        "device": report.device,
        "batch": image.batch,
        "queue_ms": round(1000 * image.queue_seconds, 3),
        "total_ms": round(1000 * report.seconds, 3),
        "condition_ms": round(1000 * report.condition_seconds, 3),
        "decode_ms": round(1000 * report.decode_seconds, 3),
        "cost_share": round(report.cost_share, 6),
        "stages": [
            {
                "stage": stage.index,
                "height": stage.height,
                "width": stage.width,
                "skipped": stage.skipped,
                "tokens": round(stage.computed, 2),
                "cfg_branches": stage.cfg_branches,
                "cost_share": round(stage.cost_share, 6),
                "ms": round(1000 * stage.seconds, 3),
            }
            for stage in report.stages
        ],
    }
