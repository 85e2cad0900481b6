"""What every route shares: the models, and the way from a task to an answer."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from metalctl.server.chat import Answer, Chat, ChatTask
from metalctl.server.models import ModelManager
from metalctl.server.streaming import EventStream, until_disconnect


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
        pieces: Callable[[Chat], AsyncIterator[bytes]] | None,
        keep_alive: float | None = None,
        **stream: Any,
    ) -> Response:
        """The answer to a chat request: as JSON by `whole`, or while it comes by `pieces`, where that is given."""
        stack = AsyncExitStack()
        try:
            chat = await until_disconnect(request, Chat.open(self.manager, stack, model, task, keep_alive))
            if pieces is not None:
                return EventStream(pieces(chat), stack.pop_all().aclose, **stream)
            answers = await until_disconnect(request, chat.answers())
            return JSONResponse(whole(chat, answers))
        finally:
            await stack.aclose()
