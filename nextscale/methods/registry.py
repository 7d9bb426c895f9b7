"""Methods by name: `"stagevar"`, `"sparsevar:tau=0.6,alpha=none"`, several joined as in `"fastvar + skip:last=1"`, or a list of such."""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from ..errors import SettingError
from ..io import expanded
from ..validation import require
from .auto import Auto
from .combine import Combined
from .drop_guidance import DropGuidance
from .fastvar import FastVAR
from .method import Method
from .near_mask import NearMask
from .skip import SkipStages
from .sparsevar import SparseVAR
from .stagevar import StageVAR

MethodLike = Method | str | Sequence[Method | str] | None

METHODS: dict[str, type[Method]] = {
    "dense": Method,
    "skip": SkipStages,
    "dropguidance": DropGuidance,
    "sparsevar": SparseVAR,
    "fastvar": FastVAR,
    "stagevar": StageVAR,
    "nearmask": NearMask,
    "auto": Auto,
}
RESEARCH = "code litevar pitome scalekv skipvar sparsevar_variants sparsevit sparvar stagevar_variants tome zipvl"
ENTRY_POINTS = "nextscale.methods"  # the group in which other packages register their methods by name


@cache
def plugins() -> Mapping[str, EntryPoint]:
    """Returns the methods that installed packages register, by name; none is imported yet."""
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINTS) if entry.name not in METHODS}


def import_methods(file: Path) -> None:
    """Runs a Python file and adds its methods, each by the name of its class in lower case."""
    path = expanded(file)
    name = f"imported_{path.stem}"  # not the stem alone: a file random.py must not hide the module of that name
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SettingError(f"--import must name a Python file, such as my_method.py; got {file}.")
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    classes = (value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name)
    found = {value.__name__.lower(): value for value in classes if issubclass(value, Method)}
    require(found, f"--import {file}", "a file with at least one subclass of nextscale.Method", list(vars(module)))
    if taken := found.keys() & set(method_names()):
        raise SettingError(f"--import {file}: the method {min(taken)} exists already. Give the class another name.")
    METHODS.update(found)


def method_names() -> list[str]:
    return [*METHODS, *sorted(plugins())]


def method_class(name: str) -> type[Method]:
    """Returns the class with this name, and imports it if a plug-in provides it."""
    if name in METHODS:
        return METHODS[name]
    if name not in plugins():
        if name in RESEARCH.split():
            raise SettingError(f"method {name!r} is a plug-in of this project's research/ folder. Install it: pip install ./research")
        close = difflib.get_close_matches(name, method_names(), n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        known = f"Known methods: {', '.join(method_names())}. Packages can add more: see docs/extend/method.md."
        raise SettingError(f"unknown method {name!r}{hint} {known}")
    try:
        found = plugins()[name].load()
    except Exception as error:
        raise SettingError(f"method {name!r} could not be imported from {plugins()[name].value}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise SettingError(f"method {name!r}: {plugins()[name].value} must be a subclass of nextscale.Method; got {found!r}")
    return found


def resolve_method(method: MethodLike) -> Method:
    """Returns one method, for several a combined one. None and an empty list are dense generation."""
    several = list(_members(method))
    if len(several) < 2:
        return several[0] if several else Method()
    return Combined(tuple(several))


def _members(method: MethodLike) -> Iterator[Method]:
    if isinstance(method, Method):
        yield method
    elif isinstance(method, str):
        yield from map(parse_method, re.split(r"\+(?=\s*[^\s\d])", method))  # not the sign of an exponent, as in 1e+3
    elif method is None or isinstance(method, Sequence):
        for one in method or ():
            yield from _members(one)
    else:
        raise SettingError(f"method must be a Method, a name ({', '.join(method_names())}), or a list of them; got {method!r}.")


def parse_method(text: str) -> Method:
    """Reads `name` or `name:field=value,field=value`. Values are numbers, true, false, none, lists in brackets, or words."""
    name, _, settings = text.strip().partition(":")
    method = method_class(name)
    known: list[str] = [one.name for one in fields(method) if one.init] if is_dataclass(method) else []
    chosen = {}
    for setting in split_settings(settings):
        field, equals, value = (part.strip() for part in setting.partition("="))
        if field not in known:
            raise SettingError(f"settings of {name} must be one of {', '.join(known) or 'none'}; got {setting.strip()!r}.")
        if not equals or field in chosen:
            raise SettingError(f"method {text!r} must have each setting once, as {field}=VALUE.")
        try:
            chosen[field] = parse_value(value)
        except (RecursionError, MemoryError):
            raise SettingError(f"{field} must be numbers, words or lists; got a value that is nested too deeply.") from None
    return method(**chosen)


def split_settings(text: str) -> list[str]:
    """Splits at the commas outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def parse_value(text: str) -> object:
    """Reads a literal without executing anything. A list becomes a tuple; other words stay text."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        tree = ast.parse(text, mode="eval")
        value = ast.literal_eval(tree)
    except (ValueError, SyntaxError, TypeError):  # TypeError: {[]: 1}
        if text.startswith(("[", "(")) and text.endswith(("]", ")")):
            return tuple(parse_value(part.strip()) for part in split_settings(text[1:-1]))
        return text
    if isinstance(tree.body, ast.Dict) and len(value) < len(tree.body.keys):
        raise SettingError(f"keys of a mapping must be different; got {text}.")
    return tuple(value) if isinstance(value, list) else value


def standard_methods(stages: int) -> dict[str, str]:
    """Returns plain skipping, every method at its defaults, budgets of SparseVAR, and two combinations that were tuned on nano.

    FastVAR and StageVAR are published for 13 stages: they skip the last two, and thin or project the one before. There each is also tried
    without skipping. Of 10 stages FastVAR thins the last by 0.4, so there it is also tried on the last two; StageVAR runs the last two
    without guidance and the last at low rank.
    """
    skips = stages > 12
    thinned = {stages - 4: 0.4, stages - 3: 0.5, stages - 2: 0.6, stages - 1: 0.75} if skips else {stages - 2: 0.4, stages - 1: 0.5}
    variant = "no stage skipped" if skips else "last two stages"
    late = range(stages - 3, stages)
    mild, bold = (dict(zip(late, shares, strict=True)) for shares in ((0.8, 0.6, 0.5), (0.6, 0.4, 0.25)))
    return {
        **{f"skip the last {words}": f"skip:last={last}" for last, words in enumerate(("stage", "two stages", "three stages"), 1)},
        "budgets .8/.6/.5, guidance dropped": f"sparsevar:keep={mild},alpha=6 + dropguidance:first_stage={stages - 2}",
        "budgets .6/.4/.25, guidance dropped": f"sparsevar:keep={bold} + dropguidance:first_stage={stages - 3}",
        "SparseVAR": "sparsevar",
        **{f"SparseVAR, {share:.0%} of the cells": f"sparsevar:keep={share}" for share in (0.2, 0.3, 0.4, 0.5, 0.6)},
        "FastVAR": "fastvar",
        f"FastVAR, {variant}": f"fastvar:ratios={thinned}",
        "StageVAR": "stagevar",
        **({"StageVAR, no stage skipped": f"stagevar:alphas={ {stages - 1: 0.96} }"} if skips else {}),
        "guidance dropped": "dropguidance",
        "guidance dropped, unconditional rows kept": "dropguidance:kept_rows=uncond",
    }
