"""Distances of images."""

from .lpips import Lpips

__all__ = ["Lpips"]
