"""The command line: one file per command."""

from . import (  # noqa: F401 - each registers its command
    bench,
    convert,
    demo,
    evaluate,
    generate,
    models,
    observe,
    plan,
    quality,
    sample,
    serve,
    train,
)
from .program import app

__all__ = ["app"]
