"""The program that the commands belong to, and how it shows errors."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from itertools import pairwise, takewhile
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..batching.ray_cluster import LOCAL
from ..errors import NextscaleError, SettingError
from ..eval.results import version
from ..loading.presets import MODELS

MEASURE = "Measurements"  # panel of the help
USAGE_ERRORS: Any = typer.BadParameter.__bases__  # the parent of all usage errors has no public name that every version of typer knows


class Program(TyperGroup):
    """Shows what the user can do something about as one `error:` message; any other exception keeps its traceback."""

    def main(self, *args: Any, **kwargs: Any) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # for names of files that the terminal cannot show
        try:
            status = super().main(*args, **kwargs | {"standalone_mode": False})
        except NextscaleError as error:
            typer.echo(f"error: {error}", err=True)
            status = 2
        except OSError as error:
            typer.echo(f"error: {error}: check the name, the permissions and the free space", err=True)
            status = 2
        except USAGE_ERRORS as error:
            message = error.format_message().rstrip(".")
            see = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
            takes_model = error.ctx is not None and any("--model" in option.opts for option in error.ctx.command.params)
            typer.echo(f"error: {message}{model_hint(message) if takes_model else ''}{see}", err=True)
            status = 2
        sys.exit(status)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """A command may have a name of two words, the first of which is a command too: `observe` and `observe ranks`."""
        require_values(args)
        args = with_cluster(args)
        two_words = " ".join(args[:2])
        return (two_words, self.commands[two_words], args[2:]) if two_words in self.commands else super().resolve_command(ctx, args)


def require_values(words: Sequence[str]) -> None:
    """Raises SettingError for an option with an empty value, as an unset variable of a shell gives."""
    for word, after in pairwise([*takewhile(lambda word: word != "--", words), "--"]):
        if word.startswith("-") and (not after or word.partition("=")[1:] == ("=", "")):
            raise SettingError(f"{word.rstrip('=')} has an empty value: give one, or leave the option out")


def with_cluster(words: Sequence[str]) -> list[str]:
    """Returns the words with the cluster that --ray means where it stands alone."""
    pairs = pairwise([*words, "--"])
    return [part for word, after in pairs for part in ((word, LOCAL) if word == "--ray" and after.startswith("-") else (word,))]


def model_hint(message: str) -> str:
    """What to write in place of a model's name that stands where no word is expected."""
    words = re.findall(r"[^\s()]+", message) if "unexpected extra argument" in message else []
    return "".join(f"; choose the model with -m {word}" for word in words if word in MODELS)


app = typer.Typer(cls=Program, add_completion=False, pretty_exceptions_enable=False)


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"nextscale {version()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    asked: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Generate images with next-scale models: VAR, FlexVAR, Infinity, HART and STAR."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
