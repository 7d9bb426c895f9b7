"""The command line: `python -m nextscale` and `nextscale`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from io import TextIOWrapper
from itertools import pairwise, takewhile
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import NextscaleError, SettingError
from .parse import LOCAL

USAGE_ERRORS: Any = typer.BadParameter.__bases__  # the parent of all usage errors has no public name that every version of typer knows
RENAMED = {  # commands and options of earlier versions
    "demo": "compare",
    "quality": "compare",
    "frontier": "compare --plot FILE",
    "profiles": "models -m NAME",
    "fit": "calibrate",
    "observe": "calibrate stagevar (other observations: python -m nextscale_research observe)",
    "train": "python -m training",
    "--images": "-n",
    "--seeds": "-n",
    "--height": "--size WIDTHxHEIGHT",
    "--width": "--size WIDTHxHEIGHT",
    "--sides": "--size 1,2,4x6",
    "--greedy": "--sampling greedy",
    "--smooth": "--sampling smooth",
    "--no-smooth": "--sampling smooth=false",
    "--no-refine": "--sampling refine=false",
    "--as-released": "--sampling as_released",
    "--positive-prompt": "--sampling positive_prompt",
    "--against": "--real FOLDER",
    "--alpha": "--set alphas=0.9+0.95",
    "--metrics": "the variable NEXTSCALE_METRICS",
    "--probe": "python -m nextscale_research quality --probe FILE",
    "--unguided": "--guidance constant:1",
    "--workers": "--ray ADDRESS,workers=N",
    "--gpus": "--ray ADDRESS,gpus=SHARE",
    "--max-images": "--limit images=N",
    "--max-pixels": "--limit pixels=N",
    "--max-prompt": "--limit prompt_chars=N",
    "--request-timeout": "--limit request_timeout=SECONDS",
    "--shutdown-timeout": "--limit shutdown_timeout=SECONDS",
}


class PlainFlags:
    """Shows flags without <bool>."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for one in found:
            if getattr(one, "is_flag", False):
                one.metavar = ""
        return found


class Command(PlainFlags, TyperCommand):
    pass


class Program(PlainFlags, TyperGroup):
    """Shows errors that a user can correct as one `error:` message; any other exception keeps its traceback."""

    def main(self, *args: Any, **kwargs: Any) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # for names of files that the terminal cannot show
        try:
            sys.exit(super().main(*args, **kwargs | {"standalone_mode": False}))
        except NextscaleError as error:
            message = str(error)
        except OSError as error:
            message = f"{error}. Check the name, the permissions and the free space."
        except USAGE_ERRORS as error:
            see = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
            message = f"{error.format_message().rstrip('.')}{hint(error)}{see}"
        typer.echo(f"error: {message}", err=True)
        sys.exit(2)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in RENAMED and args[0] not in self.commands:
            raise SettingError(f"`nextscale {args[0]}` is now `{RENAMED[args[0]]}`.")
        require_values(args)
        return super().resolve_command(ctx, with_cluster(args))


def hint(error: Any) -> str:
    """Returns what to write instead of an old option, or of a model's name without -m."""
    if (name := getattr(error, "option_name", None)) in RENAMED:
        return f"; it is now {RENAMED[name]}"
    text = str(error.format_message())
    if "unexpected extra argument" not in text or not any("--model" in option.opts for option in error.ctx.command.params):
        return ""
    from ..loading import MODELS

    return "".join(f"; choose the model with -m {word}" for word in re.findall(r"[^\s()]+", text) if word in MODELS)


def require_values(words: Sequence[str]) -> None:
    """Raises SettingError for an option with an empty value, as an unset variable of a shell gives."""
    for word, after in pairwise([*takewhile(lambda word: word != "--", words), "--"]):
        if word.startswith("-") and (not after or word.partition("=")[1:] == ("=", "")):
            raise SettingError(f"{word.rstrip('=')} has an empty value. Give one, or leave the option out.")


def with_cluster(words: Sequence[str]) -> list[str]:
    """Returns the words with a value for --ray that stands alone."""
    pairs = pairwise([*words, "--"])
    return [part for word, after in pairs for part in ((word, LOCAL) if word == "--ray" and after.startswith("-") else (word,))]


app = typer.Typer(cls=Program, add_completion=False, pretty_exceptions_enable=False)


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"nextscale {version('nextscale')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    asked: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Generate images with next-scale models: VAR, FlexVAR, Infinity, HART and STAR."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
