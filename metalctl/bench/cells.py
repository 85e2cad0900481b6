"""What is measured, and what came out. Plain Python."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from metalctl.engine.errors import UsageError


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: reading `prompt` tokens, or writing `generate`, behind `depth` tokens that are in the cache
    already, for `batch` sequences at once. One of `prompt` and `generate` is 0."""

    prompt: int
    generate: int
    depth: int = 0
    batch: int = 1

    @property
    def name(self) -> str:
        what = f"pp{self.prompt}" if self.prompt else f"tg{self.generate}"
        return what + (f" @ d{self.depth}" if self.depth else "") + (f" x {self.batch}" if self.batch > 1 else "")

    @property
    def tokens(self) -> int:
        """What the time is divided into."""
        return (self.prompt or self.generate) * self.batch

    @property
    def length(self) -> int:
        """Tokens that a sequence has in the end."""
        return self.depth + self.prompt + self.generate + 1


@dataclass(slots=True)
class Result:
    """A cell of one runtime: tokens per second of each round, or why there are none."""

    runtime: str
    cell: Cell
    values: list[float] = field(default_factory=list)
    missing: str | None = None

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def record(self, ratio: float | None) -> dict[str, Any]:
        """As JSON. `ratio`: this program's speed divided by this runtime's."""
        cell = self.cell
        return {
            "runtime": self.runtime,
            "test": cell.name,
            "prompt": cell.prompt,
            "generate": cell.generate,
            "depth": cell.depth,
            "batch": cell.batch,
            "tokens_per_second": self.mean,
            "deviation": self.deviation,
            "rounds": self.values,
            "missing": self.missing,
            "ratio": ratio,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is to be measured. Raises UsageError when that is nothing."""

    cells: list[Cell]
    repeats: int
    warmup: bool
    peers: Sequence[str]
    seed: int

    def __post_init__(self) -> None:
        if not self.cells:
            raise UsageError("there is nothing to measure.", "Give --prompt or --generate a number above 0.")

    @property
    def most_sequences(self) -> int:
        return max(cell.batch for cell in self.cells)

    @property
    def longest(self) -> int:
        return max(cell.length for cell in self.cells)

    def check(self, limit: int) -> None:
        """Raises UsageError when a sequence would be longer than `limit`."""
        if self.longest > limit:
            raise UsageError(
                f"a sequence would have {self.longest} tokens, but the context holds {limit}.",
                "Lower --prompt, --generate or --depth.",
            )


def matrix(
    prompts: Sequence[int], generates: Sequence[int], depths: Sequence[int], batches: Sequence[int]
) -> list[Cell]:
    """Every combination, reading before writing; a 0 among prompts or generates stands for none."""
    return [
        cell
        for batch in batches
        for depth in depths
        for cell in (
            *(Cell(prompt, 0, depth, batch) for prompt in prompts if prompt),
            *(Cell(0, generate, depth, batch) for generate in generates if generate),
        )
    ]


def numbers(text: str, option: str, least: int = 0) -> list[int]:
    """`128`, `128,512` or `1-4`. Raises UsageError."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"{option}: {part.strip()!r} is not a number.", "Give one, or several as 128,512 or 1-4.")
        span = range(int(first), int(last or first) + 1)
        if not span or span[0] < least or len(span) > 1000:
            raise UsageError(f"{option}: {part.strip()!r} is out of range.", f"The least is {least}.")
        found.extend(span)
    return list(dict.fromkeys(found))


def ratios(results: Sequence[Result], ours: str) -> list[float | None]:
    """For each result of a peer, `ours` divided by it, in the same cell."""
    speeds = {result.cell: result.mean for result in results if result.runtime == ours}
    found: list[float | None] = []
    for result in results:
        speed = speeds.get(result.cell)
        comparable = result.runtime != ours and speed and result.mean
        found.append(speed / result.mean if comparable else None)  # type: ignore[operator]
    return found
