"""What fits: from the device's memory to the sizes of the pools."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from metalctl.engine.config import EngineConfig
from metalctl.engine.errors import OutOfMemoryError

if TYPE_CHECKING:
    from metalctl.engine.cache.layout import CacheLayout  # brings mlx-lm, which takes a second

_TYPICAL_TOKENS = 2048  # of a sequence, to weigh state slots and windows against full attention


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes. `available` is what is free now, `recommended` what one process may take without harm."""

    name: str
    total: int
    available: int
    recommended: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How many entries each pool may grow to (the null entry included), and the terms that led there, in bytes."""

    group_limits: tuple[int, ...]
    slot_limit: int
    max_model_len: int
    terms: tuple[tuple[str, int], ...]

    @property
    def table(self) -> str:
        width = max(len(name) for name, _ in self.terms)
        return "\n".join(f"{name:<{width}}  {size / 1e6:12,.1f} MB" for name, size in self.terms)


def device_memory() -> DeviceMemory:
    """Of the device that MLX computes on: the GPU's working set, or what is free of the machine's memory."""
    import mlx.core as mx
    import psutil

    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    limit = _container_limit()
    if limit is not None and limit < total:
        used = psutil.Process().memory_info().rss
        total, available = limit, min(available, max(0, limit - used))
    info = mx.device_info()
    name = str(info.get("device_name", "CPU"))
    if mx.default_device() == mx.Device(mx.cpu):
        return DeviceMemory(name, total, available, available)
    size = int(info.get("memory_size", info.get("total_memory", total)))
    recommended = int(info.get("max_recommended_working_set_size", size))
    free = int(info.get("free_memory", recommended - mx.get_active_memory()))
    return DeviceMemory(name, size, free, recommended)


def plan(
    layout: "CacheLayout",
    config: EngineConfig,
    context_length: int,
    *,
    weights: int,
    forward: int,
    device: DeviceMemory,
    weights_loaded: bool = True,
) -> MemoryPlan:
    """Divide the budget among the pools.

    budget = utilization * memory - weights - one forward, where memory is the device's recommended working set, or on
    a CPU what is available (with the weights, which are in it by now). The budget holds full-attention blocks for as
    many tokens as possible, with windows and state slots for the sequences that so many tokens make. Raises
    OutOfMemoryError, with every term and what to lower, where not even one sequence of the asked length fits.
    """
    on_cpu = device.recommended == device.available
    memory = device.available + weights if on_cpu and weights_loaded else device.recommended
    usable = int(config.gpu_memory_utilization * memory)
    budget = config.kv_cache_bytes if config.kv_cache_bytes is not None else usable - weights - forward
    asked = config.max_model_len or context_length
    terms = [
        ("memory of the device", memory),
        (f"usable ({config.gpu_memory_utilization:.0%})", usable),
        ("weights", -weights),
        ("one forward", -forward),
        ("budget for the cache", budget),
    ]
    sizes = _Sizes(layout, config)
    tokens = _most_tokens(sizes, budget, asked)
    length = min(asked, tokens // config.block_size * config.block_size if tokens < asked else asked)
    if length < (asked if config.max_model_len else min(asked, config.block_size)):
        terms.append((f"one sequence of {asked} tokens", -sizes.total(asked)))
        raise OutOfMemoryError(
            "the cache for one sequence does not fit beside the model:\n" + MemoryPlan((), 0, 0, tuple(terms)).table,
            "Lower --max-model-len, choose a smaller quantisation, or raise --gpu-memory-utilization.",
        )
    limits, slots = sizes.limits(tokens)
    return MemoryPlan(limits, slots, length, tuple(terms))


class _Sizes:
    """What so many tokens of context take."""

    def __init__(self, layout: "CacheLayout", config: EngineConfig):
        self._layout = layout
        self._config = config

    def limits(self, tokens: int) -> tuple[tuple[int, ...], int]:
        """Entries of each group's pool, and of the slot pool, null entries included."""
        config = self._config
        sequences = min(config.max_num_seqs, max(1, tokens // _TYPICAL_TOKENS))
        blocks = -(-tokens // config.block_size)
        limits = []
        for group in self._layout.groups:
            if group.window is None:
                limits.append(blocks + 1)
            else:
                reach = -(-(group.window + config.max_num_batched_tokens) // config.block_size) + 2
                limits.append(min(blocks, 2 * sequences * reach) + 1)
        # A running slot, a checkpoint on its way and two that wait for the next turn, for each sequence.
        slots = 4 * sequences + 1 if self._layout.has_states else 0
        return tuple(limits), slots

    def total(self, tokens: int) -> int:
        limits, slots = self.limits(tokens)
        size = self._config.block_size
        blocks = sum(limit * self._layout.block_bytes(group, size) for group, limit in enumerate(limits))
        return blocks + slots * self._layout.slot_bytes


def _most_tokens(sizes: _Sizes, budget: int, asked: int) -> int:
    """The largest number of tokens whose pools fit the budget, bounded by what could ever be of use."""
    low, high = 0, max(asked * 64, 1 << 16)
    while low < high:
        middle = (low + high + 1) // 2
        if sizes.total(middle) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def _container_limit() -> int | None:
    """The memory limit of the control group this process is in, in bytes."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None
