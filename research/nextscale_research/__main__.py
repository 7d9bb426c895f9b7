"""Command line of `python -m nextscale_research`."""

from . import sensitivity_figure  # noqa: F401 - registers its command
from .observe import command  # noqa: F401
from .program import app

if __name__ == "__main__":
    app(prog_name="python -m nextscale_research")
