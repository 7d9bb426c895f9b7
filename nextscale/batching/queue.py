"""Images that wait: bounded, joined by key, the oldest first."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from threading import Condition

from ..errors import Overloaded, ShuttingDown
from .jobs import Task
from .throughput import Throughput

PROBATION = 32  # batches after which a size that ran out of memory may be tried again
REMEMBERED = 1024  # keys for which that is known
LONGEST_WAIT = 1.0  # seconds between looks at deadlines while nothing happens


@dataclass
class Limit:
    """Images that a batch may have after a larger one ran out of memory."""

    images: int
    batches: int = 0  # since then


class Waiting:
    """What waits and what runs.

    A batch is ready when it is full, or when its oldest image has waited for `delay`. Of those that are ready the one with the oldest image
    runs first, so that no key waits for another that keeps coming.
    """

    def __init__(
        self, max_batch: int, delay: float, max_queue: int, throughput: Throughput, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_batch, self._delay, self._max_queue, self._throughput, self._clock = max_batch, delay, max_queue, throughput, clock
        self._tasks: dict[Hashable, list[Task]] = {}
        self._running = 0
        self._limits: dict[Hashable, Limit] = {}  # where a full batch ran out of memory
        self._changed = Condition()
        self._open = self._alive = True

    # --- callers

    def put(self, tasks: Sequence[Task]) -> None:
        """Overloaded where there is no room for all of them, ShuttingDown after `shut`. An empty queue takes any job."""
        with self._changed:
            if not self._open:
                raise ShuttingDown("no further images are generated here: this server is shutting down, ask another one")
            self._forget_dead()
            waiting = self._count()
            if waiting and waiting + len(tasks) > self._max_queue:
                excess = waiting + len(tasks) - self._max_queue
                after = self._throughput.seconds_for(excess)
                raise Overloaded(f"{waiting} images are waiting and {self._max_queue} may: try again in {after:.1f} s", after)
            self._tasks.setdefault(tasks[0].job.key, []).extend(tasks)
            self._changed.notify_all()

    def wake(self) -> None:
        """Somebody has left: workers look again."""
        with self._changed:
            self._changed.notify_all()

    def shut(self) -> None:
        """Nothing more comes in."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def close(self) -> None:
        """Workers go home after what they run; what waits is forgotten."""
        with self._changed:
            self._open = self._alive = False
            self._tasks.clear()
            self._changed.notify_all()

    def wait_empty(self, seconds: float | None) -> bool:
        """Whether nothing waits and nothing runs, within so many seconds."""
        with self._changed:
            return self._changed.wait_for(self._idle, seconds)

    @property
    def waiting(self) -> int:
        with self._changed:
            self._forget_dead()
            return self._count()

    @property
    def running(self) -> int:
        with self._changed:
            return self._running

    @property
    def open(self) -> bool:
        return self._open

    # --- workers

    def take(self, models: Collection[str]) -> list[Task] | None:
        """The next batch for a worker that has these models; None when there is nothing more to do, ever."""
        with self._changed:
            while self._alive:
                self._forget_dead()
                key, seconds = self._ready(models)
                if key is not None:
                    return self._start(key)
                self._changed.wait(seconds)
            return None

    def finished(self, tasks: Sequence[Task]) -> None:
        with self._changed:
            self._running -= len(tasks)
            if (limit := self._limits.get(tasks[0].job.key)) is not None:
                limit.batches += 1
            self._changed.notify_all()

    def expire(self) -> None:
        """Fails what is late."""
        with self._changed:
            self._forget_dead()

    def limit(self, key: Hashable) -> int:
        """Images that a batch of this key may have at present."""
        with self._changed:
            return self._limit(key)

    def lower_limit(self, key: Hashable, images: int) -> None:
        """Batches of this key have so many images at most from now on, and again more after a while."""
        with self._changed:
            self._limits.pop(key, None)
            self._limits[key] = Limit(max(images, 1))
            if len(self._limits) > REMEMBERED:
                del self._limits[next(iter(self._limits))]

    # --- with the lock held

    def _count(self) -> int:
        return sum(map(len, self._tasks.values()))

    def _idle(self) -> bool:
        self._forget_dead()
        return not self._tasks and self._running == 0

    def _forget_dead(self) -> None:
        now = self._clock()
        for key, tasks in list(self._tasks.items()):
            for task in tasks:
                task.handle.expire(now)
            alive = [task for task in tasks if task.alive]
            if alive:
                self._tasks[key] = alive
            else:
                del self._tasks[key]

    def _limit(self, key: Hashable) -> int:
        limit = self._limits.get(key)
        if limit is not None and limit.batches >= PROBATION:
            del self._limits[key]
            limit = None
        return self._max_batch if limit is None else limit.images

    def _ready(self, models: Collection[str]) -> tuple[Hashable | None, float]:
        """The key to run now, or in how many seconds to look again."""
        mine = {key: tasks for key, tasks in self._tasks.items() if tasks[0].job.model in models}
        now = self._clock()
        left = {key: 0.0 if self._full(key) else tasks[0].queued + self._delay - now for key, tasks in mine.items()}
        ready = [key for key in mine if left[key] <= 0]
        if ready:
            return min(ready, key=lambda key: mine[key][0].queued), 0.0
        return None, min([LONGEST_WAIT, *left.values()])

    def _full(self, key: Hashable) -> bool:
        return not self._open or len(self._tasks[key]) >= self._limit(key)

    def _start(self, key: Hashable) -> list[Task]:
        limit = self._limit(key)
        batch, rest = self._tasks[key][:limit], self._tasks[key][limit:]
        if rest:
            self._tasks[key] = rest
        else:
            del self._tasks[key]
        self._running += len(batch)
        return batch
