"""A conversation that is being continued: the answers of all choices, piece by piece."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Literal

from metalctl.engine.sequence import FinishReason, RequestOutput, TokenLogprobs, Usage
from metalctl.server.chat_format.pieces import Call, Piece, Words
from metalctl.server.generation import Generation
from metalctl.server.models import ModelManager, ServedModel
from metalctl.server.prepare import Prepared, parser_of, prepare, prompts_of
from metalctl.server.task import ChatTask


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one of the answers, with the log-probabilities of the tokens that came since the last."""

    choice: int
    piece: Piece | None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """One of the answers is complete."""

    choice: int
    reason: Literal["stop", "length", "tool_calls"]
    stop_string: str | None
    usage: Usage


@dataclass
class Answer:
    """One answer as a whole."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: End | None = None

    def add(self, event: Delta | End) -> None:
        if isinstance(event, End):
            self.end = event
            return
        self.logprobs += event.logprobs
        match event.piece:
            case Call():
                self.calls.append(event.piece)
            case Words(kind="reasoning"):
                self.reasoning += event.piece.text
            case Words():
                self.text += event.piece.text

    @property
    def usage(self) -> Usage:
        assert self.end is not None
        return self.end.usage


class Chat:
    """A task on its way. `open` prepares and submits it, so that what is wrong with it is raised before any answer."""

    def __init__(self, model: ServedModel, task: ChatTask, prepared: Prepared, generation: Generation):
        self.model = model
        self.task = task
        self.prompt_tokens = len(prepared.token_ids)
        self._generation = generation
        self._parsers = [parser_of(model, task, prepared.prompt) for _ in range(task.n)]
        self._pending: list[tuple[TokenLogprobs, ...]] = [()] * task.n
        self._called: set[int] = set()

    @classmethod
    async def open(
        cls,
        manager: ModelManager,
        stack: AsyncExitStack,
        name: str | None,
        task: ChatTask,
        keep_alive: float | None = None,
    ) -> "Chat":
        """`stack` holds the model and ends the generation when it is closed."""
        model = await stack.enter_async_context(manager.use(name, keep_alive))
        prepared = await asyncio.to_thread(prepare, model, task)
        prompts = await asyncio.to_thread(prompts_of, model, task, prepared)
        generation = Generation(model, manager.metrics, prompts)
        stack.callback(generation.close)
        return cls(model, task, prepared, generation)

    async def events(self) -> AsyncGenerator[Delta | End, None]:
        """The answers piece by piece, each closed by its End."""
        async with aclosing(self._generation.outputs()) as outputs:
            async for choice, output in outputs:
                for event in self._read(choice, output):
                    yield event

    async def answers(self) -> list[Answer]:
        answers = [Answer() for _ in range(self.task.n)]
        async with aclosing(self.events()) as events:
            async for event in events:
                answers[event.choice].add(event)
        return answers

    def _read(self, choice: int, output: RequestOutput) -> list[Delta | End]:
        parser = self._parsers[choice]
        pieces = parser.feed(output.text)
        if output.finished:
            pieces = pieces + parser.finish(cut=output.finish_reason is FinishReason.LENGTH)
        deltas = self._deltas(choice, self._permitted(choice, pieces), output.logprobs)
        if output.finished:
            return [*deltas, *self._rest(choice), self._end(choice, output)]
        return list(deltas)

    def _permitted(self, choice: int, pieces: list[Piece]) -> list[Piece]:
        """Without parallel calls an answer ends with its first."""
        permitted: list[Piece] = []
        for piece in pieces:
            if choice in self._called and not self.task.parallel_tool_calls:
                break
            permitted.append(piece)
            if isinstance(piece, Call):
                self._called.add(choice)
                if not self.task.parallel_tool_calls:
                    self._generation.stop(choice)
        return permitted

    def _deltas(self, choice: int, pieces: list[Piece], logprobs: tuple[TokenLogprobs, ...]) -> list[Delta]:
        pending = self._pending[choice] + logprobs
        deltas = []
        for piece in pieces:
            deltas.append(Delta(choice, piece, pending))
            pending = ()
        self._pending[choice] = pending
        return deltas

    def _rest(self, choice: int) -> list[Delta]:
        pending, self._pending[choice] = self._pending[choice], ()
        return [Delta(choice, None, pending)] if pending else []

    def _end(self, choice: int, output: RequestOutput) -> End:
        assert output.usage is not None
        if output.finish_reason is FinishReason.LENGTH:
            return End(choice, "length", None, output.usage)
        stopped = output.stop_reason if isinstance(output.stop_reason, str) else None
        return End(choice, "tool_calls" if choice in self._called else "stop", stopped, output.usage)
