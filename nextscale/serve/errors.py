"""Error objects of OpenAI's API, and the mapping from exceptions to them."""

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ..errors import (
    DeadlinePassed,
    JobCancelled,
    NextscaleError,
    NonFiniteLogits,
    OutOfMemory,
    Overloaded,
    PromptError,
    ShuttingDown,
    SizeError,
    TextEncoderUnavailable,
    UnknownModel,
)
from .schema import ImageRequest

FEWER_STAGES = "The size sets the number of stages; the method 'skip:last=2' runs fewer."
OTHER_NAMES = {"cfg": "guidance_scale", "cfg_scale": "guidance_scale", "num_images": "n", "num_images_per_prompt": "n"}  # of fields
NO_RETRY = {"x-should-retry": "false"}
LOADING_SECONDS = 2.0
KINDS = {401: "authentication_error", 429: "rate_limit_error"}  # others are invalid_request_error or, from 499 on, server_error


class ApiError(Exception):
    """Error answer."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        kind = KINDS.get(status, "server_error" if status >= 499 else "invalid_request_error")
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        named = param is not None and len(param) < 40 and param.isidentifier()
        self.reason = f"{code or kind} {param}" if named else code or kind  # of the log, since messages may quote prompts

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=dict(self.headers or {}))


def refused(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """Returns the error of a field."""
    return ApiError(400, message, code, param)


def retry_later(status: int, message: str, code: str, seconds: float = LOADING_SECONDS) -> ApiError:
    headers = {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(1000 * seconds))}
    return ApiError(status, message, code, headers=headers)


def as_api_error(error: Exception, param: str | None = None) -> ApiError:
    """Returns the answer to an exception, without details of internal errors. param: the field that an error of settings is about."""
    text = str(error)
    match error:
        case ApiError():
            return error
        case ValidationError():
            return invalid_body(error)
        case HTTPException():  # unknown paths and methods
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
            return ApiError(error.status_code, str(error.detail), code, headers=error.headers)
        case Overloaded():
            return retry_later(429, text, "queue_full", error.retry_after)
        case ShuttingDown():
            return retry_later(503, text, "shutting_down")
        case UnknownModel():
            return ApiError(404, text, "model_not_found", "model")
        case PromptError():
            return refused(param or "prompt", text)
        case SizeError():
            return refused(param or "size", text)
        case OutOfMemory():
            return ApiError(503, text, "out_of_memory", headers=NO_RETRY)
        case DeadlinePassed():
            return ApiError(504, text, "timeout", headers=NO_RETRY)
        case JobCancelled():
            return ApiError(499, text, "cancelled")
        case NonFiniteLogits() | TextEncoderUnavailable():
            return ApiError(500, "the model could not generate this; the server's log has the reason", "model_failed", headers=NO_RETRY)
        case NextscaleError():
            return ApiError(400, text, "invalid_value", param)
    return ApiError(500, "the server failed on this request; its log has the reason", "internal_error")


def invalid_body(error: ValidationError) -> ApiError:
    """Returns the first error of a body."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = str(found["loc"][0]) if found["loc"] else None
    match found["type"]:
        case "missing":
            return refused(param or "prompt", f"{param} is required", "missing_required_parameter")
        case "extra_forbidden":
            return refused(param or "body", f"unknown field {str(param)[:80]!r}. {advice(str(param))}", "unknown_parameter")
        case "json_invalid":
            return ApiError(400, f"the body is not valid JSON: {found['msg'].removeprefix('Invalid JSON: ')}", "invalid_json")
    return ApiError(400, f"{param or 'body'} {re.sub('^(Input|String|List) should', 'must', found['msg'])}", "invalid_value", param)


def advice(field: str) -> str:
    """Returns the remedy for an unknown field of a body."""
    if "steps" in field:
        return FEWER_STAGES
    close = [OTHER_NAMES[field]] if field in OTHER_NAMES else get_close_matches(field, ImageRequest.model_fields, 1)
    return f"Did you mean {close[0]!r}?" if close else "Leave it out."
