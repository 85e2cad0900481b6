"""Shows what is fetched: bars on a terminal, events with `--json`, a few lines otherwise."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from metalctl.output import Output, human_bytes

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from metalctl.engine.models.references import Hub
    from metalctl.engine.models.sources.base import Plan, Progress

EVENT_EVERY = 0.5  # seconds between two progress events of one file


@contextmanager
def fetch_progress(output: Output, *, default_source: "Hub" = "hf", pulling: bool = False) -> Iterator["Progress"]:
    """A Progress that tells `output` what is fetched, until the block ends.

    `pulling`: fetching is what the command is for. It tells the plan itself, and with `--json` its answer is a stream
    of events.
    """
    progress = _Terminal(output) if output.interactive else _Lines(output, default_source, pulling)
    try:
        yield progress
    finally:
        progress.close()


def plan_fields(plan: "Plan", default_source: "Hub") -> dict[str, Any]:
    """A plan as JSON: sizes in bytes, null where the source tells them only while fetching."""
    return {
        "reference": plan.reference.written(default_source),
        "format": plan.format,
        "revision": plan.revision,
        "size": plan.size,
        "to_fetch": plan.to_fetch,
        "files": [{"path": file.path, "size": file.size, "cached": file.cached} for file in plan.files],
    }


class _Lines:
    """For pipes, logs and programs: events if wanted, else a line when something begins or goes wrong."""

    def __init__(self, output: Output, default_source: "Hub", pulling: bool):
        self._output = output
        self._default_source = default_source
        self._pulling = pulling
        self._events = pulling and output.json
        self._lock = threading.Lock()
        self._told: dict[str, float] = {}

    def start(self, plan: "Plan") -> None:
        if self._events:
            self._output.event("start", **plan_fields(plan, self._default_source))
        elif not plan.complete and not self._pulling:
            name = plan.reference.written(self._default_source)
            self._output.note(f"fetching {name}, {human_bytes(plan.to_fetch)}")

    def update(self, path: str, done: int, total: int | None) -> None:
        with self._lock:
            now = time.monotonic()
            if self._events and now - self._told.get(path, 0) >= EVENT_EVERY:
                self._told[path] = now
                self._output.event("progress", path=path, done=done, total=total)

    def retry(self, path: str, reason: str, wait: float) -> None:
        with self._lock:
            if self._events:
                self._output.event("retry", path=path, reason=reason, wait=wait)
            else:
                self._output.note(_retry_note(path, reason, wait))

    def finish(self, path: str) -> None:
        with self._lock:
            if self._events:
                self._output.event("file", path=path)

    def close(self) -> None: ...


class _Terminal:
    """A bar for each file: bytes, rate and time to go. Several files of a model also have one for all of them."""

    def __init__(self, output: Output):
        self._output = output
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}  # of the model that is fetched now
        self._total: TaskID | None = None

    def start(self, plan: "Plan") -> None:
        missing = [file for file in plan.files if not file.cached]
        if not missing:
            return
        if self._bars is None:
            self._bars = _make_bars(self._output)
            self._bars.start()
        self._tasks = {file.path: self._bars.add_task(_short(file.path), total=file.size) for file in missing}
        self._total = self._bars.add_task("all", total=plan.to_fetch) if len(missing) > 1 else None

    def update(self, path: str, done: int, total: int | None) -> None:
        if self._bars is not None and path in self._tasks:
            self._bars.update(self._tasks[path], completed=done, total=total)
            self._sum()

    def retry(self, path: str, reason: str, wait: float) -> None:
        target = self._bars.console if self._bars is not None else self._output.stderr
        target.print(_retry_note(path, reason, wait), style="dim", highlight=False, markup=False)

    def finish(self, path: str) -> None:
        if self._bars is not None and path in self._tasks:
            task = next(task for task in self._bars.tasks if task.id == self._tasks[path])
            self._bars.update(task.id, completed=task.total or task.completed, total=task.total or task.completed)
            self._sum()

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()

    def _sum(self) -> None:
        if self._bars is not None and self._total is not None:
            own = set(self._tasks.values())
            self._bars.update(self._total, completed=sum(task.completed for task in self._bars.tasks if task.id in own))


def _make_bars(output: Output) -> "Bars":
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=output.stderr,
    )


def _retry_note(path: str, reason: str, wait: float) -> str:
    again = f"trying again in {wait:.0f} s" if wait >= 1 else "going on"
    return f"{path}: {reason}; {again}"


def _short(path: str) -> str:
    name = path.rpartition("/")[2]
    return name if len(name) <= 40 else f"{name[:18]}...{name[-19:]}"
