"""Networks that commands use where they find them."""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import CheckpointError
from ..lab.metrics import Lpips
from ..lab.metrics.files import LPIPS, metric_file


def find_lpips(given: Path | None, device: torch.device) -> Lpips | None:
    """The network of LPIPS; None where it is missing and nobody asked for it."""
    try:
        file = metric_file(LPIPS, given)
    except CheckpointError:
        if given is not None:
            raise
        return None
    return Lpips.load(file, device)
