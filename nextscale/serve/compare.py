"""How far two pictures are apart, for the studio: PSNR, SSIM, and LPIPS where its network is at hand."""

from __future__ import annotations

from threading import Lock
from typing import Any

import torch

from ..errors import CheckpointError
from ..lab.metrics import Lpips
from ..lab.metrics.lpips import SMALLEST_SIDE
from ..lab.metrics.pixels import WINDOW, psnr, ssim
from .errors import refused
from .pictures import decoded_png
from .schema import Comparison

LEAST_DECIBELS_EQUAL = 99.0  # what is answered for equal pictures, whose PSNR is infinite


class Comparer:
    """Opens the network at the first comparison. It runs on the CPU: the GPU belongs to the workers."""

    def __init__(self, most_pixels: int) -> None:
        self._most_pixels = most_pixels
        self._lock = Lock()
        self._lpips: Lpips | None = None
        self._missing: str | None = None

    @torch.inference_mode()
    def compare(self, pair: Comparison) -> dict[str, Any]:
        a, b = decoded_png(pair.a, "a", self._most_pixels), decoded_png(pair.b, "b", self._most_pixels)
        if a.shape != b.shape:
            raise refused("b", f"a has {a.shape[3]}x{a.shape[2]} pixels and b {b.shape[3]}x{b.shape[2]}: give two of the same size")
        with self._lock:  # one comparison at a time
            network = self._network()
            return {
                "psnr": min(round(float(psnr(a, b)), 3), LEAST_DECIBELS_EQUAL),
                "ssim": round(float(ssim(a, b)), 5) if min(a.shape[2:]) >= WINDOW else None,
                "lpips": None if network is None or min(a.shape[2:]) < SMALLEST_SIDE else round(float(network(a, b)), 5),
                "lpips_missing": self._missing,
            }

    def _network(self) -> Lpips | None:
        if self._lpips is None and self._missing is None:
            try:
                self._lpips = Lpips.load()
            except CheckpointError:
                self._missing = "the network of LPIPS is not on the server: see docs/serving.md"
        return self._lpips
