"""The studio in a real browser: chromium, driven headless. Skipped where there is none."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from PIL import Image

import nextscale
from nextscale.serve.pictures import encoded
from tests.helpers.serving import SECONDS, Live, Steered, live

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: install it (apt-get install chromium) to test the studio in a browser"),
]
REFUSED = "Failed to load resource: the server responded with a status of 400"  # what the browser says of an answer that the page shows
SIZE, STAGES = "128x128", 7


@pytest.fixture(scope="module")
def pipe() -> Steered:
    return Steered(nextscale.load("nano", device="cpu"))


@pytest.fixture(scope="module")
def server(pipe: Steered) -> Iterator[Live]:
    with live({"nano": pipe}, batch_delay=0.05) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, server: Live) -> Iterator[Any]:
    """The studio at the smallest size; whatever the page complains about fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 860}, accept_downloads=True)
    opened = context.new_page()
    opened.set_default_timeout(1000 * SECONDS)
    complaints: list[str] = []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on(
        "console", lambda message: complaints.append(message.text) if message.type == "error" and REFUSED not in message.text else None
    )
    opened.goto(server.url)
    opened.select_option("#size", SIZE)
    yield opened
    context.close()
    assert not complaints


def generated(page: Any, method: str = "dense") -> None:
    page.fill("#method", method)
    page.keyboard.press("Control+Enter") if page.evaluate("document.activeElement.id") == "prompt" else page.click("text=Generate >> nth=1")
    page.wait_for_selector("#used-seed")


DROP = """async (bytes) => { const transfer = new DataTransfer();
    transfer.items.add(new File([new Uint8Array(bytes)], 'image.png', {type: 'image/png'}));
    dispatchEvent(new DragEvent('drop', {dataTransfer: transfer})); }"""


def png_with(**settings: Any) -> list[int]:
    """The bytes of a PNG that holds such settings."""
    return list(base64.b64decode(encoded(Image.new("RGB", (8, 8)), settings=settings)))


def test_stages_arrive_and_can_be_scrubbed(page: Any, server: Live) -> None:
    seen = page.evaluate_handle("""() => { const seen = []; new MutationObserver(() => {
        const canvas = document.querySelector('.canvas'); if (canvas?.dataset.stage) seen.push(canvas.dataset.stage);
    }).observe(document.body, {subtree: true, childList: true, attributes: true}); return seen; }""")
    page.fill("#method", "skip:last=2")
    page.fill("#prompt", "a 3D icon of a red apple")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#used-seed")
    stages = list(dict.fromkeys(seen.json_value()))
    assert len(stages) >= 2 and stages == sorted(stages, key=int)  # the image grew; the page may draw two stages at once
    frames = int(page.get_attribute(".canvas", "data-frames"))
    assert frames == STAGES - 2  # of the stages that ran; the finished image stands for the last
    last = page.get_attribute(".canvas img", "src")
    scrubber = page.locator('input[aria-label="stage"]')
    scrubber.focus()
    page.keyboard.press("Home")
    assert page.get_attribute(".canvas", "data-stage") == "0" and page.get_attribute(".canvas img", "src") != last
    page.keyboard.press("End")
    assert page.get_attribute(".canvas img", "src") == last
    page.check("text=darker where less of the network ran")
    mask = page.locator(".canvas .mask")
    assert mask.count() == 1
    page.locator('input[aria-label="opacity of the mask"]').fill("0.3")
    assert mask.evaluate("node => node.style.opacity") == "0.3"
    assert page.locator(".bars tbody tr").count() == STAGES and page.locator(".bars tr.skipped").count() == 2
    assert page.inner_text("#used-seed") == "7"


def test_each_image_is_shown_finished_whatever_was_looked_at_before(page: Any) -> None:
    generated(page)
    page.locator('input[aria-label="stage"]').fill("1")
    assert page.get_attribute(".canvas", "data-stage") == "1"
    page.fill("#seed", "8")
    page.click("button.primary")
    page.wait_for_function("() => document.querySelector('#used-seed')?.innerText === '8'")
    assert page.get_attribute(".canvas", "data-stage") == str(STAGES - 1)


