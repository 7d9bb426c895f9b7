"""What the pages tell a reader to type is there: commands and their options, programs, names in code, headings that links lead to."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer.main

import nextscale
from nextscale.cli import app
from nextscale.cli.program import SHORT, arranged
from tests.conftest import PROJECT
from tests.docs.test_code import OF_OTHERS, python_blocks
from tests.docs.test_readme import PAGES

PROGRAM: Any = typer.main.get_command(app)
SHELL = re.compile(r"^```(?:bash)?(?: title=.*?)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
CALL = re.compile(r"""(?<![\w./-])nextscale (?=[a-z])((?:[^`;&|#"']|"[^"]*"|'[^']*')*)""")  # up to a comment or the end of the command
HISTORY = "CHANGELOG.md"  # shows commands as they were

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))


def commands(page: Path) -> Iterator[list[str]]:
    """The words after `nextscale` of every command on a page, in blocks and between backticks."""
    text = page.read_text()
    blocks = [line for block in SHELL.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`(nextscale [a-z][^`]*)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in (*blocks, *inline):
        for call in CALL.findall(line):
            yield shlex.split(re.sub(r"\.\.\.|(?<= )\[|\](?= |$)", " ", call))


def resolved(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name, and those that follow its name."""
    group, words = PROGRAM, arranged([*SHORT.get(words[0], words[:1]), *words[1:]])
    while words[:1] == ["--import"]:
        words = words[2:]
    while hasattr(group, "commands"):
        assert words, "a command is missing"
        two = " ".join(words[:2])
        name = two if two in group.commands else words[0]
        assert name in group.commands, f"no command {name!r}"
        group, words = group.commands[name], words[len(name.split()) :]
        if not words:
            break
    return group, words


@by_page
def test_commands_and_their_options_are_there(page: Path) -> None:
    for words in commands(page) if page.name != HISTORY else ():
        command, rest = resolved(words)
        options = {name: option for option in command.params for name in (*option.opts, *option.secondary_opts) if name.startswith("-")}
        places = sum(
            1000 if argument.nargs < 0 else argument.nargs for argument in command.params if argument.param_type_name == "argument"
        )
        while rest:
            word, *rest = rest
            if word.startswith("--") or (word.startswith("-") and word in options):
                assert word in options, f"nextscale {' '.join(words)}: no option {word}"
                rest = rest if options[word].is_flag else rest[1:]
            else:
                places -= 1
        assert places >= 0, f"nextscale {' '.join(words)}: a word too many"


def test_wrong_commands_would_be_found(tmp_path: Path) -> None:
    for line in ("nextscale draw", "nextscale plan --images 4", "nextscale observe ranks --depth 3", "nextscale models one"):
        page = tmp_path / "page.md"
        page.write_text(f"Try `{line}`.\n")
        with pytest.raises(AssertionError):
            test_commands_and_their_options_are_there(page)
    page.write_text('```\nCUDA_VISIBLE_DEVICES=1 nextscale generate "a fox; a hare" -m nano --seed 7 & wait  # in the background\n```\n')
    assert [*commands(page)] == [["generate", "a fox; a hare", "-m", "nano", "--seed", "7"]]


@by_page
def test_programs_are_there(page: Path) -> None:
    for module in re.findall(r"python -m ([\w.]+)", page.read_text()):
        assert find_spec(module) is not None, module


@by_page
def test_names_in_code_are_there(page: Path) -> None:
    """Code is read, not run: what it imports of the package, and what it takes from it by name."""
    for title, code in python_blocks(page) if page.name != HISTORY else ():
        if title in OF_OTHERS:
            continue
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "nextscale":
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nextscale":
                assert hasattr(importlib.import_module("nextscale"), node.attr), ast.unparse(node)


@by_page
def test_links_lead_to_headings(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#]*)#([^)]*)\)", page.read_text()):
        text = "" if target.startswith("https://") else (page.parent / target if target else page).read_text()
        if text and f"::: {heading}\n" not in text:
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}, (
                f"{page.name}: {target}#{heading}"
            )


def test_the_architecture_names_every_module() -> None:
    modules = (PROJECT / "ARCHITECTURE.md").read_text().partition("## Modules")[2].partition("## Layers")[0]
    package = PROJECT / "nextscale"
    names = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in package.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    missing = sorted(name for name in names if not name.startswith("__") and f"`{name}" not in modules)
    assert not missing, f"ARCHITECTURE.md, Modules: add {', '.join(missing)}"


def test_environment_variables_are_listed() -> None:
    page = (PROJECT / "docs" / "reference" / "environment.md").read_text()
    used = {
        name
        for folder in ("nextscale", "research")
        for file in (PROJECT / folder).rglob("*.py")
        for name in re.findall(r"\"(NEXTSCALE_[A-Z]+)\"", file.read_text(encoding="utf-8"))
    }
    assert used and {name for name in used if f"`{name}`" not in page} == set()


def test_public_names_are_on_the_page_of_the_api() -> None:
    page = (PROJECT / "docs" / "reference" / "python.md").read_text()
    assert {name for name in nextscale.__all__ if f"nextscale.{name}\n" not in page and f"`nextscale.{name}`" not in page} == set()


def test_errors_are_listed() -> None:
    from nextscale import errors

    page = (PROJECT / "docs" / "reference" / "errors.md").read_text()
    assert {name for name in vars(errors) if name[0].isupper() and f"`{name}`" not in page and f".{name}`" not in page} == set()


@cache
def defined() -> dict[str, set[str]]:
    """Returns the names of all classes and modules' constants of the packages, each with its members."""
    found: dict[str, set[str]] = {}
    for file in [*(PROJECT / "nextscale").rglob("*.py"), *(PROJECT / "research").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                members = {getattr(one, "name", None) or getattr(getattr(one, "target", None), "id", "") for one in node.body}
                found.setdefault(node.name, set()).update(members)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.setdefault(node.id, set())
    return found


@pytest.mark.parametrize("name", ["ARCHITECTURE", "docs/extend/method", "docs/extend/backbone", "docs/reference/glossary"])
def test_files_and_classes_of_the_extension_pages_are_there(name: str) -> None:
    text = re.sub(r"```.*?```", "", (PROJECT / f"{name}.md").read_text(), flags=re.DOTALL)
    known = defined()
    for span in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"[\w/]+(\.py|/)", span) and "NAME" not in span:
            assert (PROJECT / span).exists() or (PROJECT / "nextscale" / span).exists(), span
        elif match := re.fullmatch(r"([A-Z][a-z]\w*)(?:\.(\w+))?", span):
            assert match[1] in known, span
            assert match[2] is None or match[2] in known[match[1]], span
