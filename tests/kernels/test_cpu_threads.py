"""The kernels' threads: as many as may be used, busy only while there is work, and never in each other's way."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import mlx.core as mx
import pytest

from metalctl.kernels.cores import usable_cores
from metalctl.kernels.cpu import library
from tests.kernels.cpu_library import built

COUNT_THREADS = """
import os, sys
from pathlib import Path
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from metalctl.kernels.cpu import library
library.load(Path(sys.argv[1]))
print(library.description())
"""


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    library.load(built())
    yield
    library.unload()


def product() -> library.Operation:
    return library.linear([library.pack_floating(mx.random.normal((512, 256), key=mx.random.key(0)))])


def test_there_are_as_many_threads_as_cores() -> None:
    count = usable_cores()
    assert library.description().endswith(f"{count} thread{'s' if count > 1 else ''}")


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_affinity_limits_them() -> None:
    command = [sys.executable, "-c", COUNT_THREADS, str(built())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip().endswith("1 thread")


def test_idle_threads_use_no_processor_time() -> None:
    operation, x = product(), mx.random.normal((64, 256))
    for _ in range(20):
        mx.eval(operation(x))
    time.sleep(0.05)  # they look for work a moment longer
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


def test_several_threads_of_the_program_may_compute_at_once() -> None:
    operation = product()
    x = mx.random.normal((64, 256), key=mx.random.key(1))
    expected = operation(x)
    mx.eval(x, expected)
    wrong: list[int] = []

    def compute(number: int) -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            for _ in range(50):
                if not mx.array_equal(operation(x), expected):
                    wrong.append(number)

    threads = [threading.Thread(target=compute, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
