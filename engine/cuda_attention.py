"""The attention of a decode step in four launches on CUDA: projections, `append_rows`, attention, projection.

Written out, a layer's attention is some twenty operations on small arrays, and a step is bound by the time that the
host takes to launch them. A module is replaced when it has the usual parts, and its own result on random inputs is
that of the launches.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from metalctl.engine.cache.paged_kv import PagedKVCache
from metalctl.engine.replacing import difference, norm_factor, with_call_of
from metalctl.engine.rotary import inverse_frequencies
from metalctl.kernels import append_rows
from metalctl.kernels.paged_attention import paged_attention

CLOSE = 3e-2  # of the largest value: both sides round to 16 bits, at different places
_LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_BLOCK = 16  # tokens, in the proof


@dataclass(frozen=True, slots=True)
class Places:
    """Where a forward's new tokens go and what they see: pools `[tokens, heads, size]`, and int32 arrays, `slots` and
    `positions` `[B]` and the rest as `paged_attention` takes it."""

    pools: tuple[mx.array, mx.array]
    block_size: int
    slots: mx.array
    positions: mx.array
    block_tables: mx.array
    lengths: mx.array
    starts: mx.array | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What a module's attention is made of, beside its projections."""

    scale: float
    softcap: float | None
    frequencies: mx.array
    traditional: bool
    norms: tuple[mx.array, mx.array, mx.array] | None

    def attend(self, module: Any, x: mx.array, places: Places) -> mx.array:
        """Of new tokens `x` `[B, 1, hidden]`, whose K and V are written to the pools: `[B, 1, hidden]`."""
        rows = x.shape[0]
        queries, keys, values = (part(x).reshape(rows, -1) for part in (module.q_proj, module.k_proj, module.v_proj))
        queries = append_rows.append_rows(
            *(queries, keys, values, *places.pools, places.slots, places.positions, self.frequencies),
            traditional=self.traditional,
            norms=self.norms,
        )
        key_blocks, value_blocks = (pool.reshape(-1, places.block_size, *pool.shape[1:]) for pool in places.pools)
        output = paged_attention(
            *(queries, key_blocks, value_blocks, places.block_tables, places.lengths),
            scale=self.scale,
            softcap=self.softcap,
            window=places.window,
            starts=places.starts,
        )
        result: mx.array = module.o_proj(output.reshape(rows, 1, -1))
        return result


class Attention(nn.Module):
    """Attention that is a Step where it is handed one new token of each row, and what it was otherwise."""

    step: Step

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        window = _window(x, mask, cache)
        if window is None:
            return super().__call__(x, mask, cache)
        keys, values, slots, _, _, positions = cache.in_place
        _, _, paged = cache.paged
        where = (paged.block_tables, paged.lengths, paged.starts, window[0])
        return self.step.attend(self, x, Places((keys, values), cache.block_size, slots, positions, *where))


def _window(x: mx.array, mask: Any, cache: Any) -> tuple[int | None] | None:
    """The window in a tuple, where the step serves this call."""
    if not isinstance(cache, PagedKVCache) or x.shape[1] != 1 or not append_rows.applies(x, *cache.pools):
        return None
    return cache.window_of(mask)


def fuse(module: Any) -> bool:
    """Make `module` an Attention if it computes what one does."""
    step = _read(module)
    if step is None or not _proven(module, step):
        return False
    module.__class__ = with_call_of(Attention, type(module))
    object.__setattr__(module, "step", step)
    return True


def _read(module: Any) -> Step | None:
    """The step that `module` seems to be."""
    parts = module.children()
    if not {*_LINEARS, "rope"} <= set(parts) or set(parts) - {*_LINEARS, "rope", "q_norm", "k_norm"}:
        return None
    if list(inspect.signature(type(module).__call__).parameters)[1:] != ["x", "mask", "cache"]:
        return None
    rotation, scale = inverse_frequencies(parts["rope"]), getattr(module, "scale", None)
    if rotation is None or not isinstance(scale, float):
        return None
    norms = None
    if "q_norm" in parts:
        if not all("weight" in parts[name] and hasattr(parts[name], "eps") for name in ("q_norm", "k_norm")):
            return None
        found = [norm_factor(parts[name], CLOSE) for name in ("q_norm", "k_norm")]
        if found[0] is None or found[1] is None:
            return None
        norms = (found[0], found[1], mx.array([module.q_norm.eps], mx.float32))
    softcap = getattr(module, "attn_logit_softcapping", None)
    frequencies = rotation.inverse_frequencies * rotation.scale
    mx.eval(frequencies, norms)
    return Step(scale, softcap, frequencies, rotation.traditional, norms)


def _proven(module: Any, step: Step) -> bool:
    """Whether a token after five others attends as the module lets it."""
    dtype = module.q_proj.get("scales", module.q_proj["weight"]).dtype
    hidden = _input_dims(module.q_proj)
    prompt, token = (mx.random.normal((1, n, hidden), key=mx.random.key(n)).astype(dtype) for n in (5, 1))
    cache = KVCache()
    module(prompt, "causal", cache)
    assert cache.keys is not None
    keys, values = (part[0, :, : cache.offset].swapaxes(0, 1) for part in (cache.keys, cache.values))
    pools = (_in_second_block(keys), _in_second_block(values))
    if keys.dtype != dtype or not append_rows.applies(token, *pools):
        return False
    if step.norms is not None and step.norms[0].size != keys.shape[-1]:
        return False
    expected = module(token, None, cache)
    mx.eval(pools, expected)
    slot, position, table, length = (mx.array([n], mx.int32) for n in (_BLOCK + 5, 5, 1, 6))
    got = step.attend(module, token, Places(pools, _BLOCK, slot, position, table[None], length))
    return got.shape == expected.shape and difference(expected, got) <= CLOSE


def _in_second_block(tokens: mx.array) -> mx.array:
    """A pool of two blocks that holds `tokens` `[n, heads, size]` at the start of the second."""
    return mx.pad(tokens, [(_BLOCK, _BLOCK - tokens.shape[0]), (0, 0), (0, 0)])


def _input_dims(linear: Any) -> int:
    width = int(linear["weight"].shape[-1])
    return width * 32 // linear.bits if "scales" in linear else width
