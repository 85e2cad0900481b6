"""An engine that says what it was told to say, for tests of what stands in front of it.

Run as a program it is `metalctl` with such an engine: FAKE_REPLIES holds the answers as a JSON list, FAKE_DELAY the
seconds before each piece.
"""

import contextlib
import itertools
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from metalctl.engine.errors import ContextLengthError
from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.engine.sequence import FinishReason, RequestOutput, SamplingParams, Usage
from metalctl.engine_start import RunningEngine


class FakeTokenizer:
    """A character is a token."""

    opens = ""  # what the template writes at the beginning of an answer

    def render_chat_template(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return "\n".join([*lines, *(f"{key}={value}" for key, value in variables.items()), f"assistant: {self.opens}"])

    def apply_chat_template(self, messages: list[dict[str, Any]], **variables: Any) -> list[int]:
        return [ord(character) for character in self.render_chat_template(messages, **variables)]


class FakeStream:
    def __init__(self, thread: "FakeThread", prompt: str, pieces: list[str], params: SamplingParams):
        self._thread, self._prompt, self._pieces, self._params = thread, prompt, pieces, params
        self._aborted = threading.Event()

    def abort(self) -> None:
        self._aborted.set()

    def __iter__(self) -> Iterator[RequestOutput]:
        room = self._thread.engine.max_model_len - len(self._prompt)
        limit = min(room, self._params.max_tokens or room)
        said = 0
        for piece in self._pieces:
            piece = piece[: limit - said]
            if self._aborted.wait(self._thread.delay) or not piece:
                break
            said += len(piece)
            yield self._output(piece, said, None)
        reason = FinishReason.STOP if said == len("".join(self._pieces)) else FinishReason.LENGTH
        reason = FinishReason.ABORT if self._aborted.is_set() else reason
        error = self._thread.error
        yield self._output("", said, FinishReason.ERROR if error else reason, error)

    def _output(
        self, text: str, said: int, reason: FinishReason | None, error: Exception | None = None
    ) -> RequestOutput:
        pairs = zip(self._thread.before, self._prompt, strict=False)
        cached = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        usage = Usage(len(self._prompt), said, cached, 0.001, 0.01 if said else None, 0.01 + said / 1000)
        return RequestOutput("fake", text, tuple(map(ord, text)), reason, usage=usage, error=error)


class FakeThread:
    """Gives `replies` one after the other, in pieces of `size` characters, with `delay` seconds before each piece."""

    def __init__(self, *replies: str, size: int = 3, delay: float = 0.0, context: int = 10_000):
        self.replies, self.size, self.delay = list(replies), size, delay
        self.engine = SimpleNamespace(tokenizer=FakeTokenizer(), max_model_len=context)
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.before = ""
        self.error: Exception | None = None
        self.alive = True

    def submit(self, token_ids: list[int], params: SamplingParams) -> FakeStream:
        prompt = "".join(map(chr, token_ids))
        if len(prompt) >= self.engine.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens, but the context holds {self.engine.max_model_len}."
            )
        self.before = self.prompts[-1] if self.prompts else ""
        self.prompts.append(prompt)
        self.params.append(params)
        reply = self.replies.pop(0)
        pieces = [reply[start : start + self.size] for start in range(0, len(reply), self.size)]
        return FakeStream(self, prompt, pieces, params)

    def close(self) -> None:
        self.alive = False


def running(thread: FakeThread, **generation_defaults: Any) -> Any:
    """What stands in for `metalctl.engine_start.running_engine`. The references that it was given are in `.asked`."""

    @contextlib.contextmanager
    def running_engine(
        _invocation: Any, reference: str, config: Any, *, trust_remote_code: bool = False
    ) -> Iterator[RunningEngine]:
        running_engine.asked.append(reference)  # type: ignore[attr-defined]
        if config.max_model_len:
            thread.engine.max_model_len = config.max_model_len
        checkpoint = Checkpoint(reference, "gguf", Path("model.gguf"), ())
        yield RunningEngine(thread, checkpoint, generation_defaults, 0.5)  # type: ignore[arg-type]
        thread.close()

    running_engine.asked = []  # type: ignore[attr-defined]
    return running_engine


def main() -> int:
    from metalctl import cli
    from metalctl.commands import chat

    replies = json.loads(os.environ["FAKE_REPLIES"])
    chat.running_engine = running(FakeThread(*replies, delay=float(os.environ.get("FAKE_DELAY", "0"))))
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
