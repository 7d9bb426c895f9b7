"""What a capture is made for, and which requests it serves."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from ..methods.method import Method
from ..request import Request
from ..sampling import Sampling
from ..stage import Schedule
from .buffers import text_bucket


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

    @classmethod
    def of(cls, request: Request, reads_text: bool) -> CaptureKey:
        """`reads_text`: attention has keys for the text, of which there may be more or fewer."""
        text = text_bucket(request.text_tokens) if reads_text else 0
        prefix = tuple(codes.ndim for codes in request.prefix_codes)
        return cls(request.schedule, request.batch, request.guidance.key, request.sampling, request.method, text, prefix)

    def serves(self, other: CaptureKey) -> bool:
        """Returns True if a capture for this one can run the other, of shorter prompts or fewer images."""
        enough = self.text >= other.text and self.batch >= other.batch
        return enough and replace(self, text=other.text, batch=other.batch) == other
