"""What stands before every request: who asks, under which name, and how much is sent."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, as_api_error
from .settings import ServeSettings, host_of

log = logging.getLogger(__name__)

OPEN_PATHS = ("/", "/livez", "/readyz", "/openapi.json")
OPEN_FOLDER = "/studio/files/"  # the page itself; what it asks for needs a key
COMPARE_PATH = "/studio/compare"
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
}


class Watcher(Protocol):
    """Whoever counts requests."""

    def request_began(self, path: str) -> None: ...

    def request_ended(self, path: str, status: int, seconds: float) -> None: ...


class Keys:
    """API keys, of which only digests are kept. All of them are compared, each in constant time."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def allow(self, authorization: str | None) -> bool:
        if not self._digests:
            return True
        scheme, _, given = (authorization or "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


class Gate:
    """Gives every answer an id, makes errors the error object and checks what needs no route. Only preflight requests do not come by."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, watcher: Watcher) -> None:
        self._app, self._settings, self._watcher = app, settings, watcher
        self._keys = Keys(settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, begun, status = f"req_{secrets.token_hex(12)}", time.monotonic(), 0
        scope.setdefault("state", {})["request_id"] = request_id

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = {"x-request-id": request_id, **HEADERS}
                message["headers"] = [*message.get("headers", ()), *((name.encode(), value.encode()) for name, value in extra.items())]
            await send(message)

        self._watcher.request_began(scope["path"])
        try:
            self._check(scope["method"], scope["path"], Headers(scope=scope))
            await self._app(scope, self._limited(scope, receive), answer)
        except Exception as error:
            found = as_api_error(error)
            if found.status == 500:
                log.error("%s failed", request_id, exc_info=error)
            if status:  # the answer has begun: all that is left is to end the connection
                raise
            await found.response(scope, receive, answer)
        finally:
            seconds = time.monotonic() - begun
            log.info("%s %s %r %d %.0f ms", request_id, scope["method"], scope["path"], status, 1000 * seconds)
            self._watcher.request_ended(scope["path"], status, seconds)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        """Raises ApiError for a refused request. `path` is that of the scope: request.url may be built from the Host header."""
        names = self._settings.host_names
        if names is not None and host_of(headers.get("host", "")) not in names:
            raise ApiError(421, "this server does not go by that name: use localhost, or start it with --allow-host", code="wrong_host")
        is_open = path in OPEN_PATHS or path.startswith(OPEN_FOLDER) or method == "OPTIONS"
        if not is_open and not self._keys.allow(headers.get("authorization")):
            message = "this server needs an API key: send the header Authorization: Bearer KEY with one that it knows"
            raise ApiError(401, message, kind="authentication_error", code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._most_bytes(path):
            raise self._too_large(path)

    def _most_bytes(self, path: str) -> int:
        limits = self._settings.limits
        return limits.compared_bytes if path == COMPARE_PATH else limits.body_bytes

    def _too_large(self, path: str) -> ApiError:
        return ApiError(413, f"the body is larger than the {self._most_bytes(path)} bytes that are read here", code="body_too_large")

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """Counts what comes without a length."""
        received, most = 0, self._most_bytes(scope["path"])

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise self._too_large(scope["path"])
            return message

        return counted


def content_security(page: Mapping[str, str]) -> str:
    """What the studio's page may load: its own files, and pictures that it was sent. `page`: hashes of inline scripts."""
    scripts = " ".join(["'self'", *(f"'sha256-{digest}'" for digest in page.values())])
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'self'; img-src 'self' data: blob:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
