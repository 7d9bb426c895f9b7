"""Captured requests of a pipeline: lookup, the decision to capture, and the memory budget.

A request is captured when its kind occurs for the second time, when the caller requests it, or when a capture exists that differs only by
shorter prompts or fewer kept tokens. Before that, it is replayed in a captured larger batch if that is faster, or runs eagerly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from ..device import Timer, device_lock
from ..errors import OutOfMemory
from ..methods.method import Method
from ..models.base import NextScaleModel
from ..planning.memory import reserved_bytes
from ..request import Request
from ..sampling import ImageRng, Sampling
from ..stage import Schedule
from ..tokenizers.base import Tokenizer
from ..validation import is_hashable
from .buffers import text_bucket
from .executor import ScheduleTables, prompt_inputs
from .graphs import CapturedRequest
from .memory import DeviceMemory, GraphPool, WeightPointers, expandable_segments
from .replay import ReplayExecutor

log = logging.getLogger(__name__)

SHARE = 0.4  # default budget, relative to the device's memory
MAX_HISTORY = 1024  # kinds of requests, captured or not
HOST_SECONDS = 1e-3
"""Host time for launching one block of one stage; measured: 439 ms for 32 blocks and 13 stages on an H200."""


@dataclass(frozen=True)
class CaptureKey:
    """Properties of a request that a capture depends on; requests with equal keys share a capture."""

    schedule: Schedule
    batch: int
    guidance: Hashable
    sampling: Sampling
    method: Method
    text: int  # padded text length in tokens
    prefix_codes: tuple[int, ...] = ()  # dimensions of each given stage's codes: code numbers [B, N] or mixtures [B, N, Z]
    edits: bool = False  # the canvas keeps an image outside a mask

    @classmethod
    def of(cls, request: Request, reads_text: bool) -> CaptureKey:
        """Returns the key of a request. `reads_text`: the model has cross-attention to the text."""
        text = text_bucket(request.text_tokens) if reads_text else 0
        prefix = tuple(codes.ndim for codes in request.prefix_codes)
        edits = request.edit is not None
        return cls(request.schedule, request.batch, request.guidance.key, request.sampling, request.method, text, prefix, edits)

    def serves(self, other: CaptureKey) -> bool:
        """Returns True if a capture with this key can run requests with the other key, of shorter prompts or fewer images."""
        enough = self.text >= other.text and self.batch >= other.batch
        return enough and replace(self, text=other.text, batch=other.batch) == other


@dataclass(frozen=True)
class WarmUp:
    """Cost of a capture."""

    seconds: float
    graphs: int
    bytes: int  # memory that it keeps


@dataclass(eq=False)
class CaptureEntry:
    """A capture with its measured costs."""

    request: CapturedRequest
    replay_seconds: float
    held: int  # bytes that only this capture uses, which return to the pool when it is removed


@dataclass(eq=False)
class History:
    """Statistics of one kind of request."""

    requests: int = 0  # since its capture was removed, if it had one
    needed: int = 2  # requests before it is captured; doubled whenever its capture is evicted
    refused: bool = False  # a capture failed or did not fit


class Captures:
    """All captures of a pipeline, least recently used first.

    They share one memory pool, because only one is replayed at a time. Each capture owns a small part of it, and the rest is scratch
    memory. When the pool exceeds its budget, the least recently used captures are removed, and later captures reuse their memory. The pool
    is freed when the last capture is removed. If a capture does not fit next to the scratch memory of others, all others are removed and it
    is captured again in a new pool. If it does not fit even then, such requests run eagerly, which is logged once.

    Access to the device is serialized by `device_lock`.
    """

    def __init__(self, model: NextScaleModel, tokenizer: Tokenizer, tables: ScheduleTables, budget: int | None = None) -> None:
        """`budget`: bytes of device memory for captures; by default a share of the device's memory."""
        self._model, self._tokenizer, self._tables, self._budget = model, tokenizer, tables, budget
        self._captures: dict[CaptureKey, CaptureEntry] = {}
        self._history: dict[CaptureKey, History] = {}
        self._pool: GraphPool | None = None
        self._made_in_pool = 0
        self._scratch = 0  # bytes of the pool that no single capture owns
        self._pointers = WeightPointers(model, tokenizer)
        self._weights: tuple[int, ...] = ()
        self.bytes = 0  # of device memory used by the pool and all captures

    def __len__(self) -> int:
        return len(self._captures)

    @property
    def graphs(self) -> int:
        return sum(entry.request.graphs for entry in self._captures.values())

    @property
    def budget(self) -> int:
        return self._budget if self._budget is not None else int(SHARE * DeviceMemory.total(self._model.device))

    def replay(self, request: Request, at_once: bool = False) -> ReplayExecutor | None:
        """Returns an executor that replays graphs for this request, after capturing it if needed; None if it must run eagerly."""
        if obstacle(self._model.device, request) is not None:
            return None
        self._forget_if_weights_moved()
        key = self._key(request)
        history = self._history_of(key)
        history.requests += 1
        used = self._with_room(key)
        pays = at_once or history.requests >= history.needed or bool(self._with_less_room(key))
        if used is None and not history.refused and pays and self._try(key, request, history):
            used = key
        if used is None:
            used = self._larger_batch(key, request)
        if used is None:
            return None
        self._captures[used] = self._captures.pop(used)  # marks it as most recently used
        return ReplayExecutor(self._captures[used].request, request.batch)

    def capture(self, request: Request) -> WarmUp:
        """Captures requests of this kind unless a capture exists."""
        self._forget_if_weights_moved()
        key = self._key(request)
        if self._with_room(key) is not None:
            return WarmUp(0.0, 0, 0)
        return self._capture(key, request)

    def clear(self) -> None:
        """Removes all captures and statistics, and frees their memory."""
        with device_lock(self._model.device).held():
            self._captures.clear()
            self._history.clear()
            self._drop_pool()

    def decode_with(self, tokenizer: Tokenizer) -> None:
        """Sets the tokenizer of later captures; removes captures that decode with another one."""
        if tokenizer is not self._tokenizer:
            self.clear()
            self._tokenizer = tokenizer
            self._pointers = WeightPointers(self._model, tokenizer)

    # --- lookup

    def _key(self, request: Request) -> CaptureKey:
        return CaptureKey.of(request, self._model.block_config.text is not None)

    def _with_room(self, key: CaptureKey) -> CaptureKey | None:
        """Returns the capture with the shortest sufficient text length."""
        if key in self._captures:
            return key
        enough = [known for known in self._captures if known.batch == key.batch and known.serves(key)]
        return min(enough, key=lambda known: known.text, default=None)

    def _larger_batch(self, key: CaptureKey, request: Request) -> CaptureKey | None:
        """Returns a capture of a larger batch if replaying it is faster than the host's time for eager launches.

        Padding repeats the last image, so every image needs its own random numbers.
        """
        if request.seeds is None:
            return None
        host = HOST_SECONDS * len(self._model.blocks) * sum(not plan.skip for plan in request.plans)
        faster = [known for known, entry in self._captures.items() if known.serves(key) and entry.replay_seconds <= host]
        return min(faster, key=lambda known: (known.batch, known.text), default=None)

    # --- decision

    def _history_of(self, key: CaptureKey) -> History:
        """Returns the statistics of this kind of request and marks them as most recently used."""
        self._history[key] = self._history.pop(key, History())
        if len(self._history) > MAX_HISTORY:
            del self._history[next(iter(self._history))]
        return self._history[key]

    def _with_less_room(self, key: CaptureKey) -> list[CaptureKey]:
        """Returns captures that would serve this key if their texts or token counts were larger."""
        return [known for known in self._captures if known != key and known.batch == key.batch and key.serves(known)]

    def _try(self, key: CaptureKey, request: Request, history: History) -> bool:
        """Captures the request. If that fails, logs it once, returns False and does not try again: the request may still run eagerly."""
        try:
            self._capture(key, request)
        except Exception as error:
            history.refused = True
            log.warning("%s will run eagerly because they could not be captured: %s", described(request), str(error).partition("\n")[0])
            return False
        return True

    # --- capturing

    def _capture(self, key: CaptureKey, request: Request) -> WarmUp:
        """Captures a request. Raises OutOfMemory if it exceeds the budget without other captures."""
        known = reserved_bytes(self._model, request.schedule, request.plans, request.batch, request.rows, request.text_tokens)
        if known > self.budget:
            raise self._too_large(request, known)
        begun = time.perf_counter()
        cost = self._add(key, request)
        while self._needed > self.budget and len(self) > 1:
            self._displace(next(iter(self._captures)))
        if self._needed > self.budget and self._made_in_pool > 1:
            self._remove(key)
            cost = self._add(key, request)
        if self._needed > self.budget:
            needed = self._needed
            self._remove(key)
            raise self._too_large(request, needed)
        for smaller in self._with_less_room(key):
            self._remove(smaller)  # the new capture serves the same requests
        cost = replace(cost, seconds=time.perf_counter() - begun)
        log.info("captured %s: %.1f s, %d graphs, %.2f GB", described(request), cost.seconds, cost.graphs, cost.bytes / 1e9)
        return cost

    def _add(self, key: CaptureKey, request: Request) -> WarmUp:
        device = self._model.device
        pool = self._pool = self._pool or GraphPool.fresh(device)
        earlier = pool.begun
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # so that the increase of reserved memory is the size of the capture
        begun, before = time.perf_counter(), DeviceMemory.now(device)
        try:
            with torch.inference_mode(), expandable_segments():
                inputs = prompt_inputs(self._model, request)
                tables = self._tables.of(request.schedule)
                captured = CapturedRequest(self._model, self._tokenizer, request, inputs, tables, key.text, pool)
            torch.cuda.synchronize(device)
            after, seconds = DeviceMemory.now(device), time.perf_counter() - begun
            replayed = replay_seconds(captured, request, device)
        except BaseException:
            if pool.begun > earlier:  # after a failed capture torch cannot use this pool and stream again
                self._captures.clear()
                self._drop_pool()
            raise
        grown, held = after.reserved - before.reserved, after.allocated - before.allocated
        self._captures[key] = CaptureEntry(captured, replayed, held)
        self._made_in_pool += 1
        self.bytes += grown
        if grown > 0:  # the pool had no free memory, so everything that captures do not own is scratch
            self._scratch = self.bytes - sum(entry.held for entry in self._captures.values())
        return WarmUp(seconds, captured.graphs, grown)

    @property
    def _needed(self) -> int:
        """Bytes that the pool would use without memory of removed captures."""
        return self._scratch + sum(entry.held for entry in self._captures.values())

    def _displace(self, key: CaptureKey) -> None:
        self._remove(key)
        history = self._history_of(key)
        history.requests, history.needed = 0, 2 * history.needed  # prevents kinds that evict each other from being captured again and again

    def _remove(self, key: CaptureKey) -> None:
        del self._captures[key]
        if not self._captures:
            self._drop_pool()

    def _drop_pool(self) -> None:
        self._pool, self._made_in_pool, self._scratch, self.bytes = None, 0, 0, 0

    def _too_large(self, request: Request, needed: int) -> OutOfMemory:
        return OutOfMemory(
            f"graph_memory must be at least {needed / 2**30:.2f} GiB for {described(request)}; got {self.budget / 2**30:.2f} GiB."
            " Increase it with Pipeline(..., graph_memory=bytes), or generate fewer or smaller images at a time."
        )

    # --- weights

    def _forget_if_weights_moved(self) -> None:
        addresses = self._pointers.now()
        if addresses != self._weights and self._captures:
            log.warning("weights moved to another device or dtype; existing CUDA graphs are dropped")
        if addresses != self._weights and (self._captures or self._history):
            self.clear()
        self._weights = addresses


