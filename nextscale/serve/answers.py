"""Answers with images, as JSON or as events of a stream."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from PIL import Image

from ..batching import GeneratedImage, Partial
from .catalogue import ParsedRequest, text_of
from .metrics import tokens
from .pictures import encoded, mask_picture
from .schema import ImageRequest

NO_SETTINGS = (
    *("n", "stream", "partial_images", "user", "safety_identifier", "output_format", "output_compression", "masks"),
    *("aspect", "width", "height"),  # given by the size
)


class Answer:
    """Encoder of the images of one request. Its methods take time and run outside the event loop."""

    def __init__(self, request: ImageRequest, parsed: ParsedRequest) -> None:
        self._request, self._parsed, source = request, parsed, parsed.source
        self._kind = "image_generation" if source is None else "image_edit"
        self._source_tokens = 0 if source is None else source.schedule.tokens
        self._created, self._form = int(time.time()), request.output_format or "png"
        self._common = {"background": "opaque", "output_format": self._form, "quality": "auto", "size": text_of(parsed.size)}

    def whole(self, images: Sequence[GeneratedImage]) -> dict[str, Any]:
        """Returns the answer without a stream."""
        more = {"model": self._parsed.model, "usage": usage(images, self._source_tokens)}
        data = [self._image(image) for image in images]
        return {"created": self._created, "data": data, **self._common, **more}

    def partial(self, partial: Partial, number: int) -> str:
        """Returns the event of the partial image with this number."""
        return self._event(
            f"{self._kind}.partial_image",
            b64_json=self._encode(partial.image),
            partial_image_index=number,
            image_index=partial.position,
            seed=self._parsed.seeds[partial.position],
            stage=partial.stage,
            stages=len(self._parsed.schedule),
        )

    def completed(self, position: int, image: GeneratedImage) -> str:
        spent = usage([image], self._source_tokens)
        return self._event(f"{self._kind}.completed", **self._image(image), image_index=position, model=self._parsed.model, usage=spent)

    def _event(self, kind: str, **content: Any) -> str:
        return event_text(kind, {"type": kind, "created_at": self._created, **self._common, **content})

    def _image(self, image: GeneratedImage) -> dict[str, Any]:
        answer = {"b64_json": self._encode(image.image, self._settings(image.seed)), "seed": image.seed, "report": report_of(image)}
        if image.masks is not None:
            answer["masks"] = [
                {"stage": stage, "height": mask.shape[0], "width": mask.shape[1], "b64_json": encoded(mask_picture(mask))}
                for stage, mask in enumerate(image.masks)
            ]
        return answer

    def _encode(self, image: Image.Image, settings: Mapping[str, Any] | None = None) -> str:
        height, width = self._parsed.size
        if image.size != (width, height):  # FlexVAR's images grow with the stage
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        return encoded(image, self._form, self._request.output_compression, settings)

    def _settings(self, seed: int) -> dict[str, Any]:
        """Returns the resolved fields of a request for this image."""
        given = self._request.model_dump(exclude_none=True, exclude_defaults=True, exclude={*NO_SETTINGS})
        resolved = {"model": self._parsed.model, "seed": seed, "size": text_of(self._parsed.size), "method": self._parsed.method_text}
        return given | resolved | self._parsed.hashes


def event_text(name: str, content: Mapping[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n"


def usage(images: Sequence[GeneratedImage], source: int) -> dict[str, Any]:
    """Returns the tokens of the prompt, of the edited image, and of the generated images in all cfg branches."""
    text = images[0].prompt_tokens
    run = sum(round(tokens(image.report)[0]) for image in images)
    details = {"text_tokens": text, "image_tokens": source}
    return {"input_tokens": text + source, "input_tokens_details": details, "output_tokens": run, "total_tokens": text + source + run}


def report_of(image: GeneratedImage) -> dict[str, Any]:
    """Returns the report by stage. Times are of the whole batch."""
    report = image.report
    return {
        "method": report.method,
        "engine": report.engine,
        "device": report.device,
        "batch": image.batch,
        "loras": list(map(asdict, report.loras)),
        **milliseconds(queue=image.queue_seconds, total=report.seconds, condition=report.condition_seconds, decode=report.decode_seconds),
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


def milliseconds(**seconds: float) -> dict[str, float]:
    return {f"{name}_ms": round(1000 * value, 3) for name, value in seconds.items()}
