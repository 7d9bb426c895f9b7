"""The studio in a real browser. Skipped without one."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from PIL import Image

import nextscale
from nextscale.serve.pictures import encoded
from tests.helpers.serving import SECONDS, Live, Steered, live
from tests.helpers.studio import MARKS, SIZE, STAGES, chromium, generated, method, visit

pytestmark = MARKS


@pytest.fixture(scope="module")
def pipe() -> Steered:
    return Steered(nextscale.load("nano", device="cpu"))


@pytest.fixture(scope="module")
def server(pipe: Steered) -> Iterator[Live]:
    with live({"nano": pipe}, batch_delay=0.05) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser: Any, server: Live) -> Iterator[Any]:
    with visit(browser, server.url) as opened:
        yield opened


DROP = """async (bytes) => { const transfer = new DataTransfer();
    transfer.items.add(new File([new Uint8Array(bytes)], 'image.png', {type: 'image/png'}));
    dispatchEvent(new DragEvent('drop', {dataTransfer: transfer})); }"""


def png_with(**settings: Any) -> list[int]:
    """Returns the bytes of a PNG that holds such settings."""
    return list(base64.b64decode(encoded(Image.new("RGB", (8, 8)), settings=settings)))


def stage(page: Any) -> str | None:
    return page.get_attribute(".frame", "data-stage")


# --- Generate


def test_stages_arrive_and_are_scrubbed_and_show_where_it_computed(page: Any) -> None:
    seen = page.evaluate_handle("""() => { const seen = []; new MutationObserver(() => {
        const frame = document.querySelector('.frame'); if (frame?.dataset.stage) seen.push(frame.dataset.stage);
    }).observe(document.body, {subtree: true, childList: true, attributes: true}); return seen; }""")
    method(page, "skip:last=2")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#used-seed")
    stages = list(dict.fromkeys(seen.json_value()))
    assert len(stages) >= 2 and stages == sorted(stages, key=int)  # the picture grew; the page may draw two stages at once
    assert page.get_attribute(".frame", "data-frames") == str(STAGES - 2)  # of the stages that ran, the last of them finished
    assert page.locator(".film .thumb img").count() == STAGES - 2
    last = page.get_attribute(".frame img", "src")
    page.focus('input[aria-label="Stage"]')
    page.keyboard.press("Home")
    assert stage(page) == "0" and page.get_attribute(".frame img", "src") != last
    page.keyboard.press("End")
    assert page.get_attribute(".frame img", "src") == last
    film = page.locator(".film").bounding_box()
    page.mouse.move(film["x"] + film["width"] - 2, film["y"] + 9)
    page.mouse.down()
    page.mouse.move(film["x"] + 2.5 * film["width"] / STAGES, film["y"] + 9, steps=3)
    page.mouse.up()
    assert stage(page) == "2"
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("ArrowRight")  # anywhere on the page
    assert stage(page) == "3"
    page.click("#play")
    page.wait_for_function("stage => document.querySelector('.frame').dataset.stage === stage", arg=str(STAGES - 1))
    assert page.locator(".bars tbody tr").count() == STAGES and page.locator(".bars tr.skipped").count() == 2
    assert page.inner_text("#used-seed") == "7"
    page.click(".switch")  # the picture has no masks yet: the same one is generated again
    page.wait_for_selector(".frame.faded .mask")
    page.wait_for_function("() => document.querySelector('.mask').width > 0 && document.querySelector('.mask').width < 64")
    assert page.locator(".legend").inner_text().split() == ["reused", "computed"]
    assert page.get_attribute(".frame img", "src") == last
    page.click(".switch")
    assert page.locator(".mask").count() == 0


def test_bars_do_not_touch_their_numbers(page: Any) -> None:
    generated(page)
    for width in (1280, 1920, 390):
        page.set_viewport_size({"width": width, "height": 844})
        gaps = page.locator(".bars tbody td.bar").evaluate_all("""cells => cells.map(cell => {
            const range = document.createRange();
            range.selectNodeContents(cell.nextElementSibling);
            const ends = [...cell.querySelectorAll('i')].map(bar => bar.getBoundingClientRect().right);
            return cell.nextElementSibling.innerText ? range.getBoundingClientRect().left - Math.max(...ends) : 99;
        })""")
        assert min(gaps) >= 4, f"{width} pixels: {gaps}"


def test_a_picture_is_measured_against_best_quality(page: Any) -> None:
    generated(page, "skip:last=2")
    assert page.inner_text("#likeness") == "–" and page.inner_text("#times") == "–" and float(page.inner_text("#seconds")) > 0
    page.click("#measure")
    page.wait_for_function("() => !['–', undefined].includes(document.querySelector('#likeness')?.innerText)")
    assert 20 < float(page.inner_text("#likeness")) < 100
    method(page, "skip:last=1")
    page.click("#send")  # best quality is known by now
    page.wait_for_selector("#send")
    page.wait_for_function("() => !['–', undefined].includes(document.querySelector('#likeness')?.innerText)")
    page.check("input[name=speed][value=dense]")
    page.click("#send")
    page.wait_for_function("() => document.querySelector('#likeness')?.innerText === '100'")


@pytest.mark.parametrize(("dense", "other", "shown"), [(2000, 1000, "2.0"), (2600, 1000, "–"), (9000, 1000, "–"), (1000, 2000, "–")])
def test_one_run_shows_no_speedup_that_the_saved_work_does_not_explain(page: Any, dense: int, other: int, shown: str) -> None:
    found = page.evaluate(
        """async ([dense, other]) => {
        const { ResultCard } = await import("/studio/files/measure.js");
        const { html } = await import("/studio/files/html.js");
        const { render } = await import("preact");
        const report = (total_ms, cost_share) => ({ total_ms, cost_share, batch: 1, engine: "eager" });
        const references = { find: () => ({ report: report(dense, 1) }), distanceOf: () => null };
        const place = document.createElement("div");
        const image = { report: report(other, 0.4) };
        render(html`<${ResultCard} image=${image} settings=${{ method: "fastvar" }} references=${references} />`, place);
        return place.querySelector("#times").textContent;
    }""",
        [dense, other],
    )
    assert found == shown


def test_each_picture_is_shown_finished_whatever_was_looked_at_before(page: Any) -> None:
    generated(page)
    page.locator('input[aria-label="Stage"]').fill("1")
    assert stage(page) == "1"
    page.fill("#seed", "8")
    page.click("#send")
    page.wait_for_function("() => document.querySelector('#used-seed')?.innerText === '8'")
    assert stage(page) == str(STAGES - 1)


def test_a_prompt_to_click_an_address_per_view_and_a_reload(page: Any, server: Live) -> None:
    page.fill("#prompt", "")
    assert page.locator(".prompts button").count() == 4
    page.click(".prompts button >> nth=1")
    page.wait_for_selector("#used-seed")
    prompt = page.input_value("#prompt")
    assert prompt
    page.click("#tab-grid")
    page.wait_for_function("() => document.title.startsWith('Grid')")
    assert page.url.endswith("/#/grid")
    page.reload()
    page.wait_for_selector('#tab-grid[aria-current="page"]')
    assert page.input_value("#prompt") == prompt and page.inner_text("#size-text").startswith("128 × 128")
    page.click("#tab-history")
    page.go_back()
    page.wait_for_selector('#tab-grid[aria-current="page"]')


def test_shapes_and_sizes_of_the_model(page: Any) -> None:
    page.check("input[name=aspect][value='16:9']", force=True)
    assert page.inner_text("#size-text") == "168 × 96, 7 stages"
    page.focus("#size")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#size-text") == "336 × 192, 10 stages"
    measured = [tile.get_attribute("value") for tile in page.locator("input[name=speed]").all()]
    assert measured == ["dense", "auto:lpips=0.05", "auto:speedup=2", "auto:speedup=3", "more"]
    page.check("input[name=speed][value='auto:speedup=2']", force=True)
    page.focus("#size")
    page.keyboard.press("ArrowLeft")  # a size without a profile: the choice at the same place
    assert page.locator("input[name=speed]:checked").get_attribute("value") == "skip:last=2"
    page.click("text=More shapes")
    assert page.locator("input[name=aspect]").count() == 15


# --- errors


def test_an_error_stands_beside_its_field_and_the_picture_stays(page: Any) -> None:
    generated(page)
    before = page.get_attribute(".frame img", "src")
    method(page, "warp")
    page.click("#send")
    page.wait_for_selector("#method-problem")
    assert "warp" in page.inner_text("#method-problem") and page.get_attribute("#method", "aria-describedby") == "method-problem"
    page.wait_for_function("() => document.activeElement.id === 'method'")
    assert page.locator(".banner").count() == 0
    assert page.get_attribute(".frame img", "src") == before
    page.check("input[name=speed][value=dense]")  # another method: the complaint goes with its cause
    page.wait_for_selector("#method-problem", state="detached")
    assert page.locator("input[name=speed]:checked").get_attribute("value") == "dense"


def test_what_is_no_number_is_refused_and_not_left_out(page: Any) -> None:
    for text in ("strong", "1,,2", "null", "1e999"):
        page.locator("#guidance_scale").evaluate("node => { node.closest('details').open = true; }")
        page.fill("#guidance_scale", text)
        page.click("#send")
        page.wait_for_selector("#send")
        page.wait_for_selector("#guidance_scale-problem")
    page.fill("#guidance_scale", "3.25")
    page.fill("#seed", "1.5")
    assert page.locator("#seed:invalid").count() == 1 and page.locator("#guidance_scale:invalid").count() == 0


def test_a_lost_server_is_tried_again(browser: Any, pipe: Steered) -> None:
    with live({"nano": pipe}) as first:
        port = first.port
        with visit(browser, first.url) as page:
            generated(page, "skip:last=4")
            before = page.get_attribute(".frame img", "src")
            first.server.should_exit = True
            first.server.force_exit = True
            while first.server.started and first.server.servers[0].is_serving():
                Event().wait(0.05)
            page.fill("#seed", "8")
            page.click("#send")
            page.wait_for_selector("#retry")
            page.mouse.wheel(0, 5000)  # the complaint stays in sight
            assert page.locator("#retry").bounding_box()["y"] < page.viewport_size["height"]
            assert "Is `nextscale serve` still running?" in page.inner_text(".banner")
            assert page.get_attribute(".frame img", "src") == before
            with live({"nano": pipe}, port=port):
                page.click("#retry")
                page.wait_for_function("() => document.querySelector('#used-seed')?.innerText === '8'")
                assert page.locator(".banner").count() == 0
                page.close()


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


def test_a_stream_that_ends_early_is_an_error(page: Any) -> None:
    found = page.evaluate("""async () => {
        const { stream } = await import("/studio/files/api.js");
        const event = (type) => `event: ${type}\\ndata: {"type":"${type}","b64_json":""}\\n\\n`;
        const [partial, completed] = ["image_generation.partial_image", "image_generation.completed"].map(event);
        const read = async (text) => {
            window.fetch = async () => new Response(text);
            return stream({}, () => {}).then(() => "finished", (error) => error.message);
        };
        return [await read(partial + completed), await read(partial), await read(partial + completed.trimEnd()), await read("")];
    }""")
    assert found[0] == "finished" and all("ended before" in error for error in found[1:])


def test_a_stopped_picture_stops_the_server(page: Any, server: Live, pipe: Steered) -> None:
    generated(page)
    before = page.get_attribute(".frame img", "src")
    pipe.open()
    pipe.hold_after(2)
    page.fill("#seed", "9")
    page.click("#send")
    assert pipe.holding.wait(SECONDS)
    page.keyboard.press("Escape")
    page.wait_for_selector("#send")
    assert page.inner_text(".banner span") == "Stopped." and page.get_attribute(".frame img", "src") == before
    while server.service.metrics.open_requests._value.get():
        Event().wait(0.005)
    pipe.go.set()
    assert server.service._batcher is not None and server.service._batcher._queue.wait_empty(SECONDS)
    assert pipe.stages == [0, 1, 2]
    pipe.open()


# --- Compare


def test_the_compared_picture_is_dragged(page: Any) -> None:
    page.click("#tab-compare")
    page.wait_for_selector("input[name=speed][value=dense]", state="detached")
    assert page.locator("input[name=speed]:checked").get_attribute("value") == "skip:last=1"  # recommended without a profile
    page.click("#send")
    page.wait_for_selector("#distance")
    assert 5 < float(page.inner_text("#distance").split("PSNR ")[1].split()[0]) < 99
    frame = page.locator(".split").bounding_box()

    def shown() -> tuple[int, str]:
        clip = page.locator(".above").evaluate("node => node.style.clipPath").replace("0px", "0")
        return int(page.get_attribute(".handle", "aria-valuenow")), clip.split()[1]

    middle = frame["y"] + frame["height"] / 3
    page.mouse.move(frame["x"] + 0.5 * frame["width"], middle)
    page.mouse.down()
    page.mouse.move(frame["x"] + 0.2 * frame["width"], middle + 60, steps=5)
    page.mouse.up()
    assert shown()[0] == 20 and abs(float(shown()[1].rstrip("%")) - 80) < 0.5
    assert page.evaluate("getSelection().toString()") == "" and page.evaluate("getSelection().isCollapsed")
    page.mouse.move(frame["x"] + 0.7 * frame["width"], middle)  # no button is down
    assert shown()[0] == 20
    page.mouse.click(frame["x"] + 0.6 * frame["width"], middle)
    assert shown()[0] == 60
    assert page.evaluate("document.activeElement.className") == "handle"
    for key, share in (("ArrowLeft", 58), ("ArrowRight", 60), ("Home", 0), ("End", 100)):
        page.keyboard.press(key)
        assert shown()[0] == share


@pytest.mark.parametrize(
    ("rounds", "share", "speedup", "said"),
    [
        ((300, 100, 320, 100, 340, 100), 0.3, ("3.20", "3.00 to 3.40"), None),
        ((400, 200, 300, 100, 900, 150), 0.3, ("3.00", "2.00 to 6.00"), "differ by more than a third"),
        ((300, 100, 320, 100, 340, 100), 0.5, ("–", "3.00 to 3.40"), "does not explain"),  # at most 2x of half of the work
    ],
)
def test_best_quality_and_method_are_timed_in_turns(
    page: Any, rounds: tuple[int, ...], share: float, speedup: tuple[str, str], said: str | None
) -> None:
    """The first pair is the warm-up, whatever it takes."""
    times = iter((9000, 9000, *rounds))
    asked: list[tuple[str, str]] = []
    answers: dict[str, Any] = {}

    def timed(route: Any) -> None:
        body = json.loads(route.request.post_data)
        asked.append((body["method"], str(body["seed"])))
        if body["method"] not in answers:
            answers[body["method"]] = route.fetch().json()
        content = answers[body["method"]]
        content["data"][0]["report"] |= {"total_ms": next(times), "cost_share": 1 if body["method"] == "dense" else share}
        route.fulfill(json=content)

    page.route("**/v1/images/generations", timed)
    page.click("#tab-compare")
    page.click("#send")
    page.wait_for_function("() => document.querySelector('#rounds')?.innerText.startsWith('3 of 3')")
    assert (page.inner_text("#speedup"), page.inner_text("#range")) == speedup
    assert [name for name, _ in asked[2:]] == ["dense", "skip:last=1"] * 3
    assert len(asked) == 8 and len({seed for _, seed in asked}) == 1
    notes = page.locator(".result .note").all_inner_texts()
    assert len(notes) == bool(said) and (said or "") in "".join(notes)


# --- Grid, Blind A/B, History


def test_a_grid_has_headers_is_enlarged_and_goes_into_the_history(page: Any) -> None:
    page.click("#tab-grid")
    for name in ("Skip 2 stages", "Skip 3 stages"):
        page.uncheck(f'.chips label:has(span:text-is("{name}")) input')
    page.check('.chips label:has(span:text-is("Skip 1 stage")) input')
    page.fill("#count", "2")
    page.click("#send")
    page.wait_for_function("() => document.querySelectorAll('.sheet img').length === 4")
    assert [head.inner_text() for head in page.locator(".sheet thead th").all()] == ["seed 7", "seed 8"]
    rows = [head.inner_text() for head in page.locator(".sheet tbody th").all()]
    assert [row.split("\n")[0] for row in rows] == ["Best quality", "Skip 1 stage"] and all("s per picture" in row for row in rows)
    page.click(".sheet td button >> nth=2")
    enlarged = page.locator("dialog[open] img")
    assert enlarged.get_attribute("alt") == "Skip 1 stage, seed 7"
    page.keyboard.press("ArrowRight")
    assert enlarged.get_attribute("alt") == "Skip 1 stage, seed 8"
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog[open]", state="detached")
    page.click("#tab-history")
    page.wait_for_selector(".gallery img >> nth=3")


def test_blind_votes_are_kept_counted_and_exported(page: Any) -> None:
    page.click("#tab-blind")
    page.fill("#blind-b", "skip:last=3")
    page.click("text=Start voting")
    page.wait_for_selector(".pair img >> nth=1")
    sources = [image.get_attribute("src") for image in page.locator(".pair img").all()]
    assert sources[0] != sources[1]
    assert page.locator("header, nav, form, table").count() == 0
    assert "skip" not in page.inner_text("body") and "dense" not in page.inner_text("body")
    widths = [page.locator(".pair img >> nth=0").bounding_box()["width"], page.viewport_size["width"]]
    assert widths[0] > 0.4 * widths[1]
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(".pair img", state="detached")
    page.wait_for_selector(".pair img >> nth=1")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector(".pair img", state="detached")
    page.click("text=Finish")
    page.wait_for_selector("#score")
    assert page.locator(".tally").count() == 0
    page.click("#score")
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
    page.click("#score")
    assert page.locator(".tally tbody tr").count() == 1


def test_settings_come_back_from_history_and_from_a_dropped_png(page: Any) -> None:
    page.fill("#prompt", "a flat icon of a rocket")
    page.fill("#seed", "21")
    page.locator("#negative_prompt").evaluate("node => { node.closest('details').open = true; }")
    page.fill("#negative_prompt", "fog")
    generated(page, "skip:last=4")
    with page.expect_download() as download:
        page.click("#save")
    png = Path(download.value.path()).read_bytes()

    def scramble() -> None:
        page.fill("#prompt", "something else")
        page.fill("#seed", "1")
        page.fill("#negative_prompt", "")
        method(page, "dense")

    def settings() -> list[str]:
        return [page.input_value(field) for field in ("#prompt", "#seed", "#negative_prompt", "#method")]

    asked = ["a flat icon of a rocket", "21", "fog", "skip:last=4"]
    scramble()
    page.click("#tab-history")
    page.click(".gallery figure > button")
    page.wait_for_selector(".frame img")
    assert settings() == asked and page.locator('input[aria-label="Stage"]').count() == 0
    scramble()
    page.evaluate(DROP, list(png))
    page.wait_for_function("() => document.querySelector('#prompt').value.includes('rocket')")
    assert settings() == asked


def test_large_seeds_are_kept_to_the_last_digit(page: Any) -> None:
    seed = 2**63 - 2
    page.evaluate(DROP, png_with(prompt='an apple, "seed": 5', model="nano", size=SIZE, method="skip:last=4", seed=seed))
    page.wait_for_function("() => document.querySelector('#prompt').value.startsWith('an apple')")
    assert page.input_value("#seed") == str(seed) and page.input_value("#prompt") == 'an apple, "seed": 5'
    with page.expect_request("**/generations") as asked:
        page.click("#send")
    assert json.loads(asked.value.post_data)["seed"] == seed and json.loads(asked.value.post_data)["prompt"] == 'an apple, "seed": 5'
    page.wait_for_selector("#used-seed")
    assert page.inner_text("#used-seed") == str(seed)
    page.click("#tab-grid")
    page.fill("#count", "2")
    for name in ("Skip 2 stages", "Skip 3 stages"):
        page.uncheck(f'.chips label:has(span:text-is("{name}")) input')
    page.click("#send")
    page.wait_for_selector(f'.sheet img[title="seed {seed + 1}"]')
    assert page.locator(".sheet thead th >> nth=1").inner_text() == f"seed {seed + 1}"


def test_all_settings_of_a_png_come_back_or_are_named(page: Any) -> None:
    kept = {"temperature": 0.1, "top_k": 40, "top_p": 0.5, "greedy": False, "stop_after_stage": 3}
    fields = {"prompt": "a flat icon of a rocket", "seed": 3, "size": SIZE, "method": "dense", "guidance_scale": [2, 2, 2, 2, 3, 3, 3.5]}
    page.evaluate(DROP, png_with(**fields, **kept, model="nano"))
    page.wait_for_selector("#carried")
    assert all(name in page.inner_text("#carried") for name in kept) and page.locator(".banner").count() == 0
    with page.expect_request("**/generations") as asked:
        page.click("#send")
    body = json.loads(asked.value.post_data)
    assert {name: body[name] for name in (*fields, *kept)} == fields | kept
    page.wait_for_selector("#used-seed")
    page.click("#carried button")
    with page.expect_request("**/generations") as asked:
        page.click("#send")
    assert not kept.keys() & json.loads(asked.value.post_data).keys()
    page.wait_for_selector("#send")
    page.evaluate(DROP, png_with(prompt="a hare", model="another", size="5x5", method="dense", seed=4, cfg_curve="late"))
    page.wait_for_selector(".banner")
    named = page.inner_text(".banner")
    assert all(name in named for name in ("model", "size", "cfg_curve")) and "method" not in named and "seed" not in named
    assert [page.input_value(field) for field in ("#prompt", "#model")] == ["a hare", "nano"]
    assert page.inner_text("#size-text").startswith("128 × 128")


def test_a_picture_of_the_history_is_decoded_once(page: Any) -> None:
    generated(page)
    page.evaluate("() => { const decode = atob; window.decoded = 0; window.atob = (text) => (window.decoded++, decode(text)); }")
    page.click("#tab-history")
    page.wait_for_selector(".gallery img")
    assert page.evaluate("decoded") == 1
    page.click("#tab-generate")
    page.fill("#seed", "8")  # draws the page again
    page.click("#send")
    page.wait_for_function("() => document.querySelector('#used-seed')?.innerText === '8'")
    page.click("#tab-history")
    page.wait_for_selector(".gallery img >> nth=1")
    assert page.evaluate("decoded") == 2
    page.click("text=Clear history")
    page.click("text=Really clear 2?")
    page.wait_for_selector("text=No pictures yet")


def test_it_works_under_the_path_of_a_proxy(browser: Any, pipe: Steered) -> None:
    pipe.open()
    with live({"nano": pipe}, root_path="/images") as server, visit(browser, f"{server.url}/images/") as page:
        refused: list[str] = []
        page.on("response", lambda response: refused.append(response.url) if response.status >= 400 else None)
        page.reload()
        generated(page, "skip:last=4")
        page.click("#tab-history")
        assert page.url == f"{server.url}/images/#/history"
    assert not refused
