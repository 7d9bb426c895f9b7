"""Access, limits, and the privacy of logs."""

from __future__ import annotations

import base64
import io
import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.datastructures import URL

from nextscale.errors import DeadlinePassed, NextscaleError, OutOfMemory, SettingError
from nextscale.serve import compare
from nextscale.serve.log import JsonFormatter
from nextscale.serve.run import listen, serve
from nextscale.serve.security import Keys
from nextscale.serve.service import Content, Service, Warmup
from nextscale.serve.settings import Limits, ServeSettings, host_of, parse_aliases, read_api_keys
from tests.helpers.serving import PATH, Steered, live, wait_until
from tests.helpers.tiny import shared_pipeline

KEYS = ("first-key-0123456789", "second-key-0123456789")


def test_only_keys_of_the_file_are_let_in(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of the team\n{KEYS[0]}\n\n  {KEYS[1]}\n")
    keys = read_api_keys(file)
    assert keys == KEYS
    file.write_text(KEYS[0], encoding="utf-8-sig")  # as editors on Windows write it
    assert read_api_keys(file) == KEYS[:1]
    with live({"tiny": shared_pipeline("infinity")}, api_keys=keys) as server:
        for key in KEYS:
            assert server.ask("/v1/models", headers={"authorization": f"Bearer {key}"}).status == 200
        for wrong in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEYS[0]}, {"authorization": f"Basic {KEYS[0]}"}):
            for path in ("/v1/models", "/metrics", "/studio/options"):
                refused = server.ask(path, headers=wrong)
                assert refused.status == 401 and refused.error["type"] == "authentication_error" and refused.headers["www-authenticate"]
                assert refused.error["code"] == ("invalid_api_key" if wrong else "missing_api_key")
        assert server.ask(PATH, {"prompt": "a fox"}).status == 401
        assert server.ask(PATH, {"prompt": "a fox"}, {"authorization": f"Bearer {KEYS[1]}"}).status == 200
        for path in ("/livez", "/readyz", "/", "/studio/files/main.js"):
            assert server.ask(path).status == 200, path
    assert all(key not in repr(ServeSettings(api_keys=KEYS)) for key in KEYS)


def test_the_host_header_opens_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def host_in_front(url: URL, text: str = "", scope: Any = None, **parts: Any) -> None:
        """Builds the URL as Starlette before 1.0.1 does: the Host header may hold a path."""
        host = "" if scope is None else dict(scope["headers"])[b"host"].decode("latin-1")
        url._url = text if scope is None else f"http://{host}{scope['path']}"

    monkeypatch.setattr(URL, "__init__", host_in_front)
    with live({"tiny": shared_pipeline("infinity")}, host="0.0.0.0", api_keys=KEYS) as server:
        for path in ("/v1/models", "/metrics", "/studio/options"):
            assert server.ask(path, headers={"host": "x/livez?"}).status == 401


def test_keys_without_content() -> None:
    assert Keys(()).allow(None) and not Keys(KEYS).allow(None) and not Keys(KEYS).allow("Bearer ")
    assert Keys(KEYS).allow(f"bearer {KEYS[0]}")


@pytest.mark.parametrize("content", ["short", "with space 0123456789", "unprintable\x07 0123456789", "naïve-key-0123456789"])
def test_keys_that_are_none_are_refused(content: str) -> None:
    with pytest.raises(SettingError, match="api_keys"):
        ServeSettings(api_keys=(content,))


def test_files_without_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NextscaleError, match="cannot be read"):
        read_api_keys(tmp_path / "nothing")
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(SettingError, match="API key per line"):
        read_api_keys(tmp_path / "empty")


def test_a_server_on_the_loopback_answers_to_no_other_name() -> None:
    with live({"tiny": shared_pipeline("infinity")}, allowed_hosts=("Studio.example.", "[FE80::1]")) as server:
        for host in ("evil.example", "studio.example.evil", "studio", ""):
            assert server.ask("/livez", headers={"host": host}).status == 421, host
        for host in (f"localhost:{server.port}", "localhost.", "127.0.0.1:", "studio.EXAMPLE.:80", "[fe80::1]:80", "[::1]"):
            assert server.ask("/livez", headers={"host": host}).status == 200, host
    assert ServeSettings(host="LOCALHOST").loopback and ServeSettings(host="localhost.").host_names
    for wrong in ("studio.example:8443", "https://studio.example", "*.example", "fe80::1", "bücher.example", ""):
        with pytest.raises(SettingError, match="allowed_hosts"):
            ServeSettings(allowed_hosts=(wrong,))
    assert ServeSettings(host="0.0.0.0").host_names is None and ServeSettings(host="::1").loopback
    assert host_of("[::1]:8000") == "[::1]" and host_of("[::1]") == "[::1]" and host_of("::1") == "::1"


