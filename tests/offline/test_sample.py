"""`nextscale sample`: folders of images that end the same whatever happens on the way."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import Result

from benchmarks import sample as benchmark
from benchmarks.sample_table import sample_table
from nextscale.batching.ray_cluster import RaySettings
from nextscale.cli import app
from nextscale.cli.options import ModelOptions
from nextscale.cli.sample import named_with_content
from nextscale.errors import NextscaleError, PromptError, SettingError
from nextscale.loading import presets
from nextscale.loading.load import random_pipeline
from nextscale.methods import resolve_method
from nextscale.offline import lock
from nextscale.offline.lock import FolderInUse, working_folder
from nextscale.offline.manifest import Entry, read_folder, read_manifest
from nextscale.offline.plan import Batch, Picture, plan_batches
from nextscale.offline.prompts import SamplePrompt, read_sample_prompts
from nextscale.offline.sampler import Done, Generator, longest_prompts, sample
from nextscale.offline.shard import Shard
from nextscale.offline.store import Encoded, Store
from nextscale.output import Output
from tests.helpers import tiny
from tests.helpers.cli import run_cli

SPEC = tiny.infinity_spec()
SCHEDULE = tiny.INFINITY_SCHEDULE
PROMPTS = [f"prompt number {number}" for number in range(10)]


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.MODELS, SPEC.name, SPEC)
    monkeypatch.setenv("NEXTSCALE_COMMIT", "tested")  # a commit while the tests run would be in some lines and not in others


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return written(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])


def written(file: Path, lines: Sequence[Any]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def arguments(prompts: Path, out: Path, *more: str) -> list[str]:
    options = ["-m", SPEC.name, "--random-weights", "--device", "cpu", "--batch", "4", "--prompts", str(prompts), "--out", str(out), *more]
    return ["sample", *options]


def run(prompts: Path, out: Path, *more: str) -> Result:
    return run_cli(*arguments(prompts, out, *more), catch=True)


def contents(folder: Path) -> dict[str, str]:
    """Every file below the folder, hidden ones included."""
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.rglob("*") if file.is_file()}


def images(folder: Path) -> dict[str, str]:
    return {name: content for name, content in contents(folder).items() if name.endswith(".png")}


# --- prompts, shards, plans


def test_prompts_have_ids_seeds_and_sizes(tmp_path: Path) -> None:
    file = written(
        tmp_path / "p.jsonl",
        [{"prompt": "a"}, {"id": 7, "caption": "b", "seed": 3}, {"id": "x.y", "class": 5, "size": [8, 6], "aspect": "1:1"}],
    )
    assert read_sample_prompts(file) == [
        SamplePrompt("00000", "a"),
        SamplePrompt("7", "b", 3),
        SamplePrompt("x.y", "5", None, "8x6", "1:1"),
    ]
    plain = tmp_path / "p.txt"
    plain.write_text("# comment\nfirst\nsecond\n")
    assert [(prompt.id, prompt.text) for prompt in read_sample_prompts(plain)] == [("00000", "first"), ("00001", "second")]
    assert [prompt.text for prompt in read_sample_prompts(plain, limit=1)] == ["first"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": ""}', "must have a text"),
        ('{"id": "a"}', "must have a text"),
        ("[1]", "must be an object"),
        ("{", "is not valid JSON"),
        ('{"prompt": "a", "id": "../x"}', "id must be"),
        ('{"prompt": "a", "id": ".hidden"}', "id must be"),
        ('{"prompt": "a", "seed": -1}', "seed must be"),
        ('{"prompt": "a", "size": 1.5}', "as on the command line"),
        ('{"prompt": "a", "id": "b"}\n{"prompt": "c", "id": "b"}', "several prompts"),
        ("", "has no prompt"),
        ('\n\n{"prompt": "a"}\n{"prompt": ""}', "line 4 must have a text"),
        ('{"prompt": ' + "[" * 100_000, "is not valid JSON"),
    ],
)
def test_wrong_prompt_files_are_refused(line: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(PromptError, match=said):
        read_sample_prompts(file)


def test_what_only_some_take_for_the_end_of_a_line_is_part_of_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "c\x85d"}\r\n'.encode())
    assert [(prompt.id, prompt.text) for prompt in read_sample_prompts(file)] == [("00000", "a\u2028b"), ("00001", "c\x85d")]


def test_more_images_than_a_plan_can_hold_are_refused() -> None:
    with pytest.raises(SettingError, match="prompts must be"):
        planned(1, 4, seeds=10**9)


def planned(count: int, batch: int, seeds: int = 1) -> list[Batch]:
    prompts = [SamplePrompt(str(number), PROMPTS[number]) for number in range(count)]
    return plan_batches(prompts, batch=batch, read=str, schedule=lambda _: SCHEDULE, seeds=seeds, seed=100)


def test_a_plan_counts_seeds_as_generate_does_and_fills_the_last_batch() -> None:
    batches = planned(3, 4, seeds=2)
    assert [[(picture.id, picture.seed) for picture in batch.pictures] for batch in batches] == [
        [("0", 100), ("0", 101), ("1", 102), ("1", 103)],
        [("2", 104), ("2", 105)],
    ]
    assert [picture.seed for picture in batches[1].filled] == [104, 105, 105, 105]
    assert batches[0].pictures[1].file == "0_101.png"


def test_batches_hold_one_size_each() -> None:
    sizes = {"wide": tiny.infinity_spec().settings.schedules.choose(None, None), "own": SCHEDULE}
    other = type(SCHEDULE)([1, 2])
    prompts = [SamplePrompt(str(number), "p", aspect="wide" if number % 2 else None) for number in range(6)]
    batches = plan_batches(prompts, batch=2, read=str, schedule=lambda prompt: other if prompt.aspect else sizes["own"])
    assert all(len({picture.schedule for picture in batch.pictures}) == 1 for batch in batches)
    assert [len(batch.pictures) for batch in batches] == [2, 1, 2, 1]


def test_names_that_would_meet_are_refused() -> None:
    prompts = [SamplePrompt("a_1", "p", seed=2), SamplePrompt("A", "p", seed=1), SamplePrompt("a", "p", seed=1)]
    with pytest.raises(PromptError, match="would both write"):
        plan_batches(prompts, batch=2, read=str, schedule=lambda _: SCHEDULE)


def test_shards_part_the_work() -> None:
    batches = list(range(10))
    parts = [Shard(index, 3).part(batches) for index in range(3)]
    assert sorted(number for part in parts for number in part) == batches


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4"}, Shard(3, 4)),
        ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "2"}, Shard(3, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, Shard(0, 2)),
    ],
)
def test_launchers_say_which_shard(environment: dict[str, str], expected: Shard) -> None:
    assert Shard.parse("auto", environment) == expected


@pytest.mark.parametrize("text", ["3/3", "1", "-1/2", "a/b", "1/0", "auto", f"0/{'9' * 5000}"])
def test_wrong_shards_are_refused(text: str) -> None:
    with pytest.raises(SettingError, match="--shard"):
        Shard.parse(text, {})


@pytest.mark.parametrize(
    "environment", [{"RANK": rank, "WORLD_SIZE": size} for rank, size in (("4", "4"), ("", "4"), ("0", "x"), ("0", "9" * 5000))]
)
def test_launchers_that_say_nonsense_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(SettingError, match="RANK"):
        Shard.parse("auto", environment)


# --- folders


def test_a_run_writes_every_image_with_its_line(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(prompts, out, "-n", "2")
    assert result.exit_code == 0, result.output
    assert "20 images written" in result.output
    assert {*contents(out)} == {f"{i // 2:05d}_{i}.png" for i in range(20)} | {"manifest.jsonl"}
    entries = read_manifest(out / "manifest.jsonl")
    assert [entry.seed for entry in entries] == list(range(20))
    assert entries[3].prompt == PROMPTS[1] and entries[3].settings["method"] == "dense"
    assert all(entry.matches(out) for entry in entries)
    pipe = random_pipeline(SPEC)
    alone = pipe(PROMPTS[1], seed=3, size=SCHEDULE).images[0]
    with Image.open(out / entries[3].file) as stored:
        assert stored.tobytes() == alone.tobytes()


def test_shards_give_the_same_files_as_one_process(prompts: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(prompts, whole).exit_code == 0
    for index in range(2):
        assert run(prompts, parts, "--shard", f"{index}/2").exit_code == 0
    assert images(parts) == images(whole)
    assert {*read_folder(parts)} == {*images(whole)}
    again = run(prompts, parts)  # one process after two
    assert "0 images written" in again.output and "10 kept" in again.output


def test_what_is_damaged_or_missing_is_made_again_and_nothing_else(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(prompts, out).exit_code == 0
    before = contents(out)
    untouched = (out / "00000_0.png").stat().st_mtime_ns
    (out / "00001_1.png").write_bytes(b"damaged")
    (out / "00009_9.png").unlink()
    with (out / "manifest.jsonl").open("a") as lines:
        lines.write('{"file": "0000')  # a line that was not finished
    result = run(prompts, out)
    assert "2 images written" in result.output and "8 kept" in result.output
    assert images(out) == {name: content for name, content in before.items() if name.endswith(".png")}
    assert (out / "00000_0.png").stat().st_mtime_ns == untouched
    assert Counter(entry.file for entry in read_manifest(out / "manifest.jsonl")) == Counter([*images(out)])


def test_images_of_other_settings_are_not_mixed(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(prompts, out).exit_code == 0
    before = contents(out)
    for more in (["--method", "skip:last=1"], ["--guidance", "2"], ["--sampling", "greedy"]):
        result = run(prompts, out, *more)
        assert result.exit_code == 2 and "Choose another folder" in result.output
    assert contents(out) == before


@pytest.mark.parametrize("other", [["--guidance", "2"], ["--batch", "2"], ["--seed", "7", "--sampling", "greedy"]])
def test_shards_of_one_folder_have_the_same_settings_and_batches(other: list[str], prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(prompts, out, "--shard", "0/2").exit_code == 0
    before = contents(out)
    result = run(prompts, out, "--shard", "1/2", *other)
    assert result.exit_code == 2 and "Choose another folder" in result.output
    assert contents(out) == before
    assert run(prompts, out, "--shard", "1/2").exit_code == 0


def test_shards_of_other_prompts_are_refused(prompts: Path, tmp_path: Path) -> None:
    out, others = tmp_path / "out", written(tmp_path / "others.jsonl", [{"prompt": f"other {prompt}"} for prompt in PROMPTS])
    assert run(prompts, out, "--shard", "0/2").exit_code == 0
    result = run(others, out, "--shard", "1/2")
    assert result.exit_code == 2 and "has prompt 'prompt number 0'; this run has 'other prompt number 0'" in result.output


def test_more_prompts_may_join_the_images_of_the_same_settings(prompts: Path, tmp_path: Path) -> None:
    out, more = tmp_path / "out", written(tmp_path / "more.jsonl", [{"id": "more", "prompt": "more"}])
    assert run(prompts, out, "--shard", "0/2").exit_code == 0
    assert run(more, out, "--batch", "1").exit_code == 0
    assert run(prompts, out, "--shard", "1/2").exit_code == 0
    assert len(images(out)) == 11


def test_a_shard_that_began_meanwhile_with_other_settings_is_named(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, generate = tmp_path / "out", Generator.output

    def beside(self: Generator, batch: Batch) -> Any:
        monkeypatch.setattr(Generator, "output", generate)
        assert run(prompts, out, "--shard", "1/2", "--batch", "2").exit_code == 0
        return generate(self, batch)

    monkeypatch.setattr(Generator, "output", beside)
    result = run(prompts, out, "--shard", "0/2")
    assert result.exit_code == 2 and "manifest-1-of-2.jsonl says that" in result.output and "has batch 2" in result.output


def test_what_auto_chose_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine, or a new profile, may choose another method: its images do not belong among these."""
    prompts, out = written(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b"}]), tmp_path / "out"
    monkeypatch.setattr(Generator, "output", lambda self, batch: Output(torch.zeros(batch.images, 3, 8, 8), *[None] * 3))  # type: ignore[arg-type]
    more = ("-m", "nano", "--size", "256", "--batch", "1", "--method", "auto:speedup=1.5")
    assert run(prompts, out, *more).exit_code == 0
    entry = read_manifest(out / "manifest.jsonl")[0]
    assert entry.settings["method"] == "Auto(speedup=1.5)" and entry.settings["chosen"]
    assert "2 kept" in run(prompts, out, *more).output
    monkeypatch.setattr(ModelOptions, "resolved", lambda *_: (resolve_method("skip:last=1"), "256x256"))
    result = run(prompts, out, *more)
    assert result.exit_code == 2 and "says that 00000_0.png has chosen" in result.output
    refused = run(prompts, out, *more, "--ray", "auto", "--dtype", "float32")
    assert refused.exit_code == 2 and "Name the method" in refused.output


def test_a_file_that_is_no_manifest_is_not_overwritten(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "manifest.jsonl").write_text('{"mine": 1}\n')
    result = run(prompts, out)
    assert result.exit_code == 2 and "not a line of a manifest" in result.output
    assert (out / "manifest.jsonl").read_text() == '{"mine": 1}\n'


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"settings": None}, "entry.settings must be"),
        ({"versions": "1.0"}, "entry.versions must be"),
        ({"size": 8}, "entry.size must be"),
        ({"id": "\ud800", "file": "other.png"}, "surrogates not allowed"),
        ({"file": "../x.png"}, "without folders"),
    ],
)
def test_edited_lines_of_a_manifest_are_refused(change: dict[str, Any], said: str, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(prompts, out).exit_code == 0
    file = out / "manifest.jsonl"
    first, *others = file.read_text().splitlines(keepends=True)
    file.write_text(json.dumps(json.loads(first) | change) + "\n" + "".join(others))
    before = contents(out)
    result = run(prompts, out)
    assert result.exit_code == 2 and "line 1 is not a line of a manifest" in result.output and said in result.output
    assert contents(out) == before


@pytest.fixture
def pipes_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a pipe that nobody writes would wait without end; here it fails instead."""
    opened = io.open

    def checked(file: Any, *arguments: Any, **named: Any) -> Any:
        assert isinstance(file, int) or not Path(file).is_fifo(), f"{file} is opened"
        return opened(file, *arguments, **named)

    monkeypatch.setattr(io, "open", checked)


@pytest.mark.usefixtures("pipes_fail")
def test_a_pipe_among_the_manifests_is_refused(prompts: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest-x.jsonl")
    result = run(prompts, tmp_path)
    assert result.exit_code == 2 and "manifest-x.jsonl cannot be read" in result.output


@pytest.mark.usefixtures("pipes_fail")
def test_a_pipe_in_the_place_of_an_image_is_replaced(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(prompts, out).exit_code == 0
    before = contents(out)
    (out / "00001_1.png").unlink()
    os.mkfifo(out / "00001_1.png")
    assert "1 image written" in run(prompts, out).output
    assert images(out) == images(out) | {name: content for name, content in before.items() if name == "00001_1.png"}


def test_a_manifest_of_a_million_brackets_is_refused(prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.jsonl").write_text("[" * 1_000_000 + "\n")
    result = run(prompts, tmp_path)
    assert result.exit_code == 2 and "line 1 is not a line of a manifest" in result.output


@pytest.mark.parametrize("more", [["--ray"], ["--ray", "workers=1"], ["--ray", "local"]])
def test_ray_alone_starts_a_cluster_on_this_machine(
    more: list[str], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RaySettings] = []
    monkeypatch.setattr(
        "nextscale.offline.ray.sample_on_ray", lambda *_, ray_settings, **__: asked.append(ray_settings) or Done(0, 0, 0.0, 0)
    )
    assert run(prompts, tmp_path / "out", *more).exit_code == 0
    assert [settings.address for settings in asked] == ["local"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--ray", "workers=0"], "--ray workers"),
        (["--ray", "auto"], "--dtype is required"),
        (["--ray", "local", "--device", "cuda:0"], "--device must be cpu"),
        (["--shard", "2/2"], "--shard must be"),
        (["--weights", "x.pth"], "reads no files"),
    ],
)
def test_options_that_do_not_go_together_are_refused(more: list[str], said: str, prompts: Path, tmp_path: Path) -> None:
    result = run(prompts, tmp_path / "out", *more)
    assert result.exit_code == 2 and said in result.output and not images(tmp_path / "out")


@pytest.mark.parametrize(
    ("line", "said"), [({"prompt": "\ud800"}, "half of a character"), ({"prompt": "a", "size": "9" * 5000}, "pixel budget")]
)
def test_prompts_that_no_pipeline_takes_are_refused(line: Any, said: str, tmp_path: Path) -> None:
    result = run(written(tmp_path / "p.jsonl", [line]), tmp_path / "out", "-m", "nano")
    assert result.exit_code == 2 and said in result.output and not (tmp_path / "out").exists()


def test_a_size_that_no_schedule_has_is_refused_with_its_prompt(tmp_path: Path) -> None:
    file = written(tmp_path / "odd.jsonl", [{"prompt": "a"}, {"id": "fox", "prompt": "b", "size": "banana"}])
    assert "odd.jsonl, prompt 'fox': " in run(file, tmp_path / "out", "-m", "nano").output


def test_other_versions_are_said(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(prompts, out).exit_code == 0
    file = out / "manifest.jsonl"
    file.write_text(file.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "1.0"'))
    (out / "00001_1.png").unlink()
    result = run(prompts, out)
    assert "other versions (torch '1.0'" in result.output


def test_a_folder_in_use_is_refused(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with working_folder(out, Shard(0, 2)):
        with pytest.raises(FolderInUse, match=f"process {os.getpid()} on"), working_folder(out, Shard(0, 2)):
            pass
        with working_folder(out, Shard(1, 2)):
            pass
        result = run(prompts, out)
        assert result.exit_code == 2 and "another number of shards" in result.output
    assert contents(out) == {}
    assert run(prompts, out).exit_code == 0


def test_a_folder_that_another_run_removes_meanwhile_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire, removals = lock.FileLock.acquire, iter(range(3))

    def removed_before(self: Any, *given: Any, **more: Any) -> Any:
        if next(removals, None) is not None:
            shutil.rmtree(tmp_path / ".sample")
        return acquire(self, *given, **more)

    monkeypatch.setattr(lock.FileLock, "acquire", removed_before)
    with working_folder(tmp_path, Shard()) as work:
        assert work.is_dir() and work.with_name("0-of-1.lock").exists()
    (tmp_path / ".sample").write_text("no folder")
    with pytest.raises(NextscaleError, match="cannot be locked"), working_folder(tmp_path, Shard()):
        pass


def test_file_systems_without_locks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", missing)
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(NextscaleError, match="on a file system with locks"),
        working_folder(tmp_path, Shard()),
    ):
        pass
    assert contents(tmp_path) == {}


def test_it_locks_where_fcntl_does_not_exist(tmp_path: Path) -> None:
    program = (
        "import sys, warnings; sys.modules['fcntl'] = None; warnings.simplefilter('ignore')\n"
        "from pathlib import Path\nfrom nextscale.offline.lock import FolderInUse, working_folder\n"
        "from nextscale.offline.shard import Shard\nout = Path(sys.argv[1])\n"
        "with working_folder(out, Shard()):\n"
        "    try:\n        with working_folder(out, Shard()):\n            raise SystemExit('not locked')\n"
        "    except FolderInUse:\n        pass\n"
        "with working_folder(out, Shard()) as work:\n    assert work.is_dir()\nassert not list(out.iterdir())\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_dead_runs_left_is_removed(tmp_path: Path) -> None:
    for name in ("0-of-1", "3-of-4"):
        folder = tmp_path / ".sample" / name
        folder.mkdir(parents=True)
        (folder / "half.png").write_bytes(b"half")
        (folder / "owner").write_text("process 1 on elsewhere")
        folder.with_name(f"{name}.lock").touch()
    with working_folder(tmp_path, Shard()) as work:
        assert {file.name for file in work.iterdir()} == {"owner"} and len([*work.parent.iterdir()]) == 2
    assert contents(tmp_path) == {}


def test_only_folders_of_shards_are_removed(tmp_path: Path) -> None:
    for name in ("photos", "0-of-1/inside", "1-of-2/inside"):
        (tmp_path / ".sample" / name).mkdir(parents=True)
        (tmp_path / ".sample" / name / "file").write_text("content")
    with working_folder(tmp_path, Shard()) as work:
        assert {file.name for file in work.iterdir()} == {"owner"}
    assert {*contents(tmp_path)} == {".sample/photos/file"}


def test_a_read_only_folder_is_verified_and_not_written(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert run(prompts, out).exit_code == 0
    before = {file: file.stat().st_mtime_ns for file in (out, *out.iterdir())}
    access = os.access  # permissions do not stop root, who may run this
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    result = run(prompts, out)
    assert result.exit_code == 0 and "10 kept" in result.output
    assert {file: file.stat().st_mtime_ns for file in (out, *out.iterdir())} == before
    (out / "00001_1.png").write_bytes(b"damaged")
    result = run(prompts, out)
    assert result.exit_code == 2 and "is read-only and lacks 1 images" in result.output


@pytest.mark.parametrize("link", [".sample", ".sample/0-of-1", ".sample/0-of-1.lock"])
def test_nothing_behind_a_symbolic_link_is_removed(link: str, tmp_path: Path) -> None:
    mine, out = tmp_path / "mine", tmp_path / "out"
    for name in ("lock", "0-of-1/owner", "0-of-1/half.png"):
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_text("precious")
    before = contents(mine)
    (out / link).parent.mkdir(parents=True)
    (out / link).symlink_to(mine / "lock" if link.endswith("lock") else mine)
    with pytest.raises(NextscaleError, match="is a symbolic link"), working_folder(out, Shard()):
        pass
    assert contents(mine) == before


def test_a_link_in_the_place_of_another_shard_is_left_alone(tmp_path: Path) -> None:
    mine, out = tmp_path / "mine", tmp_path / "out"
    mine.mkdir()
    (mine / "lock").write_text("precious")
    (out / ".sample").mkdir(parents=True)
    (out / ".sample" / "3-of-4").symlink_to(mine)
    with working_folder(out, Shard()):
        pass
    assert (mine / "lock").read_text() == "precious"


def test_half_a_line_of_a_full_disk_is_taken_back(tmp_path: Path) -> None:
    """The lines of images that were written before the error was seen come after it."""
    pictures = planned(4, 4)[0].pictures
    with working_folder(tmp_path, Shard()) as work:
        store = Store(tmp_path, work, Shard(), {}, {})
        entries = [store.write(picture, Encoded.of(Image.new("RGB", (8, 8)), ".png")) for picture in pictures]
        store.record(entries[0])
        room = (tmp_path / "manifest.jsonl").stat().st_size + 40
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
            with pytest.raises(NextscaleError, match="manifest.jsonl cannot be written"):
                store.record(entries[1])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        store.record(entries[2])
    assert read_manifest(tmp_path / "manifest.jsonl") == [entries[0], entries[2]]


def test_a_disk_that_refuses_ends_the_run_with_a_message(tmp_path: Path) -> None:
    batches = planned(4, 2)
    out = tmp_path / "out"
    with working_folder(out, Shard()) as work:
        store = Store(out, work, Shard(), {}, {})
        (out / batches[0].pictures[1].file).mkdir()
        with pytest.raises(NextscaleError, match="cannot be written"):
            sample(lambda: random_pipeline(SPEC), {}, batches, store)
        (out / "manifest.jsonl").unlink()
        (out / "manifest.jsonl").mkdir()
        entry = store.write(batches[0].pictures[0], Encoded(b"", "", (8, 8)))
        with pytest.raises(NextscaleError, match="manifest.jsonl cannot be written"):
            store.record(entry)


def test_the_model_is_not_loaded_where_nothing_is_missing(tmp_path: Path) -> None:
    batches = planned(4, 2)
    with working_folder(tmp_path, Shard()) as work:
        store = Store(tmp_path, work, Shard(), {}, {})
        sample(lambda: random_pipeline(SPEC), {}, batches, store)
        again = Store(tmp_path, work, Shard(), {}, {})
        done = sample(lambda: pytest.fail("loaded"), {}, batches, again)
    assert (done.written, done.there, done.images_per_second) == (0, 4, None)


def test_graphs_are_captured_for_the_longest_prompt() -> None:
    """On a GPU; here a pipeline that only notes what it is asked for."""
    asked: list[Any] = []

    class Noted:
        engine = "graphs"
        reader = random_pipeline(SPEC).reader

        def warmup(self, prompt: Any, **settings: Any) -> None:
            asked.append((prompt, settings["size"]))

    prompts = [SamplePrompt(str(number), "word " * number) for number in range(1, 6)]
    batches = plan_batches(prompts, batch=2, read=str, schedule=lambda _: SCHEDULE)
    Generator(Noted(), {}).prepare(batches, longest_prompts(batches))  # type: ignore[arg-type]
    assert asked == [(["word " * 5] * 2, SCHEDULE)]


def test_every_shard_captures_for_the_longest_prompt_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(Generator, "prepare", lambda self, batches, longest: asked.append(longest[SCHEDULE][-1]))
    prompts = written(tmp_path / "p.jsonl", [{"prompt": "word " * number} for number in range(1, 10)])
    for index in range(3):
        assert run(prompts, tmp_path / "out", "--shard", f"{index}/3").exit_code == 0
    assert asked == ["word " * 9] * 3


def test_files_are_encoded_as_their_name_says() -> None:
    image = Image.new("RGB", (8, 6), "red")
    for suffix, start in ((".png", b"\x89PNG"), (".jpg", b"\xff\xd8"), (".webp", b"RIFF")):
        encoded = Encoded.of(image, suffix)
        assert encoded.content.startswith(start) and encoded.size == (6, 8)


# --- killed


def child(arguments: list[str], moment: int | None = None) -> None:
    """The program in a process, which is killed before it changes a file for the time that `moment` says, counted from 0."""
    os.environ["NEXTSCALE_COMMIT"] = "tested"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    presets.MODELS[SPEC.name] = SPEC
    if moment is not None:
        sys.addaudithook(Killer(arguments[arguments.index("--out") + 1], moment))
    app(arguments)


class Killer:
    """Ends its own process as SIGKILL does. A number of changes below a folder does not depend on how fast or busy a machine is."""

    def __init__(self, folder: str, moment: int) -> None:
        self._folder, self._left = folder, moment

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir") or (event == "open" and str(arguments[1])[:1] in ("a", "w"))
        if not changes or not str(arguments[0]).startswith(self._folder):
            return
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


@pytest.fixture(scope="module")
def processes() -> Iterator[Any]:
    """Starts processes in which the program is imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "tests.offline.test_sample"])  # the first is imported where a model is built
    yield context


