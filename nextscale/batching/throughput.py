"""How fast images are generated, from what was measured."""

from __future__ import annotations

from threading import Lock

KEPT = 0.8  # of what was known, with every batch: the last few count
UNKNOWN_SECONDS = 1.0  # what a caller waits before anything was measured
SHORTEST_SECONDS = 0.05


class Throughput:
    """Images per second of busy time, of recent batches, times the number of workers."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._images = self._seconds = 0.0
        self._lock = Lock()

    def add(self, images: int, seconds: float) -> None:
        with self._lock:
            self._images = KEPT * self._images + images
            self._seconds = KEPT * self._seconds + seconds

    @property
    def images_per_second(self) -> float | None:
        """None before the first batch."""
        with self._lock:
            return self._workers * self._images / self._seconds if self._seconds > 0 else None

    def seconds_for(self, images: int) -> float:
        rate = self.images_per_second
        return UNKNOWN_SECONDS if rate is None else max(images / rate, SHORTEST_SECONDS)
