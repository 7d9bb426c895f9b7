"""The routes of the server."""

from __future__ import annotations

import base64
import hashlib
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from ..guidance import ResolvedGuidance
from ..methods.registry import standard_methods
from ..stage import Schedule
from .catalogue import Catalogue, Served, fitting, parsed_method
from .compare import Comparer
from .errors import ApiError
from .generations import generate
from .metrics import GENERATIONS
from .schema import MOST_PARTIALS, ImageRequest, openapi_body
from .security import COMPARE_PATH, OPEN_FOLDER, Gate, content_security
from .service import Service

STUDIO = Path(__file__).parent / "studio"


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="nextscale", version="1", docs_url=None, redoc_url=None)
    metrics, settings = service.metrics, service.settings
    comparer = Comparer(settings.limits)
    page = (STUDIO / "index.html").read_text(encoding="utf-8")
    policy = content_security({"inline": digest_of_inline_script(page)})

    app.add_middleware(Gate, settings=settings, watcher=metrics)
    if settings.cors_origins:  # outside of the gate, so that pages can read its refusals too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
            expose_headers=["x-request-id", "retry-after", "retry-after-ms", "x-should-retry"],
        )

    @app.post(GENERATIONS, openapi_extra=openapi_body(ImageRequest))
    async def generations(request: Request) -> Response:
        """Generates images from a prompt."""
        return await generate(request, service)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card(service, name) for name in model_names(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name not in model_names(service):
            raise ApiError(404, f"no model {name[:80]!r} is served", param="model", code="model_not_found")
        return model_card(service, name)

    @app.head("/livez", include_in_schema=False)
    @app.get("/livez")
    async def livez() -> JSONResponse:
        return JSONResponse({"state": service.state}, 503 if service.state == "failed" else 200)

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        return JSONResponse({"state": service.state}, 200 if service.state == "ready" else 503)

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(await run_in_threadpool(metrics.text), media_type="text/plain; version=0.0.4")

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def studio() -> HTMLResponse:
        return HTMLResponse(page, headers={"content-security-policy": policy})

    @app.get("/studio/options", include_in_schema=False)
    async def options() -> dict[str, Any]:
        return await run_in_threadpool(studio_options, service.require_catalogue())

    @app.post(COMPARE_PATH, include_in_schema=False)
    async def compare(request: Request) -> dict[str, Any]:
        return await comparer.answer(request)

    app.mount(OPEN_FOLDER.rstrip("/"), StaticFiles(directory=STUDIO), name="studio")
    app.add_exception_handler(HTTPException, http_error)
    return app


async def http_error(request: Request, error: Exception) -> Response:
    """What the framework refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers).response


def model_names(service: Service) -> list[str]:
    return [*service.content.models, *service.content.aliases]


def model_card(service: Service, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": service.started, "owned_by": "nextscale"}


def studio_options(catalogue: Catalogue) -> dict[str, Any]:
    """What the page offers: models with their sizes and stages, methods that fit, and limits."""
    return {
        "models": [studio_model(served) for served in catalogue.models.values()],
        "method": catalogue.method,
        "most_images": catalogue.limits.images,
        "most_partials": MOST_PARTIALS,
    }


def studio_model(served: Served) -> dict[str, Any]:
    book = served.pipeline.settings.schedules
    schedules = {served.pixels(schedule): schedule for schedule in (book.choose(size, None) for size in book.offers())}
    sizes = sorted(schedules, key=lambda size: (size[0] * size[1], size))
    by_stages = {len(schedule): schedule for schedule in [*schedules.values(), served.default]}
    height, width = served.pixels(served.default)
    return {
        "id": served.name,
        "classes": served.classes,
        "size": f"{width}x{height}",
        "stages": len(served.default),
        "sizes": [{"size": f"{width}x{height}", "stages": len(schedules[height, width])} for height, width in sizes],
        "methods": {stages: named_methods(served, schedule) for stages, schedule in by_stages.items()},
    }


def named_methods(served: Served, schedule: Schedule) -> dict[str, str]:
    """Those of `nextscale quality` that fit the model with so many stages."""
    guided = ResolvedGuidance(served.pipeline.settings.guidance, schedule, len(served.pipeline.model.blocks))
    found = {"dense": "dense"}
    for name, text in standard_methods(len(schedule)).items():
        with suppress(ApiError):
            fitting(served, parsed_method(text), schedule, guided, "method")
            found[name] = text
    return found


def digest_of_inline_script(page: str) -> str:
    """Of the import map, the one script inside the page."""
    found = re.search(r"<script type=\"importmap\">(.*?)</script>", page, re.DOTALL)
    assert found is not None
    return base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
