"""Faults around a server, which continues to serve."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, current_thread
from typing import Any

import openai
import pytest
import torch

from nextscale.errors import CheckpointError, OutOfMemory
from nextscale.serve import compare, generations, run
from nextscale.serve.run import serve
from nextscale.serve.service import Content, Service
from nextscale.serve.settings import ServeSettings
from tests.helpers.serving import PATH, SECONDS, Answer, Live, Steered, live, wait_until
from tests.helpers.tiny import shared_pipeline

PROJECT = Path(__file__).parents[2]
LAST_STAGE = 3


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Live, Steered]]:
    pipe = Steered(shared_pipeline("infinity"))
    with live({"tiny": pipe}, batch_delay=0.05, max_batch=4) as server:
        yield server, pipe


@pytest.fixture
def server(shared: tuple[Live, Steered]) -> Live:
    shared[1].open()
    return shared[0]


@pytest.fixture
def pipe(shared: tuple[Live, Steered]) -> Steered:
    return shared[1]


def settled(server: Live) -> None:
    """Waits until nothing waits and nothing runs."""
    batcher = server.service._batcher
    assert batcher is not None
    while batcher.waiting or batcher.running:
        Event().wait(0.005)


def begin(server: Live, **fields: Any) -> http.client.HTTPConnection:
    """A request whose answer is not read."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
    connection.request("POST", PATH, json.dumps({"prompt": "a fox", **fields}), {"content-type": "application/json"})
    return connection


# --- leaving


@pytest.mark.parametrize("stream", [False, True])
def test_work_stops_within_a_stage_when_the_client_leaves(server: Live, pipe: Steered, stream: bool) -> None:
    pipe.hold_after(1)
    connection = begin(server, stream=stream)
    assert pipe.holding.wait(SECONDS)
    connection.close()
    while server.service.metrics.open_requests._value.get():
        Event().wait(0.005)
    pipe.go.set()
    settled(server)
    assert pipe.stages == [0, 1]
    pipe.open()
    assert server.generate(prompt="a fox").status == 200


def test_a_neighbour_of_somebody_who_leaves_gets_the_image(server: Live, pipe: Steered) -> None:
    pipe.hold_after(0)
    leaves = begin(server, prompt="leaves", seed=1)
    with ThreadPoolExecutor(1) as pool:
        stays = pool.submit(server.generate, prompt="stays", seed=2)
        assert pipe.holding.wait(SECONDS)
        leaves.close()
        pipe.held_after = None
        pipe.go.set()
        assert stays.result(SECONDS).json["data"][0]["seed"] == 2


