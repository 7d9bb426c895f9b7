"""What the papers behind the methods observed, measured on any model: `nextscale observe`."""

from .numbers import Observations, read_observations, to_json
from .observe import Examples, Sample, observe
from .verdicts import Verdict, verdicts

__all__ = ["Examples", "Observations", "Sample", "Verdict", "observe", "read_observations", "to_json", "verdicts"]