def graphs_run_on(device: torch.device) -> bool:
    return device.type == "cuda"


def obstacle(device: torch.device, request: Request) -> str | None:
    """Returns the reason why this request cannot be captured, or None."""
    if not graphs_run_on(device):
        return f"CUDA graphs need a GPU, and the model is on {device}. Use engine='eager'."
    if request.compute_mask or request.revise is not None:
        return "compute_mask and revise need the host between stages and cannot be captured. Leave them out of warmup."
    if request.rng is request.method_rng and request.method.data_dependent and request.sampling.refine is not None:
        return "seeds must be ints to capture this request, because the order of random numbers depends on the image."
    if not request.method.capturable:
        return f"{request.method.label} reads from the device between stages and cannot be captured. Its calls run eagerly."
    if not is_hashable(request.method):
        return f"{request.method.label} must be hashable to be captured. Make it a frozen dataclass."
    return None


def described(request: Request) -> str:
    return f"requests for {request.batch} image(s) of {request.schedule} with {request.method.label}"


@torch.inference_mode()
def replay_seconds(captured: CapturedRequest, request: Request, device: torch.device) -> float:
    """Returns the duration of the second replay, because the first one uploads the graphs to the device."""
    seconds = 0.0
    for _ in range(2):
        numbers = ImageRng(range(request.batch), device)
        replay, begun = ReplayExecutor(captured, request.batch), time.perf_counter()
        replay.run(replace(request, rng=numbers, method_rng=numbers), Timer(device), lambda done: None, decode=True)
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begun
    return seconds
