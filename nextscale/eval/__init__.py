"""Judging generators and methods: the same prompts and seeds with and without a method, measured image by image."""

from ..offline.prompts import EvalPrompt, read_eval_prompts
from .agreement import Agreement, Probe
from .judges import Judges
from .methods import chosen_methods
from .quality import Evaluation, evaluate

__all__ = ["Agreement", "EvalPrompt", "Evaluation", "Judges", "Probe", "chosen_methods", "evaluate", "read_eval_prompts"]