def test_partial_images_do_not_pile_up_for_a_client_that_reads_slowly(server: Live, pipe: Steered, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe.hold_after(1)
    monkeypatch.setattr(generations, "MAX_UNSENT", 1)
    begun, go, partial = Event(), Event(), generations.Answer.partial

    def slow(*arguments: Any) -> str:
        begun.set()
        assert go.wait(SECONDS)
        return partial(*arguments)

    monkeypatch.setattr(generations.Answer, "partial", slow)
    connection = begin(server, stream=True, partial_images=3)
    assert begun.wait(SECONDS)  # the first one is being sent: of the others one waits
    pipe.go.set()
    settled(server)
    go.set()
    events = [json.loads(line[6:]) for line in connection.getresponse().read().splitlines() if line.startswith(b"data: ")]
    assert [event.get("partial_image_index") for event in events] == [0, 1, None]
    assert events[-1]["type"] == "image_generation.completed"


def test_somebody_who_leaves_the_openai_client_in_a_stream(server: Live, pipe: Steered) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    pipe.hold_after(2)
    stream: Any = client.images.generate(model="tiny", prompt="a fox", stream=True, partial_images=3)
    assert next(iter(stream)).type == "image_generation.partial_image"
    assert pipe.holding.wait(SECONDS)
    stream.close()
    while server.service.metrics.open_requests._value.get():
        Event().wait(0.005)
    pipe.go.set()
    settled(server)
    assert pipe.stages == [0, 1, 2]


def test_comparisons_come_one_by_one_and_stop_when_the_client_leaves(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    go, decoded, read, left = Event(), list[str](), list[Any](), list[Any]()

    def decode(text: str, param: str, most_pixels: int) -> Any:
        decoded.append(f"{text} {current_thread().name}")
        assert go.wait(SECONDS)
        return torch.zeros(1, 3, 8, 8)

    async def gone(request: Any) -> None:
        read.append(request)
        await generations.gone(request)
        left.append(request)

    monkeypatch.setattr(compare, "decoded_png", decode)
    monkeypatch.setattr(compare, "gone", gone)
    path, connections = "/studio/compare", []
    for number in range(compare.MAX_OPEN):
        connections.append(http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS))
        body = json.dumps({"a": f"{number} a", "b": f"{number} b"})
        connections[-1].request("POST", path, body, {"content-type": "application/json"})
        wait_until(lambda: len(read) == len(connections))
    refused = server.ask(path, {"a": "x", "b": "x"})
    assert refused.status == 429 and refused.error["code"] == "queue_full" and int(refused.headers["retry-after"]) >= 1
    assert [server.ask(other).status for other in ("/livez", "/metrics")] == [200, 200]
    connections[0].close()  # while the first picture is decoded
    connections[1].close()  # while it waits
    wait_until(lambda: len(left) == 2)
    go.set()
    assert [connection.getresponse().status for connection in connections[2:]] == [200, 200]
    thread = "nextscale-compare_0"
    assert decoded == [f"{picture} {thread}" for picture in ("0 a", "2 a", "2 b", "3 a", "3 b")]
    assert server.ask(path, {"a": "x", "b": "x"}).status == 200


def closed(connection: socket.socket) -> bool:
    """Returns True if the server has closed the connection. Discards received data."""
    with suppress(BlockingIOError):
        while received := connection.recv(1 << 16, socket.MSG_DONTWAIT):
            assert received.startswith(b"HTTP/1.1 200")
        return True
    return False


def test_connections_that_ask_nothing_are_closed_beyond_a_number(server: Live, pipe: Steered) -> None:
    pipe.hold_after(0)
    busy = begin(server)
    assert pipe.holding.wait(SECONDS)
    with ExitStack() as stack:

        def opened(*parts: bytes) -> socket.socket:
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for part in parts:
                connection.sendall(part)
            return connection

        asked = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
        first = [opened(), opened(asked), opened(asked, asked[:9]), opened(asked[:9])]
        wait_until(lambda: len(server.server._idle) >= len(first))
        second = [opened() for _ in range(run.MAX_IDLE)]
        wait_until(lambda: all(map(closed, first)))
        assert not any(map(closed, second))
        assert server.ask("/livez").status == 200
        pipe.go.set()
        assert busy.getresponse().status == 200


# --- failing


def test_a_worker_that_raises_answers_without_its_inside(server: Live, pipe: Steered) -> None:
    pipe.fails = lambda prompts: KeyError("a secret of the inside") if "bad" in prompts else None
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda prompt: server.generate(prompt=prompt, seed=1), ["good", "bad", "fine", "well"]))
    assert [answer.status for answer in answers] == [200, 500, 200, 200]
    error = answers[1].error
    assert error["type"] == "server_error" and error["code"] == "internal_error"
    assert b"secret" not in answers[1].body and b"Traceback" not in answers[1].body


def test_out_of_memory_is_halved_then_refused_without_a_retry(server: Live, pipe: Steered) -> None:
    pipe.fails = lambda prompts: OutOfMemory("0.10 GiB are free") if len(prompts) > 1 else None
    assert server.generate(prompt="a fox", n=4, seed=1).status == 200
    assert max(map(len, pipe.calls)) > 1
    pipe.fails = lambda prompts: OutOfMemory("0.10 GiB are free")
    answer = server.generate(prompt="a fox")
    assert answer.status == 503 and answer.error["code"] == "out_of_memory" and answer.headers["x-should-retry"] == "false"
    assert "0.10 GiB" in answer.error["message"]
    text = server.ask("/metrics").body.decode()
    assert 'nextscale_batches_failed_total{model="tiny",reason="out_of_memory"}' in text


def test_a_failure_in_mid_stream_is_an_event(server: Live, pipe: Steered) -> None:
    class Fault:
        def __call__(self, prompts: list[Any]) -> Exception | None:
            return ZeroDivisionError("inside") if len(pipe.calls) > 0 else None

    pipe.fails = Fault()
    connection = begin(server, stream=True)
    text = connection.getresponse().read().decode()
    assert text.startswith("event: error\ndata: ")
    assert json.loads(text.partition("data: ")[2])["error"]["code"] == "internal_error"
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    with pytest.raises(openai.APIError, match="the server failed on this request"):
        list(client.images.generate(model="tiny", prompt="a fox", stream=True))  # type: ignore[call-overload]


def test_a_request_that_takes_too_long_is_given_up() -> None:
    pipe = Steered(shared_pipeline("infinity"))
    with live({"tiny": pipe}, batch_delay=0) as server:
        pipe.hold_after(0)
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(server.generate, prompt="a fox")
            assert pipe.holding.wait(SECONDS)
            assert server.service._batcher is not None
            (handle,) = server.service._batcher._handles
            assert handle.job.deadline is not None
            object.__setattr__(handle.job, "deadline", 0.0)  # it is over now
            pipe.go.set()
            answer = late.result(SECONDS)
        assert answer.status == 504 and answer.error["code"] == "timeout" and answer.headers["x-should-retry"] == "false"
        assert pipe.stages == [0]


