"""Hidden states of a request, and the ranks that StageVAR needs."""

from .ranks import measure_ranks

__all__ = ["measure_ranks"]
