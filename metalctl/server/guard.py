"""What stands before every route: hosts, origins, keys, sizes, and the last word on failures."""

import hmac
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from metalctl.server.errors import ApiError, body, dialect_of, translate
from metalctl.server.ids import new_id
from metalctl.server.metrics import Metrics
from metalctl.server.streaming import ClientGone

log = logging.getLogger("metalctl.server")

OPEN_PATHS = frozenset({"/health", "/ready"})  # answered without a key: they say nothing but yes or no


@dataclass(frozen=True)
class GuardOptions:
    """`hosts`: names that the Host header may have; None: any. `origins`: web pages that may call, "*" for all."""

    api_keys: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None
    origins: frozenset[str] = frozenset()
    max_body: int = 32 << 20  # bytes

    def __post_init__(self) -> None:
        if not all(self.api_keys):
            raise ValueError("an API key must not be empty")


@dataclass
class _Exchange:
    """One request on its way: what has been sent of its answer."""

    status: int = 0
    began: float = field(default_factory=time.perf_counter)


class Guard:
    """ASGI middleware. Nothing that is raised below it reaches the server or shows more than an error's message."""

    def __init__(self, app: ASGIApp, options: GuardOptions, metrics: Metrics):
        self._app = app
        self._options = options
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange()
        name = new_id("req_")
        headers = Headers(scope=scope)
        origin = self._allowed_origin(headers)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                for header in ("x-request-id", "request-id"):  # as OpenAI's and Anthropic's clients look for it
                    MutableHeaders(scope=message)[header] = name
                if origin:
                    MutableHeaders(scope=message).append("access-control-allow-origin", origin)
                    MutableHeaders(scope=message).append("vary", "Origin")
            await send(message)

        await self._answer(scope, receive, noting, headers, exchange)
        seconds = time.perf_counter() - exchange.began
        self._metrics.request(scope, exchange.status, seconds)
        path = _printable(scope["path"])
        log.info("%s %s %s %d %.3f s", name, scope["method"], path, exchange.status, seconds)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, headers: Headers, exchange: _Exchange) -> None:
        try:
            self._check_host(headers)
            if scope["method"] == "OPTIONS" and self._allowed_origin(headers):
                await _preflight(headers)(scope, receive, send)
                return
            if scope["path"] not in OPEN_PATHS:
                self._check_key(headers)
            await self._app(scope, self._limited(headers, receive), send)
        except ClientGone:
            exchange.status = exchange.status or 499
        except Exception as error:  # noqa: BLE001  the boundary: every failure becomes an answer here
            failure = translate(error)
            if exchange.status == 0:
                await error_response(failure, scope["path"])(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        """A web page that has its own name point here sends that name: it must not read from this server."""
        allowed = self._options.hosts
        if allowed is not None and _host_name(headers.get("host", "")) not in allowed:
            raise ApiError(403, "this server does not answer to that host name; see --allowed-host.", code="host")

    def _allowed_origin(self, headers: Headers) -> str | None:
        origin = headers.get("origin")
        return origin if origin and ("*" in self._options.origins or origin in self._options.origins) else None

    def _check_key(self, headers: Headers) -> None:
        if not self._options.api_keys:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not _is_one_of(given, self._options.api_keys):
            message = "the API key is wrong." if given else "an API key is needed: Authorization: Bearer KEY."
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _limited(self, headers: Headers, receive: Receive) -> Receive:
        """`receive`, with an end to the body after so many bytes."""
        limit = self._options.max_body
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise _too_large(limit)
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _too_large(limit)
            return message

        return limited


def error_response(error: ApiError, path: str) -> Response:
    return JSONResponse(body(error, dialect_of(path)), error.status, headers=dict(error.headers))


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes.", code="request_too_large")


def _is_one_of(given: str, keys: Iterable[str]) -> bool:
    """Compared in a time that tells nothing; all of them, so that it does not tell which either."""
    found = False
    for key in keys:
        found |= hmac.compare_digest(given.encode(), key.encode())
    return found


def _host_name(host: str) -> str:
    """The Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _preflight(headers: Headers) -> Response:
    asked = headers.get("access-control-request-headers", "")
    allow = {"access-control-allow-methods": "GET, POST, HEAD, DELETE", "access-control-max-age": "600"}
    return Response(status_code=204, headers=allow | ({"access-control-allow-headers": asked} if asked else {}))


def _printable(path: str) -> str:
    return path[:200].encode("unicode_escape").decode()