def test_a_lost_device_makes_the_server_ask_for_its_end() -> None:
    pipe = Steered(shared_pipeline("infinity"))
    with live({"tiny": pipe}) as server:
        pipe.fails = lambda prompts: RuntimeError("CUDA error: device-side assert triggered")
        assert server.generate(prompt="a fox").status == 500
        assert server.ask("/livez").status == 503 and server.ask("/readyz").status == 503


# --- the end


def test_draining_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    pipe = Steered(shared_pipeline("infinity"))
    with live({"tiny": pipe}, batch_delay=0) as server:
        pipe.hold_after(0)
        with ThreadPoolExecutor(2) as pool:
            accepted = pool.submit(server.generate, prompt="accepted")
            assert pipe.holding.wait(SECONDS)
            server.server.handle_exit(signal.SIGTERM, None)
            while server.service.state != "draining":
                Event().wait(0.005)
            refused = server.generate(prompt="late")
            assert refused.status == 503 and refused.error["code"] == "shutting_down" and "retry-after" in refused.headers
            assert server.ask("/readyz").status == 503 and server.ask("/livez").status == 200
            pipe.held_after = None
            pipe.go.set()
            assert accepted.result(SECONDS).status == 200


def process(*options: str) -> tuple[subprocess.Popen[str], int]:
    """`nextscale serve` on a free port, once it is ready."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-m", "nextscale", "serve", "--port", "0", "--device", "cpu", *options]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    assert started.stderr is not None
    for line in started.stderr:
        if found := re.search(r"API: http://127.0.0.1:(\d+)/v1", line):
            return started, int(found[1])
    raise AssertionError(f"it ended with {started.wait()}")


def waiting(port: int) -> float:
    """Images that the server has accepted and not begun."""
    text = Live(None, None, port).ask("/metrics").body.decode()  # type: ignore[arg-type]
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("nextscale_images_waiting "))


def ask(port: int, **fields: Any) -> Answer:
    return Live(None, None, port).generate(**fields)  # type: ignore[arg-type]


def test_sigterm_under_load() -> None:
    """Accepted requests finish, and later ones are refused with an answer."""
    started, port = process("--max-batch", "1", "--limit", "shutdown_timeout=60")
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, port, prompt="a red apple", size="128x128", seed=seed) for seed in range(6)]
        wait_until(lambda: waiting(port) >= 2)
        started.send_signal(signal.SIGTERM)
        late = ask(port, prompt="late", size="128x128")
        while late.status == 200:  # the signal has not arrived yet
            late = ask(port, prompt="late", size="128x128")
        assert late.status == 503 and late.error["code"] == "shutting_down"
        answers = [answer.result(SECONDS) for answer in asked]
        drawn = [answer for answer in answers if answer.status == 200]
        assert len(drawn) >= 2  # at least those that were seen to wait
        assert all(answer.error["code"] == "shutting_down" for answer in answers if answer not in drawn)
    assert started.wait(SECONDS) == 0


def test_what_does_not_finish_in_time_is_given_up_with_an_answer() -> None:
    started, port = process("--max-batch", "1", "--limit", "shutdown_timeout=0.01")
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, port, prompt="a red apple", size="256x256", n=4, seed=seed) for seed in range(2)]
        wait_until(lambda: waiting(port) > 4)  # images of both requests
        started.send_signal(signal.SIGTERM)
        assert [answer.result(SECONDS).error["code"] for answer in asked] == ["shutting_down"] * 2
    assert started.wait(SECONDS) == 0


def test_a_server_that_still_loads_cannot_end_its_threads() -> None:
    go = Event()

    def load(name: str, device: str | None) -> Any:
        assert go.wait(SECONDS)
        return shared_pipeline("infinity")

    service = Service(Content(("tiny",), (None,), load, {}), ServeSettings())
    service.start(failed=lambda: None)
    assert not service.close()  # so that the process is ended with it, instead of aborted
    go.set()
    wait_until(service.close)


def test_a_model_that_cannot_be_loaded_ends_the_server_with_the_reason() -> None:
    def load(name: str, device: str | None) -> Any:
        raise CheckpointError("nothing at nowhere.safetensors")

    with pytest.raises(CheckpointError, match="nowhere"):
        serve(Content(("tiny",), (None,), load, {}), ServeSettings(port=0))
