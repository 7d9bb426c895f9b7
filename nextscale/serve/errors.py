"""The error object that clients expect, and which of our errors becomes what."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from ..errors import (
    DeadlinePassed,
    JobCancelled,
    NextscaleError,
    NonFiniteLogits,
    OutOfMemory,
    Overloaded,
    PromptError,
    SettingError,
    ShuttingDown,
    SizeError,
    TextEncoderUnavailable,
    UnknownModel,
)

NO_RETRY = {"x-should-retry": "false"}
LOADING_SECONDS = 2.0


class ApiError(Exception):
    """An answer that is no image."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code, self.headers = status, message, kind, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=dict(self.headers or {}))


def refused(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A field that cannot be honoured."""
    return ApiError(400, message, param=param, code=code)


def retry_later(seconds: float) -> dict[str, str]:
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(1000 * seconds))}


def loading() -> ApiError:
    headers = retry_later(LOADING_SECONDS)
    return ApiError(503, "the models are being loaded: try again soon", kind="server_error", code="loading", headers=headers)


def as_api_error(error: Exception, param: str | None = None) -> ApiError:
    """`param`: the field that an error of settings is about. What is nobody's fault but ours says nothing of its inside."""
    match error:
        case ApiError():
            return error
        case Overloaded():
            headers = retry_later(error.retry_after)
            return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers=headers)
        case ShuttingDown():
            return ApiError(503, str(error), kind="server_error", code="shutting_down", headers=retry_later(LOADING_SECONDS))
        case UnknownModel():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case PromptError():
            return refused(param or "prompt", str(error))
        case SizeError():
            return refused(param or "size", str(error))
        case OutOfMemory():
            return ApiError(503, str(error), kind="server_error", code="out_of_memory", headers=NO_RETRY)
        case DeadlinePassed():
            return ApiError(504, str(error), kind="server_error", code="timeout", headers=NO_RETRY)
        case JobCancelled():
            return ApiError(499, "the client has left", kind="server_error", code="cancelled")
        case NonFiniteLogits() | TextEncoderUnavailable():
            message = "the model could not generate this: the server's log has the reason"
            return ApiError(500, message, kind="server_error", code="model_failed", headers=NO_RETRY)
        case SettingError() | NextscaleError():
            return ApiError(400, str(error), param=param, code="invalid_value")
    return ApiError(500, "the server failed on this request: its log has the reason", kind="server_error", code="internal_error")


def invalid_body(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(str(part) for part in found["loc"][:1]) or None
    match found["type"]:
        case "missing":
            return refused(param or "prompt", f"{param} is missing: it is needed", "missing_required_parameter")
        case "extra_forbidden":
            return refused(param or "body", f"{str(param)[:80]!r} is no field of this endpoint: leave it out", "unknown_parameter")
        case "json_invalid":
            return ApiError(400, f"the body is no JSON: {found['msg']}", code="invalid_json")
    return ApiError(400, f"{param or 'body'}: {found['msg']}", param=param, code="invalid_value")
