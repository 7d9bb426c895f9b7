"""Energy that a GPU spends, as its driver counts it."""

from __future__ import annotations

import ctypes

import torch


class EnergyMeter:
    """Reads the counter of NVIDIA's management library, which comes with the driver. It moves about ten times a second."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    @staticmethod
    def of(device: torch.device) -> EnergyMeter | None:
        """The meter of this device; None where there is no such library or counter."""
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
        """Energy spent since the driver was loaded; None where it cannot be read."""
        millijoules = ctypes.c_ulonglong()
        failed = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules))
        return None if failed else millijoules.value / 1000
