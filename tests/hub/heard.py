"""A Progress for tests."""

from metalctl.engine.models.sources.base import Plan


class Heard:
    """A Progress that remembers."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.retries: list[tuple[str, str, float]] = []
        self.finished: list[str] = []
        self.done: dict[str, int] = {}

    def start(self, plan: Plan) -> None:
        self.plans.append(plan)

    def update(self, path: str, done: int, total: int | None) -> None:
        self.done[path] = done

    def retry(self, path: str, reason: str, wait: float) -> None:
        self.retries.append((path, reason, wait))

    def finish(self, path: str) -> None:
        self.finished.append(path)
