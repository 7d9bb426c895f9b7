"""What the papers behind the methods observed, measured on any model: `nextscale observe` and `measure_ranks`."""

from .numbers import Observations, read_observations, to_json
from .observe import Examples, Sample, observe
from .ranks import measure_ranks
from .verdicts import Verdict, verdicts

__all__ = ["Examples", "Observations", "Sample", "Verdict", "measure_ranks", "observe", "read_observations", "to_json", "verdicts"]
