"""A server on the loopback, in a thread of the test's own process, over tiny models."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

from nextscale.pipeline import Pipeline
from nextscale.serve.run import DrainingServer, http_server
from nextscale.serve.service import Content, Service
from nextscale.serve.settings import ServeSettings

SECONDS = 60  # after which a test that hangs fails
PATH = "/v1/images/generations"


class Steered:
    """A pipeline that stops before chosen stages until it is released, and fails on demand."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.open()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def open(self) -> None:
        """Releases all stages and disables failures."""
        self.held_after: int | None = None
        self.go, self.holding = Event(), Event()
        self.fails: Callable[[list[Any]], Exception | None] = lambda prompts: None
        self.stages: list[int] = []
        self.calls: list[list[Any]] = []

    def hold_after(self, stage: int) -> None:
        self.held_after = stage

    def __call__(self, prompt: Any, **settings: Any) -> Any:
        return self._run(self._pipeline, prompt, **settings)

    def edit(self, image: Any, prompt: Any, **settings: Any) -> Any:
        return self._run(partial(self._pipeline.edit, image), prompt, **settings)

    def _run(self, call: Callable[..., Any], prompt: Any, *, on_stage: Any = None, **settings: Any) -> Any:
        self.calls.append(list(prompt))
        if (error := self.fails(list(prompt))) is not None:
            raise error

        def steered(preview: Any) -> None:
            self.stages.append(preview.done.stage.index)
            if preview.done.stage.index == self.held_after:
                self.holding.set()
                assert self.go.wait(SECONDS)
            if on_stage is not None:
                on_stage(preview)

        return call(prompt, on_stage=steered, **settings)


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]


@dataclass
class Live:
    service: Service
    server: DrainingServer
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, method: str | None = None) -> Answer:
        """Sends a request. `body`: an object for JSON, or bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        default = {} if body is None else {"content-type": "application/json"}
        connection.request(method or ("GET" if body is None else "POST"), path, content, {**default, **(headers or {})})
        response = connection.getresponse()
        answer = Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
        connection.close()
        return answer

    def generate(self, **fields: Any) -> Answer:
        return self.ask(PATH, fields)


def wait_until(happened: Callable[[], bool]) -> None:
    """Fails where it does not happen, rather than waiting for ever."""
    for _ in range(100 * SECONDS):
        if happened():
            return
        Event().wait(0.01)
    raise AssertionError("it did not happen")


@contextmanager
def live(
    models: Mapping[str, Any],
    aliases: Mapping[str, str] | None = None,
    method: str = "dense",
    lora_dir: Path | None = None,
    **settings: Any,
) -> Iterator[Live]:
    content = Content(tuple(models), (None,), lambda name, device: models[name], aliases or {}, method, (), lora_dir)
    service = Service(content, ServeSettings(**{"port": 0} | settings))
    server = http_server(service)
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while service.state == "loading" or not server.started:
            assert thread.is_alive()
            Event().wait(0.01)
        yield Live(service, server, server.servers[0].sockets[0].getsockname()[1])
    finally:
        service.close()
        server.stop()
        thread.join(SECONDS)
