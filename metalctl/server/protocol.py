"""How the server speaks HTTP: what uvicorn is told, and an end to connections that never finish a request."""

import asyncio
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_TIMEOUT = 30.0  # seconds until the head of a request must be whole
BACKLOG = 1024  # connections that may wait to be accepted

# Seconds that a connection may be idle between two requests. A client must give one up before the server does, or it
# sends a request into a connection that is closing; the pools of common clients keep theirs for 5 to 60 seconds.
_IDLE_CONNECTION = 75


def uvicorn_config(app: Starlette, drain_timeout: float = 30.0, **options: Any) -> uvicorn.Config:
    """uvicorn's settings for `app`, which has `drain_timeout` seconds to end its answers when the server stops."""
    return uvicorn.Config(
        app,
        http=ImpatientProtocol,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        backlog=BACKLOG,
        timeout_keep_alive=_IDLE_CONNECTION,
        timeout_graceful_shutdown=max(1, round(drain_timeout)),
        **options,
    )


class ImpatientProtocol(H11Protocol):
    """HTTP as uvicorn has it, with an end to waiting for a request; uvicorn itself waits only between two."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_TIMEOUT, self._give_up)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()
