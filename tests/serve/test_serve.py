"""The server as clients meet it: OpenAI's own over real HTTP, and plain requests."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

import nextscale
from nextscale.batching import Job
from nextscale.pipeline import Pipeline
from nextscale.serve.pictures import CHUNK
from nextscale.serve.service import Content, Service, Warmup
from nextscale.serve.settings import ServeSettings
from tests.helpers.serving import PATH, Live, Steered, live, wait_until
from tests.helpers.tiny import shared_pipeline

SMALL = "128x128"


@pytest.fixture(scope="module")
def nano() -> Pipeline:
    return nextscale.load("nano", device="cpu")


@pytest.fixture(scope="module")
def server(nano: Pipeline) -> Iterator[Live]:
    models = {"nano": nano, "classes": shared_pipeline("var"), "tiny": Steered(shared_pipeline("infinity"))}
    with live(models, aliases={"gpt-image-1": "nano"}, batch_delay=0.02) as running:
        yield running


@pytest.fixture(scope="module")
def stages(nano: Pipeline) -> dict[int, Image.Image]:
    """A rocket with seed 3, after every stage."""
    seen: dict[int, Image.Image] = {}
    nano("a rocket", seed=3, size=(128, 128), on_stage=lambda preview: seen.setdefault(preview.done.stage.index, preview.images()[0]))
    return seen


@pytest.fixture
def client(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def opened(b64: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(b64)))


def same(ours: Image.Image, theirs: Image.Image) -> bool:
    """Up to rounding at the edge of a level."""
    return ours.size == theirs.size and int(np.abs(np.asarray(ours).astype(int) - np.asarray(theirs).astype(int)).max()) <= 1


# --- OpenAI's client


def test_an_image_is_the_one_that_the_library_generates(client: openai.OpenAI, nano: Pipeline) -> None:
    answer = client.images.generate(model="gpt-image-1", prompt="a red apple", size=SMALL, extra_body={"seed": 7})
    assert answer.data is not None and len(answer.data) == 1 and answer.size == SMALL and answer.output_format == "png"
    picture = opened(answer.data[0].b64_json or "")
    assert same(picture, nano("a red apple", seed=7, size=(128, 128)).images[0])
    assert answer.data[0].seed == 7  # type: ignore[attr-defined]
    assert answer.usage is not None and answer.usage.input_tokens == nano.reader.read("a red apple").longest > 0
    cells = sum(stage.cells for stage in nano.settings.schedules.choose((128, 128), None))
    assert answer.usage.output_tokens == 2 * cells  # guided
    assert json.loads(picture.info[CHUNK]) == {"prompt": "a red apple", "size": SMALL, "seed": 7, "model": "nano", "method": "dense"}


def test_several_images_have_their_own_seeds_and_are_the_same_alone(client: openai.OpenAI) -> None:
    many = client.images.generate(model="tiny", prompt="a fox", n=3, extra_body={"seed": [5, 9, 2]})
    assert many.data is not None and [image.seed for image in many.data] == [5, 9, 2]  # type: ignore[attr-defined]
    alone = client.images.generate(model="tiny", prompt="a fox", extra_body={"seed": 9})
    assert alone.data is not None
    assert same(opened(many.data[1].b64_json or ""), opened(alone.data[0].b64_json or ""))
    counted = client.images.generate(model="tiny", prompt="a fox", n=2, extra_body={"seed": 8})
    assert counted.data is not None and same(opened(counted.data[1].b64_json or ""), opened(alone.data[0].b64_json or ""))


def test_a_stream_has_partial_images_of_real_stages(client: openai.OpenAI, stages: dict[int, Image.Image]) -> None:
    events: list[Any] = list(
        client.images.generate(model="nano", prompt="a rocket", size=SMALL, stream=True, partial_images=2, extra_body={"seed": 3})
    )
    assert [event.type for event in events] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    assert [(event.stage, event.stages) for event in events[:2]] == [(1, 7), (4, 7)]
    for event in events[:2]:
        assert same(opened(event.b64_json), stages[event.stage])
    assert same(opened(events[2].b64_json), stages[6]) and events[2].usage.output_tokens > 0
    assert events[0].size == SMALL and events[0].output_format == "png" and events[0].created_at == events[2].created_at


def test_a_stream_of_several_images_completes_each(client: openai.OpenAI) -> None:
    events: list[Any] = list(
        client.images.generate(model="tiny", prompt="an owl", n=2, stream=True, partial_images=1, extra_body={"seed": 1})
    )
    assert sorted((event.type.rpartition(".")[2], event.image_index) for event in events) == [
        ("completed", 0),
        ("completed", 1),
        ("partial_image", 0),
        ("partial_image", 1),
    ]
    assert {event.image_index: event.seed for event in events} == {0: 1, 1: 2}


def test_models_are_listed_with_their_aliases(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["nano", "classes", "tiny", "gpt-image-1"]
    assert client.models.retrieve("gpt-image-1").object == "model"
    with pytest.raises(openai.NotFoundError, match="model must be one of"):
        client.images.generate(model="dall-e-3", prompt="a fox")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("dall-e-3")


def test_errors_are_the_clients_own_classes_with_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.images.generate(model="nano", prompt="a fox", size="1x1")  # type: ignore[call-overload]
    assert refused.value.param == "size" and "Nearest" in refused.value.message and refused.value.request_id
    with pytest.raises(openai.BadRequestError) as refused:
        client.images.generate(model="nano", prompt=" ".join(["word"] * 100), size=SMALL)
    assert refused.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as refused:
        client.images.generate(model="nano", prompt="a fox", size=SMALL, extra_body={"negative_prompt": " ".join(["word"] * 100)})
    assert refused.value.param == "negative_prompt"


def test_a_full_queue_is_tried_again_by_the_client() -> None:
    pipe = Steered(shared_pipeline("infinity"))
    with live({"tiny": pipe}, max_queue=1, max_batch=1, batch_delay=0) as server:
        pipe.hold_after(0)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=5)
        with ThreadPoolExecutor(4) as pool:
            first = pool.submit(client.images.generate, model="tiny", prompt="first")
            assert pipe.holding.wait(60)
            second = pool.submit(client.images.generate, model="tiny", prompt="second")
            while server.service._batcher is None or server.service._batcher.waiting < 1:
                Event().wait(0.005)
            refused = server.generate(prompt="third")
            assert refused.status == 429 and refused.error["code"] == "queue_full" and refused.error["type"] == "rate_limit_error"
            assert int(refused.headers["retry-after-ms"]) > 0 and int(refused.headers["retry-after"]) >= 1
            third = pool.submit(client.images.generate, model="tiny", prompt="third")
            while server.service.metrics.requests.labels("429")._value.get() < 2:
                Event().wait(0.005)
            pipe.held_after = None
            pipe.go.set()
            for answer in (first, second, third):
                assert answer.result(60).data
        assert sorted(call[0] for call in pipe.calls) == ["first", "second", "third"]


# --- extensions


def test_the_report_says_what_ran(server: Live) -> None:
    body = server.generate(model="nano", prompt="a red apple", size=SMALL, seed=1, method="skip:last=2", masks=True).json
    image = body["data"][0]
    report = image["report"]
    assert report["method"].startswith("SkipStages") or "skip" in report["method"].lower()
    assert [stage["skipped"] for stage in report["stages"]] == [False] * 5 + [True] * 2
    assert report["cost_share"] < 1 and report["batch"] >= 1 and report["total_ms"] > 0
    assert [(mask["height"], mask["width"]) for mask in image["masks"]][-1] == (16, 16)
    assert np.asarray(opened(image["masks"][-1]["b64_json"])).max() == 0 and np.asarray(opened(image["masks"][0]["b64_json"])).min() == 255


def test_stopping_after_a_stage_is_the_canvas_of_that_stage(server: Live, stages: dict[int, Image.Image]) -> None:
    body = server.generate(model="nano", prompt="a rocket", size=SMALL, seed=3, stop_after_stage=4).json
    assert same(opened(body["data"][0]["b64_json"]), stages[4])
    assert [stage["skipped"] for stage in body["data"][0]["report"]["stages"]] == [False] * 5 + [True] * 2


def test_guidance_negative_prompts_and_sampling_reach_the_pipeline(server: Live) -> None:
    pipe = shared_pipeline("infinity")
    fields: dict[str, Any] = {"guidance_scale": 2.5, "negative_prompt": "fog", "temperature": 0.7, "top_k": 5, "top_p": 0.5}
    body = server.generate(model="tiny", prompt="a fox", seed=4, **fields).json
    expected = pipe("a fox", seed=4, guidance=2.5, negative="fog", temperature=0.7, top_k=5, top_p=0.5)
    assert same(opened(body["data"][0]["b64_json"]), expected.images[0])
    assert not same(expected.images[0], pipe("a fox", seed=4).images[0])
    per_stage = server.generate(model="tiny", prompt="a fox", seed=4, guidance_scale=[1, 1, 2, 3], greedy=True).json
    assert same(opened(per_stage["data"][0]["b64_json"]), pipe("a fox", seed=4, guidance=[1, 1, 2, 3], greedy=True).images[0])


def test_classes_are_asked_for_as_text(server: Live) -> None:
    body = server.generate(model="classes", prompt="7", seed=1)
    assert body.status == 200
    assert same(opened(body.json["data"][0]["b64_json"]), shared_pipeline("var")(7, seed=1).images[0])
    assert server.generate(model="classes", prompt="a fox").error["param"] == "prompt"
    assert server.generate(model="classes", prompt="99").error["param"] == "prompt"


@pytest.mark.parametrize(("form", "kind"), [("jpeg", "JPEG"), ("webp", "WEBP")])
def test_other_formats(server: Live, form: str, kind: str) -> None:
    body = server.generate(model="tiny", prompt="a fox", seed=1, output_format=form, output_compression=80).json
    assert opened(body["data"][0]["b64_json"]).format == kind and body["output_format"] == form


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("quality", {"quality": "high"}),
        ("background", {"background": "transparent"}),
        ("response_format", {"response_format": "url"}),
        ("style", {"style": "vivid"}),
        ("num_inference_steps", {"num_inference_steps": 20}),
        ("output_compression", {"output_compression": 50}),
        ("partial_images", {"partial_images": 2}),
        ("n", {"n": 11}),
        ("n", {"n": "2"}),
        ("size", {"size": "128 x 128"}),
        ("size", {"size": SMALL, "width": 128, "height": 128}),
        ("height", {"width": 128}),
        ("aspect", {"aspect": "40:1"}),
        ("aspect", {"size": SMALL, "aspect": "1:1"}),
        ("guidance_scale", {"guidance_scale": -5}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": [1, 2]}),
        ("seed", {"n": 2, "seed": 2**63 - 1}),
        ("method", {"method": "warp"}),
        ("method", {"method": "skip:last=99"}),
        ("method", {"method": "skip:last=[[1]]"}),
        ("method", {"method": "fastvar:ratios=/etc/passwd"}),
        ("method", {"method": "code:refiner=var-d16"}),
        ("method", {"method": "code + skip:last=1"}),
        ("method", {"method": "skipvar:models=LICENSE"}),
        ("method", {"method": ""}),
        ("stop_after_stage", {"stop_after_stage": 12}),
        ("guidance_scale", {"guidance_scale": [1, 2]}),
        ("negative_prompt", {"negative_prompt": "fog", "guidance_scale": 1}),
        ("negative_prompt", {"negative_prompt": "  "}),
        ("temperature", {"temperature": 0}),
        ("temperature", {"temperature": 1e-300}),
        ("prompt", {"prompt": "   "}),
        ("prompt", {"prompt": "x" * 3000}),
        ("prompt", {"prompt": 7}),
        ("steps", {"steps": 3}),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_field(server: Live, param: str, fields: dict[str, Any]) -> None:
    answer = server.generate(**{"prompt": "a fox", **fields})
    assert answer.status == 400 and answer.error["param"] == param, answer.body
    assert answer.error["message"] and answer.error["type"] == "invalid_request_error" and answer.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("field", "remedy"),
    [("steps", "skip:last=2"), ("guidance", "'guidance_scale'"), ("cfg_scale", "'guidance_scale'"), ("negative", "'negative_prompt'")],
)
def test_unknown_fields_have_a_remedy(server: Live, field: str, remedy: str) -> None:
    assert remedy in server.generate(prompt="a fox", **{field: 3}).error["message"]


@pytest.mark.parametrize("fields", [{"prompt": ""}, {"guidance_scale": -5}, {"size": SMALL, "aspect": "1:1"}, {"n": 0}, {"seed": "x"}])
def test_messages_name_fields_and_show_no_python(server: Live, fields: dict[str, Any]) -> None:
    answer = server.generate(**{"prompt": "a fox", "model": "nano"} | fields)
    assert answer.error["message"].startswith(f"{answer.error['param']} must be ") or " must have " in answer.error["message"]
    assert not any(text in answer.error["message"] for text in ("should", "(128, 128)", "Guidance"))


def test_sizes_are_width_and_height_in_errors_too(server: Live) -> None:
    message = server.generate(prompt="a fox", model="nano", size="300x200").error["message"]
    nearest = message.partition("Nearest: ")[2].rstrip(".").split(", ")
    assert all(int(width) > int(height) for width, height in (size.split("x") for size in nearest))
    assert server.generate(prompt="a fox", model="nano", size=nearest[0], method="skip:last=9").json["size"] == nearest[0]


def test_fields_that_clients_send_by_habit_are_taken(server: Live) -> None:
    habits = {
        "quality": "auto",
        "background": "opaque",
        "moderation": "low",
        "user": "someone",
        "response_format": "b64_json",
        "style": None,
    }
    assert server.generate(model="tiny", prompt="a fox", **habits, stream=False, partial_images=None, n=None).status == 200


def test_budgets_and_aspects_choose_a_size(server: Live) -> None:
    wide = server.generate(model="nano", prompt="a boat", size="0.02M", aspect="2:1").json
    assert wide["size"] == "176x88" and opened(wide["data"][0]["b64_json"]).size == (176, 88)
    body = {"model": "nano", "prompt": "a boat", "width": 176, "height": 88}
    assert server.ask(PATH, body).json["size"] == "176x88"


# --- what stands around it


def test_health_metrics_and_description(server: Live) -> None:
    assert server.generate(model="tiny", prompt="a fox").status == 200
    assert server.ask("/livez").json == {"state": "ready"} and server.ask("/readyz").status == 200
    wait_until(lambda: b"nextscale_images_running 0.0" in server.ask("/metrics").body)  # counted down after the answer
    text = server.ask("/metrics").body.decode()
    for name in (
        'nextscale_requests_total{status="200"}',
        "nextscale_images_waiting 0.0",
        "nextscale_requests_open",
        "nextscale_request_seconds_count",
        "nextscale_queue_seconds_count",
        'nextscale_batch_images_count{model="tiny"}',
        'nextscale_stage_seconds_count{model="tiny",stage="3"}',
        'nextscale_tokens_run_total{model="tiny"}',
        'nextscale_tokens_saved_total{model="tiny"}',
        "nextscale_gpu_memory_bytes",
        'nextscale_captures{device="cpu",model="tiny"} 0.0',
    ):
        assert name in text, name
    described = server.ask("/openapi.json").json["paths"][PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "seed", "stop_after_stage", "masks"} <= set(described["properties"])


def test_health_and_the_page_answer_head(server: Live) -> None:
    for path in ("/livez", "/readyz", "/"):
        answer, got = server.ask(path, method="HEAD"), server.ask(path)
        assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"", got.headers["content-length"]), path
    assert set(server.ask("/openapi.json").json["paths"]["/livez"]) == {"get"}


def test_tokens_that_methods_save_are_counted(server: Live) -> None:
    def saved() -> float:
        return server.service.metrics.tokens_saved.labels("tiny")._value.get()

    before = saved()
    server.generate(model="tiny", prompt="a fox", method="skip:last=1")
    assert saved() - before == 2 * 12  # the last stage has 4 x 3 cells, and two cfg branches


def test_unknown_paths_and_methods_have_the_error_object(server: Live) -> None:
    unknown, wrong = server.ask("/v1/nothing"), server.ask(PATH)
    assert (unknown.status, unknown.error["code"]) == (404, "not_found")
    assert all(text in unknown.error["message"] for text in ("GET '/v1/nothing'", f"POST {PATH}", "GET /v1/models"))
    assert (wrong.status, wrong.error["code"]) == (405, "method_not_allowed") and "Use POST" in wrong.error["message"]
    assert server.ask("/studio/files/../../settings.py").status == 404
    assert server.ask("/studio/files/%2e%2e/settings.py").status == 404


def test_bodies_that_are_none(server: Live) -> None:
    assert server.ask(PATH, b"{", method="POST").error["code"] == "invalid_json"
    assert server.ask(PATH, b"[1]", method="POST").status == 400
    assert server.ask(PATH, b"\xff\xfe", method="POST").status == 400
    assert server.ask(PATH, b"{}", {"content-type": "text/plain"}).status == 415
    assert server.ask(PATH, b'{"prompt": "' + b"x" * 70_000 + b'"}').status == 413
    huge = server.ask(PATH, None, {"content-length": "99999999999"}, method="POST")
    assert huge.status == 413 and huge.error["code"] == "body_too_large"


def test_with_same_images_warm_ups_and_requests_have_full_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, run, images = shared_pipeline("var"), Pipeline.__call__, list[int]()
    monkeypatch.setattr(Pipeline, "__call__", lambda self, prompt, **given: images.append(len(prompt)) or run(self, prompt, **given))
    size = next(iter(pipe.settings.schedules.offers()))
    content = Content(("tiny",), (None,), lambda name, device: pipe, {}, "dense", (Warmup(size, (1, 2)),))
    service = Service(content, ServeSettings(max_batch=3, same_images=True))
    service.open()
    try:
        assert service._batcher is not None and service._batcher.submit(Job("tiny", 1, (5,))).result(60)[0].batch == 1
    finally:
        service.close()
    assert images == [3, 3]