def test_pages_elsewhere_may_call_only_where_that_is_set() -> None:
    asks = {"origin": "https://page.example", "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    with live({"tiny": shared_pipeline("infinity")}) as server:
        assert "access-control-allow-origin" not in server.ask(PATH, headers=asks, method="OPTIONS").headers
    with live({"tiny": shared_pipeline("infinity")}, cors_origins=("https://page.example",)) as server:
        assert server.ask(PATH, headers=asks, method="OPTIONS").headers["access-control-allow-origin"] == "https://page.example"
        other = server.ask(PATH, headers={**asks, "origin": "https://other.example"}, method="OPTIONS")
        assert "access-control-allow-origin" not in other.headers


def test_refusals_have_cors_headers_and_one_line_of_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    origin, pipe = {"origin": "https://page.example"}, Steered(shared_pipeline("infinity"))
    own = origin | {"authorization": f"Bearer {KEYS[0]}"}
    monkeypatch.setattr(compare, "MAX_OPEN", 0)
    caplog.set_level(logging.INFO, logger="nextscale.serve.security")

    def lines() -> list[tuple[str, bool]]:
        """Level, and whether there is a traceback."""
        return [(one.levelname, one.exc_info is not None) for one in caplog.records if one.name == "nextscale.serve.security"]

    with live({"tiny": pipe}, cors_origins=("https://page.example",), api_keys=KEYS) as server:
        answers = [
            server.ask(PATH, {"prompt": "a fox", "quality": "high"}, own),
            server.ask("/v1/models", headers=origin),
            server.ask(PATH, {"prompt": "a fox", "model": "x"}, own),
            server.ask(PATH, headers=own),
            server.ask(PATH, b"x" * 70_000, own),
            server.ask("/v1/models", headers=own | {"host": "evil.example"}),
            server.ask("/studio/compare", {"a": "x", "b": "x"}, own),
        ]
        pipe.fails = lambda prompts: OutOfMemory("0.10 GiB are free")
        answers.append(server.ask(PATH, {"prompt": "a fox"}, own))
        pipe.fails = lambda prompts: DeadlinePassed("too late")
        answers.append(server.ask(PATH, {"prompt": "a fox"}, own))
        assert [answer.status for answer in answers] == [400, 401, 404, 405, 413, 421, 429, 503, 504]
        assert "400, unsupported_value quality, " in caplog.text and "401, missing_api_key, " in caplog.text
        for path in ("/livez", "/readyz", "/studio/files/main.js"):
            assert server.ask(path).status == 200 and path not in caplog.text
        with socket.create_connection(("127.0.0.1", server.port)) as leaving:
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[0]}\r\nContent-Type: application/json\r\n"
            leaving.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        wait_until(lambda: " 499, " in caplog.text)  # logged when the answer is sent
        assert lines() == [("INFO", False)] * (len(answers) + 1)
        caplog.clear()
        pipe.fails = lambda prompts: KeyError("a fault of ours")
        answers.append(server.ask(PATH, {"prompt": "a fox"}, own))
        wait_until(lambda: lines() == [("ERROR", True), ("INFO", False)])
        assert answers[-1].status == 500
    assert all(answer.headers["access-control-allow-origin"] == "https://page.example" for answer in answers)
    assert all("retry-after" in answer.headers["access-control-expose-headers"] for answer in answers)


def test_a_start_is_one_line_and_lines_may_be_json() -> None:
    pipe = shared_pipeline("infinity")
    content = Content(("tiny",), (None,), lambda name, device: pipe, {}, "skip:last=1")
    service = Service(content, ServeSettings(host="::1", port=9000, root_path="/images"))
    assert service.described([{"tiny": pipe}]) == (
        "serving tiny (float32) on cpu, method skip:last=1. API: http://[::1]:9000/images/v1, studio: http://[::1]:9000/images/"
    )
    record = logging.LogRecord("x", logging.ERROR, "", 0, "%d\n", (7,), (KeyError, KeyError("gone"), None))
    record.fields = {"status": 500}
    line = JsonFormatter().format(record)
    entry = json.loads(line)
    assert (
        "\n" not in line and (entry["level"], entry["message"], entry["status"]) == ("ERROR", "7\n", 500) and "gone" in entry["traceback"]
    )


def test_a_taken_port_is_refused_before_anything_is_loaded() -> None:
    def load(name: str, device: str | None) -> Any:
        raise AssertionError("loaded")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingError, match=rf"--port {port + 1}"):
            serve(Content(("tiny",), (None,), load, {}), ServeSettings(port=port))
    with pytest.raises(SettingError, match="--host"):
        listen(ServeSettings(host="192.0.2.1"))  # an address of documentation, which no machine has


def test_a_proxy_may_publish_the_server_under_a_path() -> None:
    """The proxy may strip the path or pass it on."""
    with live({"tiny": shared_pipeline("infinity")}, root_path="/images", api_keys=KEYS) as server:
        page = server.ask("/images/")
        assert page.status == 200 and b'"/images/studio/files/main.js"' in page.body and server.ask("/").body == page.body
        for root in ("", "/images"):
            assert server.ask(f"{root}/studio/files/main.js").status == server.ask(f"{root}/livez").status == 200
            assert server.ask(f"{root}/v1/models").status == 401
            assert server.ask(f"{root}/v1/models", headers={"authorization": f"Bearer {KEYS[0]}"}).status == 200
        for path in ("/images", "/imagesv1/models", "/images/images/livez", "/images//livez", "/studio/files/../../v1/models"):
            assert server.ask(path).status in (401, 404), path
    for wrong in ("images", "/images/", "/a b", "/<x>"):
        with pytest.raises(SettingError, match="root_path"):
            ServeSettings(root_path=wrong)


