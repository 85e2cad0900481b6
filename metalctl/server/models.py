"""The models that are served: loaded when they are asked for, unloaded when room or time demands it."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from metalctl.engine import heap
from metalctl.engine.errors import ModelNotFoundError, OutOfMemoryError
from metalctl.engine.grammar import GrammarCompiler
from metalctl.server.chat_format.formats import ChatFormat
from metalctl.server.durations import FOR_EVER
from metalctl.server.errors import bad_request, overloaded
from metalctl.server.metrics import Metrics

if TYPE_CHECKING:
    from metalctl.engine.engine_thread import EngineThread
    from metalctl.engine.models.tokenizer import Tokenizer

log = logging.getLogger("metalctl.server")


@dataclass(frozen=True)
class ModelSpec:
    """A model that may be asked for. `size` is in bytes, 0 when it is not known before loading."""

    name: str
    reference: str
    size: int = 0
    pinned: bool = False
    created: int = 0  # Unix time, of the files where that is known
    format: str | None = None


@dataclass
class ServedModel:
    """A model that is loaded. `slots` is how many sequences may run or wait, `close` unloads it."""

    name: str
    thread: "EngineThread"
    generation_defaults: Mapping[str, Any]
    slots: int
    close: Callable[[], None]
    size: int = 0  # bytes of weights
    taken: int = 0

    def __post_init__(self) -> None:
        engine = self.thread.engine
        self.compiler = GrammarCompiler(engine.tokenizer, engine.vocab_size)
        self.format = ChatFormat.of(engine.tokenizer)

    @property
    def tokenizer(self) -> "Tokenizer":
        return self.thread.engine.tokenizer

    @property
    def context_length(self) -> int:
        return self.thread.engine.max_model_len

    def take(self, count: int) -> None:
        """Count so many sequences in. Raises ApiError: 503 when the queue is full, 400 for more than it ever holds."""
        if count > self.slots:
            raise bad_request(f"the request makes {count} sequences; at most {self.slots} are taken.", "n")
        if self.taken + count > self.slots:
            raise overloaded(f"the queue of {self.name} is full: {self.taken} requests run or wait.")
        self.taken += count

    def give_back(self, count: int) -> None:
        self.taken -= count


@dataclass
class _Slot:
    spec: ModelSpec
    keep_alive: float  # seconds that it stays loaded without a request
    model: ServedModel | None = None
    users: int = 0
    last_used: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    timer: asyncio.TimerHandle | None = None

    @property
    def evictable(self) -> bool:
        return self.model is not None and self.users == 0 and not self.spec.pinned


@dataclass(frozen=True)
class Limits:
    """How many models may be loaded, in how many bytes of weights, and how long one stays without a request."""

    max_loaded: int = 1
    memory: int | None = None  # bytes
    keep_alive: float = FOR_EVER  # seconds
    patience: float = 60.0  # seconds that a request waits for room


class ModelManager:
    """Gives out models by name. `load` runs in a worker thread and may raise what loading raises; `first` is loaded.

    Of several models only so many are loaded at a time. For a new one the one goes that was not used for longest and
    is neither in use nor pinned; when there is none, the request waits, and is turned away when that takes too long.
    """

    def __init__(
        self,
        specs: list[ModelSpec],
        load: Callable[[ModelSpec], ServedModel],
        limits: Limits,
        first: ServedModel | None = None,
    ):
        if not specs:
            raise ValueError("there must be a model to serve")
        self.limits = limits
        self.metrics = Metrics(self.loaded)
        self._load = load
        self._slots = {spec.name: _Slot(spec, limits.keep_alive) for spec in specs}
        if first is not None:
            self._slots[first.name].model = first
            self.metrics.loads.labels(first.name).inc()
        self._room = asyncio.Condition()
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def specs(self) -> list[ModelSpec]:
        """The default model first."""
        return [slot.spec for slot in self._slots.values()]

    def loaded(self) -> list[ServedModel]:
        return [slot.model for slot in self._slots.values() if slot.model is not None]

    def expires_in(self, name: str) -> float:
        """Seconds until the model is unloaded when nobody asks for it."""
        slot = self._slots[name]
        return FOR_EVER if slot.spec.pinned else slot.keep_alive - (time.monotonic() - slot.last_used)

    @property
    def dead(self) -> list[str]:
        """Models whose engine has stopped by itself."""
        return [model.name for model in self.loaded() if not model.thread.alive]

    def find(self, name: str | None) -> ModelSpec:
        """The model called `name`, by its name or its reference; None: the default. Raises ModelNotFoundError."""
        if not name:
            return self.specs[0]
        for candidate in (name, name.removesuffix(":latest")):
            for spec in self.specs:
                if candidate in (spec.name, spec.reference):
                    return spec
        offered = ", ".join(list(self._slots)[:20])
        raise ModelNotFoundError(f"the model {name[:200]!r} is not served here.", f"There are: {offered}.")

    @asynccontextmanager
    async def use(self, name: str | None, keep_alive: float | None = None) -> AsyncIterator[ServedModel]:
        """The model, loaded, for as long as the block lasts. `keep_alive` holds from then on."""
        slot = self._slots[self.find(name).name]
        slot.users += 1
        try:
            async with slot.lock:
                if slot.model is None:
                    async with self._loading:
                        slot.model = await self._make(slot)
            if keep_alive is not None:
                slot.keep_alive = keep_alive
            yield slot.model
        finally:
            slot.users -= 1
            slot.last_used = time.monotonic()
            self._set_timer(slot)
            async with self._room:
                self._room.notify_all()

    async def close(self) -> None:
        """Unload everything, what runs included."""
        for task in self._tasks:
            task.cancel()
        for slot in self._slots.values():
            async with slot.lock:
                await self._unload(slot)

    # -- loading and unloading

    async def _make(self, slot: _Slot) -> ServedModel:
        await self._make_room(slot.spec.size)
        log.info("loading %s", slot.spec.name)
        try:
            model = await asyncio.to_thread(self._load, slot.spec)
        except OutOfMemoryError:
            if not await self._evict():
                raise
            model = await asyncio.to_thread(self._load, slot.spec)
        self.metrics.loads.labels(slot.spec.name).inc()
        return model

    async def _make_room(self, size: int) -> None:
        deadline = time.monotonic() + self.limits.patience
        while not self._has_room(size):
            if await self._evict():
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                raise overloaded("all models that are loaded are in use.", seconds=10)
            async with self._room:
                try:
                    await asyncio.wait_for(self._room.wait(), left)
                except TimeoutError:
                    continue

    def _has_room(self, size: int) -> bool:
        models = self.loaded()
        if not models:
            return True
        if len(models) >= self.limits.max_loaded:
            return False
        return self.limits.memory is None or sum(model.size for model in models) + size <= self.limits.memory

    async def _evict(self) -> bool:
        """Unload what was not used for longest. False when there is nothing that may go."""
        candidates = [slot for slot in self._slots.values() if slot.evictable]
        if not candidates:
            return False
        await self._retire(min(candidates, key=lambda slot: slot.last_used))
        return True

    async def _retire(self, slot: _Slot) -> None:
        """Unload it unless somebody has come to use it."""
        async with slot.lock:
            if slot.evictable:
                await self._unload(slot)

    async def _unload(self, slot: _Slot) -> None:
        model, slot.model = slot.model, None
        if slot.timer is not None:
            slot.timer.cancel()
        if model is None:
            return
        log.info("unloading %s", slot.spec.name)
        await asyncio.to_thread(model.close)
        del model
        await asyncio.to_thread(heap.release)
        self.metrics.unloads.labels(slot.spec.name).inc()

    def _set_timer(self, slot: _Slot) -> None:
        if slot.timer is not None:
            slot.timer.cancel()
            slot.timer = None
        if slot.users == 0 and slot.model is not None and not slot.spec.pinned and slot.keep_alive < FOR_EVER:
            slot.timer = asyncio.get_running_loop().call_later(slot.keep_alive, self._expire, slot)

    def _expire(self, slot: _Slot) -> None:
        if slot.evictable:
            task = asyncio.ensure_future(self._retire(slot))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
