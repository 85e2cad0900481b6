"""A pseudo-terminal with a program in it, for tests that type and look."""

import os
import pty
import re
import select
import subprocess
import time
from types import TracebackType
from typing import Self

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[=>]|\x1b\][^\x07]*\x07")


class Terminal:
    """Use as a context; leaving it kills the program if it still runs."""

    def __init__(self, command: list[str], environment: dict[str, str], columns: int = 80, rows: int = 24):
        self._master, slave = pty.openpty()
        variables = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": str(columns)}
        os.set_blocking(self._master, False)
        import fcntl
        import struct
        import termios

        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment | variables, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.raw = ""
        self._seen = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self._master)

    @property
    def text(self) -> str:
        """All that was written, without what moves and colours."""
        return _ESCAPES.sub("", self.raw).replace("\r", "")

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, words: str, timeout: float = 20) -> None:
        """Wait until `words` appear after what was expected before."""
        deadline = time.monotonic() + timeout
        while words not in self.text[self._seen :]:
            if time.monotonic() > deadline or not self._read(0.1):
                raise AssertionError(f"{words!r} did not appear in {self.text[self._seen :]!r}")
        self._seen = self.text.index(words, self._seen) + len(words)

    def wait(self, timeout: float = 20) -> int:
        deadline = time.monotonic() + timeout
        while self._read(0.1) and time.monotonic() < deadline:
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def _read(self, seconds: float) -> bool:
        """False when the program has closed its end."""
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:
            return False
        self.raw += data.decode("utf-8", "replace")
        return bool(data)
