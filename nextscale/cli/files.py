"""What the commands write, and under which names."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ..errors import SettingError
from ..io import IMAGE_FORMATS
from ..stage import Stage

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


def plan_pictures(prompts: Sequence[str | int], images: int, seed: int, out: Path) -> list[Picture]:
    repeated = [prompt for prompt in prompts for _ in range(images)]
    if out.suffix.lower() not in IMAGE_FORMATS:
        if out.suffix.lower() in Image.registered_extensions():
            raise SettingError(f"--out {out}: give a folder, or a name that ends in {', '.join(IMAGE_FORMATS)}")
        return [Picture(prompt, seed + i, out / picture_name(i, seed + i, prompt)) for i, prompt in enumerate(repeated)]
    if len(repeated) > 1:
        raise SettingError(f"--out {out} is a single file for {len(repeated)} images: give a folder, and --grid FILE for one sheet")
    return [Picture(prompts[0], seed, out)]


def picture_name(index: int, seed: int, prompt: str | int) -> str:
    words = [slug(prompt)] if isinstance(prompt, str) else []
    return "-".join(filter(None, [f"{index:04d}", f"seed{seed}", *words])) + ".png"


def slug(text: str) -> str:
    """The first words as letters and digits that are safe in file names; empty if the text has none."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    words = "-".join(re.findall(r"[a-z0-9]+", plain))
    return words if len(words) <= LONGEST_SLUG else words[: LONGEST_SLUG + 1].rpartition("-")[0] or words[:LONGEST_SLUG]


def require_image_name(option: str, file: Path) -> None:
    if file.suffix.lower() not in IMAGE_FORMATS:
        raise SettingError(f"{option} {file}: give a name that ends in {', '.join(IMAGE_FORMATS)}")


def require_writable(files: Sequence[Path], force: bool) -> None:
    """Raises SettingError unless all files can be written, each once; existing ones only with `force`."""
    if twice := [file for file, times in Counter(files).items() if times > 1]:
        raise SettingError(f"{named(twice)} would be written twice: give --out, --grid and --report different names")
    if folders := [file for file in files if file.is_dir()]:
        raise SettingError(f"cannot write {named(folders)}: there is a folder of that name")
    existing = list(dict.fromkeys(next(folder for folder in file.parents if os.path.lexists(folder)) for file in files))
    if blocked := [folder for folder in existing if not folder.is_dir()]:
        raise SettingError(f"cannot write into {named(blocked)}: it is a file; give a folder")
    if read_only := [folder for folder in existing if not os.access(folder, os.W_OK | os.X_OK)]:
        raise SettingError(f"cannot write into {named(read_only)}: it is read-only; give another folder")
    if not force and (taken := [file for file in files if file.exists()]):
        raise SettingError(f"not overwriting {named(taken)}: choose another name, or pass --force")


def named(files: Sequence[Path]) -> str:
    shown = ", ".join(str(file) for file in files[:FILES_NAMED])
    return f"{shown} and {len(files) - FILES_NAMED} more" if len(files) > FILES_NAMED else shown
