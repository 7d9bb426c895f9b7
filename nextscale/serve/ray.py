"""The server as a Ray Serve application: replicas on the machines of a cluster behind one address, with the same HTTP contract.

Every replica is the whole server of `nextscale serve`, with a batcher of its own, which refuses what is too much with 429. Ray spreads
requests over replicas, replaces those that die and ends them gently. What a dying replica had begun fails with a 5xx; clients ask again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any

from ..errors import MissingExtra, SettingError
from ..offline.ray import CPUS, LOCAL, RaySettings, connected, gpus_per_worker, workers_for
from .app import create_app
from .service import Content, Service
from .settings import ServeSettings

NAME = "nextscale"
WAITING_SECONDS = 1.0
PROXY_SECONDS = ("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
"""Ray Serve kills a proxy that is not up after 5 seconds, which busy machines of few cores do not manage."""


class Replica:
    """One server without its socket; Ray asks it for an ASGI application."""

    def __init__(self, content: Content, settings: ServeSettings) -> None:
        self._service = Service(content, settings)
        self._service.open()
        self._seconds = settings.shutdown_timeout

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._service)

    def check_health(self) -> None:
        """Raises where Ray should replace it."""
        if self._service.state == "failed":
            raise RuntimeError("a worker of the batcher died")

    def __del__(self) -> None:
        if (service := getattr(self, "_service", None)) is not None:
            service.close()


@dataclass(frozen=True)
class RayServer:
    """Where replicas run. `ray.workers` is their number, `ray.gpus` the share of a GPU of each."""

    content: Content
    settings: ServeSettings
    ray: RaySettings

    def __post_init__(self) -> None:
        if self.content.devices != (None,):
            raise SettingError("with --ray every replica takes the GPU that Ray gives it: leave out --device, and say --workers and --gpus")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Until the block ends; then accepted requests finish."""
        os.environ.setdefault(*PROXY_SECONDS)  # for a cluster that is started here
        with connected(self.ray) as ray:
            serve = ray_serve()
            if self.ray.address == LOCAL:  # which does not grow: Ray would wait without end
                self.require_room(ray.cluster_resources())
            serve.start(http_options={"host": self.settings.host, "port": self.settings.port})
            try:
                serve.run(self.application(serve), name=NAME, route_prefix="/")
                yield
            finally:
                serve.delete(NAME)
                serve.shutdown()

    def require_room(self, resources: Mapping[str, float]) -> None:
        share, workers = gpus_per_worker(self.ray), workers_for(self.ray)
        room = min(int(resources.get("CPU", 0) / CPUS), int(resources["GPU"] / share) if share else workers)
        if workers > room:
            raise SettingError(
                f"--workers {workers}: this machine has room for {room}; give fewer, or a smaller share of a GPU with --gpus"
            )

    def application(self, serve: Any) -> Any:
        deployment = serve.deployment(
            name="images",
            num_replicas=workers_for(self.ray),
            ray_actor_options={"num_cpus": CPUS, "num_gpus": gpus_per_worker(self.ray)},
            max_ongoing_requests=2 * self.settings.max_queue,  # so that the batcher's own answer, with retry-after, is what clients see
            max_queued_requests=self.settings.max_queue,
            graceful_shutdown_timeout_s=self.settings.shutdown_timeout,
            health_check_period_s=5,
        )
        return deployment(serve.ingress()(Replica)).bind(self.content, self.settings)


def ray_serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:
        raise MissingExtra(f"`serve --ray` needs Ray Serve ({error}): pip install 'nextscale[ray]'") from error
    return serve


def serve_on_ray(server: RayServer) -> None:
    """Returns after SIGINT or SIGTERM. While replicas start, which may wait for machines without end, these end it at once."""
    ended = Event()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with server.running():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        while not ended.wait(WAITING_SECONDS):
            pass
