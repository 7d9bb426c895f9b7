"""Finding settings for a model: sensitivities, a predicted frontier, real runs by successive halving, and other prompts as proof."""

from .candidate import Candidate
from .search import Progress, tune

__all__ = ["Candidate", "Progress", "tune"]
