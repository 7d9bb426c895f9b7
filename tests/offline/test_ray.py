"""`nextscale sample --ray` on a real cluster of this machine."""

from __future__ import annotations

import base64
import json
import math
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nextscale.batching.ray_cluster import LOCAL, RaySettings, connected
from nextscale.device import hardware_name
from nextscale.errors import NextscaleError, SettingError
from nextscale.loading.load import random_pipeline
from nextscale.offline import ray as offline_ray
from nextscale.offline.lock import working_folder
from nextscale.offline.manifest import read_manifest
from nextscale.offline.ray import sample_on_ray
from nextscale.offline.sampler import Done, sample
from nextscale.offline.shard import Shard
from nextscale.offline.store import Store
from nextscale.pipeline import Pipeline
from tests.conftest import PROJECT
from tests.helpers import tiny
from tests.offline.test_sample import contents, planned

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # of its own
SPEC = tiny.infinity_spec()
BATCHES = planned(10, 2)


def tiny_pipeline() -> Pipeline:
    torch.set_num_threads(1)
    return random_pipeline(SPEC)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two cores, on which Ray starts in about ten seconds."""
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "PYTHONPATH": str(PROJECT)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        memory = 200 * 2**20  # of objects, bytes
        runtime = {"env_vars": environment}
        ray.init(address=LOCAL, num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=memory, runtime_env=runtime)
        yield
        ray.shutdown()


def on_ray(out: Path, on_images: Any = lambda _: None, workers: int = 1) -> Done:
    with working_folder(out, Shard()) as work:
        store = Store(out, work, Shard(), {"model": SPEC.name}, {})
        return sample_on_ray(tiny_pipeline, {}, BATCHES, store, RaySettings(LOCAL, workers), on_images)


def undisturbed(out: Path) -> dict[str, str]:
    with working_folder(out, Shard()) as work:
        store = Store(out, work, Shard(), {"model": SPEC.name}, {"device": hardware_name(torch.device("cpu"))})
        sample(tiny_pipeline, {}, BATCHES, store)
    return contents(out)


def actor_processes(name: str) -> list[int]:
    """Processes of this machine that Ray named after an actor, and that belong to this test's cluster."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().decode(errors="replace")
            mine = str(PROJECT).encode() in (folder / "environ").read_bytes()
        except OSError:
            continue
        if line.startswith("ray::") and name in line and mine:
            found.append(int(folder.name))
    return found


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("workers", [1, 2])
def test_an_actor_killed_in_the_middle_is_restarted_and_changes_nothing(workers: int, tmp_path: Path) -> None:
    whole = undisturbed(tmp_path / "whole")
    killed: list[int] = []

    def kill_once(images: int) -> None:
        if images and not killed and (processes := actor_processes("ray::Worker")):
            killed.append(processes[0])
            os.kill(processes[0], signal.SIGKILL)

    done = on_ray(tmp_path / "out", kill_once, workers)
    assert killed, "no actor was found to kill"
    assert done.written == 10 and done.there == 0
    assert contents(tmp_path / "out") == whole  # the manifest too, in the plan's order


