"""What the C library's allocator keeps to itself, given back to the system.

glibc raises the size from which it maps a block by itself each time such a block is freed, up to 32 MB. Pools and
weights then lie between smaller blocks on its heap, and the pages of those that have gone stay resident: a third of the
process after the cache has grown a few times. Does nothing where the C library is another one.
"""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_DEFAULT_TRIM_THRESHOLD = 128 << 10  # mallopt(3)
_LARGEST_ON_HEAP = 32 << 20  # the most that mallopt takes
_NEVER = (1 << 31) - 1
_LARGE = 1 << 20  # bytes


def map_large_blocks() -> None:
    """From now on a block of a megabyte is memory of its own, and gone when it is freed.

    All threads share one heap, since only that can be given back whole.
    """
    library = _glibc()
    if library is not None:
        library.mallopt(_M_ARENA_MAX, 1)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)


@contextmanager
def recycled() -> Iterator[None]:
    """Inside, blocks of up to 32 MB are kept for the next ones when they are freed, and given back at the end.

    Weights go through many blocks that live for a moment, and the system clears each page that it hands out: that
    takes longer than all of the work on it. Larger ones would leave holes that are too much to keep.
    """
    library = _glibc()
    if library is None:
        yield
        return
    library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
    library.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_M_TRIM_THRESHOLD, _DEFAULT_TRIM_THRESHOLD)
        library.malloc_trim(0)


def release() -> None:
    """Free what only cycles of objects hold, and give back the pages that nothing lies on any more: a model that is
    gone is both."""
    gc.collect()
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None
