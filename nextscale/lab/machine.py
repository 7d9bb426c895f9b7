"""Where and when a measurement was made: the machine, the versions and the day."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from ..report import hardware_name


def where(device: torch.device) -> dict[str, str]:
    return {
        "hardware": hardware_name(device),
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def version() -> str:
    """The version of this package."""
    try:
        return metadata.version("nextscale")
    except metadata.PackageNotFoundError:
        return "unknown (not installed as a package)"


def commit() -> str:
    """The commit of the checkout that this package runs from, or the variable NEXTSCALE_COMMIT where it is set."""
    if "NEXTSCALE_COMMIT" in os.environ:
        return os.environ["NEXTSCALE_COMMIT"]
    here = Path(__file__)
    tracked = git("ls-files", here.name, folder=here.parent)  # an installed copy may lie inside the checkout of another project
    return (git("rev-parse", "--short", "HEAD", folder=here.parent) if tracked else "") or "unknown"


def git(*arguments: str, folder: Path) -> str:
    """What git answers; empty where it fails or is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
