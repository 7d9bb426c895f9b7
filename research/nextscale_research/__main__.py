"""Command line of `python -m nextscale_research`."""

from . import sensitivity_figure  # noqa: F401 - registers its command
from .methods import calibrate_scalekv, calibrate_skipvar  # noqa: F401
from .observe import command as observe_command  # noqa: F401
from .program import app
from .quality import command as quality_command  # noqa: F401
from .quality import smaller  # noqa: F401
from .suites import command as suites_command  # noqa: F401

if __name__ == "__main__":
    app(prog_name="python -m nextscale_research")
