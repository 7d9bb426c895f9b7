"""The package is built in layers, low to high: a lower one imports no higher one, not even for types or inside a function."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import nextscale

PACKAGE = Path(nextscale.__file__).parent

LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("basics", ("errors", "validation", "io", "kernels", "varlen", "stage", "checkpoints", "assets", "serialization")),
    ("parts", ("cache", "canvas", "edit", "guidance", "sampling", "schedules", "metrics")),
    ("models", ("models", "tokenizers", "text")),
    ("device", ("device", "lora")),
    ("method interface", ("methods.method",)),
    ("planning", ("planning",)),
    ("methods", ("methods",)),
    ("generate", ("generate", "prefix", "request")),
    ("engine", ("engine",)),
    ("pipeline", ("edit_inputs", "output", "report", "profiles", "pipeline")),
    ("loading", ("loading",)),
    ("batching", ("batching",)),
    ("products", ("serve", "offline")),
    ("evaluation", ("eval",)),
    ("tuning", ("tune",)),
    ("command line", ("cli",)),
    ("program", ("__main__",)),
)
"""Layer to its modules and packages, by their longest name. From `batching` on, the packages of a layer do not import each other."""

TOP = "nextscale"  # the package itself may import everything, and nothing imports it

ALLOWED: dict[tuple[str, str], str] = {}
"""(importing module, imported module) to the reason why that stands for now."""


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    importer: str  # without the leading "nextscale."
    imported: str


@cache
def modules() -> dict[str, Path]:
    """Name without the leading "nextscale." to file; the package itself is called "nextscale"."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name or TOP] = file
    return found


def imports_of(name: str, file: Path) -> Iterator[Import]:
    """Every import of the package in a file, wherever it stands; of `from x import y` both x and, where it is a module, x.y."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    package = [] if name == TOP else package
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [TOP, *package[: len(package) - node.level + 1]] if node.level else []
            source = ".".join([*base, *(node.module.split(".") if node.module else [])])
            members = [f"{source}.{alias.name}" for alias in node.names]
            inside = [member for member in members if member.removeprefix(f"{TOP}.") in modules()]
            targets = inside if len(inside) == len(members) else [source, *inside]
        else:
            continue
        for target in targets:
            if target.split(".")[0] == TOP:
                yield Import(file, node.lineno, name, target.removeprefix(f"{TOP}."))


def layer_of(name: str) -> int:
    return place_of(name)[0]


def place_of(name: str) -> tuple[int, str]:
    """Returns the number of the layer and its entry: the longest one that the name starts with."""
    if name == TOP:
        return len(LAYERS), TOP
    known = {entry: number for number, (_, entries) in enumerate(LAYERS) for entry in entries}
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (entry := ".".join(parts[:length])) in known:
            return known[entry], entry
    raise AssertionError(f"nextscale.{name} belongs to no layer: add it to LAYERS in {Path(__file__).name}")


def layer_name(name: str) -> str:
    number = layer_of(name)
    return LAYERS[number][0] if number < len(LAYERS) else "the package itself"


def all_imports() -> list[Import]:
    return [found for name, file in modules().items() for found in imports_of(name, file)]


def upward(found: Import) -> bool:
    return layer_of(found.imported) > layer_of(found.importer)


def test_no_layer_imports_a_higher_one() -> None:
    wrong = [
        f"{found.file.relative_to(PACKAGE.parent)}:{found.line}: {found.importer} ({layer_name(found.importer)}) imports"
        f" {found.imported} ({layer_name(found.imported)})"
        for found in all_imports()
        if upward(found) and (found.importer, found.imported) not in ALLOWED
    ]
    assert not wrong, "a lower layer imports a higher one:\n" + "\n".join(wrong)


def test_siblings_do_not_import_each_other() -> None:
    """From `batching` on, so that a server does not need what samples folders, and the other way round."""
    first = layer_of("batching")
    places = [(place_of(found.importer), place_of(found.imported), found) for found in all_imports()]
    wrong = [
        f"{found.file.relative_to(PACKAGE.parent)}:{found.line}: {found.importer} imports its sibling {found.imported}"
        for (layer, entry), (other_layer, other), found in places
        if layer == other_layer >= first and entry != other
    ]
    assert not wrong, "\n".join(wrong)


def test_the_package_imports_without_posix_modules() -> None:
    """In a fresh interpreter that has none of them, as on Windows, nano generates; the peak memory is unknown."""
    program = (
        "import sys; sys.modules |= dict.fromkeys(('fcntl', 'grp', 'pwd', 'resource', 'termios'))\n"
        "import torch, nextscale, nextscale.loading.load, nextscale.text, nextscale.checkpoints.hub\n"
        "from nextscale.device import peak_memory\n"
        "assert peak_memory(torch.device('cpu')) == 0\n"
        "assert nextscale.load('nano', device='cpu')('a red apple', seed=0, size=128).pixels.shape[2:] == (128, 128)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_allowed_exceptions_still_exist() -> None:
    needed = {(found.importer, found.imported) for found in all_imports() if upward(found)}
    assert set(ALLOWED) <= needed, f"no longer needed, remove it: {set(ALLOWED) - needed}"


def test_every_module_belongs_to_a_layer() -> None:
    for name in modules():
        layer_of(name)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from ..cache import Env", {"cache"}),
        ("from .. import kernels", {"kernels"}),
        ("from . import blocks, rope", {"models.blocks", "models.rope"}),
        ("import nextscale.pipeline", {"pipeline"}),
        ("from nextscale import load", {TOP}),
        ("from nextscale.methods import method", {"methods.method"}),
        ("def late():\n    from ..engine.graphs import Captures", {"engine.graphs"}),
        ("if TYPE_CHECKING:\n    from ..pipeline import Pipeline", {"pipeline"}),
        ("import torch\nfrom torch import nn", set()),
    ],
)
def test_imports_are_found(source: str, expected: set[str], tmp_path: Path) -> None:
    file = tmp_path / "base.py"
    file.write_text(source)
    assert {found.imported for found in imports_of("models.base", file)} == expected


def test_the_longest_name_decides_the_layer() -> None:
    assert layer_of("methods.method") < layer_of("planning.cost") < layer_of("methods.fastvar") == layer_of("methods")
    assert layer_of(TOP) > layer_of("cli.program")
