"""One answer of the model, as a stream of pieces."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from metalctl.engine.errors import MetalctlError
from metalctl.engine.sequence import FinishReason, RequestOutput, SamplingParams, Usage
from metalctl.reasoning import Piece, ReasoningSplitter, opened_by

if TYPE_CHECKING:
    from metalctl.engine.engine_thread import EngineThread


class Turn:
    """Iterate over it for the pieces; what has come so far stands in the attributes.

    Raises ContextLengthError at once when the prompt does not fit. Ctrl-C ends the answer early, with everything that
    was generated handed out and the finish reason ABORT; a second one, when the engine takes long to notice, raises
    KeyboardInterrupt.
    """

    def __init__(
        self, thread: "EngineThread", messages: list[dict[str, Any]], params: SamplingParams, variables: dict[str, Any]
    ):
        tokenizer = thread.engine.tokenizer
        prompt = tokenizer.render_chat_template(messages, **variables)
        self._splitter = ReasoningSplitter(opened_by(prompt))
        self._stream = thread.submit(tokenizer.apply_chat_template(messages, **variables), params)
        self._params = params
        self._context = thread.engine.max_model_len
        self.text = ""
        self.reasoning = ""
        self.finish_reason: FinishReason | None = None
        self.usage: Usage | None = None

    def __iter__(self) -> Iterator[Piece]:
        with _on_interrupt(self._stream.abort):
            for output in self._stream:
                yield from self._take(self._splitter.feed(output.text))
                self._note_end(output)
            yield from self._take(self._splitter.finish())

    @property
    def context_is_full(self) -> bool:
        """Whether the answer was cut because the context is full, and not at `max_tokens`."""
        limit, usage = self._params.max_tokens, self.usage
        reached_limit = usage is not None and limit is not None and usage.output_tokens >= limit
        return self.finish_reason is FinishReason.LENGTH and not reached_limit

    @property
    def context_used(self) -> float:
        """The share of the context that this conversation takes, 0 to 1."""
        return (self.usage.prompt_tokens + self.usage.output_tokens) / self._context if self.usage else 0.0

    def _take(self, pieces: list[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if piece.kind == "text":
                self.text += piece.text
            else:
                self.reasoning += piece.text
            yield piece

    def _note_end(self, output: RequestOutput) -> None:
        self.usage = output.usage or self.usage
        self.finish_reason = output.finish_reason
        if output.error is not None:
            if isinstance(output.error, MetalctlError):
                raise output.error
            raise MetalctlError(
                f"the answer broke off: {type(output.error).__name__}: {output.error}",
                "This is a bug in metalctl. Please report it with the output under --debug.",
            ) from output.error


@contextmanager
def _on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Let the first Ctrl-C call `stop`, so that no exception tears a half-written line; the second raises as usual."""

    def handle(_signal: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
