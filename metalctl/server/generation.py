"""From prompts to a stream of outputs of the engine: counted, watched, and ended when nobody reads."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from metalctl.engine.engine_thread import RequestStream
from metalctl.engine.grammar import TokenGrammar
from metalctl.engine.sequence import FinishReason, RequestOutput, SamplingParams
from metalctl.server.errors import bad_request
from metalctl.server.metrics import Metrics
from metalctl.server.models import ServedModel


@dataclass(frozen=True)
class Prompt:
    """What one sequence of a request begins with."""

    token_ids: list[int]
    params: SamplingParams
    grammar: TokenGrammar | None = None


class Generation:
    """The sequences of one request, submitted together. Raises what submitting raises, and ApiError 503.

    `outputs` yields pairs of the sequence's index and what a step brought; an error of the engine is raised. Closing
    it ends what still runs.
    """

    def __init__(self, model: ServedModel, metrics: Metrics, prompts: Sequence[Prompt]):
        self.model = model
        self.prompts = prompts
        self._metrics = metrics
        self._streams: list[RequestStream] = []
        self._ended: set[int] = set()
        for prompt in prompts:
            model.thread.engine.check(prompt.token_ids, prompt.params)
            _check_token_ids(prompt.params, model.thread.engine.vocab_size)
        model.take(len(prompts))
        try:
            self._submit()
        except BaseException:
            self.close()
            raise

    def _submit(self) -> None:
        loop = asyncio.get_running_loop()
        for prompt in self.prompts:
            stream = self.model.thread.submit(prompt.token_ids, prompt.params, grammar=prompt.grammar, loop=loop)
            self._streams.append(stream)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        async with aclosing(_merged(self._streams)) as merged:
            async for index, output in merged:
                if output.finished:
                    self._end(index, output)
                if output.error is not None:
                    raise output.error
                yield index, output

    def stop(self, index: int) -> None:
        """End one sequence; its stream still brings a last output."""
        self._streams[index].abort()

    def close(self) -> None:
        """End what still runs, and give back its places in the queue. Idempotent."""
        for index, stream in enumerate(self._streams):
            if index not in self._ended:
                stream.abort()
                self._end(index, RequestOutput(stream.request_id, "", (), FinishReason.ABORT))
        if len(self._ended) < len(self.prompts):  # those that never got a stream
            self.model.give_back(len(self.prompts) - len(self._ended))
            self._ended.update(range(len(self.prompts)))

    def _end(self, index: int, output: RequestOutput) -> None:
        if index not in self._ended:
            self._ended.add(index)
            self.model.give_back(1)
            self._metrics.finished(self.model.name, output)


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        for entry in getattr(params, name):
            token = entry[0] if isinstance(entry, tuple) else entry
            if not 0 <= token < vocab_size:
                raise bad_request(f"{name} has token {token}; this model's go from 0 to {vocab_size - 1}.", name)


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of all streams in the order in which they come, each with the index of its stream."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    outputs: asyncio.Queue[tuple[int, RequestOutput]] = asyncio.Queue()

    async def pump(index: int, stream: RequestStream) -> None:
        async for output in stream:
            outputs.put_nowait((index, output))

    tasks = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            index, output = await outputs.get()
            left -= output.finished
            yield index, output
    finally:
        for task in tasks:
            task.cancel()
