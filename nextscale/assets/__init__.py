"""The models that come with the package, one folder each, and the network of LPIPS."""

from pathlib import Path

EMBEDDED = Path(__file__).parent
