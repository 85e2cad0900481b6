"""GET /api/tags, /api/ps and /api/version; POST /api/show"""

import hashlib
import math
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from metalctl.server.body import read
from metalctl.server.models import ModelManager, ModelSpec, ServedModel
from metalctl.server.ollama.types import ShowRequest
from metalctl.server.service import Service
from metalctl.version import __version__


async def tags(service: Service, _request: Request) -> Response:
    return JSONResponse({"models": [_model(service.manager, spec) for spec in service.manager.specs]})


async def running(service: Service, _request: Request) -> Response:
    manager = service.manager
    models = []
    for model in manager.loaded():
        record = _model(manager, manager.find(model.name))
        expiry = {"expires_at": _expiry(manager.expires_in(model.name)), "size_vram": record["size"]}
        models.append({**record, **expiry, "context_length": model.context_length})
    return JSONResponse({"models": models})


async def show(service: Service, request: Request) -> Response:
    asked = await read(request, ShowRequest)
    spec = service.manager.find(asked.model or asked.name)
    model = _loaded(service.manager, spec.name)
    template = "" if model is None else model.tokenizer.chat_templates.sources.get("default", "")
    return JSONResponse(
        {
            "modelfile": f"FROM {spec.name}\n",
            "parameters": "",
            "template": template,
            "details": _details(spec, model),
            "model_info": {"general.architecture": "unknown"} if model is None else _info(model),
            "capabilities": ["completion", "tools", *_thinking(model)],
            "modified_at": _time(spec.created),
        }
    )


async def version(_service: Service, _request: Request) -> Response:
    return JSONResponse({"version": __version__})


async def root(_service: Service, _request: Request) -> Response:
    return PlainTextResponse("metalctl is running")


def _model(manager: ModelManager, spec: ModelSpec) -> dict[str, Any]:
    model = _loaded(manager, spec.name)
    return {
        "name": spec.name,
        "model": spec.name,
        "modified_at": _time(spec.created),
        "size": model.size if model else spec.size,
        "digest": hashlib.sha256(spec.reference.encode()).hexdigest(),
        "details": _details(spec, model),
    }


def _loaded(manager: ModelManager, name: str) -> ServedModel | None:
    return next((model for model in manager.loaded() if model.name == name), None)


def _details(spec: ModelSpec, model: ServedModel | None) -> dict[str, Any]:
    family = "" if model is None else _family(model)
    families = [family] if family else []
    known = {"parent_model": "", "format": spec.format or "", "family": family, "families": families}
    return {**known, "parameter_size": "", "quantization_level": ""}


def _info(model: ServedModel) -> dict[str, Any]:
    family = _family(model)
    return {"general.architecture": family, f"{family}.context_length": model.context_length}


def _family(model: ServedModel) -> str:
    return str(model.thread.engine.loaded.config.get("model_type") or "unknown")


def _thinking(model: ServedModel | None) -> list[str]:
    return ["thinking"] if model is not None and model.format.can_switch_reasoning else []


def _expiry(seconds: float) -> str:
    """When the model goes; a day far off when it stays."""
    if math.isinf(seconds):
        return "9999-12-31T23:59:59Z"
    return _iso(datetime.now(UTC) + timedelta(seconds=max(0.0, seconds)))


def _time(unix: int) -> str:
    return _iso(datetime.fromtimestamp(unix, UTC))


def _iso(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
