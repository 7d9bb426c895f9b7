"""`nextscale sample --ray` on a real cluster of this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nextscale.cluster.lock import working_folder
from nextscale.cluster.manifest import read_manifest
from nextscale.cluster.ray_sampler import LOCAL, RaySettings, sample_on_ray, workers_for
from nextscale.cluster.sampler import Done, sample
from nextscale.cluster.shard import Shard
from nextscale.cluster.store import Store
from nextscale.errors import SettingError
from nextscale.loading.random_weights import random_pipeline
from nextscale.pipeline import Pipeline

from . import tiny
from .conftest import PROJECT
from .test_sample import contents, planned

ray = pytest.importorskip("ray")
SPEC = tiny.infinity_spec()
BATCHES = planned(10, 2)


def tiny_pipeline() -> Pipeline:
    torch.set_num_threads(1)
    return random_pipeline(SPEC)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two cores, on which Ray starts in about ten seconds."""
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(PROJECT)}
    os.environ |= environment
    ray.init(address=LOCAL, num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    yield
    ray.shutdown()


def on_ray(out: Path, on_images: Any = lambda _: None, workers: int = 1) -> Done:
    with working_folder(out, Shard()) as work:
        store = Store(out, work, Shard(), {"model": SPEC.name}, {})
        return sample_on_ray(tiny_pipeline, {}, BATCHES, store, RaySettings(LOCAL, workers), on_images)


def undisturbed(out: Path) -> dict[str, str]:
    with working_folder(out, Shard()) as work:
        sample(tiny_pipeline, {}, BATCHES, Store(out, work, Shard(), {"model": SPEC.name}, {}))
    return contents(out)


def actor_processes() -> list[int]:
    """Processes of this machine that Ray named after our actor, and that belong to this test's cluster."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().decode(errors="replace")
            mine = str(PROJECT).encode() in (folder / "environ").read_bytes()
        except OSError:
            continue
        if line.startswith("ray::") and "MapWorker" in line and mine:
            found.append(int(folder.name))
    return found


@pytest.mark.usefixtures("cluster")
def test_an_actor_killed_in_the_middle_changes_nothing(tmp_path: Path) -> None:
    whole = undisturbed(tmp_path / "whole")
    killed: list[int] = []

    def kill_once(images: int) -> None:
        if images and not killed and (processes := actor_processes()):
            killed.append(processes[0])
            os.kill(processes[0], signal.SIGKILL)

    done = on_ray(tmp_path / "out", kill_once, workers=2)
    assert killed, "no actor was found to kill"
    assert done.written == 20 // 2 and done.there == 0
    assert contents(tmp_path / "out") == whole  # the manifest too, in the plan's order


@pytest.mark.usefixtures("cluster")
def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    whole = undisturbed(tmp_path / "whole")
    undisturbed(tmp_path / "out")
    (tmp_path / "out" / BATCHES[3].pictures[0].file).unlink()
    done = on_ray(tmp_path / "out")
    assert (done.written, done.there) == (1, 9)
    assert contents(tmp_path / "out") == whole
    assert len(read_manifest(tmp_path / "out" / "manifest.jsonl")) == 10
    assert on_ray(tmp_path / "out").written == 0


@pytest.mark.usefixtures("cluster")
def test_without_gpus_there_is_one_worker() -> None:
    assert workers_for(RaySettings()) == 1 and workers_for(RaySettings(workers=3)) == 3


@pytest.mark.parametrize("gpus", [0, -1, 1.5])
def test_wrong_shares_are_refused(gpus: float) -> None:
    with pytest.raises(SettingError, match="GPUs per worker"):
        RaySettings(gpus=gpus)
