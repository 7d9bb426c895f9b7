"""Options in groups: a command takes a dataclass where options belong together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

import typer


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Shows typer a command whose arguments that are dataclasses are replaced by their fields, and builds the dataclasses for the call.

    The fields have annotated options as types, as arguments of typer commands do, and their defaults.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type] = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}

    def parameters() -> Iterator[inspect.Parameter]:
        for name, parameter in inspect.signature(command).parameters.items():
            if name in groups:
                yield from options(groups[name])
            else:
                yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])

    @wraps(command)
    def run(**values: Any) -> None:
        built = {name: group(**{field.name: values.pop(field.name) for field in fields(group)}) for name, group in groups.items()}
        command(**values, **built)

    signature = inspect.Signature(list(parameters()))
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return run


def options(group: type) -> list[inspect.Parameter]:
    """The fields of a dataclass as arguments that are given by name."""
    hints = get_type_hints(group, include_extras=True)
    signature = inspect.signature(group).parameters.values()
    return [one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[one.name]) for one in signature]


def given_by_user(context: typer.Context, name: str) -> bool:
    """Whether the command line names this option, though it may be with the default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
