"""Shards of a run. Shard i of N takes every N-th batch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import SettingError

AUTO = "auto"
WHOLE = r"\d{1,18}"  # Python refuses to read thousands of digits
LAUNCHERS = (  # variables for the process number, the number of processes and the first number
    ("RANK", "WORLD_SIZE", None),  # torchrun
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("SLURM_PROCID", "SLURM_NTASKS", None),  # srun
)

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    index: int = 0
    count: int = 1

    @property
    def name(self) -> str:
        return f"{self.index}-of-{self.count}"

    def part(self, batches: Sequence[T]) -> Sequence[T]:
        """Returns the shard's batches. Batches are never split, so images do not depend on the number of shards."""
        return batches[self.index :: self.count]

    @staticmethod
    def parse(text: str, environment: Mapping[str, str] = os.environ) -> Shard:
        """Reads "2/8", counted from 0, or "auto" under torchrun or Slurm."""
        if text == AUTO:
            return _launched(environment)
        match = re.fullmatch(rf"({WHOLE})/({WHOLE})", text)
        if match is None or not int(match[1]) < int(match[2]):
            raise SettingError(f"--shard must be i/N with i from 0 to N - 1, such as 0/8, or {AUTO} under torchrun or Slurm; got {text!r}.")
        return Shard(int(match[1]), int(match[2]))


def _launched(environment: Mapping[str, str]) -> Shard:
    for number, count, first in LAUNCHERS:
        if number in environment and count in environment:
            given = [environment[number], environment[count], environment.get(first or "", "0")]
            if not all(re.fullmatch(WHOLE, value) for value in given):
                raise SettingError(f"{number} and {count} must be ints; got {given[0]!r} and {given[1]!r}.")
            index, total = int(given[0]) - int(given[2]), int(given[1])
            if not 0 <= index < total:
                raise SettingError(f"{number} must be below {count} {total}; got {index}. Slurm arrays must count in steps of 1.")
            return Shard(index, total)
    names = ", ".join(f"{number} and {count}" for number, count, _ in LAUNCHERS)
    raise SettingError(f"--shard {AUTO} needs {names}. Start with torchrun or Slurm, or give --shard i/N.")
