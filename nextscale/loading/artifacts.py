"""The published parts of a model: where they are on this machine, which files of the hub they are, and the files beside them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from ..checkpoints.files import INDEX_SUFFIX, indexed_shards
from ..checkpoints.hub import Folder, HubCache, RemoteFile, cached_snapshot, download, hub_package, list_files
from ..errors import CheckpointError, DownloadError, MissingExtra, SettingError
from ..io import expanded, home
from ..methods.stagevar_ranks import RankTable, rank_file, read_rank_table
from ..models.base import NextScaleModel
from ..profiles import profile_folder
from ..text import TextEncoder
from ..text.files import EncoderFiles
from .hart_config import CONFIG_NAME
from .presets import Embedded, ModelSpec, Source, TextSource

KINDS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt")
"""Suffixes of weights, in the order of preference where a folder of the hub has several."""


@dataclass(frozen=True)
class Artifact:
    """A file or folder of weights, or a text encoder, that is published on its own."""

    what: str
    source: Source
    encoder: EncoderFiles | None = None  # the files of a text encoder

    def below(self, root: Path) -> Path | None:
        """Returns its path in a folder such as NEXTSCALE_HOME names, if it is complete there."""
        return self._complete(root / self.source.local)

    def cached(self) -> Path | None:
        """Returns its path in the hub's cache, if it is complete there."""
        snapshot = cached_snapshot(self.source.repository) if self.source.file or self.encoder else None
        found = None if snapshot is None else self._complete(snapshot / self.source.file)
        if found is not None and found.is_dir() and self.source.only and not (found / self.source.only).is_file():
            return None  # another program has fetched other weights of that folder
        return found

    def _complete(self, path: Path) -> Path | None:
        if self.encoder is None:
            return complete(path)
        return path if path.is_dir() and not self.encoder.absent(path) else None

    def select(self) -> dict[RemoteFile, str]:
        """Returns the files of the hub that are needed, with their names below the folder of all weights."""
        source = self.source
        if self.encoder is not None:
            return {file: f"{source.local}/{file.path}" for file in list_files(source.repository, self.encoder.downloaded)}
        files = {file.path: file for file in list_files(source.repository)}
        if source.file in files:
            return {files[source.file]: source.local}
        inside = {PurePosixPath(path).name: file for path, file in files.items() if str(PurePosixPath(path).parent) == source.file}
        kind = next((kind for kind in KINDS if any(name.endswith(kind) for name in inside)), None)
        if kind is None:
            raise DownloadError(
                f"{self.what}: {source.repository} no longer has {source.file}. See what is published at "
                f"https://huggingface.co/{source.repository}, fetch it by hand and pass its path."
            )
        weights = [source.only] if source.only in inside else [name for name in inside if name.endswith((kind, kind + INDEX_SUFFIX))]
        return {inside[name]: f"{source.local}/{name}" for name in (CONFIG_NAME, *weights) if name in inside}


def complete(path: Path) -> Path | None:
    """Returns a file of weights, or a folder that has all its shards, if it is there; its converted file takes precedence."""
    if (converted := converted_file(path)).is_file():
        return converted
    if not path.is_dir():
        return path if os.path.exists(path) else None
    try:
        for index in path.glob(f"*{INDEX_SUFFIX}"):
            indexed_shards(index)
    except CheckpointError:  # an absent shard
        return None
    return path if any(file.suffix in KINDS for file in path.iterdir()) else None


def converted_file(path: Path) -> Path:
    """Returns the safetensors file that a file or a folder of weights is converted to."""
    return path.with_name(f"{path.stem if path.suffix in KINDS else path.name}.safetensors")


def weight_artifacts(spec: ModelSpec) -> list[Artifact]:
    """Returns the published weights, without those that come with the package or are not released."""
    sources = (("weights", spec.weights), ("tokenizer", spec.tokenizer_weights))
    return [Artifact(f"{what} of {spec.name}", source) for what, source in sources if isinstance(source, Source)]


def encoder_artifact(spec: ModelSpec) -> Artifact | None:
    """Returns the text encoder; None for classes and for an encoder that comes with the package."""
    encoder = encoder_class(spec.text_encoder)
    if encoder is None or spec.text_encoder is None or not isinstance(spec.text_encoder.origin, str):
        return None
    repository = spec.text_encoder.origin
    return Artifact(f"text encoder of {spec.name}", Source(repository, "", PurePosixPath(repository).name), encoder.files)


def encoder_class(source: TextSource | None) -> type[TextEncoder] | None:
    encoder = source and source.encoder
    return encoder if isinstance(encoder, type) and issubclass(encoder, TextEncoder) else None


def encoder_bytes(spec: ModelSpec) -> int:
    """Returns the size of a published text encoder's weights on a GPU, in bytes; 0 for other encoders."""
    encoder = encoder_class(spec.text_encoder)
    return 0 if encoder is None else encoder.cuda_bytes


# --- on this machine


def locate(artifact: Artifact) -> Path | None:
    """Returns its path below NEXTSCALE_HOME or in the hub's cache; None if it is not on this machine."""
    return artifact.below(home()) or artifact.cached()


