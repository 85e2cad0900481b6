"""A model that says what it was told to say, in pieces of any size, behind a real tokenizer."""

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

from byte_tokenizer import byte_tokenizer

from metalctl.engine.engine_thread import RequestStream
from metalctl.engine.errors import ContextLengthError
from metalctl.engine.llm_engine import EngineStats
from metalctl.engine.models.tokenizer import Tokenizer
from metalctl.engine.sequence import FinishReason, RequestOutput, SamplingParams, Usage

# Shows tools, messages and calls on lines of their own.
TEMPLATE = (
    "{% for t in tools or [] %}tool {{ t.function.name }}{{ '\n' }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %} <tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class ScriptedThread:
    """Gives `replies` one after the other, the last for ever. A reply that is an exception is the request's error."""

    def __init__(self, *replies: Any, tokenizer: Tokenizer | None = None, size: int = 3, context: int = 10_000):
        self.replies = list(replies)
        self.size = size
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.grammars: list[Any] = []
        self.aborted: list[str] = []
        self.alive = True
        self.pause = 0.0  # seconds before each piece
        self._names = itertools.count()
        tokenizer = tokenizer or byte_tokenizer()
        self.engine = SimpleNamespace(
            tokenizer=tokenizer, max_model_len=context, vocab_size=288, check=self._check, stats=EngineStats
        )

    def _check(self, token_ids: list[int], _params: SamplingParams) -> None:
        if len(token_ids) >= self.engine.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens, but the context holds {self.engine.max_model_len}."
            )

    def submit(
        self, token_ids: list[int], params: SamplingParams, *, grammar: Any, loop: asyncio.AbstractEventLoop
    ) -> RequestStream:
        self.prompts.append(self.engine.tokenizer.decode(token_ids, skip_special_tokens=False))
        self.params.append(params)
        self.grammars.append(grammar)
        reply = self.replies[0] if len(self.replies) == 1 else self.replies.pop(0)
        stream = RequestStream(f"scripted-{next(self._names)}", self.aborted.append, loop)
        loop.create_task(self._say(stream, reply, params, len(token_ids)))
        return stream

    async def _say(self, stream: RequestStream, reply: Any, params: SamplingParams, prompt: int) -> None:
        if isinstance(reply, Exception):
            stream.deliver(RequestOutput(stream.request_id, "", (), FinishReason.ERROR, error=reply))
            return
        limit = params.max_tokens or len(reply)
        said = reply[:limit]
        for start in range(0, len(said), self.size):
            await asyncio.sleep(self.pause)
            if stream.request_id in self.aborted:
                break
            stream.deliver(RequestOutput(stream.request_id, said[start : start + self.size], (0,)))
        reason = FinishReason.STOP if limit >= len(reply) else FinishReason.LENGTH
        reason = FinishReason.ABORT if stream.request_id in self.aborted else reason
        usage = Usage(prompt, len(said), 0, 0.001, 0.01, 0.02)
        stream.deliver(RequestOutput(stream.request_id, "", (), reason, usage=usage))

    def close(self) -> None:
        self.alive = False
