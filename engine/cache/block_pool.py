"""Who owns which entry of one pool of equal entries: KV blocks of one kind of layer, or recurrent-state slots."""

from collections import OrderedDict

from metalctl.engine.cache.free_runs import FreeRuns

NULL = 0  # the entry that is never handed out: padding writes go there


class PoolExhausted(Exception):
    """Every entry is in use; internal, answered by preemption."""


class BlockPool:
    """Reference counts, content hashes and least-recently-used eviction over the entries 1 .. capacity - 1.

    An entry is *free* (holds nothing of worth), *cached* (holds content under a hash, used by nobody, may be evicted)
    or *in use* (reference count above 0, with or without a hash). `limit` bounds how many entries the pool may ever
    have, the null entry included; it grows by doubling up to that, and only when nothing is free.
    """

    def __init__(self, limit: int, initial: int = 64):
        self.limit = limit
        self.capacity = min(limit, max(2, initial))
        self._free = FreeRuns()
        if self.capacity > 1:
            self._free.add(1, self.capacity)
        self._references: dict[int, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._by_hash: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def num_used(self) -> int:
        return len(self._references)

    @property
    def num_cached(self) -> int:
        """Entries that hold reusable content and are used by nobody."""
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """How many `allocate` calls would succeed now."""
        return self.limit - 1 - len(self._references)

    def allocate(self, after: int | None = None, spread: bool = False) -> int:
        """An entry with one reference, the one right behind `after` if that is free. Raises PoolExhausted.

        `spread` places a new run away from those that others are growing.
        """
        entry = self._pick(after, spread)
        self._references[entry] = 1
        return entry

    def find(self, content: bytes) -> int | None:
        """The entry that holds this content. Takes no reference and does not count as a use."""
        return self._by_hash.get(content)

    def share(self, entry: int) -> None:
        """One more reference to an entry that is in use or cached."""
        self._references[entry] = self._references.get(entry, 0) + 1
        self._evictable.pop(entry, None)

    def release(self, entry: int) -> None:
        """One reference less; an entry that nobody uses is kept for reuse if it has a hash, else freed."""
        self._references[entry] -= 1
        if self._references[entry]:
            return
        del self._references[entry]
        if entry in self._hash_of:
            self._evictable[entry] = None
        else:
            self._free.add(entry, entry + 1)

    def publish(self, entry: int, content: bytes) -> bool:
        """Make an entry in use findable under its content. False where another holds the same, or it has a name."""
        if content in self._by_hash or entry in self._hash_of:
            return self._by_hash.get(content) == entry
        self._by_hash[content] = entry
        self._hash_of[entry] = content
        return True

    def discard(self, content: bytes) -> None:
        """Make content unfindable; the entry that holds it is freed once nobody uses it."""
        entry = self._by_hash.pop(content, None)
        if entry is None:
            return
        del self._hash_of[entry]
        if entry in self._evictable:
            del self._evictable[entry]
            self._free.add(entry, entry + 1)

    def forget(self) -> None:
        """Drop all content that nobody uses, and make nothing findable any more."""
        for entry in self._evictable:
            self._free.add(entry, entry + 1)
        self._evictable.clear()
        self._hash_of.clear()
        self._by_hash.clear()

    def _pick(self, after: int | None, spread: bool) -> int:
        if after is not None and self._free.take_at(after + 1):
            return after + 1
        if not self._free and not self._grow():
            return self._evict()
        if after is not None and self._free.take_at(after + 1):  # the pool grew right behind it
            return after + 1
        return self._free.take_first(spread)

    def _grow(self) -> bool:
        if self.capacity >= self.limit:
            return False
        capacity = min(self.limit, self.capacity * 2)
        self._free.add(self.capacity, capacity)
        self.capacity = capacity
        return True

    def _evict(self) -> int:
        if not self._evictable:
            raise PoolExhausted
        entry, _ = self._evictable.popitem(last=False)
        del self._by_hash[self._hash_of.pop(entry)]
        return entry
