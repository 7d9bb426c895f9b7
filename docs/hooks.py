"""Fills pages while MkDocs builds: the command line from the program, HTTP from its schema, tables from README.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    for mark, lines in (("<!-- commands -->", command_lines), ("<!-- http -->", http_lines)):
        if mark in markdown:
            markdown = markdown.replace(mark, "\n".join(lines()))
    return re.sub(r"<!-- readme: (\w+) -->", lambda mark: readme_part(mark[1]), markdown)


def table(heads: str, lines: list[list[str]]) -> Iterator[str]:
    yield f"\n| {heads} |"
    yield "|" + "---|" * len(heads.split("|"))
    for cells in lines:
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
    yield ""


# --- command line


def command_lines() -> Iterator[str]:
    import typer.main

    from nextscale.cli import app

    program: Any = typer.main.get_command(app)
    for name, command in program.commands.items():
        context: Any = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(command.collect_usage_pieces(context))
        yield f"\n## {name}\n\n{command.help}\n\n```text\nnextscale {name} {usage}\n```\n"
        panels: dict[str, list[list[str]]] = {}
        for one in command.params:
            record = None if one.param_type_name == "argument" else one.get_help_record(context)
            if record is not None and one.name != "help":
                names = ", ".join(f"`{option}`" for option in one.opts)
                shown = f"{names} `{one.metavar}`" if one.metavar else names
                panels.setdefault(one.rich_help_panel or "Options", []).append([shown, one.help or "", default_of(one)])
        for panel, lines in panels.items():
            yield from table(f"{panel} | | default", lines)


def default_of(option: Any) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    if option.show_default is False or option.default in (None, False, (), []) or callable(option.default):
        return ""
    return f"`{option.default}`"


# --- HTTP


def http_lines() -> Iterator[str]:
    from nextscale.serve.app import create_app
    from nextscale.serve.service import Content, Service
    from nextscale.serve.settings import ServeSettings

    def load(name: str, device: str | None) -> Any:
        raise NotImplementedError  # the schema needs no model

    schema = create_app(Service(Content(("nano",), (None,), load, {}), ServeSettings())).openapi()
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            yield f"\n## {method.upper()} {path}\n\n{route.get('description', '')}\n"
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body:
                fields = body["properties"].items()
                yield from table("field | type | default | meaning", [field_line(name, field, body) for name, field in fields])


def field_line(name: str, field: dict[str, Any], body: dict[str, Any]) -> list[str]:
    default = "required" if name in body.get("required", ()) else f"`{field['default']}`" if field.get("default") is not None else ""
    return [f"`{name}`", " or ".join(dict.fromkeys(types_of(field))), default, field.get("description", "")]


def types_of(field: dict[str, Any]) -> Iterator[str]:
    for one in field.get("anyOf", [field]):
        if "enum" in one:
            yield ", ".join(f"`{value}`" for value in one["enum"])
        elif one.get("type") == "array":
            yield f"list of {' or '.join(types_of(one['items']))}"
        elif one.get("type") != "null":
            bounds = [f"{one[key]:g}" for key in ("minimum", "maximum") if abs(one.get(key, 2**63)) < 2**31]
            yield f"{one.get('type', 'any')}{' ' + ' to '.join(bounds) if len(bounds) == 2 else ''}"


# --- parts of README.md


def readme_part(name: str) -> str:
    """Returns the table between the marks of `speed`, or the section whose heading contains the name."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    if f"<!-- {name}:begin -->" in text:
        return text.partition(f"<!-- {name}:begin -->")[2].partition(f"<!-- {name}:end -->")[0]
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    return next(body for heading, body in sections.items() if name in heading.lower())
