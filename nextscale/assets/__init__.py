"""Weights included in the package: nano and the LPIPS network."""

from pathlib import Path

EMBEDDED = Path(__file__).parent
