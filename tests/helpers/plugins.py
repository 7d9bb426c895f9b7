"""Registers the plug-ins of this checkout's research/ folder, whatever version of it is installed."""

from __future__ import annotations

import atexit
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

RESEARCH = Path(__file__).parents[2] / "research"


def register_plugins() -> None:
    """Puts metadata with the entry points of research/pyproject.toml before installed packages. Child processes see only the latter."""
    project = tomllib.loads((RESEARCH / "pyproject.toml").read_text())["project"]
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    info = Path(folder.name, f"{project['name'].replace('-', '_')}-{project['version']}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [line for group, entries in groups for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    sys.path[:0] = [folder.name, str(RESEARCH)]
