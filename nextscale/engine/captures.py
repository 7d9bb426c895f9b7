"""The captured graphs of a pipeline: which request can use which, when capturing pays, and what they may keep.

A request is captured when it comes for the second time, or at once when the caller says so, and where one that differs from it only in
having shorter prompts, or images that keep fewer tokens, has been captured already. Until then it is replayed in a larger captured batch,
where that is faster, or run eagerly.
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

SHARE = 0.4  # of the device's memory, which captures may keep unless the caller says otherwise
REMEMBERED = 1024  # kinds of requests, whether captured or not
HOST_SECONDS = 1e-3
"""What the host takes to launch one block of one stage: 439 ms were measured on an H200 for 32 blocks and 13 stages."""


@dataclass(frozen=True)
class CaptureKey:
    """What a capture is made for; a request with the same one can use it."""

    schedule: Schedule
    batch: int
    guidance: Hashable
    sampling: Sampling
    method: Method
    text: int  # room for this number of text tokens
    prefix_codes: tuple[int, ...] = ()  # dimensions of the codes of each given stage: code numbers [B, N] or mixtures [B, N, Z]
    edits: bool = False  # the canvas keeps an image outside a mask

    @classmethod
    def of(cls, request: Request, reads_text: bool) -> CaptureKey:
        """`reads_text`: attention has keys for the text, of which there may be more or fewer."""
        text = text_bucket(request.text_tokens) if reads_text else 0
        prefix = tuple(codes.ndim for codes in request.prefix_codes)
        edits = request.edit is not None
        return cls(request.schedule, request.batch, request.guidance.key, request.sampling, request.method, text, prefix, edits)

    def serves(self, other: CaptureKey) -> bool:
        """Returns True if a capture for this one can run the other, of shorter prompts or fewer images."""
        enough = self.text >= other.text and self.batch >= other.batch
        return enough and replace(self, text=other.text, batch=other.batch) == other


@dataclass(frozen=True)
class WarmUp:
    """What a capture cost."""

    seconds: float
    graphs: int
    bytes: int  # that it keeps


@dataclass(eq=False)
class Kept:
    """A capture that can be used."""

    request: CapturedRequest
    replay_seconds: float
    held: int  # bytes that are its own, which go back to the pool when it leaves


@dataclass(eq=False)
class History:
    """What is known of one kind of request."""

    requests: int = 0  # since its capture left, if it had one
    needed: int = 2  # requests after which it is captured; twice as many each time that its capture had to leave
    refused: bool = False  # a capture did not fit, or failed


class Captures:
    """All captures of a pipeline, the least recently used first.

    They share one pool of memory, since only one is replayed at a time: `bytes` of the device, of which each capture holds a little for
    itself and the rest is scratch for whichever is replayed. When the pool outgrows its budget the least recently used captures leave.
    What they held goes back to the pool, where the next capture takes it; the device gets memory back only when the last one has left
    and the pool goes with it. Where a capture is too large beside the scratch of others, all of them leave, and it is made again in a
    pool of its own; if it is too large even then, such requests run eagerly, which is said once.

    Callers take their turns on the device: see `turns`.
    """

    def __init__(self, model: NextScaleModel, tokenizer: Tokenizer, tables: ScheduleTables, budget: int | None = None) -> None:
        """`budget`: bytes of the device that captures may keep; None is a share of its memory."""
        self._model, self._tokenizer, self._tables, self._budget = model, tokenizer, tables, budget
        self._captures: dict[CaptureKey, Kept] = {}
        self._history: dict[CaptureKey, History] = {}
        self._pool: GraphPool | None = None
        self._made_in_pool = 0
        self._scratch = 0  # bytes of the pool that no capture holds for itself
        self._places = WeightPointers(model, tokenizer)
        self._weights: tuple[int, ...] = ()
        self.bytes = 0  # that the pool and all that captures hold take of the device

    def __len__(self) -> int:
        return len(self._captures)

    @property
    def graphs(self) -> int:
        return sum(kept.request.graphs for kept in self._captures.values())

    @property
    def budget(self) -> int:
        return self._budget if self._budget is not None else int(SHARE * DeviceMemory.total(self._model.device))

    def replay(self, request: Request, at_once: bool = False) -> ReplayExecutor | None:
        """What runs this request from captured graphs; None where it has to run eagerly. Captures it if that pays, or at once."""
        if obstacle(self._model.device, request) is not None:
            return None
        self._forget_if_weights_moved()
        key = self._key(request)
        history = self._remembered(key)
        history.requests += 1
        used = self._with_room(key)
        pays = at_once or history.requests >= history.needed or bool(self._with_less_room(key))
        if used is None and not history.refused and pays and self._try(key, request, history):
            used = key
        if used is None:
            used = self._larger_batch(key, request)
        if used is None:
            return None
        self._captures[used] = self._captures.pop(used)  # the most recently used is the last to leave
        return ReplayExecutor(self._captures[used].request, request.batch)

    def capture(self, request: Request) -> WarmUp:
        """Captures requests like this one, unless that has been done."""
        self._forget_if_weights_moved()
        key = self._key(request)
        if self._with_room(key) is not None:
            return WarmUp(0.0, 0, 0)
        return self._capture(key, request)

    def clear(self) -> None:
        """Forgets all captures and what it knows of requests; the device gets its memory back."""
        with device_lock(self._model.device).held():
            self._captures.clear()
            self._history.clear()
            self._drop_pool()

    def decode_with(self, tokenizer: Tokenizer) -> None:
        """Later captures decode with this tokenizer; those that decode with another are forgotten."""
        if tokenizer is not self._tokenizer:
            self.clear()
            self._tokenizer = tokenizer
            self._places = WeightPointers(self._model, tokenizer)

    # --- which capture

    def _key(self, request: Request) -> CaptureKey:
        return CaptureKey.of(request, self._model.block_config.text is not None)

    def _with_room(self, key: CaptureKey) -> CaptureKey | None:
        """The capture with the least room for text that is enough."""
        if key in self._captures:
            return key
        enough = [known for known in self._captures if known.batch == key.batch and known.serves(key)]
        return min(enough, key=lambda known: known.text, default=None)

    def _larger_batch(self, key: CaptureKey, request: Request) -> CaptureKey | None:
        """A capture of more images, where replaying it is faster than running this request eagerly.

        That takes at least what the host needs to launch every block of every stage. The padding repeats the last image, for which
        every image needs its own random numbers.
        """
        if request.seeds is None:
            return None
        host = HOST_SECONDS * len(self._model.blocks) * sum(not plan.skip for plan in request.plans)
        faster = [known for known, kept in self._captures.items() if known.serves(key) and kept.replay_seconds <= host]
        return min(faster, key=lambda known: (known.batch, known.text), default=None)

    # --- when to capture

    def _remembered(self, key: CaptureKey) -> History:
        """What is known of this kind of request, which is the last to be forgotten now."""
        self._history[key] = self._history.pop(key, History())
        if len(self._history) > REMEMBERED:
            del self._history[next(iter(self._history))]
        return self._history[key]

    def _with_less_room(self, key: CaptureKey) -> list[CaptureKey]:
        """Captures whose only fault is that a text of this request is longer, or that its images keep more tokens."""
        return [known for known in self._captures if known != key and known.batch == key.batch and key.serves(known)]

    def _try(self, key: CaptureKey, request: Request, history: History) -> bool:
        """Captures the request; returns False, logs it once and does not try again if that fails: the request may still run eagerly."""
        try:
            self._capture(key, request)
        except Exception as error:
            history.refused = True
            log.warning("%s run eagerly from now on: they could not be captured (%s)", described(request), str(error).partition("\n")[0])
            return False
        return True

    # --- capturing

    def _capture(self, key: CaptureKey, request: Request) -> WarmUp:
        """OutOfMemory where it would not fit the budget by itself."""
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
            self._remove(smaller)  # whatever it served is served by this one
        cost = replace(cost, seconds=time.perf_counter() - begun)
        log.info("captured %s: %.1f s, %d graphs, %.2f GB", described(request), cost.seconds, cost.graphs, cost.bytes / 1e9)
        return cost

    def _add(self, key: CaptureKey, request: Request) -> WarmUp:
        device = self._model.device
        pool = self._pool = self._pool or GraphPool.fresh(device)
        earlier = pool.begun
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # so that what is reserved afterwards is what the capture keeps
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
            if pool.begun > earlier:  # torch cannot capture into this pool and stream after a failure: drop the pool and all its captures
                self._captures.clear()
                self._drop_pool()
            raise
        grown, held = after.reserved - before.reserved, after.allocated - before.allocated
        self._captures[key] = Kept(captured, replayed, held)
        self._made_in_pool += 1
        self.bytes += grown
        if grown > 0:  # nothing in the pool was free, so that what no capture holds is scratch
            self._scratch = self.bytes - sum(kept.held for kept in self._captures.values())
        return WarmUp(seconds, captured.graphs, grown)

    @property
    def _needed(self) -> int:
        """Bytes that the pool would have without what captures have left in it."""
        return self._scratch + sum(kept.held for kept in self._captures.values())

    def _displace(self, key: CaptureKey) -> None:
        self._remove(key)
        history = self._remembered(key)
        history.requests, history.needed = 0, 2 * history.needed  # else kinds that displace one another are captured again and again

    def _remove(self, key: CaptureKey) -> None:
        del self._captures[key]
        if not self._captures:
            self._drop_pool()

    def _drop_pool(self) -> None:
        self._pool, self._made_in_pool, self._scratch, self.bytes = None, 0, 0, 0

    def _too_large(self, request: Request, needed: int) -> OutOfMemory:
        return OutOfMemory(
            f"graphs of {described(request)} keep {needed / 2**30:.2f} GiB, and graph_memory allows {self.budget / 2**30:.2f}: give more"
            " (Pipeline(..., graph_memory=bytes)), or generate fewer or smaller images at a time"
        )

    # --- weights

    def _forget_if_weights_moved(self) -> None:
        addresses = self._places.now()
        if addresses != self._weights and self._captures:
            log.warning("the weights have moved, to another device or type: graphs that were captured before are forgotten")
        if addresses != self._weights and (self._captures or self._history):
            self.clear()
        self._weights = addresses


def graphs_run_on(device: torch.device) -> bool:
    return device.type == "cuda"


def obstacle(device: torch.device, request: Request) -> str | None:
    """Why such requests cannot be captured; None where they can."""
    if not graphs_run_on(device):
        return f"graphs are captured on a GPU; this model is on {device}: use engine='eager' there"
    if request.compute_mask or request.revise is not None:
        return "compute_mask and revise need the host between stages and cannot be captured: leave them out of warmup"
    if request.rng is request.method_rng and request.method.data_dependent and request.sampling.refine is not None:
        return "one generator for image and method is used in an order that depends on the image: give whole numbers as seeds"
    if not request.method.capturable:
        return f"{request.method.label} reads from the device between stages and cannot be captured: calls with it run eagerly"
    if not is_hashable(request.method):
        return f"{request.method.label} has no hash by which its graphs could be found again: make it a frozen dataclass"
    return None


def described(request: Request) -> str:
    return f"requests for {request.batch} image(s) of {request.schedule} with {request.method.label}"


@torch.inference_mode()
def replay_seconds(captured: CapturedRequest, request: Request, device: torch.device) -> float:
    """Seconds of the second replay: the first one still moves the graphs to the device."""
    seconds = 0.0
    for _ in range(2):
        numbers = ImageRng(range(request.batch), device)
        replay, begun = ReplayExecutor(captured, request.batch), time.perf_counter()
        replay.run(replace(request, rng=numbers, method_rng=numbers), Timer(device), lambda done: None, decode=True)
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begun
    return seconds
