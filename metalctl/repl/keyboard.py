"""The keyboard while the model speaks."""

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent_keyboard() -> Iterator[None]:
    """Keys are not echoed into the answer, but wait for the next prompt. Ctrl-C works as ever."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
