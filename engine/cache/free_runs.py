"""Free block ids, kept as maximal runs of consecutive numbers."""


class FreeRuns:
    """A set of block ids in which neighbours are merged, so that consecutive blocks can be handed out.

    A sequence whose blocks are consecutive is read from the pool as a slice, without a gather.
    """

    def __init__(self) -> None:
        self._end: dict[int, int] = {}  # first id of a run -> one past its last
        self._start: dict[int, int] = {}  # one past the last id of a run -> its first
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, start: int, end: int) -> None:
        """Add the ids start .. end - 1, none of which is in the set."""
        self._size += end - start
        if end in self._end:  # a run begins where this one ends
            end = self._remove(end)[1]
        if start in self._start:
            start = self._remove(self._start[start])[0]
        self._end[start] = end
        self._start[end] = start

    def take_at(self, block: int) -> bool:
        """Take `block` if it is the first of a run; tell whether it was."""
        if block not in self._end:
            return False
        self._take(block)
        return True

    def take_first(self, spread: bool) -> int:
        """Take a block for a sequence that starts anew, from the longest run: its first block, or with `spread` the
        one in its middle, which leaves whoever grows towards the run as much room as the newcomer gets."""
        start = max(self._end, key=lambda first: self._end[first] - first)
        end = self._end[start]
        if spread and end - start > 2:
            middle = (start + end) // 2
            self._remove(start)
            self._insert(start, middle)
            self._insert(middle, end)
            start = middle
        self._take(start)
        return start

    def _take(self, start: int) -> None:
        _, end = self._remove(start)
        self._size -= 1
        if start + 1 < end:
            self._insert(start + 1, end)

    def _insert(self, start: int, end: int) -> None:
        self._end[start] = end
        self._start[end] = start

    def _remove(self, start: int) -> tuple[int, int]:
        end = self._end.pop(start)
        del self._start[end]
        return start, end
