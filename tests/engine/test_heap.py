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
if "trimmed" in sys.argv:
    heap.trim()
print((resident() - before) >> 20)
"""


def left_over(*arguments: str) -> int:
    """Megabytes that stay resident of 160 that were freed."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C library is another one")
def test_large_blocks_leave_the_process_when_they_are_freed() -> None:
    kept = left_over()
    if kept < 100:
        pytest.skip("the C library gives blocks back by itself")
    assert left_over("mapped") < 20
    assert left_over("trimmed") < 20
