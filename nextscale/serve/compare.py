"""Compares two images for the studio: PSNR, SSIM and LPIPS."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from threading import Event
from typing import Any

import torch
from starlette.requests import Request

from ..errors import JobCancelled, Overloaded
from ..metrics import Lpips
from ..metrics.lpips import SMALLEST_SIDE
from ..metrics.pixels import WINDOW, psnr, ssim
from .errors import refused
from .generations import gone, read_body
from .pictures import decoded_png
from .schema import Comparison
from .settings import Limits

MAX_PSNR = 99.0  # of equal images, instead of infinity
MAX_OPEN = 4  # running or waiting comparisons, which hold their images in memory
RETRY_SECONDS = 2.0


class Comparer:
    """Thread that compares pairs on the CPU, since the GPU belongs to the workers."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, "nextscale-compare")
        self._open = 0  # requests

    async def answer(self, request: Request) -> dict[str, Any]:
        """Reads and compares two images. Raises Overloaded if too many requests wait, JobCancelled if the client leaves."""
        if self._open >= MAX_OPEN:
            raise Overloaded(f"{self._open} comparisons are waiting. Try again in {RETRY_SECONDS:.0f} s.", RETRY_SECONDS)
        self._open += 1
        try:
            pair = await read_body(request, Comparison, self._limits.read_seconds)
            left = Event()
            leaving = asyncio.ensure_future(gone(request))
            leaving.add_done_callback(lambda _: left.set())
            try:
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._compare, pair, left)
            finally:
                leaving.cancel()
        finally:
            self._open -= 1

    @torch.inference_mode()
    def _compare(self, pair: Comparison, left: Event) -> dict[str, Any]:
        """Compares a pair; stops before the next step if the client has left."""

        def stay() -> None:
            if left.is_set():
                raise JobCancelled("the client has left")

        images = []
        for name in ("a", "b"):
            stay()
            images.append(decoded_png(getattr(pair, name), name, self._limits.pixels))
        a, b = images
        if a.shape != b.shape:
            raise refused("b", f"b must have the size of a, {a.shape[3]}x{a.shape[2]}; got {b.shape[3]}x{b.shape[2]}")
        side = min(a.shape[2:])
        stay()
        answer: dict[str, float | None] = {"psnr": min(round(float(psnr(a, b)), 3), MAX_PSNR)}
        stay()
        answer["ssim"] = round(float(ssim(a, b)), 5) if side >= WINDOW else None
        stay()
        answer["lpips"] = round(float(self._lpips(a, b)), 5) if side >= SMALLEST_SIDE else None
        return answer

    @cached_property
    def _lpips(self) -> Lpips:
        return Lpips.load()
