"""Builds the wheel and installs it into fresh virtual environments, bare and with each extra alone.

    python -m tests.fresh_environments [EXTRA ...]

In each: the package imports, the command line answers, one image is generated, and what an extra is needed for either works or says
which extra to install. Not part of `make test`: it takes minutes and a package index. torch is installed once, in an environment that the
others look into; everything else is installed in each.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parent.parent
BARE = "without extras"
DEVELOPERS = "dev"  # the tests themselves run with it


@dataclass(frozen=True)
class Probe:
    """Something that needs an extra: without it the output names the extra, with it that is not so and the output has `expected`."""

    code: str
    expected: str


SHOW_ERROR = "\nexcept nextscale.NextscaleError as error:\n    print(error)"
PROBES = {
    "hub": Probe(f"import nextscale\ntry:\n    nextscale.load('var-d16', device='cpu'){SHOW_ERROR}", "HF_HUB_OFFLINE forbids it"),
    "text": Probe(f"import nextscale\ntry:\n    nextscale.T5Encoder('no/such-encoder'){SHOW_ERROR}", "is not on this machine"),
    "serve": Probe(
        "import nextscale\nfrom nextscale.cli.serve import require_packages\ntry:\n    require_packages()"
        f"\n    print('it can start'){SHOW_ERROR}",
        "it can start",
    ),
    "ray": Probe(
        f"import nextscale\nfrom nextscale.batching.ray_cluster import import_ray\ntry:\n    print(import_ray().__version__){SHOW_ERROR}",
        "2.",
    ),
}


@dataclass(frozen=True)
class Extra:
    packages: bool  # whether it has packages of its own
    brings: frozenset[str]  # itself and the extras that it brings along


def extras() -> dict[str, Extra]:
    listed = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def closure(name: str) -> frozenset[str]:
        brought = [found.split(",") for need in listed[name] for found in re.findall(r"^nextscale\[(.+)\]", need)]
        return frozenset({name}).union(*(closure(inner) for names in brought for inner in names))

    own = {name: any(not need.startswith("nextscale[") for need in needs) for name, needs in listed.items()}
    return {name: Extra(own[name], closure(name)) for name in listed if name != DEVELOPERS}


def there(name: str, installed: frozenset[str]) -> bool:
    """Whether all packages of an extra are there: one that only brings others along is complete with those."""
    extra = extras()[name]
    return name in installed or (not extra.packages and extra.brings - {name} <= installed)


class Environment:
    def __init__(self, folder: Path, base: Environment | None = None) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self.folder = folder
        self.packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
        if base is not None:
            (self.packages / "base.pth").write_text(f"{base.packages}\n")

    def install(self, *what: str) -> None:
        command = [self.folder / "bin" / "pip", "install", "--quiet", "--constraint", PROJECT / "constraints.txt", *what]
        subprocess.run(command, check=True)

    def run(self, program: str, *arguments: str) -> str:
        """Everything that was shown; AssertionError where the program fails."""
        outside = self.folder.parent
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(outside / "home"),
            "NEXTSCALE_HOME": str(outside / "weights"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [str(self.folder / "bin" / program), *arguments]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{program} {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr


def check(environment: Environment, installed: frozenset[str]) -> list[str]:
    """What was found, one line each."""
    where = environment.run("python", "-c", "import nextscale; print(nextscale.__file__)").strip()
    assert str(environment.folder) in where, f"{where} is not the installed package"
    assert "generate" in environment.run("nextscale", "--help")
    environment.run("nextscale", "generate", "a 3D icon of a red apple", "--size", "128", "--seed", "7", "--out", "apple.png")
    environment.run("python", "-c", "from nextscale.metrics import Lpips; Lpips.load()")
    found = [f"imports, --help, one image ({(environment.folder / 'apple.png').stat().st_size} bytes)"]
    for extra, probe in PROBES.items():
        shown = environment.run("python", "-c", probe.code)
        named = re.search(r"pip install ['\"]nextscale\[\w+\]['\"]", shown)
        if there(extra, installed):
            assert probe.expected in shown and named is None, f"{extra} is installed, but: {shown}"
            found.append(f"{extra}: works")
        else:
            assert named is not None, f"{extra} is not installed, and nothing says so: {shown}"
            found.append(f"{extra}: {named[0]}")
    return found


def main(wanted: list[str]) -> None:
    known = extras()
    if unknown := set(wanted) - known.keys():
        raise SystemExit(f"no such extra: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    cases = {BARE: frozenset[str]()} | {name: extra.brings for name, extra in known.items()}
    cases = {name: installed for name, installed in cases.items() if not wanted or name in wanted}
    torch = next(line for line in (PROJECT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", root, PROJECT], check=True)
        [wheel] = root.glob("nextscale-*.whl")
        base = Environment(root / "base")
        base.install(torch)
        for number, (name, installed) in enumerate(cases.items()):
            environment = Environment(root / f"case{number}", base)
            environment.install(str(wheel) if name == BARE else f"nextscale[{name}] @ {wheel.as_uri()}")
            print(f"{name}:", *check(environment, installed), sep="\n  ", flush=True)
            if without := installed - PROBES.keys():
                print(f"  no probe for {', '.join(sorted(without))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
