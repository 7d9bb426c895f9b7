"""What a model makes of a schedule, kept for the last few of them."""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch

from ..models.base import NextScaleModel
from ..stage import Schedule

KEPT = 8  # 5 MB each for images of 1024 x 1024 pixels


class ScheduleTables:
    def __init__(self, model: NextScaleModel) -> None:
        self._model = model
        self._tables: dict[tuple[Schedule, torch.device], Any] = {}  # the last one used is the last to go
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._tables)

    def of(self, schedule: Schedule) -> Any:
        key = schedule, self._model.device
        with self._lock:
            tables = self._tables.pop(key) if key in self._tables else self._model.schedule_tables(schedule)
            if len(self._tables) == KEPT:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = tables
        return tables
