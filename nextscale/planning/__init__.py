"""What a plan costs: MACs and memory, counted before anything runs."""

from .. import methods as methods  # first: methods of two models import this package
