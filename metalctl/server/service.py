"""What every route shares: the models, and the way from a task to an answer."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from metalctl.server.chat import Answer, Chat
from metalctl.server.models import ModelManager
from metalctl.server.streaming import COMMENT, EventStream, until_disconnect
from metalctl.server.task import ChatTask


@dataclass(frozen=True)
class Service:
    """Answers requests with the models of a manager."""

    manager: ModelManager

    async def chat(
        self,
        request: Request,
        model: str | None,
        task: ChatTask,
        *,
        whole: Callable[[Chat, list[Answer]], dict[str, Any]],
        pieces: Callable[[Chat], AsyncGenerator[bytes, None]] | None,
        keep_alive: float | None = None,
        silence: bytes | None = COMMENT,
        media_type: str = "text/event-stream",
    ) -> Response:
        """The answer to a chat request: as JSON by `whole`, or while it comes by `pieces`, where that is given.

        `keep_alive` is how long the model stays loaded after it, in seconds; `silence` is sent when a stream has none.
        """
        stack = AsyncExitStack()
        try:
            chat = await until_disconnect(request, Chat.open(self.manager, stack, model, task, keep_alive))
            if pieces is not None:
                return EventStream(pieces(chat), stack.pop_all().aclose, silence, media_type)
            answers = await until_disconnect(request, chat.answers())
            return JSONResponse(whole(chat, answers))
        finally:
            await stack.aclose()
