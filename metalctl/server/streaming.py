"""Answers that are sent while they come, and clients that go away."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEEP_ALIVE = 10.0  # seconds of silence after which a comment is sent
COMMENT = b": still here\n\n"
SEND_TIMEOUT = 60.0  # seconds that a client may take to read what was sent

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed the connection, or does not read any more."""


class EventStream(Response):
    """Sends pieces as they come; `silence` is sent when none comes for a while.

    When the client goes away the iterator is closed at once. `close` is awaited at the end, whatever happened.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        silence: bytes | None = COMMENT,
        media_type: str = "text/event-stream",
    ):
        super().__init__(media_type=media_type, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._pieces = pieces
        self._close = close
        self._silence = silence
        self._sent = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        relay = asyncio.ensure_future(self._relay(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            while not (relay.done() or gone.done()):
                await asyncio.wait({relay, gone}, timeout=KEEP_ALIVE, return_when=asyncio.FIRST_COMPLETED)
                if self._is_silent and not relay.done():
                    await _send(send, self._silence or b"")
            if relay.done():
                relay.result()
        except ClientGone:
            pass
        finally:
            gone.cancel()
            await _cancelled(relay)
            await self._close()

    async def _relay(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                self._sent = float("inf")  # while the client is slow to take it, there is no need of comments
                await _send(send, piece)
                self._sent = time.monotonic()
        await _send(send, b"", more=False)

    @property
    def _is_silent(self) -> bool:
        return self._silence is not None and time.monotonic() - self._sent >= KEEP_ALIVE


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. Raises ClientGone then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        await _cancelled(task)


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event with `data` as JSON."""
    text = f"data: {_line(data)}\n\n"
    return (f"event: {event}\n{text}" if event else text).encode()


def ndjson(data: Any) -> bytes:
    return f"{_line(data)}\n".encode()


def _line(data: Any) -> str:
    """JSON without anything that some client takes for the end of a line."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


async def _send(send: Send, data: bytes, more: bool = True) -> None:
    """Raises ClientGone when the client takes too long."""
    try:
        async with asyncio.timeout(SEND_TIMEOUT):
            await send({"type": "http.response.body", "body": data, "more_body": more})
    except (TimeoutError, OSError):
        raise ClientGone from None


async def _cancelled(task: "asyncio.Future[Any]") -> None:
    """Return when the task has ended, by being cancelled if need be."""
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError, ClientGone):
            await task
