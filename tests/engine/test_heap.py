"""Memory that is freed leaves the process."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import numpy, psutil
from metalctl.engine import heap

resident = lambda: psutil.Process().memory_info().rss
if "mapped" in sys.argv:
    heap.map_large_blocks()
for size in (30, 30):
    del_me = numpy.ones(size << 20, numpy.uint8); del del_me  # glibc now takes what is smaller from its heap
before = resident()
blocks, between = [], []
for i in range(20):
    blocks.append(numpy.ones(8 << 20, numpy.uint8))
    between.append(numpy.ones(100_000, numpy.uint8))  # keeps the heap from shrinking
blocks.clear()
if "released" in sys.argv:
    heap.release()
print((resident() - before) >> 20)
"""


def left_over(*arguments: str) -> int:
    """Megabytes that stay resident of 160 that were freed."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True)
    return int(done.stdout)


REPEATED = """
import contextlib, resource, sys
import numpy, psutil
from metalctl.engine import heap

faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
resident = lambda: psutil.Process().memory_info().rss
heap.map_large_blocks()
before = resident()
with heap.recycled() if "recycled" in sys.argv else contextlib.nullcontext():
    numpy.ones(3 << 20, numpy.uint8)
    start = faults()
    for _ in range(20):
        numpy.ones(3 << 20, numpy.uint8)
    print(faults() - start)
print((resident() - before) >> 20)
"""


def repeated(*arguments: str) -> tuple[int, int]:
    """Pages that 20 blocks of 3 MB took one after the other, and megabytes that stay."""
    done = subprocess.run([sys.executable, "-c", REPEATED, *arguments], capture_output=True, text=True, check=True)
    pages, left = map(int, done.stdout.split())
    return pages, left


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C library is another one")
def test_blocks_are_used_again_while_a_model_is_loaded() -> None:
    fresh, _ = repeated()
    if fresh < 1000:
        pytest.skip("the C library uses blocks again by itself")
    pages, left = repeated("recycled")
    assert pages < 100
    assert left < 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C library is another one")
def test_large_blocks_leave_the_process_when_they_are_freed() -> None:
    kept = left_over()
    if kept < 100:
        pytest.skip("the C library gives blocks back by itself")
    assert left_over("mapped") < 20
    assert left_over("released") < 20
