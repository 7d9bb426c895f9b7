"""Energy of a GPU, from the counter of its driver."""

from __future__ import annotations

import ctypes
import math
import statistics
from typing import Any

import torch

from nextscale.eval.bench import Runner
from nextscale.eval.results import Row, short_error

METERED_SECONDS = 1.5  # duration of the requests whose energy is measured


class EnergyMeter:
    """Energy counter of NVIDIA's management library, which is part of the driver. It updates about ten times per second."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    @staticmethod
    def of(device: torch.device) -> EnergyMeter | None:
        """Returns the meter of a device, or None without the library or its counter."""
        if device.type != "cuda":
            return None
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
        handle = ctypes.c_void_p()
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
            return None
        meter = EnergyMeter(library, handle)
        return meter if meter.joules() is not None else None

    def joules(self) -> float | None:
        """Returns the energy since the driver was loaded; None if it cannot be read."""
        millijoules = ctypes.c_ulonglong()
        failed = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules))
        return None if failed else millijoules.value / 1000


def energy_columns(runner: Runner, prompts: Any, images: int, meter: EnergyMeter | None) -> Row:
    """Measures consecutive requests, long enough for several counter updates. The energy includes the GPU's idle power."""
    if meter is None:
        return {"joules_per_image": None}
    requests = max(2, math.ceil(METERED_SECONDS / statistics.median(timed.seconds for timed in runner.timed)))
    before = meter.joules()
    try:
        for seed in range(requests):
            runner.request(prompts, seed)
    except Exception as error:  # keeps the measured times
        return {"joules_per_image": None, "not_metered": short_error(error)}
    after = meter.joules()
    return {"joules_per_image": None if before is None or after is None else round((after - before) / (requests * images), 1)}
