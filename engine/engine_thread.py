"""The engine in a thread of its own, and the streams that requests are read from, blocking or with asyncio."""

import asyncio
import itertools
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metalctl.engine.errors import MetalctlError
from metalctl.engine.llm_engine import LLMEngine
from metalctl.engine.sequence import FinishReason, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from metalctl.engine.grammar import TokenGrammar


class EngineDeadError(MetalctlError):
    """The engine's thread has ended; nothing can be generated any more."""

    type = "engine_dead"


class RequestStream:
    """The outputs of one request, in order; the last one has a finish reason.

    Iterate in a thread, or with `async for` in the event loop that submitted it. An error of the request is in its
    last output, not raised.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None], loop: asyncio.AbstractEventLoop | None):
        self.request_id = request_id
        self._abort = abort
        self._loop = loop
        self._outputs: Any = queue.SimpleQueue() if loop is None else asyncio.Queue()
        self._ended = False

    def abort(self) -> None:
        """Ask for the end; the stream still yields a last output with FinishReason.ABORT, unless it has ended."""
        self._abort(self.request_id)

    def __iter__(self) -> Iterator[RequestOutput]:
        while not self._ended:
            output = self._outputs.get()
            self._ended = output.finished
            yield output

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while not self._ended:
            output = await self._outputs.get()
            self._ended = output.finished
            yield output

    def deliver(self, output: RequestOutput) -> None:
        """Called by the engine's thread."""
        if self._loop is None:
            self._outputs.put(output)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)


class EngineThread:
    """Owns the thread in which a model is loaded and run: MLX's lazy arrays belong to the thread that made them."""

    def __init__(self) -> None:
        self.engine: LLMEngine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}
        self._names = itertools.count()
        self._lock = threading.Lock()
        self._started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._closed = False
        self._thread: threading.Thread

    @classmethod
    def start(cls, load: Callable[[], LLMEngine]) -> "EngineThread":
        """Load in a new thread and return when the engine is ready. Raises what `load` raises."""
        self = cls()
        self._thread = threading.Thread(target=self._main, args=(load,), name="engine", daemon=True)
        self._thread.start()
        error = self._started.get()
        if error is not None:
            raise error
        return self

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    def submit(
        self,
        token_ids: Many[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        cache_salt: bytes = b"",
        grammar: "TokenGrammar | None" = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> RequestStream:
        """Queue a request and return its stream; with `loop` one that is read there. Raises as LLMEngine.check does,
        and EngineDeadError."""
        params = params or SamplingParams()
        self.engine.check(token_ids, params)
        name = request_id or f"stream-{next(self._names)}"
        stream = RequestStream(name, self._ask_abort, loop)
        with self._lock:
            if not self.alive:
                raise EngineDeadError("the engine has stopped.", "Start it again.")
            self._commands.put(lambda: self._add(stream, token_ids, params, cache_salt, grammar))
        return stream

    def call(self, function: Callable[[LLMEngine], Any]) -> Any:
        """Run a function in the engine's thread, between two steps; return or raise what it does."""
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put((function(self.engine), None))
            except Exception as error:  # noqa: BLE001  handed to the caller
                answer.put((None, error))

        with self._lock:
            if not self.alive:
                raise EngineDeadError("the engine has stopped.", "Start it again.")
            self._commands.put(run)
        value, error = answer.get()
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End every request and the thread. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._commands.put(None)
        self._thread.join()
        _await_exit(self._thread.native_id)

    # -- in the thread

    def _main(self, load: Callable[[], LLMEngine]) -> None:
        try:
            self.engine = load()
        except BaseException as error:  # noqa: BLE001  raised again by `start`
            self._started.put(error)
            return
        self._started.put(None)
        failure: BaseException | None = None
        try:
            while self._serve_commands():
                for output in self.engine.step() if self.engine.has_work else ():
                    self._deliver(output)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._finish(failure)

    def _serve_commands(self) -> bool:
        """Do what was asked for, waiting only where there is nothing else to do. False when it is time to end."""
        while not self.engine.has_work or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _add(
        self,
        stream: RequestStream,
        token_ids: Many[int],
        params: SamplingParams,
        cache_salt: bytes,
        grammar: "TokenGrammar | None",
    ) -> None:
        self._streams[stream.request_id] = stream
        try:
            self.engine.add_request(token_ids, params, stream.request_id, cache_salt, grammar)
        except Exception as error:  # noqa: BLE001  it belongs to this request
            self._deliver(RequestOutput(stream.request_id, "", (), FinishReason.ERROR, error=error))

    def _ask_abort(self, request_id: str) -> None:
        def run() -> None:
            output = self.engine.abort(request_id)
            if output is not None:
                self._deliver(output)

        self._commands.put(run)

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if output.finished:
            del self._streams[output.request_id]
        stream.deliver(output)

    def _finish(self, failure: BaseException | None) -> None:
        """No stream is left without an end, also those whose command is still in the queue."""
        with self._lock:
            self._closed = True
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()
        for name, stream in list(self._streams.items()):
            error = EngineDeadError(f"the engine has stopped: {failure}") if failure else None
            reason = FinishReason.ERROR if failure else FinishReason.ABORT
            stream.deliver(RequestOutput(name, "", (), reason, error=error))
        self._streams.clear()


def _await_exit(native_id: int | None) -> None:
    """Wait until the system's thread is gone, too. Before Python 3.13 `join` returns a moment earlier, while MLX still
    frees what it kept for the thread; a program that ends in that moment is aborted."""
    if sys.version_info >= (3, 13) or native_id is None:
        return
    task = Path(f"/proc/self/task/{native_id}")
    deadline = time.monotonic() + (2 if task.parent.exists() else 0.05)
    while time.monotonic() < deadline and (task.exists() or not task.parent.exists()):
        time.sleep(0.002)
