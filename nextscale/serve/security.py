"""Checks before every request: host name, API key and body size."""

import base64
import hashlib
import hmac
import logging
import re
import secrets
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, as_api_error
from .metrics import EDITS, ServeMetrics
from .settings import ServeSettings, host_of

log = logging.getLogger(__name__)

HEALTH = ("/livez", "/readyz")
OPEN_PATHS = ("/", "/openapi.json", *HEALTH)
OPEN_FOLDER = "/studio/files/"  # of the page, whose requests need a key
COMPARE_PATH = "/studio/compare"
WRONG_KEY = ("the API key was not accepted", "invalid_api_key")
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
}


class Keys:
    """Digests of API keys, compared in constant time."""

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
    """Middleware that checks and logs requests, adds an id to answers and turns exceptions into error objects."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: ServeMetrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._keys = Keys(settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, begun, status, reason = f"req_{secrets.token_hex(12)}", time.monotonic(), 0, ""
        root, path = self._settings.root_path, scope["path"]
        path = path.removeprefix(root) if path.startswith(f"{root}/") else path  # proxies may strip the root path or pass it on
        scope = {**scope, "root_path": root, "path": root + path}
        scope.setdefault("state", {})["request_id"] = request_id

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = {"x-request-id": request_id, **HEADERS}
                message["headers"] = [*message.get("headers", ()), *((name.encode(), value.encode()) for name, value in extra.items())]
            await send(message)

        self._metrics.request_began(path)
        try:
            self._check(scope["method"], path, Headers(scope=scope))
            await self._app(scope, self._limited(path, receive), answer)
        except Exception as error:
            found = as_api_error(error)
            if found.status == 500:
                log.error("%s failed", request_id, exc_info=error, extra={"fields": {"request_id": request_id}})
            reason = found.reason
            if status:  # the answer has begun: only the connection can be ended
                raise
            await found.response(scope, receive, answer)
        finally:
            seconds = time.monotonic() - begun
            if status >= 400 or not (path in HEALTH or path.startswith(OPEN_FOLDER)):
                names = ("request_id", "method", "path", "status", "reason", "ms")
                fields = dict(zip(names, (request_id, scope["method"], scope["path"], status, reason, round(1000 * seconds)), strict=True))
                text = "%(request_id)s %(method)s %(path)r %(status)d" + ", %(reason)s" * bool(reason) + ", %(ms)d ms"
                log.info(text, fields, extra={"fields": fields})
            self._metrics.request_ended(path, status, seconds)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        """Raises ApiError for a refused request. path: from the scope, since request.url may be built from the Host header."""
        names = self._settings.host_names
        if names is not None and host_of(headers.get("host", "")) not in names:
            raise ApiError(421, "unknown host name. Use localhost, or start the server with --allow-host NAME.", "wrong_host")
        is_open = path in OPEN_PATHS or path.startswith(OPEN_FOLDER) or method == "OPTIONS"
        if not is_open and not self._keys.allow(headers.get("authorization")):
            sent, code = ("no API key was sent", "missing_api_key") if "authorization" not in headers else WRONG_KEY
            message = f"{sent}. Send the header `Authorization: Bearer KEY` with a key of this server."
            raise ApiError(401, message, code, headers={"www-authenticate": "Bearer"})
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._most_bytes(path):
            raise self._too_large(path)

    def _most_bytes(self, path: str) -> int:
        limits = self._settings.limits
        return {COMPARE_PATH: limits.compared_bytes, EDITS: limits.edit_bytes}.get(path, limits.body_bytes)

    def _too_large(self, path: str) -> ApiError:
        return ApiError(413, f"the body must have at most {self._most_bytes(path)} bytes", "body_too_large")

    def _limited(self, path: str, receive: Receive) -> Receive:
        """Limits bodies that are sent without a length."""
        received, most = 0, self._most_bytes(path)

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise self._too_large(path)
            return message

        return counted


def content_security(page: str) -> str:
    """Returns the policy of the studio's page, which allows its own files, its import map and data URLs of images."""
    found = re.search(r"<script type=\"importmap\">(.*?)</script>", page, re.DOTALL)
    assert found is not None
    digest = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
