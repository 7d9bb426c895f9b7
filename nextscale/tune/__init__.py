"""Searches settings for a model: sensitivities, a predicted frontier, real runs by successive halving, and validation on other prompts."""

from .candidate import Candidate
from .search import Search

__all__ = ["Candidate", "Search"]
