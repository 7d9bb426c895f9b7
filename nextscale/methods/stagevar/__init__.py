"""StageVAR: late stages without guidance, at low rank, or skipped."""

from .method import StageVAR

__all__ = ["StageVAR"]
