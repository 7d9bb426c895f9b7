"""Judging folders of images, wherever they come from: against real ones, against dense ones of the same seeds, or by themselves."""

from .evaluate import PAIR_METRICS, EvaluationSetup, evaluate_folder
from .images import ImageFolder
from .networks import NETWORKS

__all__ = ["NETWORKS", "PAIR_METRICS", "EvaluationSetup", "ImageFolder", "evaluate_folder"]