@pytest.mark.usefixtures("cluster")
def test_what_is_there_is_not_made_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor does Ray warn, as it does of arguments that are going to be removed, and of actors that may not start again."""
    whole = undisturbed(tmp_path / "whole")
    undisturbed(tmp_path / "out")
    (tmp_path / "out" / BATCHES[3].pictures[0].file).unlink()
    counted: list[int] = []
    capfd.readouterr()
    done = on_ray(tmp_path / "out", counted.append)
    assert capfd.readouterr().err == ""
    assert (done.written, done.there, counted) == (1, 9, [9, 1])
    assert contents(tmp_path / "out") == whole
    assert len(read_manifest(tmp_path / "out" / "manifest.jsonl")) == 10
    assert on_ray(tmp_path / "out").written == 0


@pytest.mark.usefixtures("cluster")
def test_without_gpus_there_is_one_worker() -> None:
    assert RaySettings().count(ray) == 1 and RaySettings(workers=3).count(ray) == 3


def dying_pipeline() -> Pipeline:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.usefixtures("cluster")
def test_an_actor_that_always_dies_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline_ray, "RETRIES", 1)  # each starts a process anew
    with working_folder(tmp_path, Shard()) as work:
        store = Store(tmp_path, work, Shard(), {"model": SPEC.name}, {})
        with pytest.raises(NextscaleError, match="^a Ray actor failed: "):
            sample_on_ray(dying_pipeline, {}, BATCHES, store, RaySettings())


def refusing_pipeline() -> Pipeline:
    raise SettingError("the weights are not on this machine: put them there")


@pytest.mark.usefixtures("cluster")
def test_what_an_actor_refuses_is_one_message(tmp_path: Path) -> None:
    with working_folder(tmp_path, Shard()) as work:
        store = Store(tmp_path, work, Shard(), {"model": SPEC.name}, {})
        with pytest.raises(NextscaleError, match="^a Ray actor failed: SettingError: the weights are not on this machine: put them there"):
            sample_on_ray(refusing_pipeline, {}, BATCHES, store, RaySettings())


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_at_which_nothing_listens_is_refused_at_once(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("asked Ray, which tries for minutes"))
    address = f"{scheme}127.0.0.1:{free_port()}"
    with pytest.raises(NextscaleError, match=f"no Ray cluster at '{address}'"), connected(RaySettings(address)):
        pass


@pytest.mark.parametrize("gpus", [0, -1, 1.5, math.inf, math.nan])
def test_wrong_shares_are_refused(gpus: float) -> None:
    with pytest.raises(SettingError, match="gpus"):
        RaySettings(gpus=gpus)


# --- the server


def load_tiny(name: str, device: str | None) -> Pipeline:
    return tiny_pipeline()


def asked(port: int, seed: int) -> bytes:
    """The image of a seed, asked for again where a replica died, as OpenAI's client does."""
    body = json.dumps({"prompt": "a cat", "seed": seed, "output_format": "png"}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/images/generations", body, {"content-type": "application/json"})
    for _ in range(20):
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return base64.b64decode(json.load(answer)["data"][0]["b64_json"])
        except urllib.error.HTTPError as error:
            assert error.code >= 500, error.read()
        except OSError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"seed {seed} was not answered")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.usefixtures("cluster")
def test_every_request_is_answered_when_a_replica_dies() -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    from nextscale.serve.ray import RayServer
    from nextscale.serve.service import Content
    from nextscale.serve.settings import ServeSettings

    port = free_port()
    content = Content((SPEC.name,), (None,), load_tiny, {})
    server = RayServer(content, ServeSettings(port=port, max_batch=2), RaySettings(LOCAL, workers=2))
    with server.running():
        replicas = actor_processes("ServeReplica")
        assert len(replicas) == 2
        before = [asked(port, seed) for seed in range(4)]
        assert len({*before}) == 4
        with ThreadPoolExecutor(4) as clients:
            answers = [clients.submit(asked, port, seed % 4) for seed in range(24)]
            answers[4].result()
            os.kill(replicas[0], signal.SIGKILL)
            assert [answer.result() for answer in answers] == [before[seed % 4] for seed in range(24)]
    assert not actor_processes("ServeReplica")


@pytest.mark.usefixtures("cluster")
def test_more_replicas_than_a_machine_has_room_for_are_refused() -> None:
    pytest.importorskip("fastapi")
    from nextscale.serve.ray import RayServer
    from nextscale.serve.service import Content
    from nextscale.serve.settings import ServeSettings

    server = RayServer(Content((SPEC.name,), (None,), load_tiny, {}), ServeSettings(), RaySettings(LOCAL, workers=5))
    with pytest.raises(SettingError, match="workers must be at most 4"), server.running():
        pass


def test_sigterm_stays_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray takes it when it starts, and then ends a program by an abort."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    with connected(RaySettings()):
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_ends_by_signals_and_can_be_stopped_while_it_starts(number: signal.Signals) -> None:
    pytest.importorskip("fastapi")
    from nextscale.serve.ray import serve_on_ray

    class Running:
        @contextmanager
        def running(self) -> Iterator[None]:
            threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
            yield

    class Starting:
        @contextmanager
        def running(self) -> Iterator[None]:
            os.kill(os.getpid(), number)
            time.sleep(5)
            pytest.fail("it went on")
            yield

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        serve_on_ray(Running())  # type: ignore[arg-type]
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            serve_on_ray(Starting())  # type: ignore[arg-type]
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_devices_are_rays_to_give() -> None:
    pytest.importorskip("fastapi")
    from nextscale.serve.ray import RayServer
    from nextscale.serve.service import Content
    from nextscale.serve.settings import ServeSettings

    with pytest.raises(SettingError, match="--device"):
        RayServer(Content((SPEC.name,), ("cuda:1",), load_tiny, {}), ServeSettings(), RaySettings())
