"""`POST /v1/images/generations`: one route that answers JSON or a stream of events."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..engine.batcher import GeneratedImage, Handle, Partial
from ..errors import JobCancelled, PromptError
from .answers import Answer, event_text
from .catalogue import Asked, Catalogue
from .errors import ApiError, invalid_body
from .schema import ImageRequest
from .service import Service

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)
MOST_UNSENT = 32 * 2**20  # pixels of partial images that wait for a client that reads slowly, about 100 MB
HEARTBEAT_SECONDS = 15.0  # a comment in a quiet stream, so that nobody in between closes it


async def read_body(request: Request, schema: type[Body], seconds: float) -> Body:
    """The body by its schema; ApiError with the field for what does not fit."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "send JSON, with the header Content-Type: application/json", code="unsupported_media_type")
    try:
        content = await asyncio.wait_for(request.body(), seconds)
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {seconds:.0f} s", code="body_timeout") from error
    except ClientDisconnect as error:
        raise JobCancelled("the client has left") from error
    try:
        return schema.model_validate_json(content)
    except ValidationError as error:
        raise invalid_body(error) from error


async def generate(request: Request, service: Service) -> Response:
    catalogue = service.require_catalogue()
    body = await read_body(request, ImageRequest, service.settings.limits.read_seconds)
    asked = await run_in_threadpool(catalogue.ask, body)
    if service.settings.log_prompts:
        log.info("%s %s %r", request.state.request_id, asked.model, body.prompt)
    answer = Answer(body, asked)
    if body.stream:
        return EventStream(service, catalogue, asked, answer)
    try:
        images = await finished(service.submit(asked), request)
    except PromptError as error:
        raise await run_in_threadpool(catalogue.blamed, error, asked) from error
    return JSONResponse(await run_in_threadpool(answer.whole, images))


async def finished(handle: Handle, request: Request) -> list[GeneratedImage]:
    """The images; when the client leaves before, the job is cancelled."""
    images: asyncio.Future[list[GeneratedImage]] = asyncio.wrap_future(handle.future)
    leaving = asyncio.ensure_future(gone(request))
    try:
        both: list[asyncio.Future[Any]] = [images, leaving]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not images.done():
            raise JobCancelled("the client has left")
        return images.result()
    finally:
        leaving.cancel()
        handle.cancel()
        images.cancel()


async def gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Partial images as their stages are done, every image when it is finished, and an error in the place of what fails.

    A client that reads slower than images are generated gets fewer partial ones: all of them would be up to 400 MB for one request.
    """

    def __init__(self, service: Service, catalogue: Catalogue, asked: Asked, answer: Answer) -> None:
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._unsent = 0  # pixels of the partial images in it

        def watch(event: object) -> None:
            loop.call_soon_threadsafe(self._put, event)

        self._catalogue, self._asked, self._answer = catalogue, asked, answer
        self._handle = service.submit(asked, watch)
        self._handle.future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._events.put_nowait, None))
        super().__init__(self._texts(), media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._handle.cancel()  # where the client has left; nothing where all is sent

    def _put(self, event: object) -> None:
        """Leaves a partial image out if too many wait."""
        if isinstance(event, Partial):
            if self._unsent and self._unsent + pixels_of(event) > MOST_UNSENT:
                return
            self._unsent += pixels_of(event)
        self._events.put_nowait(event)

    async def _texts(self) -> AsyncIterator[str]:
        numbers: Counter[int] = Counter()
        while True:
            try:
                event = await asyncio.wait_for(self._events.get(), HEARTBEAT_SECONDS)
            except TimeoutError:
                yield ": still at work\n\n"
                continue
            match event:
                case Partial():
                    self._unsent -= pixels_of(event)
                    yield await run_in_threadpool(self._answer.partial, event, numbers[event.position])
                    numbers[event.position] += 1
                case (int() as position, GeneratedImage() as image):
                    yield await run_in_threadpool(self._answer.completed, position, image)
                case None:
                    break
        if (error := self._handle.future.exception()) is not None:
            assert isinstance(error, Exception)
            blamed = await run_in_threadpool(self._catalogue.blamed, error, self._asked)
            yield event_text("error", blamed.body)


def pixels_of(partial: Partial) -> int:
    return partial.image.width * partial.image.height
