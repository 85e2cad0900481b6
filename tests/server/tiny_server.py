"""`metalctl` with a random model instead of what is found and loaded; its first argument is the delay of a step."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serving import tiny_engine

from metalctl import cli
from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.engine_start import RunningEngine
from metalctl.server import launch

DELAY = float(sys.argv.pop(1))


@contextlib.contextmanager
def running_engine(_invocation: Any, reference: str, _config: Any, **_: Any) -> Iterator[RunningEngine]:
    thread = tiny_engine()
    step = thread.engine.step

    def slow() -> Any:
        time.sleep(DELAY)
        return step()

    thread.engine.step = slow  # type: ignore[method-assign]
    try:
        yield RunningEngine(thread, Checkpoint(reference, "mlx", Path(), ()), {"temperature": 1.0}, 0.1)
    finally:
        thread.close()


launch.running_engine = running_engine  # type: ignore[assignment]
launch.find_model = lambda _invocation, reference: Checkpoint(reference, "mlx", Path(), ())
launch.served_vectors = lambda *_: None
sys.exit(cli.main())
