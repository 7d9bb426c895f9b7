"""A small hub on loopback: lists repositories, serves files with ranges and redirects as the real one does, and can misbehave."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".pth", ".bin", ".safetensors", ".model")  # stored outside git and served from another address


@dataclass
class Request:
    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class Hub:
    """Repositories with their files, recorded requests, and simulated failures."""

    repositories: dict[str, dict[str, bytes]]
    endpoint: str = ""
    requests: list[Request] = field(default_factory=list)
    token: str | None = None  # that a client has to send
    cuts: list[int] = field(default_factory=list)  # bytes of a large file after which the connection breaks, one for each request
    served_instead: dict[str, bytes] = field(default_factory=dict)  # content that differs from the announced hash
    listed: dict[str, object] = field(default_factory=dict)  # other values in the entry of each file
    headers: dict[str, str] = field(default_factory=dict)  # other values of those that it sends
    commit: str = COMMIT

    def fetched(self) -> list[str]:
        """Names of the files that were requested from the beginning."""
        asked = [unquote(one.path) for one in self.requests if one.method == "GET" and one.range is None]
        large = [path.split("/", 4)[4] for path in asked if path.startswith("/blobs/")]
        return large + [path.partition(f"/resolve/{COMMIT}/")[2] for path in asked if "/resolve/" in path]

    def ranges(self) -> list[str | None]:
        return [one.range for one in self.requests if one.method == "GET" and one.path.startswith("/blobs/")]


def etag(name: str, content: bytes) -> str:
    if name.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def send_header(self, keyword: str, value: str) -> None:
        super().send_header(keyword, self.hub.headers.get(keyword, value))

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        sent = self.headers.get("authorization")
        self.hub.requests.append(Request(self.command, self.path, self.headers.get("range"), sent))
        if self.hub.token is not None and sent != f"Bearer {self.hub.token}" and not path.startswith("/blobs/"):
            return self.refuse(401, "")
        if path.startswith("/api/models/"):
            return self.list_files(path.removeprefix("/api/models/").partition("/revision/")[0])
        if path.startswith("/blobs/"):
            return self.send_content(path.removeprefix("/blobs/"))
        repository, _, rest = path.removeprefix("/").partition("/resolve/")
        return self.resolve(repository, rest.partition("/")[2])

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def list_files(self, repository: str) -> None:
        files = self.hub.repositories.get(repository)
        if files is None:
            return self.refuse(404, "RepoNotFound")
        siblings = [self.entry(name, content) for name, content in files.items()]
        body = json.dumps({"id": repository, "sha": self.hub.commit, "siblings": siblings, "tags": [], "private": False}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def entry(self, name: str, content: bytes) -> dict[str, object]:
        entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": etag(name, content)}
        if name.endswith(LARGE):
            entry["blobId"] = "f" * 40
            entry["lfs"] = {"size": len(content), "sha256": etag(name, content), "pointerSize": 134}
        return entry | self.hub.listed

    def resolve(self, repository: str, name: str) -> None:
        files = self.hub.repositories.get(repository, {})
        if name not in files:
            return self.refuse(404, "EntryNotFound")
        content = files[name]
        if not name.endswith(LARGE):
            return self.send_bytes(name, self.hub.served_instead.get(name, content), etag(name, content))
        self.send_response(302)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("X-Linked-Etag", f'"{etag(name, content)}"')
        self.send_header("Location", f"{self.hub.endpoint}/blobs/{repository}/{name}")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    def send_content(self, path: str) -> None:
        repository = next(name for name in self.hub.repositories if path.startswith(f"{name}/"))
        name = path.removeprefix(f"{repository}/")
        content = self.hub.served_instead.get(name, self.hub.repositories[repository][name])
        self.send_bytes(name, content, etag(name, content), can_break=True)

    def send_bytes(self, name: str, content: bytes, tag: str, can_break: bool = False) -> None:
        asked = self.headers.get("range")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        body = content[start:]
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", f'"{tag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if can_break and self.hub.cuts:
            self.wfile.write(body[: self.hub.cuts.pop(0)])
            self.close_connection = True
            return
        self.wfile.write(body)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    handler = type("OwnHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
