"""Judging generators and methods: the same prompts and seeds with and without a method, measured image by image."""

from .agreement import Agreement, Probe
from .methods import chosen_methods
from .prompts import EvalPrompt, read_eval_prompts
from .quality import Evaluation, Judges, evaluate

__all__ = ["Agreement", "EvalPrompt", "Evaluation", "Judges", "Probe", "chosen_methods", "evaluate", "read_eval_prompts"]
