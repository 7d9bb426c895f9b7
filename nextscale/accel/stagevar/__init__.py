"""StageVAR: late stages without guidance, at low rank, or skipped."""

from .method import StageVAR, measure_ranks

__all__ = ["StageVAR", "measure_ranks"]
