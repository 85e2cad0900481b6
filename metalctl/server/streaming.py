"""Answers that are sent while they come, and clients that go away."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

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
        pieces: AsyncIterator[bytes],
        close: Callable[[], Awaitable[None]],
        silence: bytes | None = COMMENT,
        media_type: str = "text/event-stream",
    ):
        super().__init__(media_type=media_type, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._pieces = pieces
        self._close = close
        self._silence = silence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await _send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._relay(send, gone)
            await _send(send, {"type": "http.response.body", "body": b""})
        except ClientGone:
            pass
        finally:
            gone.cancel()
            await _close(self._pieces)
            await self._close()

    async def _relay(self, send: Send, gone: "asyncio.Future[None]") -> None:
        while True:
            piece = asyncio.ensure_future(_next(self._pieces))
            try:
                while not piece.done():
                    await asyncio.wait({piece, gone}, timeout=KEEP_ALIVE, return_when=asyncio.FIRST_COMPLETED)
                    if gone.done():
                        raise ClientGone
                    if not piece.done() and self._silence is not None:
                        await _send_piece(send, self._silence)
            finally:
                if not piece.done():
                    piece.cancel()
                    with suppress(asyncio.CancelledError):
                        await piece
            data = piece.result()
            if data is None:
                return
            await _send_piece(send, data)


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
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event with `data` as JSON."""
    text = f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
    return (f"event: {event}\n{text}" if event else text).encode()


def ndjson(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


async def _next(pieces: AsyncIterator[bytes]) -> bytes | None:
    return await anext(pieces, None)


async def _close(pieces: AsyncIterator[bytes]) -> None:
    close = getattr(pieces, "aclose", None)
    if close is not None:
        await close()


async def _send_piece(send: Send, data: bytes) -> None:
    await _send(send, {"type": "http.response.body", "body": data, "more_body": True})


async def _send(send: Send, message: Message) -> None:
    try:
        await asyncio.wait_for(send(message), SEND_TIMEOUT)
    except (TimeoutError, OSError):
        raise ClientGone from None
