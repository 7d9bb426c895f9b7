"""What a measurement belongs to: the machine, the versions and the day."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch


def where(device: torch.device) -> dict[str, str]:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "hardware": gpu or f"CPU {platform.machine()}",
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def commit() -> str:
    """Of the checkout that this package runs from; where there is no history NEXTSCALE_COMMIT says it."""
    if "NEXTSCALE_COMMIT" in os.environ:
        return os.environ["NEXTSCALE_COMMIT"]
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git here
        found = ""
    return found or "unknown"
