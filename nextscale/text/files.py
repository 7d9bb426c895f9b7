"""Files of a text encoder, in a local folder or on the hub."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ..checkpoints.files import read_object, shard_names
from ..checkpoints.hub import cached_snapshot, snapshot
from ..errors import CheckpointError, DownloadError, MissingExtra, TextEncoderUnavailable
from ..io import expanded

CONFIG = "config.json"
WEIGHTS, INDEX, SHARDS = "model.safetensors", "model.safetensors.index.json", "model-*.safetensors"


@dataclass(frozen=True)
class EncoderFiles:
    """The files that one kind of text encoder needs."""

    kind: str  # used in messages
    repository: str  # on the hub
    tokenizer_needs: tuple[tuple[str, ...], ...]  # alternatives, one of each required
    tokenizer_helps: tuple[str, ...]  # optional
    tokenizer_folder: str = ""
    model_folder: str = ""  # with a trailing slash
    model_types: tuple[str, ...] = ()  # accepted in config.json; empty: any

    @property
    def needed(self) -> tuple[tuple[str, ...], ...]:
        return ((self.model_folder + CONFIG,), *self.tokenizer_needs, (self.model_folder + WEIGHTS, self.model_folder + INDEX))

    @property
    def downloaded(self) -> tuple[str, ...]:
        """Patterns of all files to download from the hub."""
        return (*(name for names in self.needed for name in names), *self.tokenizer_helps, self.model_folder + SHARDS)

    def absent(self, folder: Path) -> list[str]:
        """Returns the required files that are missing."""
        absent = [" or ".join(names) for names in self.needed if not any((folder / name).is_file() for name in names)]
        index = folder / self.model_folder / INDEX
        if index.is_file() and not index.with_name(WEIGHTS).is_file():
            absent += [self.model_folder + name for name in shard_names(index) if not (index.parent / name).is_file()]
        return absent

    def open(self, given: str | Path, download: bool = True) -> Path:
        """Returns a complete folder: a local one, which is never completed from the network, or the hub's cache folder of a hub name."""
        folder = self._from_hub(str(given), download) if is_hub_name(given) else expanded(given)
        if not folder.is_dir():
            raise self.unavailable(given, "is not a local folder.")
        try:
            if absent := self.absent(folder):
                raise self.unavailable(given, f"is incomplete; missing: {', '.join(absent)}.")
            found = read_object(folder / self.model_folder / CONFIG).get("model_type")
        except CheckpointError as error:
            raise self.unavailable(given, f"could not be read: {error}") from error
        if self.model_types and found not in self.model_types:
            expected = " or ".join(map(repr, self.model_types))
            raise self.unavailable(given, f"must have model_type {expected} in its {CONFIG}; got {found!r:.80}.")
        return folder

    def _from_hub(self, repository: str, download: bool) -> Path:
        cached = cached_snapshot(repository)
        if cached is not None and not self.absent(cached):
            return cached
        if not download:
            raise self.unavailable(repository, "is not in the hub's cache, and downloads are not allowed.")
        try:
            return snapshot(repository, self.downloaded)
        except DownloadError as error:
            raise self.unavailable(repository, f"is not on this machine. {error}") from error

    def unavailable(self, given: str | Path, problem: str) -> TextEncoderUnavailable:
        repository = given if is_hub_name(given) else self.repository
        wanted = ", ".join(" or ".join(names) for names in self.needed)
        return TextEncoderUnavailable(
            f"text encoder {str(given)!r} {problem} Download {wanted} (with its shards) and {', '.join(self.tokenizer_helps)} from "
            f'https://huggingface.co/{repository} into a folder and pass that folder: text_encoder="<folder>".'
        )

    def require_package(self, module: str) -> None:
        try:
            import_module(module)
        except ImportError as error:
            raise MissingExtra(f"the {self.kind} text encoder needs the package {module!r}: pip install 'nextscale[text]'.") from error


def is_hub_name(source: str | Path) -> bool:
    if isinstance(source, Path):
        return False
    looks_like_path = source.startswith((".", "/", "~")) or source.count("/") > 1 or "\\" in source
    return not looks_like_path and not Path(source).exists()
