"""The program that the commands of `python -m nextscale_research` belong to."""

import typer

from nextscale.cli.program import Program

app = typer.Typer(
    cls=Program,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Analyses and figures of the papers behind nextscale.",
)
