"""Measures the papers' observations on any model."""

from .measure import Examples, Sample, observe
from .numbers import Observations, read_observations, to_json
from .verdicts import Verdict, verdicts

__all__ = ["Examples", "Observations", "Sample", "Verdict", "observe", "read_observations", "to_json", "verdicts"]