def killed_at(moment: int, processes: Any, prompts: Path, out: Path) -> int:
    """Returns the exit code: killed, or 0 if it changes fewer files."""
    process = processes.Process(target=child, args=(arguments(prompts, out), moment))
    process.start()
    process.join()
    return int(process.exitcode)


def test_killed_at_random_moments_it_ends_as_an_undisturbed_run(processes: Any, tmp_path: Path) -> None:
    prompts = written(tmp_path / "prompts.jsonl", [{"prompt": f"prompt number {number}"} for number in range(64)])
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(prompts, whole).exit_code == 0
    moments = random.Random(0)
    assert {killed_at(moments.randrange(30), processes, prompts, killed) for _ in range(10)} == {-signal.SIGKILL}
    assert 0 < len(images(killed)) < 64
    assert run(prompts, killed).exit_code == 0
    assert contents(killed) == contents(whole)  # the manifest too; no temporary file, no lock
    assert len(read_manifest(killed / "manifest.jsonl")) == 64


def test_killed_before_any_change_of_a_file_it_leaves_nothing_behind(processes: Any, tmp_path: Path) -> None:
    prompts = written(tmp_path / "prompts.jsonl", [{"prompt": f"prompt number {number}"} for number in range(2)])
    whole = tmp_path / "whole"
    assert run(prompts, whole).exit_code == 0
    for moment in count():
        out = tmp_path / str(moment)
        ended = killed_at(moment, processes, prompts, out)
        assert run(prompts, out).exit_code == 0
        assert contents(out) == contents(whole), f"killed before change {moment}"
        if ended == 0:
            break
    assert moment > 10


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_it_says_how_it_goes_on(number: signal.Signals, code: int, prompts: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert run(prompts, whole).exit_code == 0
    generate = Generator.output

    def stop(self: Generator, batch: Batch) -> Any:
        if batch.number == 1:
            os.kill(os.getpid(), number)
        return generate(self, batch)

    before = signal.getsignal(number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generator, "output", stop)
        result = run(prompts, out)
    assert result.exit_code == code and "stopped" in result.output
    assert signal.getsignal(number) is before
    assert not (out / ".sample").exists() and len(images(out)) == len(read_manifest(out / "manifest.jsonl"))
    assert run(prompts, out).exit_code == 0
    assert contents(out) == contents(whole)


def test_two_processes_on_one_shard_do_not_corrupt_one_another(processes: Any, prompts: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert run(prompts, whole).exit_code == 0
    both = [processes.Process(target=child, args=(arguments(prompts, out),)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert 0 in {process.exitcode for process in both} and {process.exitcode for process in both} <= {0, 2}
    assert contents(out) == contents(whole)


# --- what files cost


def test_files_are_measured_against_the_same_batches_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = Store.write, list[Picture]()

    def counted(store: Store, picture: Picture, image: Encoded) -> Entry:
        calls.append(picture)
        return write(store, picture, image)

    monkeypatch.setattr(Store, "write", counted)
    given = ["-m", SPEC.name, "--random-weights", "--batch", "2", "--batches", "3", "--repeats", "1", "--out", str(tmp_path / "rows.jsonl")]
    (row,) = benchmark.main(given)
    assert "error" not in row and (row["images"], len(calls)) == (6, 6)
    assert row["share"]["median"] == pytest.approx(row["written_per_s"]["median"] / row["generated_per_s"]["median"], rel=1e-2)
    on_gpu = row | {"hardware": "NVIDIA H200", "written_per_s": {"median": 141.2}, "generated_per_s": {"median": 150.1}}
    shown = sample_table([row | {"hardware": "CPU x86_64"}, row | {"hardware": "CPU x86_64", "error": "died"}, on_gpu])
    assert "| 141 | 150 |" in shown and shown.count("CPU x86_64") == 1 and "|  |  |" in shown
    assert sample_table([]) == ""
    with pytest.raises(SystemExit):
        benchmark.main([*given, "--batches", "1"])


def test_files_of_one_name_are_told_apart_by_their_content(tmp_path: Path) -> None:
    for number, folder in enumerate(("a", "b", "copy of a")):
        (tmp_path / folder / "encoder").mkdir(parents=True)
        for file in ("model.pth", "encoder/model.safetensors"):
            content = bytearray(2**23)
            content[2**22 : 2**22 + 2**18] = bytes([number % 2]) * 2**18  # in the middle of as many bytes
            (tmp_path / folder / file).write_bytes(content)
    for file in ("model.pth", "encoder"):
        a, b, copy = (named_with_content(tmp_path / folder / file) for folder in ("a", "b", "copy of a"))
        assert a == copy != b and a.startswith(file)
    assert named_with_content("someone/a-repository") == "someone/a-repository"
