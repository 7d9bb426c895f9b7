"""The route `POST /v1/images/generations`, which answers JSON or a stream of events."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..batching import GeneratedImage, Handle, Partial
from ..errors import JobCancelled, PromptError
from .answers import Answer, event_text
from .catalogue import Catalogue, ParsedRequest
from .errors import ApiError
from .schema import ImageRequest
from .service import Service

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)
MAX_UNSENT = 32 * 2**20  # pixels of waiting partial images, about 100 MB
HEARTBEAT_SECONDS = 15.0  # between comments in a quiet stream, so that proxies keep it open


async def read_body(request: Request, schema: type[Body], seconds: float) -> Body:
    """Reads and validates a body."""
    if media_type(request) != "application/json":
        raise ApiError(415, "send JSON, with the header Content-Type: application/json", "unsupported_media_type")
    return schema.model_validate_json(await read_content(request, seconds))


def media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_content(request: Request, seconds: float) -> bytes:
    try:
        return await asyncio.wait_for(request.body(), seconds)
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {seconds:.0f} s", "body_timeout") from error
    except ClientDisconnect as error:
        raise JobCancelled("the client has left") from error


async def generate(request: Request, service: Service) -> Response:
    catalogue = service.require_catalogue()
    body = await read_body(request, ImageRequest, service.settings.limits.read_seconds)
    parsed = await run_in_threadpool(catalogue.parse, body)
    return await respond(request, service, body, parsed)


async def respond(request: Request, service: Service, body: ImageRequest, parsed: ParsedRequest) -> Response:
    """Generates the images of a request, and answers."""
    catalogue = service.require_catalogue()
    if service.settings.log_prompts:
        log.info("%s %s %r", request.state.request_id, parsed.model, body.prompt)
    answer = Answer(body, parsed)
    if body.stream:
        return EventStream(service, catalogue, parsed, answer)
    try:
        images = await finished(service.submit(parsed), request)
    except PromptError as error:
        raise await run_in_threadpool(catalogue.api_error, error, parsed) from error
    return JSONResponse(await run_in_threadpool(answer.whole, images))


async def finished(handle: Handle, request: Request) -> list[GeneratedImage]:
    """Returns the images; cancels the job if the client leaves before."""
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
    """Stream of partial images, finished images, and an error if the job fails.

    A slow client gets fewer partial images, since all of them can take 400 MB for one request.
    """

    def __init__(self, service: Service, catalogue: Catalogue, parsed: ParsedRequest, answer: Answer) -> None:
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Any] = asyncio.Queue()

        self._unsent = 0  # pixels of the partial images in it

        def put(event: object) -> None:
            loop.call_soon_threadsafe(self._put, event)

        self._catalogue, self._parsed, self._answer = catalogue, parsed, answer
        self._handle = service.submit(parsed, put)
        self._handle.future.add_done_callback(lambda _: put(None))
        super().__init__(self._texts(), media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._handle.cancel()  # if the client has left

    def _put(self, event: object) -> None:
        """Queues an event, unless it is a partial image and too many are waiting."""
        if isinstance(event, Partial):
            pixels = event.image.width * event.image.height
            if self._unsent and self._unsent + pixels > MAX_UNSENT:
                return
            self._unsent += pixels
        self._events.put_nowait(event)

    async def _texts(self) -> AsyncIterator[str]:
        numbers: Counter[int] = Counter()
        while True:
            try:
                event = await asyncio.wait_for(self._events.get(), HEARTBEAT_SECONDS)
            except TimeoutError:
                yield ": still running\n\n"
                continue
            match event:
                case Partial():
                    self._unsent -= event.image.width * event.image.height
                    yield await run_in_threadpool(self._answer.partial, event, numbers[event.position])
                    numbers[event.position] += 1
                case (int() as position, GeneratedImage() as image):
                    yield await run_in_threadpool(self._answer.completed, position, image)
                case None:
                    break
        if (error := self._handle.future.exception()) is not None:
            assert isinstance(error, Exception)
            yield event_text("error", (await run_in_threadpool(self._catalogue.api_error, error, self._parsed)).body)