def test_a_full_server_is_asked_again_when_it_says_and_a_stop_ends_the_wait(page: Any) -> None:
    found = page.evaluate("""async () => {
        const { compare, generate } = await import("/studio/files/api.js");
        const answers = [[429, { "retry-after-ms": "1500", "retry-after": "60" }], [429, { "retry-after": "1" }], [200, {}]];
        const asked = [], begun = performance.now();
        window.fetch = async () => {
            asked.push(performance.now() - begun);
            const [status, headers] = answers.shift();
            return new Response("{}", { status, headers });
        };
        await generate({});
        answers.push([429, { "retry-after": "600" }], [429, { "retry-after": "600" }]);
        const stopped = [];
        for (const work of [(signal) => generate({}, signal), (signal) => compare("a", "b", signal)]) {
            const controller = new AbortController();
            setTimeout(() => controller.abort(), 100);
            stopped.push(await work(controller.signal).catch((error) => error.name));
        }
        return { asked, stopped };
    }""")
    first, second, third = found["asked"][:3]
    assert second - first >= 1499 and third - second >= 999
    assert found["stopped"] == ["AbortError"] * 2 and len(found["asked"]) == 5


def test_names_of_methods_are_shown_in_full(page: Any) -> None:
    for width in (1280, 920, 390):
        page.set_viewport_size({"width": width, "height": 844})
        natural, shown = page.locator("#method >> xpath=../select").evaluate("""select => {
            const copy = select.cloneNode(true);
            copy.style = "position: absolute; width: auto";
            select.parentNode.append(copy);
            const natural = copy.offsetWidth;
            copy.remove();
            return [natural, select.offsetWidth];
        }""")
        assert natural <= shown, f"{width} pixels: the names need {natural}, and {shown} are shown"


def test_a_stopped_image_stops_the_server(page: Any, server: Live, pipe: Steered) -> None:
    pipe.open()
    pipe.hold_after(2)
    page.click("text=Generate >> nth=1")
    assert pipe.holding.wait(SECONDS)
    page.keyboard.press("Escape")
    page.wait_for_selector("button.primary:not([disabled])")
    while server.service.metrics.open_requests._value.get():
        Event().wait(0.005)
    pipe.go.set()
    assert server.service._batcher is not None and server.service._batcher._queue.wait_empty(SECONDS)
    assert pipe.stages == [0, 1, 2]
    pipe.open()


def test_dense_and_method_are_compared(page: Any) -> None:
    page.click("#tab-compare")
    page.fill("#method", "skip:last=1")
    page.click("text=Compare with dense")
    page.wait_for_function("() => document.querySelector('#psnr') && document.querySelector('#psnr').innerText.endsWith('dB')")
    assert 5 < float(page.inner_text("#psnr").split()[0]) < 99
    slider = page.locator('input[aria-label="slider"]')
    slider.fill("20")
    assert page.locator(".canvas .above").evaluate("node => node.style.clipPath").replace("0px", "0").startswith("inset(0 80%")


@pytest.mark.parametrize(
    ("rounds", "speedup", "said"),
    [((300, 100, 320, 100, 340, 100), "3.20 (3.00 to 3.40)", False), ((400, 200, 300, 100, 900, 150), "3.00 (2.00 to 6.00)", True)],
)
def test_dense_and_method_are_timed_in_turns(page: Any, rounds: tuple[int, ...], speedup: str, said: bool) -> None:
    """The first pair is the warm-up, whatever it takes."""
    times = iter((9000, 9000, *rounds))
    asked: list[tuple[str, str]] = []

    def timed(route: Any) -> None:
        body = json.loads(route.request.post_data)
        asked.append((body["method"], str(body["seed"])))
        answer = route.fetch()
        content = answer.json()
        content["data"][0]["report"]["total_ms"] = next(times)
        route.fulfill(response=answer, json=content)

    page.route("**/v1/images/generations", timed)
    page.click("#tab-compare")
    page.fill("#method", "skip:last=1")
    page.click("text=Compare with dense")
    page.wait_for_function("() => document.querySelector('#rounds')?.innerText.startsWith('3 of 3')")
    assert page.inner_text("#speedup") == speedup
    assert [method for method, _ in asked[2:]] == ["dense", "skip:last=1"] * 3
    assert len(asked) == 8 and len({seed for _, seed in asked}) == 1
    assert page.locator("text=Rounds differ by more than a third").count() == (1 if said else 0)


