"""Requests choose adapters of the server by name."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import nextscale
from nextscale import lora
from nextscale.io import to_pil
from nextscale.pipeline import Pipeline
from tests.helpers.serving import PATH, Live, live
from tests.helpers.studio import CHROMIUM, chromium, visit
from tests.helpers.tiny import fresh_pipeline
from tests.test_lora import targets, updates, write

NAMES = ("ink", "toy", "wax")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, pipe = tmp_path_factory.mktemp("adapters"), fresh_pipeline("var")
    for seed, name in enumerate(NAMES):
        write(folder / name, updates(pipe, seed=seed))
    write(folder / "other", updates(fresh_pipeline("infinity")))
    (folder / "notes.txt").write_text("no adapter")
    (folder / "damaged.safetensors").write_bytes(b"x" * 20)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    with live({"tiny": fresh_pipeline("var")}, lora_dir=folder, max_batch=4) as running:
        yield running


def body(seed: int, *choices: tuple[str, float]) -> dict[str, Any]:
    chosen = {"lora": [{"name": name, "scale": scale} for name, scale in choices]} if choices else {}
    return {"model": "tiny", "prompt": str(seed % 5), "seed": seed, **chosen}


def image_of(answer: Any) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(base64.b64decode(answer["data"][0]["b64_json"]))).convert("RGB"))


def test_adapters_are_listed(server: Live) -> None:
    (card,) = server.ask("/v1/models").json["data"]
    assert card["adapters"] == list(NAMES)
    assert server.ask("/v1/models/tiny").json["adapters"] == list(NAMES)
    assert server.ask("/studio/options").json["models"][0]["adapters"] == list(NAMES)


def test_requests_with_different_adapters_under_load(server: Live, folder: Path) -> None:
    choices: list[tuple[tuple[str, float], ...]] = [(), (("ink", 1.0),), (("toy", 0.5),), (("ink", 0.4), ("toy", 0.6)), (("wax", 1.0),)]
    jobs = [(seed, choices[seed % len(choices)]) for seed in range(30)]
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda job: server.ask(PATH, body(job[0], *job[1])), jobs))
    alone = fresh_pipeline("var")
    for name in NAMES:
        alone.load_lora(folder / name, scale=0)
    for (seed, chosen), answer in zip(jobs, answers, strict=True):
        assert answer.status == 200, answer.json
        expected = np.asarray(to_pil(alone(seed % 5, seed=seed, lora=chosen).pixels)[0]).astype(int)
        assert abs(image_of(answer.json).astype(int) - expected).max() <= 1
        assert {one["name"]: one["scale"] for one in answer.json["data"][0]["report"]["loras"]} == dict(chosen)
    switches = next(line for line in server.ask("/metrics").body.decode().splitlines() if line.startswith("nextscale_lora_switches{"))
    assert float(switches.split()[-1]) >= 4


def test_png_metadata_names_adapters(server: Live) -> None:
    answer = server.ask(PATH, body(1, ("ink", 0.5)))
    picture = Image.open(BytesIO(base64.b64decode(answer.json["data"][0]["b64_json"])))
    assert json.loads(picture.text["nextscale"])["lora"] == [{"name": "ink", "scale": 0.5}]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "wrong",
    [
        [{"name": "pen"}],
        [{"name": "../ink"}],
        [{"name": "/etc/passwd"}],
        [{"name": "other"}],
        [{"name": "ink"}, {"name": "ink"}],
        [{"name": "ink", "scale": 1e9}],
        [{"name": "ink", "scale": "1"}],
        [{"name": "ink", "path": "/tmp"}],
        [{"name": ""}],
        [{"name": "ink"}] * 9,
        "ink",
        {"ink": 1},
    ],
    ids=str,
)
def test_wrong_choices_are_refused(server: Live, wrong: Any) -> None:
    answer = server.ask(PATH, body(1) | {"lora": wrong})
    assert answer.status == 400 and answer.json["error"]["param"] == "lora"


def test_a_server_without_adapters(folder: Path) -> None:
    with live({"tiny": fresh_pipeline("var")}) as plain:
        assert "adapters" not in plain.ask("/v1/models").json["data"][0]
        assert plain.ask(PATH, body(1, ("ink", 1.0))).status == 400


def test_adapters_used_last_stay_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "MAX_OFFERED", 2)
    pipe: Pipeline = fresh_pipeline("var")
    pipe.loras.offer(folder)
    base = pipe(1, seed=0)
    for name in (*NAMES, "ink"):
        pipe(1, seed=0, lora={name: 1.0})
    assert pipe.loras.names == ["ink", "wax"]
    again = pipe(1, seed=0, lora={})
    assert bool((again.latent == base.latent).all())


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_studio_weighs_adapters(folder: Path) -> None:
    pipe = nextscale.load("nano", device="cpu")
    adapters = folder.parent / "nano-adapters"
    write(adapters / "ink", updates(pipe, targets(pipe)[:2], size=0.05))
    with live({"nano": pipe}, lora_dir=adapters) as running, chromium() as browser, visit(browser, running.url) as page:
        slider = page.locator(".adapters label", has_text="ink").locator("input")
        slider.fill("0.5")
        assert "0.5" in page.inner_text(".adapters")
        page.click("#send")
        page.wait_for_selector("#stop")
        page.wait_for_selector("#send")
        assert [(one.name, one.scale) for one in pipe.loras.applied] == [("ink", 0.5)]
        page.reload()
        assert page.locator(".adapters input").input_value() == "0.5"
        slider.fill("0")
        page.click("#send")
        page.wait_for_selector("#stop")
        page.wait_for_selector("#send")
        assert pipe.loras.applied == ()
