"""Connects to a Ray cluster, for `serve` and `sample`."""

import logging
import math
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import current_thread, main_thread
from typing import Any

from ..errors import MissingExtra, NextscaleError, SettingError

LOCAL = "local"
CPUS = 0.5  # per worker, since a machine may have more GPU workers than cores
CONNECT_SECONDS = 10


@dataclass(frozen=True)
class RaySettings:
    """Address and workers of a Ray run.

    address: "local" starts a cluster on this machine; "auto" or the address that `ray start` prints joins one.
    workers: number of actors; None: as many as fit on the GPUs, or one without GPUs.
    gpus: GPUs per worker on clusters with GPUs; 0.25 puts four small models on a GPU.
    """

    address: str = LOCAL
    workers: int | None = None
    gpus: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.gpus < math.inf or (self.gpus > 1 and self.gpus != int(self.gpus)):
            raise SettingError(f"gpus must be a share of one GPU, such as 0.25, or a whole number; got {self.gpus}.")

    def share(self, ray: Any) -> float:
        """Returns the GPUs per worker; 0 on a cluster without GPUs."""
        return self.gpus if ray.cluster_resources().get("GPU", 0) else 0.0

    def count(self, ray: Any) -> int:
        """Returns the number of workers."""
        if self.workers is not None:
            return self.workers
        share = self.share(ray)
        return max(1, int(ray.cluster_resources()["GPU"] / share)) if share else 1


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtra(f"--ray needs Ray ({error}): pip install 'nextscale[ray]'") from error
    return ray


@contextmanager
def connected(settings: RaySettings) -> Iterator[Any]:
    """Yields the connected module `ray`. Shuts down a cluster that it has started."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if match := re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", settings.address):  # Ray itself would retry a wrong address for minutes
            socket.create_connection((match[1], int(match[2])), timeout=CONNECT_SECONDS).close()
        dashboard = False if settings.address == LOCAL else None
        ray.init(address=settings.address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError) as error:
        message = f"no Ray cluster at {settings.address!r} ({str(error).splitlines()[0]}). Run `ray start --head`, or use {LOCAL}."
        raise NextscaleError(message) from error
    finally:
        if current_thread() is main_thread() and handler is not None:  # Ray's own handler prints stacks and aborts
            signal.signal(signal.SIGTERM, handler)
    try:
        yield ray
    finally:
        ray.shutdown()
