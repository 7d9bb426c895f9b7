"""Runs the server as a Ray Serve application: replicas on a cluster behind one address, with the same HTTP contract.

Every replica is a complete server with its own batcher. Ray distributes requests, replaces replicas that die and drains replicas that it
stops. Requests of a dying replica fail with a 5xx, and clients send them again.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any

from ..batching.ray_cluster import CPUS, LOCAL, RaySettings, connected
from ..errors import MissingExtra, SettingError
from .app import create_app
from .service import Content, Service
from .settings import ServeSettings

NAME = "nextscale"
WAITING_SECONDS = 1.0
PROXY_SECONDS = ("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # its default of 5 s is too short for busy machines of few cores


class Replica:
    """Server without a socket, which gives Ray an ASGI application."""

    def __init__(self, content: Content, settings: ServeSettings) -> None:
        self._service = Service(content, settings)
        self._service.open()

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._service)

    def check_health(self) -> None:
        """Raises RuntimeError if Ray should replace the replica."""
        if self._service.state == "failed":
            raise RuntimeError("a worker of the batcher died")

    def __del__(self) -> None:
        if (service := getattr(self, "_service", None)) is not None:
            service.close()


@dataclass(frozen=True)
class RayServer:
    """Server of `ray.workers` replicas."""

    content: Content
    settings: ServeSettings
    ray: RaySettings

    def __post_init__(self) -> None:
        if self.content.devices != (None,):
            raise SettingError("--device must be left out with --ray, since Ray assigns a GPU to every replica")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs the replicas until the block ends, and then finishes accepted requests."""
        os.environ.setdefault(*PROXY_SECONDS)  # for a cluster that is started here
        with connected(self.ray) as ray:
            try:
                from ray import serve
            except ImportError as error:
                raise MissingExtra(f"`serve --ray` needs Ray Serve ({error}): pip install 'nextscale[ray]'") from error
            share, workers = self.ray.share(ray), self.ray.count(ray)
            if self.ray.address == LOCAL:  # a local cluster cannot grow, and Ray would wait forever
                resources = ray.cluster_resources()
                room = min(int(resources.get("CPU", 0) / CPUS), int(resources["GPU"] / share) if share else workers)
                if workers > room:
                    raise SettingError(
                        f"workers must be at most {room} on this machine; got {workers}. Give fewer, or a smaller share of GPUs for each."
                    )
            deployment = serve.deployment(
                name="images",
                num_replicas=workers,
                ray_actor_options={"num_cpus": CPUS, "num_gpus": share},
                max_ongoing_requests=2 * self.settings.max_queue,  # so that clients get the batcher's own answer, with retry-after
                max_queued_requests=self.settings.max_queue,
                graceful_shutdown_timeout_s=self.settings.shutdown_timeout,
                health_check_period_s=5,
            )
            serve.start(http_options={"host": self.settings.host, "port": self.settings.port})
            try:
                serve.run(deployment(serve.ingress()(Replica)).bind(self.content, self.settings), name=NAME, route_prefix="/")
                yield
            finally:
                serve.delete(NAME)
                serve.shutdown()


def serve_on_ray(server: RayServer) -> None:
    """Serves until SIGINT or SIGTERM. While replicas start, which may wait for machines, the signals end it at once."""
    ended = Event()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with server.running():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        while not ended.wait(WAITING_SECONDS):
            pass
