"""Runs the server until a signal, and then finishes accepted requests and refuses new ones."""

import asyncio
import errno
import logging
import os
import socket
import sys
from types import FrameType
from typing import Any

import uvicorn

from ..errors import SettingError
from .app import create_app
from .service import Content, Service
from .settings import ServeSettings

log = logging.getLogger(__name__)

ANSWER_SECONDS = 2  # to send the last answers
MAX_IDLE = 64  # connections between requests


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains on the first signal, refusing new requests, and exits on the second."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._idle: dict[tuple[Any, Any], None] = {}  # connections and their last requests, the longest idle first
        self.in_time = True

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)  # type: ignore[arg-type]
        self._service.start(failed=self.stop)

    async def on_tick(self, counter: int) -> bool:
        """Also closes connections beyond MAX_IDLE, the longest idle first, since uvicorn keeps them open without limit."""
        last = [(connection, getattr(connection, "cycle", None)) for connection in self.server_state.connections]
        idle = dict.fromkeys(pair for pair in last if pair[1] is None or pair[1].response_complete)
        self._idle = {pair: None for pair in self._idle if pair in idle} | idle
        for connection, _ in list(self._idle)[:-MAX_IDLE]:
            connection.shutdown()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None or self._service.state == "draining":
            self.should_exit = self.force_exit = True
            return
        self._loop.call_soon_threadsafe(self._begin)

    def stop(self) -> None:
        self.should_exit = True

    def _begin(self) -> None:
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        seconds = self._service.settings.shutdown_timeout
        log.info("shutting down: accepted requests have %.0f s to finish", seconds)
        self.in_time = await asyncio.to_thread(self._service.drain, seconds)
        if not self.in_time:
            log.warning("some requests did not finish in %.0f s and fail", seconds)
            await asyncio.to_thread(self._service.close)
        self.should_exit = True


def http_server(service: Service) -> DrainingServer:
    config = uvicorn.Config(
        create_app(service),
        host=service.settings.host,
        port=service.settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=ANSWER_SECONDS,
    )
    return DrainingServer(config, service)


def listen(settings: ServeSettings) -> socket.socket:
    """Opens the port before the models are loaded. Raises SettingError if it is not free."""
    host, port = settings.host.strip("[]"), settings.port
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SettingError(f"port {port} of {host} is taken. Try --port {port + 1}, or --port 0 for any free port.") from error
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise SettingError(f"the server cannot listen on {host}, port {port} ({reason}). Check --host and --port.") from error


def serve(content: Content, settings: ServeSettings) -> None:
    """Serves until a signal. Raises the error of loading the models."""
    listening = listen(settings)
    service = Service(content, settings.model_copy(update={"port": listening.getsockname()[1]}))
    if not settings.loopback and not settings.api_keys:
        log.warning("%s can be reached from other machines without an API key: use --api-key-file", settings.host)
    http_server(service).run([listening])
    if service.error is not None:
        raise service.error
    if not service.close():
        log.warning("a thread still loads or runs a model; the process ends without it")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
