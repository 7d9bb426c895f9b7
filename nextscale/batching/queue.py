"""Bounded queue of images, which joins them into batches by key, oldest first."""

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from threading import Condition, Lock

from ..errors import Overloaded, ShuttingDown
from .jobs import Task

PROBATION = 32  # batches after which a size that ran out of memory may be tried again
MAX_KEYS = 1024  # with a lowered limit
MAX_WAIT = 1.0  # seconds between checks of deadlines
DECAY = 0.8  # weight of earlier batches in the measured rate, per batch
UNKNOWN_SECONDS = 1.0  # retry time before the first batch
MIN_SECONDS = 0.05


class Throughput:
    """Images per second of busy time over recent batches, times the number of workers."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._images = self._seconds = 0.0
        self._lock = Lock()

    def add(self, images: int, seconds: float) -> None:
        with self._lock:
            self._images = DECAY * self._images + images
            self._seconds = DECAY * self._seconds + seconds

    @property
    def images_per_second(self) -> float | None:
        """Returns None before the first batch."""
        with self._lock:
            return self._workers * self._images / self._seconds if self._seconds > 0 else None

    def seconds_for(self, images: int) -> float:
        rate = self.images_per_second
        return UNKNOWN_SECONDS if rate is None else max(images / rate, MIN_SECONDS)


class JobQueue:
    """Queued and running images.

    A batch is ready when it is full or its oldest image has waited for `delay`. The ready batch with the oldest image runs first, so that
    no key starves.
    """

    def __init__(
        self, max_batch: int, delay: float, max_queue: int, throughput: Throughput, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_batch, self._delay, self._max_queue, self._throughput, self._clock = max_batch, delay, max_queue, throughput, clock
        self._tasks: dict[Hashable, list[Task]] = {}
        self._running = 0
        self._limits: dict[Hashable, list[int]] = {}  # of keys that ran out of memory: images, batches since then
        self._changed = Condition()  # its lock is reentrant
        self._open = self._alive = True

    # --- callers

    def put(self, tasks: Sequence[Task]) -> None:
        """Adds tasks. Raises Overloaded if they do not all fit, ShuttingDown after `shut`. An empty queue accepts any job."""
        with self._changed:
            if not self._open:
                raise ShuttingDown("this server is shutting down. Send the request to another one.")
            self.expire()
            waiting = self._count()
            if waiting and waiting + len(tasks) > self._max_queue:
                excess = waiting + len(tasks) - self._max_queue
                after = self._throughput.seconds_for(excess)
                raise Overloaded(f"the queue holds {waiting} of {self._max_queue} images. Try again in {after:.1f} s.", after)
            self._tasks.setdefault(tasks[0].job.key, []).extend(tasks)
            self._changed.notify_all()

    def wake(self) -> None:
        """Makes workers check the queue again after a job has ended."""
        with self._changed:
            self._changed.notify_all()

    def shut(self) -> None:
        """Refuses new jobs."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def close(self) -> None:
        """Drops queued jobs; workers exit after the current batch."""
        with self._changed:
            self._open = self._alive = False
            self._tasks.clear()
            self._changed.notify_all()

    def wait_empty(self, seconds: float | None) -> bool:
        """Waits until all jobs have ended. Returns False after `seconds`."""
        with self._changed:
            return self._changed.wait_for(self._idle, seconds)

    @property
    def waiting(self) -> int:
        with self._changed:
            self.expire()
            return self._count()

    @property
    def running(self) -> int:
        with self._changed:
            return self._running

    # --- workers

    def take(self, models: Collection[str]) -> list[Task] | None:
        """Returns the next batch for a worker with these models, or None after `close`."""
        with self._changed:
            while self._alive:
                self.expire()
                key, seconds = self._ready(models)
                if key is not None:
                    limit = self.limit(key)
                    batch, self._tasks[key] = self._tasks[key][:limit], self._tasks[key][limit:]
                    if not self._tasks[key]:
                        del self._tasks[key]
                    self._running += len(batch)
                    return batch
                self._changed.wait(seconds)
            return None

    def finished(self, tasks: Sequence[Task]) -> None:
        with self._changed:
            self._running -= len(tasks)
            if (key := tasks[0].job.key) in self._limits:
                self._limits[key][1] += 1
            self._changed.notify_all()

    def expire(self) -> None:
        """Fails jobs whose deadline has passed, and drops the tasks of jobs that are over."""
        with self._changed:
            now = self._clock()
            for key, tasks in list(self._tasks.items()):
                for task in tasks:
                    task.handle.expire(now)
                if alive := [task for task in tasks if task.alive]:
                    self._tasks[key] = alive
                else:
                    del self._tasks[key]

    def limit(self, key: Hashable) -> int:
        """Returns the current batch limit of a key."""
        with self._changed:
            if key in self._limits and self._limits[key][1] >= PROBATION:
                del self._limits[key]
            return self._limits.get(key, [self._max_batch])[0]

    def lower_limit(self, key: Hashable, images: int) -> None:
        """Limits batches of a key; the limit is lifted after PROBATION batches."""
        with self._changed:
            self._limits.pop(key, None)
            self._limits[key] = [max(images, 1), 0]
            if len(self._limits) > MAX_KEYS:
                del self._limits[next(iter(self._limits))]

    # --- with the lock held

    def _count(self) -> int:
        return sum(map(len, self._tasks.values()))

    def _idle(self) -> bool:
        self.expire()
        return not self._tasks and self._running == 0

    def _ready(self, models: Collection[str]) -> tuple[Hashable | None, float]:
        """Returns the key to run now, or None and the seconds until the next check."""
        mine = {key: tasks for key, tasks in self._tasks.items() if tasks[0].job.model in models}
        full = {key for key, tasks in mine.items() if not self._open or len(tasks) >= self.limit(key)}
        now = self._clock()
        left = {key: 0.0 if key in full else tasks[0].queued + self._delay - now for key, tasks in mine.items()}
        if ready := [key for key in mine if left[key] <= 0]:
            return min(ready, key=lambda key: mine[key][0].queued), 0.0
        return None, min([MAX_WAIT, *left.values()])
