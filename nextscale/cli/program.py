"""The program that the commands belong to, and how it shows errors."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import NextscaleError

USAGE_ERRORS: Any = typer.BadParameter.__bases__  # the parent of all usage errors has no public name that every version of typer knows


class Program(TyperGroup):
    """Shows what the user can do something about as one `error:` message; any other exception keeps its traceback."""

    def main(self, *args: Any, **kwargs: Any) -> None:
        try:
            status = super().main(*args, **kwargs | {"standalone_mode": False})
        except NextscaleError as error:
            typer.echo(f"error: {error}", err=True)
            status = 2
        except USAGE_ERRORS as error:
            see = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
            typer.echo(f"error: {error.format_message().rstrip('.')}{see}", err=True)
            status = 2
        sys.exit(status)


app = typer.Typer(cls=Program, add_completion=False, pretty_exceptions_enable=False)


def version() -> str:
    try:
        return metadata.version("nextscale")
    except metadata.PackageNotFoundError:
        return "unknown (not installed as a package)"


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"nextscale {version()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    asked: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Draw images with next-scale generators: VAR, FlexVAR, Infinity, HART and STAR."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
