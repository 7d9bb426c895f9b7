"""Routes of the server."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles

from ..errors import NextscaleError
from ..methods.auto import Auto, fitting_profile
from ..methods.registry import standard_methods
from ..stage import Schedule
from .catalogue import Catalogue, Served, parse_method, text_of
from .compare import Comparer
from .edits import Editor
from .errors import ApiError, as_api_error
from .generations import generate
from .metrics import EDITS, GENERATIONS
from .schema import MAX_PARTIALS, EditRequest, ImageRequest, openapi_body, openapi_form
from .security import COMPARE_PATH, OPEN_FOLDER, Gate, content_security
from .service import Service

STUDIO = Path(__file__).parent / "studio"
AUTO_POINTS = {"auto:lpips=0.05": Auto(lpips=0.05), "auto:speedup=2": Auto(speedup=2), "auto:speedup=3": Auto(speedup=3)}  # of the studio


def create_app(service: Service) -> FastAPI:
    metrics, settings, content = service.metrics, service.settings, service.content
    app = FastAPI(title="nextscale", version="1", docs_url=None, redoc_url=None)
    comparer, editor = Comparer(settings.limits), Editor(service)
    names = [*content.models, *content.aliases]
    page = (STUDIO / "index.html").read_text(encoding="utf-8").replace('"/studio/', f'"{settings.root_path}/studio/')
    policy = content_security(page)

    app.add_middleware(Gate, settings=settings, metrics=metrics)
    if settings.cors_origins:  # outside the gate, so that pages can also read refusals
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
            expose_headers=["x-request-id", "retry-after", "retry-after-ms", "x-should-retry"],
        )

    def card(name: str) -> dict[str, Any]:
        known = {"id": name, "object": "model", "created": service.started, "owned_by": "nextscale"}
        adapters = [] if service.catalogue is None else [*service.catalogue.find(name).pipeline.loras.offered]
        return known | ({"adapters": adapters} if adapters else {})

    @app.post(GENERATIONS, openapi_extra=openapi_body(ImageRequest))
    async def generations(request: Request) -> Response:
        """Generates images from a prompt."""
        return await generate(request, service)

    @app.post(EDITS, openapi_extra=openapi_form(EditRequest, "image", "mask", "mask_image"))
    async def edits(request: Request) -> Response:
        """Changes an image."""
        return await editor.answer(request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name not in names:
            raise ApiError(404, f"model must be one of {', '.join(names)}; got {name[:80]!r}", "model_not_found", "model")
        return card(name)

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

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def studio() -> HTMLResponse:
        return HTMLResponse(page, headers={"content-security-policy": policy})

    @app.get("/studio/options", include_in_schema=False)
    async def options() -> dict[str, Any]:
        return await run_in_threadpool(studio_options, service.require_catalogue())

    @app.post(COMPARE_PATH, include_in_schema=False)
    async def compare(request: Request) -> dict[str, Any]:
        return await comparer.answer(request)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        asked = f"{request.method} {request.url.path[:80]!r}"
        if error.status_code == 404:
            listed = [route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema and "{" not in route.path]
            error.detail = f"{asked} does not exist. This server has {', '.join(f'{min(one.methods or ())} {one.path}' for one in listed)}."
        elif error.status_code == 405:
            error.detail = f"{asked} is not allowed. Use {(error.headers or {}).get('Allow', 'another method')}."
        raise as_api_error(error)  # for the log line of the gate

    app.mount(OPEN_FOLDER.rstrip("/"), StaticFiles(directory=STUDIO), name="studio")
    app.add_exception_handler(HTTPException, http_error)
    return app


def studio_options(catalogue: Catalogue) -> dict[str, Any]:
    """Returns the models with their sizes, stages and methods, and the limits."""
    return {
        "models": [studio_model(served) for served in catalogue.models.values()],
        "method": catalogue.method,
        "most_images": catalogue.limits.images,
        "most_partials": MAX_PARTIALS,
    }


def studio_model(served: Served) -> dict[str, Any]:
    book = served.pipeline.settings.schedules
    schedules = {served.pixels(schedule): schedule for schedule in (book.choose(size, None) for size in book.offers())}
    sizes = sorted(schedules, key=lambda size: (size[0] * size[1], size))
    by_stages = {len(schedule): schedule for schedule in [*schedules.values(), served.default]}
    return {
        "id": served.name,
        "classes": served.classes,
        "adapters": [*served.pipeline.loras.offered],
        "size": text_of(served.pixels(served.default)),
        "stages": len(served.default),
        "sizes": [{"size": text_of(size), "stages": len(schedules[size])} for size in sizes],
        "methods": {stages: named_methods(served, schedule) for stages, schedule in by_stages.items()},
        "points": {stages: measured_points(served, schedule) for stages, schedule in by_stages.items()},
    }


def named_methods(served: Served, schedule: Schedule) -> dict[str, str]:
    """Returns the standard methods that fit the model at a number of stages."""
    guided = served.guided(schedule)
    found = {"dense": "dense"}
    for name, text in standard_methods(len(schedule)).items():
        with suppress(ApiError):
            served.plans(parse_method(text), schedule, guided, "method")
            found[name] = text
    return found


def measured_points(served: Served, schedule: Schedule) -> dict[str, dict[str, Any]]:
    """Returns the measurements of the points of auto that a profile of the model has at a number of stages."""
    found = {}
    for text, method in AUTO_POINTS.items():
        with suppress(NextscaleError):
            profile = fitting_profile(served.pipeline.situation(schedule))
            point = method.point_of(profile)
            found[text] = {"speedup": point.speedup.value, "lpips": point.lpips.value, "profile": f"Profile of {profile.described}"}
    return found
