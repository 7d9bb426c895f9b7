"""Counts how large the package is: `python -m tests.house` prints it beside the caps of house.toml, `--write` stores it as the new caps."""

from __future__ import annotations

import inspect
import sys
import tokenize
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.nn.functional as F
import typer.main

import nextscale
from nextscale.cli import app
from tests.helpers.tape import Tape, play_graphs_on_the_cpu

PACKAGE = Path(nextscale.__file__).parent
CAPS = Path(__file__).with_name("house.toml")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def counts() -> dict[str, dict[str, int]]:
    """Returns the counts as house.toml has their caps."""
    lines, tokens = sizes()
    packages = {file.parent for file in PACKAGE.rglob("__init__.py")} - {PACKAGE}
    slots = option_slots()
    modules, eager, captured = request_path()
    house = {
        "lines": sum(lines.values()),
        "tokens": sum(tokens.values()),
        "packages": len(packages),
        "nested_packages": sum(folder.parent != PACKAGE for folder in packages),
        "hooks": sum(map(hooks, (nextscale.Method, nextscale.MethodRun))),
        "commands": len(slots),
        "option_slots": sum(slots.values()),
        "modules_of_a_request": modules,
        "frames_to_attention": eager,
        "frames_to_replay": captured,
    }
    return {"house": house, "lines": lines, "tokens": tokens}


def sizes() -> tuple[dict[str, int], dict[str, int]]:
    """Returns lines, and tokens without comments and white space, per package; files beside the packages count as nextscale."""
    lines, tokens = Counter[str](), Counter[str]()
    for file in sorted(PACKAGE.rglob("*.py")):
        inside = file.relative_to(PACKAGE)
        package = inside.parts[0] if len(inside.parts) > 1 else "nextscale"
        with file.open("rb") as opened:
            tokens[package] += sum(token.type not in NO_CODE for token in tokenize.tokenize(opened.readline))
        lines[package] += len(file.read_bytes().splitlines())
    return dict(lines), dict(tokens)


def hooks(interface: type) -> int:
    """Returns the number of methods that a method's author may write."""
    return sum(inspect.isfunction(value) and not name.startswith("_") for name, value in vars(interface).items())


def option_slots() -> dict[str, int]:
    """Returns the number of options and arguments of every command."""
    program: Any = typer.main.get_command(app)
    return {name: len(command.params) for name, command in leaves(program.commands)}


def leaves(commands: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        leaf
        for name, command in commands.items()
        for leaf in (leaves(command.commands) if hasattr(command, "commands") else [(name, command)])
    ]


def request_path() -> tuple[int, int, int]:
    """Returns the modules that an eager request runs, and our frames from the call to attention and to the replay of a captured graph."""
    pipe, request = nextscale.load("nano", device="cpu"), {"prompt": "a red apple", "size": 128, "seed": 0}
    modules, eager, captured = set[str](), set[int](), set[int]()

    def seen(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and is_ours(frame.f_code.co_filename):
            modules.add(frame.f_code.co_filename)

    def measured(run: Callable[..., Any], depths: set[int]) -> Callable[..., Any]:
        def measure(*arguments: Any, **options: Any) -> Any:
            depths.add(sum(is_ours(frame.filename) for frame in traceback.extract_stack()))
            return run(*arguments, **options)

        return measure

    pipe(**request)  # the first request also loads the text encoder and counts what is remembered
    sys.setprofile(seen)
    try:
        pipe(**request)
    finally:
        sys.setprofile(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", measured(F.scaled_dot_product_attention, eager))
        pipe(**request)
    with pytest.MonkeyPatch.context() as patch:
        play_graphs_on_the_cpu(patch)
        pipe = nextscale.load("nano", device="cpu", engine="graphs")
        pipe(**request, warmup=True)
        patch.setattr(Tape, "replay", measured(Tape.replay, captured))
        pipe(**request)
    return len(modules), max(eager), max(captured)


def is_ours(file: str) -> bool:
    return Path(file).is_relative_to(PACKAGE)


def caps() -> dict[str, dict[str, int]]:
    return tomllib.loads(CAPS.read_text())


def too_large(found: dict[str, dict[str, int]], allowed: dict[str, dict[str, int]]) -> list[str]:
    """Returns what exceeds its cap, in words; something without a cap has the cap 0."""
    return [
        f"{table}.{name} is {number}; its cap in {CAPS.name} is {allowed[table].get(name, 0)}"
        for table, numbers in found.items()
        for name, number in numbers.items()
        if number > allowed[table].get(name, 0)
    ]


def main() -> None:
    found = counts()
    if "--write" in sys.argv:
        tables = (
            "\n".join([f"[{table}]", *(f"{name} = {number}" for name, number in numbers.items())]) for table, numbers in found.items()
        )
        comment = "# Caps of the package, checked by test_house.py. Raising one is a decision: say why in the commit.\n\n"
        CAPS.write_text(comment + "\n\n".join(tables) + "\n")
        return
    allowed = caps()
    for table, numbers in found.items():
        print(f"{table}: " + ", ".join(f"{name} {number} (cap {allowed[table].get(name, 0)})" for name, number in numbers.items()))


if __name__ == "__main__":
    main()
