"""Distances of images: of pairs, and of whole sets. The networks behind some of them are files of their own."""

from .files import metric_file
from .lpips import Lpips

__all__ = ["Lpips", "metric_file"]
