"""Linear layers of one module that are given the same array: one operation computes them together."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

MOST_TOGETHER = 3  # layers that one operation computes

Together = Callable[[mx.array], list[mx.array]]  # the results of all members of a group


class Group:
    """Members whose results the first one's call computes. `alone(member, x)` is what another array gets."""

    def __init__(self, members: Sequence[nn.Module], together: Together, alone: Callable[[Any, mx.array], mx.array]):
        self._leader = members[0]
        self._followers = {id(member): i for i, member in enumerate(members)}
        self._together = together
        self._alone = alone
        self._x: mx.array | None = None
        self._results: list[mx.array | None] = []

    def __call__(self, member: nn.Module, x: mx.array) -> mx.array:
        if member is self._leader:
            results = self._together(x)
            self._x, self._results = x, [None, *results[1:]]
            return results[0]
        result = self._take(self._followers[id(member)]) if x is self._x else None
        return self._alone(member, x) if result is None else result

    def _take(self, index: int) -> mx.array | None:
        result, self._results[index] = self._results[index], None
        if not any(r is not None for r in self._results):
            self._x = None
        return result


class Siblings:
    """The linear layers of one module. Which of them are given the same array, the first pass shows."""

    def __init__(self, join: Callable[[list[Any]], Together], alone: Callable[[Any, mx.array], mx.array]):
        """`join` makes the operation of some layers, `alone` computes one of them."""
        self._join = join
        self._alone = alone
        self._seen: list[tuple[mx.array, Any]] | None = []
        self._groups: dict[int, Group] = {}

    def __call__(self, member: Any, x: mx.array) -> mx.array:
        if self._seen is not None:
            if all(member is not other for _, other in self._seen):
                self._seen.append((x, member))
                return self._alone(member, x)
            self._form_groups(self._seen)
            self._seen = None
        group = self._groups.get(id(member))
        return self._alone(member, x) if group is None else group(member, x)

    def _form_groups(self, seen: list[tuple[mx.array, Any]]) -> None:
        together: dict[int, list[Any]] = {}
        for x, member in seen:
            together.setdefault(id(x), []).append(member)
        for members in together.values():
            for start in range(0, len(members), MOST_TOGETHER):
                some = members[start : start + MOST_TOGETHER]
                if len(some) > 1:
                    group = Group(some, self._join(some), self._alone)
                    self._groups |= {id(member): group for member in some}
