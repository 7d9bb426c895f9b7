"""Names of the files that commands write."""

from __future__ import annotations

import mimetypes
import os
import re
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SettingError

if TYPE_CHECKING:
    from ..stage import Stage

IMAGE_FORMATS = (".png", ".jpg", ".jpeg", ".webp")

LONGEST_SLUG = 40
FILES_NAMED = 3  # in one error message


@dataclass(frozen=True)
class Picture:
    """One image to generate."""

    prompt: str | int
    seed: int
    file: Path

    def preview_file(self, stage: Stage) -> Path:
        return self.file.with_stem(f"{self.file.stem}-stage{stage.index:02d}")

    @property
    def mask_file(self) -> Path:
        return self.file.with_stem(f"{self.file.stem}-mask")


def default_out(name: str) -> Path:
    """Returns the file or folder of this name here; in a checkout of nextscale one outside of it."""
    here = Path.cwd()
    in_checkout = any((folder / ".git").exists() and (folder / "nextscale" / "cli").is_dir() for folder in (here, *here.parents))
    return Path(tempfile.gettempdir(), "nextscale", name) if in_checkout else Path(name)


def plan_pictures(prompts: Sequence[str | int], images: int, seed: int, out: Path, details: Sequence[str], force: bool) -> list[Picture]:
    """Returns all pictures with their files. In a folder the names end in `details`, and in a number if a file has that name."""
    repeated = [prompt for prompt in prompts for _ in range(images)]
    if out.suffix.lower() not in IMAGE_FORMATS:
        if (mimetypes.guess_type(out.name)[0] or "").startswith("image/"):
            require_image_name("--out", out)
        words = [slug(prompt) if isinstance(prompt, str) else f"class{prompt}" for prompt in repeated]
        names = ["-".join(filter(None, (f"{i:04d}-seed{seed + i}", text, *details))) for i, text in enumerate(words)]
        files = [out / f"{name}.png" if force else free(out / f"{name}.png") for name in names]
        return [Picture(prompt, seed + i, file) for i, (prompt, file) in enumerate(zip(repeated, files, strict=True))]
    if len(repeated) > 1:
        raise SettingError(f"--out must be a folder for {len(repeated)} images; got the file {out}. One picture of all: --grid FILE.")
    return [Picture(prompts[0], seed, out)]


def free(file: Path) -> Path:
    """Returns the file, with a number if the name is taken."""
    return next(one for n in count(1) if not (one := file if n == 1 else file.with_stem(f"{file.stem}-{n}")).exists())


def slug(text: str) -> str:
    """Returns the first words as letters and digits that are safe in file names; empty if the text has none."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    words = "-".join(re.findall(r"[a-z0-9]+", plain))
    return words if len(words) <= LONGEST_SLUG else words[: LONGEST_SLUG + 1].rpartition("-")[0] or words[:LONGEST_SLUG]


def require_image_name(option: str, file: Path) -> None:
    if file.suffix.lower() not in IMAGE_FORMATS:
        raise SettingError(f"{option} must end in {', '.join(IMAGE_FORMATS)}; got {file}.")


def require_writable(files: Sequence[Path], force: bool) -> None:
    """Raises SettingError unless all files can be written, each once; existing ones only with `force`."""
    if twice := [file for file, times in Counter(files).items() if times > 1]:
        raise SettingError(f"{named(twice)} would be written twice. Give the files different names.")
    if folders := [file for file in files if file.is_dir()]:
        raise SettingError(f"cannot write {named(folders)}: a folder has that name. Choose another name.")
    existing = list({next(filter(os.path.lexists, file.absolute().parents)): None for file in files})
    if blocked := [folder for folder in existing if not folder.is_dir()]:
        raise SettingError(f"cannot write into {named(blocked)}: it is a file. Give a folder.")
    if read_only := [folder for folder in existing if not os.access(folder, os.W_OK | os.X_OK)]:
        raise SettingError(f"cannot write into {named(read_only)}: it is read-only. Give another folder.")
    if not force and (taken := [file for file in files if file.exists()]):
        raise SettingError(f"{named(taken)} exists already. Choose another name, or pass --force.")


def require_results(out: Path | None) -> None:
    """Raises SettingError unless rows can be added to the file: it must be new, or a file of results."""
    from ..eval.results import read_rows

    if out is not None:
        require_writable([out], force=True)
        if out.exists() and any("benchmark" not in row for row in read_rows(out)):
            raise SettingError(f"--out must be a new file or a file of results; got {out}. Choose another name.")


def named(files: Sequence[Path]) -> str:
    shown = ", ".join(map(str, files[:FILES_NAMED]))
    return f"{shown} and {len(files) - FILES_NAMED} more" if len(files) > FILES_NAMED else shown