def test_a_grid_of_seeds_and_methods(page: Any) -> None:
    page.click("#tab-grid")
    page.check('label:text-is("skip the last stage") input')
    page.fill("input[type=number][max]", "2")
    page.click("text=Generate the grid")
    page.wait_for_function("() => document.querySelectorAll('.grid img').length === 4")
    assert [row.inner_text().split("\n")[0] for row in page.locator(".grid th").all()] == ["dense", "skip the last stage"]


def test_blind_votes_are_kept_counted_and_exported(page: Any) -> None:
    page.click("#tab-blind")
    page.fill("#blind-b", "skip:last=3")
    page.click("text=Next pair")
    page.wait_for_selector(".pair img >> nth=1")
    sources = [image.get_attribute("src") for image in page.locator(".pair img").all()]
    assert sources[0] != sources[1]
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(".tally")
    page.wait_for_selector(".pair img >> nth=1")
    page.keyboard.press("ArrowDown")
    page.wait_for_function("() => document.querySelector('.tally tbody td:nth-child(5)').innerText === '1'")
    with page.expect_download() as download:
        page.click("text=Export votes")
    kept = json.loads(Path(download.value.path()).read_text())
    assert [vote["choice"] for vote in kept["votes"]][1] == "tie" and kept["votes"][0]["choice"] in ("a", "b")
    # One vote for "a" that stood on the right, or for "b" that stood there: by chance, and known.
    first = kept["votes"][0]
    assert (first["choice"] == "b") == first["swapped"] and {first["a"], first["b"]} == {"dense", "skip:last=3"}
    (line,) = kept["tally"]
    assert line["ties"] == 1 and line["winsA"] + line["winsB"] == 1
    assert line["interval"] == pytest.approx([0.2065, 1.0] if line["winsA"] else [0.0, 0.7935], abs=1e-3)  # Wilson, one of one
    page.reload()
    page.click("#tab-blind")
    assert page.locator(".tally tbody tr").count() == 1


def test_settings_come_back_from_history_and_from_a_dropped_png(page: Any) -> None:
    page.fill("#prompt", "a flat icon of a rocket")
    page.fill("#seed", "21")
    page.fill("#negative_prompt", "fog")
    generated(page, "skip:last=4")
    with page.expect_download() as download:
        page.click("text=Save PNG")
    png = Path(download.value.path()).read_bytes()

    def scramble() -> None:
        page.fill("#prompt", "something else")
        page.fill("#seed", "1")
        page.fill("#negative_prompt", "")
        page.fill("#method", "dense")

    def settings() -> list[str]:
        return [page.input_value(field) for field in ("#prompt", "#seed", "#negative_prompt", "#method", "#size")]

    asked = ["a flat icon of a rocket", "21", "fog", "skip:last=4", SIZE]
    scramble()
    page.click("#tab-history")
    page.click(".history figure > button")
    assert settings() == asked
    scramble()
    page.evaluate(DROP, list(png))
    page.wait_for_function("() => document.querySelector('#prompt').value.includes('rocket')")
    assert settings() == asked


@pytest.mark.parametrize("seed", [2**53 + 1, 2**63 - 1])
def test_large_seeds_are_kept_to_the_last_digit(page: Any, pipe: Steered, seed: int) -> None:
    page.evaluate(DROP, png_with(prompt='an apple, "seed": 5', model="nano", size=SIZE, method="skip:last=4", seed=seed))
    page.wait_for_function("() => document.querySelector('#prompt').value.startsWith('an apple')")
    assert page.input_value("#seed") == str(seed) and page.input_value("#prompt") == 'an apple, "seed": 5'
    with page.expect_request("**/generations") as asked:
        page.click("button.primary")
    assert json.loads(asked.value.post_data)["seed"] == seed and json.loads(asked.value.post_data)["prompt"] == 'an apple, "seed": 5'
    page.wait_for_selector("#used-seed")
    assert page.inner_text("#used-seed") == str(seed)
    page.click("#tab-grid")
    page.fill("input[type=number][max]", "1")
    page.click("text=Generate the grid")
    page.wait_for_selector(f'.grid img[title="seed {seed}"]')


