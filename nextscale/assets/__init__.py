"""The files of the models that come with the package, one folder each."""

from pathlib import Path

EMBEDDED = Path(__file__).parent
