"""Whether the server lives, is ready, and how it fares."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from metalctl.server.service import Service
from metalctl.version import __version__


async def health(service: Service, _request: Request) -> Response:
    """503 when a model's engine has stopped by itself: nothing will be generated until the server is started again."""
    dead = service.manager.dead
    return JSONResponse({"status": "dead" if dead else "ok"}, 503 if dead else 200)


async def ready(service: Service, _request: Request) -> Response:
    """Whether requests are taken: 503 when an engine has stopped, or a queue is full."""
    manager = service.manager
    is_ready = not manager.dead and all(model.taken < model.slots for model in manager.loaded())
    return JSONResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)


async def metrics(service: Service, _request: Request) -> Response:
    return Response(service.manager.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def version(_service: Service, _request: Request) -> Response:
    return JSONResponse({"version": __version__})
