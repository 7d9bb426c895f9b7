"""The command line: `python -m nextscale` and `nextscale`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from io import TextIOWrapper
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import NextscaleError, SettingError
from .parse import LOCAL
from .show import IMPORTED

USAGE_ERRORS: Any = typer.BadParameter.__bases__  # the parent of all usage errors has no public name that every version of typer knows
RENAMED = {  # commands of earlier versions
    "demo": "compare",
    "quality": "compare",
    "frontier": "compare --plot FILE",
    "profiles": "models -m NAME",
    "fit": "calibrate",
    "observe": "calibrate stagevar (other observations: python -m nextscale_research observe)",
    "train": "python -m training",
}
SHORT = {"methods": ("generate", "--method", "help")}
ALIASES = {  # options of diffusers
    "--guidance-scale": "--guidance",
    "--negative-prompt": "--negative",
    "--num-images-per-prompt": "--num-images",
}
STEPS = "The size fixes the number of stages; --method skip:last=2 runs fewer"
INSTEAD = {  # options of earlier versions and of other programs
    "--steps": STEPS,
    "--num-inference-steps": STEPS,
    "--strength": "Run nextscale edit IMAGE PROMPT --strength 0.6",
    "--images": "Use -n",
    "--seeds": "Use -n",
    "--prompt": 'Write the prompt without an option: nextscale generate "a red apple"',
    "--height": "Use --size WIDTHxHEIGHT",
    "--width": "Use --size WIDTHxHEIGHT",
    "--cfg": "Use --guidance",
    "--output": "Use --out",
    "--sides": "Use --size 1,2,4x6",
    "--greedy": "Use --sampling greedy",
    "--smooth": "Use --sampling smooth",
    "--no-smooth": "Use --sampling smooth=false",
    "--no-refine": "Use --sampling refine=false",
    "--as-released": "Use --sampling as_released",
    "--positive-prompt": "Use --sampling positive_prompt",
    "--against": "Use --real FOLDER",
    "--alpha": "Use --set alphas=0.9+0.95",
    "--metrics": "Set the variable NEXTSCALE_METRICS",
    "--probe": "Run python -m nextscale_research quality --probe FILE",
    "--unguided": "Use --guidance constant:1",
    "--workers": "Use --ray ADDRESS,workers=N",
    "--gpus": "Use --ray ADDRESS,gpus=SHARE",
    "--max-images": "Use --limit images=N",
    "--max-pixels": "Use --limit pixels=N",
    "--max-prompt": "Use --limit prompt_chars=N",
    "--request-timeout": "Use --limit request_timeout=SECONDS",
    "--shutdown-timeout": "Use --limit shutdown_timeout=SECONDS",
}
EPILOG = 'Start with: nextscale generate "a 3D icon of a red apple". List the methods: nextscale methods'
INTERRUPTED = 130  # exit status


class PlainFlags:
    """Shows flags without <bool>, and arguments without their type."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for one in found:
            if getattr(one, "is_flag", False):
                one.metavar = ""
            if one.param_type_name == "argument":
                one.display_type_rich = lambda ctx: ""
        return found


class Command(PlainFlags, TyperCommand):
    pass


class Program(PlainFlags, TyperGroup):
    """Shows errors that a user can correct as one `error:` message; any other exception keeps its traceback."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # for names of files that the terminal cannot show
        try:
            words = arranged(sys.argv[1:] if args is None else args)
            status = super().main(words, *more, **options | {"standalone_mode": False})
            if status != INTERRUPTED:
                sys.exit(status)
            stopped("")  # before a command began
        except NextscaleError as error:
            message = str(error)
        except OSError as error:
            message = f"{error}. Check the name, the permissions and the free space."
        except USAGE_ERRORS as error:
            advice = hint(error)
            see = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
            message = f"{error.format_message().rstrip('.')}{advice}{see}"
        typer.echo(f"error: {message}", err=True)
        sys.exit(2)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            stopped(str(stop))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in RENAMED and args[0] not in self.commands:
            raise SettingError(f"`nextscale {args[0]}` is now `{RENAMED[args[0]]}`.")
        require_values(args)
        return super().resolve_command(ctx, with_cluster([*SHORT.get(args[0], args[:1]), *args[1:]]))


def stopped(kept: str) -> NoReturn:
    typer.echo(f"Stopped. {kept or 'Nothing was written.'}", err=True)
    sys.exit(INTERRUPTED)


def hint(error: Any) -> str:
    """Returns advice for an option of another program or version, and for a model or a file without its option."""
    if advice := INSTEAD.get(getattr(error, "option_name", "")):
        error.possibilities = []  # similar names would lead astray
        return f". {advice}"
    text = str(error.format_message())
    options = {name for option in error.ctx.command.params for name in option.opts} if error.ctx else set()
    if "unexpected extra argument" not in text or "--model" not in options:
        return ""
    words = re.findall(r"[^\s()]+", text)
    if "--prompts" in options and any(word.endswith((".jsonl", ".txt", ".tar")) for word in words):
        return "; name the file with --prompts FILE"
    from ..loading import MODELS

    return "".join(f"; choose the model with -m {word}" for word in words if word in MODELS)


def arranged(words: Sequence[str]) -> list[str]:
    """Returns the words with each --import FILE in front, and options by the names that they have here."""
    front, rest, remaining = list[str](), list[str](), iter(words)
    for word in remaining:
        if word == "--":
            return [*front, *rest, word, *remaining]
        if word.partition("=")[0] == "--import":
            front += [word] if "=" in word else [word, next(remaining, "")]
        else:
            name, equals, value = word.partition("=")
            rest.append(ALIASES.get(name, name) + equals + value)
    return front + rest


def require_values(words: Sequence[str]) -> None:
    """Raises SettingError for an option with an empty value, as an unset variable of a shell gives."""
    for word, after in pairwise([*takewhile(lambda word: word != "--", words), "--"]):
        if word.startswith("-") and (not after or word.partition("=")[1:] == ("=", "")):
            raise SettingError(f"{word.rstrip('=')} has an empty value. Give one, or leave the option out.")


def with_cluster(words: Sequence[str]) -> list[str]:
    """Returns the words with a value for --ray that stands alone."""
    pairs = pairwise([*words, "--"])
    return [part for word, after in pairs for part in ((word, LOCAL) if word == "--ray" and after.startswith("-") else (word,))]


app = typer.Typer(cls=Program, add_completion=False, pretty_exceptions_enable=False, epilog=EPILOG)


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"nextscale {version('nextscale')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    asked: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")] = False,
    files: Annotated[
        list[Path] | None,
        typer.Option("--import", metavar="FILE", help="Add the methods of a Python file: each by its class name in lower case."),
    ] = None,
) -> None:
    """Generate images with next-scale models: VAR, FlexVAR, Infinity, HART and STAR."""
    IMPORTED[:] = files or ()
    for file in IMPORTED:
        from ..methods.registry import import_methods

        import_methods(file)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
