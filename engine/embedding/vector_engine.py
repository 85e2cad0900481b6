"""What an engine thread runs for a model that makes vectors or scores: batches out of what several requests want."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn

from metalctl.engine.embedding.batches import batches
from metalctl.engine.embedding.embedder import Embedder, Tokens, batch_tokens
from metalctl.engine.embedding.pooling import Vector
from metalctl.engine.embedding.reranker import Reranker
from metalctl.engine.errors import UsageError
from metalctl.engine.llm_engine import EngineStats
from metalctl.engine.models.tokenizer import Tokenizer
from metalctl.engine.sequence import RequestOutput, SamplingParams

WINDOW = 16  # batches' worth of tokens that are ordered by length together


@dataclass(slots=True)
class _Job:
    """What one request wants: its items, and their vectors as far as they are made."""

    items: Sequence[Tokens]
    future: "Future[list[Vector]]"
    vectors: dict[int, Vector] = field(default_factory=dict)


class VectorEngine:
    """Has the form of LLMEngine where an EngineThread and a server look, and refuses to generate.

    A step computes one batch; of all that waits, texts of similar lengths go together, whoever asked for them.
    """

    def __init__(self, maker: Embedder | Reranker, kind: str = "encoder", budget: int | None = None):
        self.maker = maker
        self.loaded = SimpleNamespace(config={"model_type": kind})
        self.max_model_len = maker.max_length
        self.vocab_size = maker.tokenizer.vocab_size
        self._budget = budget or batch_tokens()
        self._waiting: deque[tuple[_Job, int]] = deque()
        self._batches: list[list[tuple[_Job, int]]] = []
        self._stats = EngineStats()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.maker.tokenizer

    def add(self, items: Sequence[Tokens]) -> "Future[list[Vector]]":
        """Queue the items of one request. Their vectors come in their order; cancelling drops what is not computed."""
        job = _Job(items, Future())
        self._waiting.extend((job, index) for index in range(len(items)))
        self._stats.requests += 1
        return job.future

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._batches)

    def step(self) -> list[RequestOutput]:
        """Compute one batch. An error belongs to the requests that have items in it."""
        if not self._batches:
            self._batches = self._form_batches()
        batch = [(job, index) for job, index in self._batches.pop() if not job.future.done()] if self._batches else []
        if not batch:
            return []
        self._stats.steps += 1
        try:
            vectors = self.maker.compute([job.items[index] for job, index in batch])
        except Exception as error:  # noqa: BLE001  handed to the requests
            for job, _ in batch:
                _fail(job.future, error)
            return []
        for (job, index), vector in zip(batch, vectors, strict=True):
            self._stats.prompt_tokens += len(job.items[index].ids)
            job.vectors[index] = vector
            if len(job.vectors) == len(job.items):
                _finish(job)
        return []

    def _form_batches(self) -> list[list[tuple[_Job, int]]]:
        """Batches of what has waited longest, in the reverse of their order."""
        some: list[tuple[_Job, int]] = []
        room = WINDOW * self._budget
        while self._waiting and room > 0:
            job, index = self._waiting.popleft()
            if not job.future.done():
                some.append((job, index))
                room -= len(job.items[index].ids)
        formed = batches([len(job.items[index].ids) for job, index in some], self._budget)
        return [[some[place] for place in places] for places in reversed(formed)]

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> NoReturn:
        raise UsageError("the model makes vectors or scores; it does not generate text.", "Use another model for that.")

    def add_request(self, *arguments: Any) -> NoReturn:
        self.check((), SamplingParams())

    def abort(self, request_id: str) -> None:
        """There are no requests of that kind."""

    def stats(self) -> EngineStats:
        self._stats.waiting = len(self._waiting)
        self._stats.running = sum(map(len, self._batches))
        return self._stats


def _finish(job: _Job) -> None:
    if job.future.set_running_or_notify_cancel():
        job.future.set_result([job.vectors[index] for index in range(len(job.items))])


def _fail(future: "Future[list[Vector]]", error: Exception) -> None:
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_exception(error)
