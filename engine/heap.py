"""What the C library's allocator keeps to itself, given back to the system.

glibc raises the size from which it maps a block by itself each time such a block is freed, up to 32 MB. Pools and
weights then lie between smaller blocks on its heap, and the pages of those that have gone stay resident: a third of the
process after the cache has grown a few times. Does nothing where the C library is another one.
"""

import ctypes
import sys
from typing import Any

_M_MMAP_THRESHOLD = -3  # malloc.h
_LARGE = 1 << 20  # bytes


def map_large_blocks() -> None:
    """From now on a block of a megabyte is memory of its own, and gone when it is freed."""
    library = _glibc()
    if library is not None:
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)


def trim() -> None:
    """Give back the pages that nothing lies on any more: worth it after a model was loaded."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") else None