def test_a_stream_that_ends_early_is_an_error(page: Any) -> None:
    found = page.evaluate("""async () => {
        const { stream } = await import("/studio/files/api.js");
        const event = (type) => `event: ${type}\ndata: {"type":"${type}","b64_json":""}\n\n`;
        const [partial, completed] = ["image_generation.partial_image", "image_generation.completed"].map(event);
        const read = async (text) => {
            window.fetch = async () => new Response(text);
            return stream({}, () => {}).then(() => "finished", (error) => error.message);
        };
        return [await read(partial + completed), await read(partial), await read(partial + completed.trimEnd()), await read("")];
    }""")
    assert found[0] == "finished" and all("ended before" in error for error in found[1:])


def test_all_settings_of_a_png_come_back_or_are_named(page: Any) -> None:
    kept = {"temperature": 0.1, "top_k": 40, "top_p": 0.5, "greedy": False, "stop_after_stage": 3}
    fields = {"prompt": "a flat icon of a rocket", "seed": 3, "size": SIZE, "method": "dense", "guidance_scale": [2, 2, 2, 2, 3, 3, 3.5]}
    page.evaluate(DROP, png_with(**fields, **kept, model="nano"))
    page.wait_for_selector("#carried")
    assert all(name in page.inner_text("#carried") for name in kept) and page.locator(".error").count() == 0
    with page.expect_request("**/generations") as asked:
        page.click("button.primary")
    body = json.loads(asked.value.post_data)
    assert {name: body[name] for name in (*fields, *kept)} == fields | kept
    page.wait_for_selector("#used-seed")
    page.click("#carried button")
    with page.expect_request("**/generations") as asked:
        page.click("button.primary")
    assert not kept.keys() & json.loads(asked.value.post_data).keys()
    page.evaluate(DROP, png_with(prompt="a hare", model="another", size="5x5", method="dense", seed=4, cfg_curve="late"))
    page.wait_for_selector(".error")
    named = page.inner_text(".error")
    assert all(name in named for name in ("model", "size", "cfg_curve")) and "method" not in named and "seed" not in named
    assert [page.input_value(field) for field in ("#prompt", "#model", "#size")] == ["a hare", "nano", SIZE]


def test_what_is_no_number_is_refused_and_not_left_out(page: Any) -> None:
    for text in ("strong", "1,,2", "null", "1e999"):
        page.fill("#guidance_scale", text)
        page.click("button.primary")
        page.wait_for_selector(".error")
        assert "guidance_scale" in page.inner_text(".error")
    page.fill("#guidance_scale", "3.25")
    page.fill("#seed", "1.5")
    assert page.locator("#seed:invalid").count() == 1 and page.locator("#guidance_scale:invalid").count() == 0


def test_an_image_of_the_history_is_decoded_once(page: Any) -> None:
    generated(page)
    page.evaluate("() => { const decode = atob; window.decoded = 0; window.atob = (text) => (window.decoded++, decode(text)); }")
    page.click("#tab-history")
    page.wait_for_selector(".history img")
    assert page.evaluate("decoded") == 1
    page.fill("#seed", "8")  # draws the page again
    page.click("button.primary")
    page.wait_for_selector("#used-seed")
    page.click("#tab-history")
    page.wait_for_selector(".history img >> nth=1")
    assert page.evaluate("decoded") == 2


def test_errors_of_the_server_are_shown(page: Any) -> None:
    page.fill("#method", "warp")
    page.click("text=Generate >> nth=1")
    page.wait_for_selector(".error")
    assert "unknown method 'warp'" in page.inner_text(".error")


def test_it_works_under_the_path_of_a_proxy(browser: Any, pipe: Steered) -> None:
    pipe.open()
    with live({"nano": pipe}, root_path="/images") as server:
        page = browser.new_page()
        refused: list[str] = []
        page.on("response", lambda response: refused.append(response.url) if response.status >= 400 else None)
        page.goto(f"{server.url}/images/")
        page.select_option("#size", SIZE)
        page.fill("#prompt", "a red apple")
        generated(page)
        page.close()
    assert not refused