def find(given: str | Path | None, source: Source | Embedded | None, what: str) -> Path:
    """Returns the given path, the file of the package, or the place of a published file on this machine."""
    if given is not None:
        return expanded(given)
    if source is None:
        raise CheckpointError(f"the {what} have not been released: pass weights=... with your own file.")
    if isinstance(source, Embedded):
        if not source.path.is_file():
            raise CheckpointError(f"{what}: {source.path} is absent. Install nextscale, or save the pipeline, again.")
        return source.path
    if (path := locate(Artifact(what, source))) is None:
        raise CheckpointError(
            f"{what}: {home() / source.local} is absent, and not in the hub's cache. Fetch {source.url} and put it there, pass its path, "
            "or allow downloads."
        )
    return path


def local_weights(spec: ModelSpec) -> Path | None:
    """Returns where a model's weights are, or where they are looked for first; None if none are released."""
    source = spec.weights
    if isinstance(source, Source):
        return locate(Artifact("weights", source)) or home() / source.local
    return source.path if source else None


def profile_folders(spec: ModelSpec, weights: Path) -> list[Path]:
    """Returns the folders of profiles for these weights; later ones take precedence."""
    return [*([profile_folder(spec.weights.path)] if isinstance(spec.weights, Embedded) else []), profile_folder(weights)]


def rank_table_of(model: NextScaleModel, weights: Path) -> RankTable | None:
    """Returns StageVAR's rank table beside the weights, if there is one. Raises SettingError for another model's."""
    file = rank_file(weights)
    if not file.is_file():
        return None
    table = read_rank_table(file)
    if not table.belongs_to(model):
        raise SettingError(f"{file} must be of the model beside it; got {table!r}. Remove it, or run `nextscale calibrate stagevar`.")
    return table


# --- from the hub


def fetch(artifacts: Sequence[Artifact], to: Path | None = None, room: float = 1.0) -> None:
    """Fetches artifacts into the hub's cache, or below `to`. room: times their size that must be free."""
    hub_package()
    for artifact in artifacts:
        if artifact.encoder is None and not artifact.source.file:
            raise DownloadError(
                f"{artifact.what}: its publication names no file. Choose it at {artifact.source.url} and save it as "
                f"{home() / artifact.source.local}, or pass its path."
            )
    wanted = {file: name for artifact in artifacts for file, name in artifact.select().items()}
    extra = int((room - 1) * sum(file.size for file in wanted))
    download(wanted, HubCache() if to is None else Folder(to), extra)


def fetch_missing(spec: ModelSpec, needed: Sequence[Artifact], with_encoder: bool) -> None:
    """Fetches the missing files of a model, with its text encoder if the package that reads it is installed."""
    missing = [artifact for artifact in needed if locate(artifact) is None]
    encoder = encoder_artifact(spec) if with_encoder and missing and find_spec("transformers") else None
    if encoder is not None and locate(encoder) is None:
        missing.append(encoder)
    try:
        if missing:
            fetch(missing)
    except (DownloadError, MissingExtra) as error:
        places = [f"{artifact.source.url} to {home() / artifact.source.local}" for artifact in needed if artifact.source.file]
        raise type(error)(f"{error} By hand: {', and '.join(places)}." if places else str(error)) from error


def download_artifacts(spec: ModelSpec, to: Path | None, offline: bool, room: float) -> Mapping[Artifact, Path]:
    """Finds everything that a model needs, or fetches it (see `download_model`)."""
    if spec.weights is None:
        raise CheckpointError(f"the weights of {spec.name} have not been released: there is nothing to download.")
    if to is not None and to.exists() and not to.is_dir():
        raise SettingError(f"--to must be a folder; got the file {to}.")
    artifacts = [*weight_artifacts(spec), *filter(None, [encoder_artifact(spec)])]

    def found(artifact: Artifact) -> Path | None:
        return locate(artifact) if to is None else artifact.below(to)

    paths = {artifact: found(artifact) for artifact in artifacts}
    needed = [artifact for artifact, path in paths.items() if path is None or (to and _differs(artifact, path, to, offline))]
    if needed and offline:
        raise DownloadError(f"missing or changed: {', '.join(artifact.what for artifact in needed)}. Leave out --offline to fetch them.")
    if needed:
        fetch(needed, to, room)
    result = {artifact: path for artifact in artifacts if (path := found(artifact)) is not None}
    if incomplete := [artifact for artifact in artifacts if artifact not in result]:
        raise DownloadError(f"{incomplete[0].what} is still incomplete. See the published files at {incomplete[0].source.url}.")
    return result


def _differs(artifact: Artifact, path: Path, to: Path, offline: bool) -> bool:
    """Returns True if files below `to` may differ from the hub's. Offline, files that were put there by hand pass."""
    if artifact.encoder is None and (not artifact.source.file or path != to / artifact.source.local):
        return False  # the hub names no such file, or the package wrote it
    if not offline:
        return True
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return any(Folder(to).has_changed(file.relative_to(to).as_posix()) for file in files)
