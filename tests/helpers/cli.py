"""Runs commands in this process."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner, Result

from nextscale.cli import app


def run_cli(
    *words: object, program: Any = app, columns: int | str = 100, charset: str = "utf-8", catch: bool = False, **env: str
) -> Result:
    """Returns the output of a command and its exit status. `catch`: exceptions are part of the result."""
    runner = CliRunner(charset=charset, env={"COLUMNS": str(columns), **env})
    return runner.invoke(program, [str(word) for word in words], catch_exceptions=catch, prog_name="nextscale")
