"""`nextscale serve` refuses what cannot work before anything is loaded, and passes on what can."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nextscale.serve import run as serving
from nextscale.serve.service import Content, Warmup
from nextscale.serve.settings import ServeSettings
from tests.conftest import PROJECT
from tests.helpers.cli import run_cli
from tests.helpers.serving import live
from tests.helpers.tiny import shared_pipeline


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Content, ServeSettings]]:
    """What the command would serve."""
    calls: list[tuple[Content, ServeSettings]] = []
    monkeypatch.setattr(serving, "serve", lambda content, settings: calls.append((content, settings)))
    return calls


def invoke(*words: str) -> Any:
    return run_cli("serve", *words, catch=True)


def test_without_options_it_serves_nano_on_the_loopback(started: list[tuple[Content, ServeSettings]]) -> None:
    assert invoke().exit_code == 0
    ((content, settings),) = started
    assert (content.models, content.devices, content.method, content.warmups) == (("nano",), (None,), "dense", ())
    assert settings == ServeSettings() and settings.loopback and (settings.host, settings.port) == ("127.0.0.1", 8000)
    pipeline = content.load("nano", "cpu")
    assert pipeline.name == "nano"


def test_every_option_arrives(started: list[tuple[Content, ServeSettings]], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef\n")
    words = (
        "-m nano -m infinity-125m --alias gpt-image-1=nano --method fastvar --method skip:last=1 --host 0.0.0.0 --port 9000 --max-batch 4"
        f" --batch-delay-ms 20 --max-queue 9 --api-key-file {keys} --warmup 256x256:1,4 --cors-origin https://a.example --device cpu"
        " --limit shutdown_timeout=5 --limit request_timeout=7 --limit images=2 --limit pixels=1000000 --limit prompt_chars=100"
        " --allow-host b.example --log-prompts --log-format json --same-images"
    )
    result = invoke(*words.split())
    assert result.exit_code == 0, result.output
    ((content, settings),) = started
    assert content.models == ("nano", "infinity-125m") and content.aliases == {"gpt-image-1": "nano"} and content.devices == ("cpu",)
    assert content.method == "fastvar + skip:last=1" and content.warmups == (Warmup((256, 256), (1, 4)),)
    assert (settings.host, settings.port, settings.max_batch, settings.batch_delay, settings.max_queue) == ("0.0.0.0", 9000, 4, 0.02, 9)
    assert settings.api_keys == ("0123456789abcdef",) and not settings.loopback and settings.log_prompts
    assert settings.same_images and not ServeSettings().same_images
    assert (settings.shutdown_timeout, settings.request_timeout) == (5, 7)
    assert (settings.cors_origins, settings.allowed_hosts) == (("https://a.example",), ("b.example",))
    assert (settings.limits.images, settings.limits.pixels, settings.limits.prompt_chars) == (2, 1_000_000, 100)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-m nanoo", "unknown model 'nanoo'"),
        ("--device tpu", "device must be cpu, cuda"),
        ("--method warp", "unknown method 'warp'"),
        ("--method skip:last=99", "cannot skip 99"),
        ("--warmup 100x100:1", "no model has 100x100"),
        ("--warmup 256x256", "WIDTHxHEIGHT:BATCH"),
        ("--alias x=y", "alias"),
        ("--api-key-file nowhere", "cannot be read"),
        ("-m nano -m infinity-2b --weights x", "need a single model"),
        ("--port 99999", "65535"),
        ("--batch-delay-ms 60000", "batch_delay"),
        ("--cors-origin https://a.example/", "cors_origin"),
        ("--allow-host a.example:8443", "allowed_host"),
    ],
)
def test_what_cannot_work_is_refused_at_once(started: list[tuple[Content, ServeSettings]], words: str, message: str) -> None:
    result = invoke(*words.split())
    assert result.exit_code == 2 and message in result.output and not started


def test_a_missing_extra_is_named(started: list[tuple[Content, ServeSettings]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    result = invoke()
    assert result.exit_code == 2 and "pip install 'nextscale[serve]'" in result.output


def dockerfile(instruction: str) -> str:
    """What follows the last instruction of that name, as one line."""
    lines = (PROJECT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "").splitlines()
    return next(line.partition(" ")[2] for line in reversed(lines) if line.startswith(f"{instruction} "))


def test_a_container_needs_keys(started: list[tuple[Content, ServeSettings]], tmp_path: Path) -> None:
    program, command, *words = json.loads(dockerfile("ENTRYPOINT"))
    assert (program, command) == ("nextscale", "serve")
    result = invoke(*words)
    assert result.exit_code == 2 and "/models/keys cannot be read" in " ".join(result.output.split()) and not started
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef\n")
    assert invoke(*words, "--api-key-file", str(keys), "--port", "9000").exit_code == 0
    assert not started[0][1].loopback and started[0][1].api_keys == ("0123456789abcdef",)


@pytest.mark.parametrize("option", ["--port\0{port}", "--port={port}", "--port\x009\0--port\0{port}"])
def test_a_container_checks_the_port_that_it_serves(option: str, tmp_path: Path) -> None:
    file = tmp_path / "cmdline"
    check = dockerfile("HEALTHCHECK").partition(" CMD ")[2].replace("/proc/1/cmdline", str(file)).replace("python3", sys.executable)
    with live({"tiny": shared_pipeline("infinity")}) as server:
        file.write_text(f"nextscale\0serve\0{option.format(port=server.port)}\0--device\0cpu\0")
        subprocess.run(["sh", "-c", check], check=True)
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(["sh", "-c", check], check=True, stderr=subprocess.DEVNULL)