def test_origins_that_no_browser_sends_are_refused() -> None:
    ServeSettings(cors_origins=("*", "null", "https://a.example", "http://localhost:3000", "http://[::1]:443", "chrome-extension://abc"))
    for wrong in (
        "https://a.example/",
        "https://A.example",
        "a.example",
        "https://a.example:443",
        "http://[::1]:80",
        "https://*.example",
        "",
    ):
        with pytest.raises(SettingError, match="cors_origins"):
            ServeSettings(cors_origins=(wrong,))


def test_the_page_may_load_only_its_own_files() -> None:
    with live({"tiny": shared_pipeline("infinity")}) as server:
        page = server.ask("/")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and page.headers["x-frame-options"] == "DENY"
        assert server.ask("/studio/files/main.js").headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("asked", [False, True])
def test_prompts_are_logged_only_where_asked(asked: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="nextscale"), live({"tiny": shared_pipeline("infinity")}, log_prompts=asked) as server:
        answer = server.generate(prompt="a private matter")
        assert answer.status == 200
        server.generate(prompt="a private matter", method="warp")
        server.generate(prompt="a private matter" * 300)
    assert answer.headers["x-request-id"] in caplog.text
    assert ("private" in caplog.text) == asked


def test_a_path_cannot_forge_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="nextscale"), live({"tiny": shared_pipeline("infinity")}) as server:
        server.ask("/x%0d%0aERROR%20forged%1b%5b2J%e2%80%a8")
    (line,) = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
    assert line.isprintable() and r"'/x\r\nERROR forged\x1b[2J\u2028'" in line


def test_limits_are_those_of_the_settings() -> None:
    limits = Limits(prompt_chars=10, images=2, pixels=100, body_bytes=200)
    with live({"tiny": shared_pipeline("infinity")}, limits=limits) as server:  # 8 x 6 pixels
        assert server.generate(prompt="a fox", n=2).status == 200
        assert server.generate(prompt="a fox", n=3).error["param"] == "n"
        assert server.generate(prompt="a long prompt").error["param"] == "prompt"
        assert server.generate(prompt="a fox", user="u" * 300).status == 413
    with live({"tiny": shared_pipeline("infinity")}, limits=Limits(pixels=50)) as server:
        refused = server.generate(prompt="a fox", n=2)
        assert refused.error["param"] == "size" and "2 image(s) of 6x8" in refused.error["message"]


def png(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def test_pictures_are_compared_and_others_refused() -> None:
    grey, light = Image.new("RGB", (32, 32), (100, 100, 100)), Image.new("RGB", (32, 32), (110, 110, 110))
    with live({"tiny": shared_pipeline("infinity")}, limits=Limits(pixels=2000)) as server:
        same = server.ask("/studio/compare", {"a": png(grey), "b": png(grey)}).json
        assert same["psnr"] == 99.0 and same["ssim"] == 1.0 and same["lpips"] == 0.0
        assert server.ask("/studio/compare", {"a": png(grey), "b": png(light)}).json["psnr"] == pytest.approx(28.13, abs=0.01)
        jpeg = io.BytesIO()
        grey.save(jpeg, "JPEG")
        for wrong in ("?", "aGVsbG8=", base64.b64encode(jpeg.getvalue()).decode(), png(Image.new("RGB", (64, 64))), png(grey)[:60]):
            assert server.ask("/studio/compare", {"a": png(grey), "b": wrong}).error["param"] == "b"
        assert server.ask("/studio/compare", {"a": png(grey), "b": png(Image.new("RGB", (16, 16)))}).status == 400


def test_settings_and_words_of_the_command_line() -> None:
    assert Warmup.parse("1024x768:1,4") == Warmup((768, 1024), (1, 4))
    for wrong in ("1024", "1024x768", "1024x768:", "1024x768:0", "1024x768:1,,2", "x:1"):
        with pytest.raises(SettingError, match="warmup"):
            Warmup.parse(wrong)
    assert parse_aliases(["gpt-image-1=nano"], ("nano",)) == {"gpt-image-1": "nano"}
    for alias in ("nano=nano", "x=y", "=nano", "x"):
        with pytest.raises(SettingError, match="alias"):
            parse_aliases([alias], ("nano",))
    for field, value in (("port", 70000), ("request_timeout", 0), ("shutdown_timeout", float("inf")), ("max_batch", 0), ("max_queue", 0.5)):
        with pytest.raises(SettingError, match=field):
            ServeSettings(**{field: value})  # type: ignore[arg-type]
