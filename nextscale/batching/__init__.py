"""Jobs of many callers, joined into batches: what serves a pipeline to a team, with or without HTTP."""

from .batcher import Batcher
from .jobs import GeneratedImage, Handle, Job, Partial
from .worker import BatchRecord, GeneratesImages

__all__ = ["BatchRecord", "Batcher", "GeneratedImage", "GeneratesImages", "Handle", "Job", "Partial"]
