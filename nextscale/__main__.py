"""`python -m nextscale` is the command line too."""

from .cli import app

app()
