"""The command line: one file per command."""

from . import (  # noqa: F401 - each registers its command
    bench,
    convert,
    demo,
    download,
    evaluate,
    fit,
    generate,
    models,
    observe_ranks,
    plan,
    profiles,
    quality,
    sample,
    serve,
    tune,
)
from .program import app

__all__ = ["app"]
