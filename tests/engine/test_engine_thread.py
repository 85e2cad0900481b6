"""The engine in its thread: streams end whatever happens, blocking or with asyncio."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from driving import engine
from metalctl.engine.engine_thread import EngineDeadError, EngineThread
from metalctl.engine.errors import CheckpointError, ContextLengthError
from metalctl.engine.sequence import FinishReason, SamplingParams
from tiny import build, prompt, reference

GREEDY = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture
def thread():
    thread = EngineThread.start(engine)
    yield thread
    thread.close()


def expected(seed: int, length: int = 12, count: int = 20) -> list[int]:
    return reference(build("llama"), prompt(length, seed), count)[0]


def test_streams_read_from_many_threads_get_their_own_tokens(thread):
    got: dict[int, list[int]] = {}

    def read(seed: int) -> None:
        stream = thread.submit(prompt(12, seed), GREEDY)
        got[seed] = [token for output in stream for token in output.token_ids]

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert got == {seed: expected(seed) for seed in range(8)}


def test_async_streams(thread):
    async def read(seed: int) -> list[int]:
        stream = thread.submit(prompt(12, seed), GREEDY, loop=asyncio.get_running_loop())
        return [token async for output in stream for token in output.token_ids]

    async def both():
        return await asyncio.gather(read(1), read(2))

    assert asyncio.run(both()) == [expected(1), expected(2)]


def test_an_aborted_stream_ends_and_the_next_works(thread):
    stream = thread.submit(prompt(12), SamplingParams(max_tokens=3000))
    outputs = iter(stream)
    next(outputs)
    stream.abort()
    assert [output.finish_reason for output in outputs][-1] is FinishReason.ABORT
    stream.abort()  # has ended: nothing happens
    again = thread.submit(prompt(12, 1), GREEDY)
    assert [token for output in again for token in output.token_ids] == expected(1)


def test_a_request_that_cannot_fit_is_refused_where_it_is_submitted(thread):
    with pytest.raises(ContextLengthError):
        thread.submit(prompt(12), SamplingParams(max_tokens=100_000))


def test_what_loading_raises_is_raised_by_start():
    def load():
        raise CheckpointError("broken")

    with pytest.raises(CheckpointError, match="broken"):
        EngineThread.start(load)


def test_close_ends_every_stream_and_refuses_new_ones():
    thread = EngineThread.start(engine)
    streams = [thread.submit(prompt(12, i), SamplingParams(max_tokens=3000)) for i in range(3)]
    thread.close()
    thread.close()
    assert not thread.alive
    for stream in streams:
        assert list(stream)[-1].finish_reason is FinishReason.ABORT
    with pytest.raises(EngineDeadError):
        thread.submit(prompt(12))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_thread_dies_every_stream_ends_with_an_error():
    thread = EngineThread.start(engine)
    stream = thread.submit(prompt(12), SamplingParams(max_tokens=3000))
    next(iter(stream))

    def step():
        raise SystemExit("killed")

    thread.engine.step = step
    last = list(stream)[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, EngineDeadError)
    thread._thread.join(5)
    assert not thread.alive
    with pytest.raises(EngineDeadError):
        thread.submit(prompt(12))


def test_call_runs_in_the_engine_thread_and_raises_what_it_raises(thread):
    assert thread.call(lambda engine: threading.current_thread().name) == "engine"
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda engine: 1 / 0)


def test_a_program_may_end_right_after_close():
    program = """
import sys
sys.path[:0] = sys.argv[1:]
from driving import engine
from metalctl.engine.engine_thread import EngineThread
from tiny import prompt
thread = EngineThread.start(engine)
from metalctl.engine.sequence import SamplingParams
list(thread.submit(prompt(5), SamplingParams(max_tokens=5)))
thread.close()
"""
    root = Path(__file__).parents[2]
    paths = [str(root / "tests" / "engine"), str(root)]
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
