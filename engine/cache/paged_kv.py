"""The cache objects that mlx-lm's attention layers are handed: they write to block pools and read from them."""

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import _BaseCache

from metalctl.engine.cache.forward import UNSIGNED, Forward, GroupContext, Paged
from metalctl.engine.cache.layout import KVLayer

Mask = mx.array | str | None
MASK_AXES = 4  # of a batch's mask: [B, heads, L, S]


class PagedKVCache(_BaseCache):  # type: ignore[misc]
    """One attention layer's K and V of all sequences.

    The pools `keys_pool` and `values_pool` are `[num_blocks * block_size, num_kv_heads, head_dim]`, token-major; block
    0 is where padding goes. Towards the model this object is an mlx-lm cache: `offset`, `update_and_fetch`,
    `make_mask`. Only this class rebinds the pools: a second reference to one would turn each write into a copy of all
    of it.
    """

    def __init__(self, layer: KVLayer, block_size: int):
        self.layer = layer
        self.block_size = block_size
        self.mask_axes = MASK_AXES
        self.clear()
        self._forward: Forward | None = None
        self._written: tuple[mx.array, mx.array] | None = None

    # -- towards the runner

    @property
    def pools(self) -> list[mx.array]:
        return [self.keys_pool, self.values_pool]

    def begin(self, forward: Forward | None) -> None:
        """Serve this forward until the next call; None lets go of the last one's arrays."""
        self._forward = forward
        self._written = None

    def bind(self, pools: list[mx.array]) -> None:
        self.keys_pool, self.values_pool = pools

    def clear(self) -> None:
        """Give the pools back."""
        self.keys_pool = mx.zeros((0, *self.layer.key_shape), self.layer.dtype)
        self.values_pool = mx.zeros((0, *self.layer.value_shape), self.layer.dtype)

    def resize(self, num_blocks: int) -> None:
        """Grow the pools to so many blocks; what they hold stays. Waits until they have grown, so that the smaller ones
        are gone before another layer's grow."""
        tokens = num_blocks * self.block_size
        missing = tokens - self.keys_pool.shape[0]
        if missing > 0:
            self.keys_pool = _extended(self.keys_pool, missing)
            self.values_pool = _extended(self.values_pool, missing)
            mx.eval(self.keys_pool, self.values_pool)

    # -- towards the model

    @property
    def offset(self) -> int | mx.array:
        """Tokens in the cache; after `update_and_fetch` the new ones too, as mlx-lm's caches count."""
        assert self._forward is not None
        offset = self._forward.offset
        return offset if self._written is None else offset + self._forward.length

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write K and V of the new tokens, `[B, H, L, D]`; return those of all visible tokens, `[B, H, S, D]`."""
        context = self._context
        dtype = keys.dtype
        _write(self.keys_pool, context.write, keys)
        _write(self.values_pool, context.write, values)
        if self.empty():
            # Nothing but what was just written.
            seen = tuple(x.astype(self.layer.dtype).astype(dtype) for x in (keys, values))
        else:
            seen = tuple(self._read(pool, context).astype(dtype) for pool in self.pools)
        self._written = seen  # type: ignore[assignment]
        return seen  # type: ignore[return-value]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Which visible tokens each of N new tokens attends to, in the forms that mlx-lm's caches return."""
        forward, context = self._forward, self._context
        assert forward is not None
        window = min(filter(None, (window_size, context.window)), default=None)
        if forward.is_batch:
            mask = _narrowed(context, forward, window_size)
            if self.mask_axes != mask.ndim:
                mask = mask.reshape(-1, *[1] * (self.mask_axes - 3), *mask.shape[-2:])
            return self._given(mask, window)
        offset = int(forward.offset) - context.start
        if window is not None and offset + N > window:
            return self._given(create_causal_mask(N, offset, window_size=window), window)
        if N == 1:
            return None
        return self._given(create_causal_mask(N, offset), None) if return_array else "causal"

    def window_of(self, mask: Mask) -> tuple[int | None] | None:
        """The window (in a tuple; None in it for no window) that makes `mask` plain causal attention over the visible
        tokens, or None where the mask is not one that `make_mask` gave: then only the mask itself is right."""
        assert self._forward is not None
        if mask is None or isinstance(mask, str):
            alone = not self._forward.is_batch and (mask is not None or self._forward.length == 1)
            return (self._context.window,) if alone else None
        return next(((window,) for given, window in self._forward.masks if given is mask), None)

    @property
    def paged(self) -> tuple[mx.array, mx.array, Paged]:
        """The pools `[num_blocks, block_size, H, D]` and what finds this forward's sequences in them."""
        keys, values = (pool.reshape(-1, self.block_size, *pool.shape[1:]) for pool in self.pools)
        return keys, values, self._context.paged

    @property
    def in_place(self) -> tuple[mx.array, ...]:
        """For a layer that reads and writes the pools by itself: the pools, which stay the arrays that they are, the
        token slots it writes `[B * L]`, block tables `[B, num_blocks]`, lengths `[B]` counted from each table's first
        slot, and the position of each row's first new token `[B]`."""
        return (*self.pools, *self._context.in_place)

    @property
    def reads_slice(self) -> bool:
        """Whether what is read lies in one piece, so that it costs nothing to hand it out."""
        return isinstance(self._context.read, slice)

    @property
    def num_visible(self) -> int:
        """Tokens that are read, the new ones and padding included."""
        return self._context.length

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What `update_and_fetch` returned in this forward, for layers that share another layer's K and V."""
        assert self._written is not None
        return self._written

    @property
    def keys(self) -> mx.array | None:
        return None if self._written is None else self._written[0]

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        """For models that tie another array's evaluation to their cache; here the pools are evaluated in any case."""
        self._written = keys, self.keys_and_values()[1]

    @property
    def values(self) -> mx.array | None:
        return None if self._written is None else self._written[1]

    @values.setter
    def values(self, values: mx.array) -> None:
        self._written = self.keys_and_values()[0], values

    @property
    def start_position(self) -> int:
        """The position of the first token that is read, for models that make the mask of a chunk by themselves."""
        return self._context.start

    def maybe_trim_front(self) -> None:
        """Nothing: blocks that the window has left are not read."""

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values

    def empty(self) -> bool:
        return self._forward is None or (not self._forward.is_batch and bool(self._forward.offset == 0))

    @property
    def nbytes(self) -> int:
        return int(self.keys_pool.nbytes + self.values_pool.nbytes)

    # -- inner

    def _given(self, mask: mx.array, window: int | None) -> mx.array:
        assert self._forward is not None
        self._forward.masks.append((mask, window))
        return mask

    @property
    def _context(self) -> GroupContext:
        assert self._forward is not None
        return self._forward.groups[self.layer.group]

    def _read(self, pool: mx.array, context: GroupContext) -> mx.array:
        if isinstance(context.read, slice):
            return pool[context.read].transpose(1, 0, 2)[None]
        if pool.shape[-1] == 0:
            return mx.zeros((context.read.shape[0], pool.shape[1], context.length, 0), pool.dtype)
        blocks = pool.reshape(-1, self.block_size, *pool.shape[1:])[context.read]
        batch, count, size, heads, width = blocks.shape
        tokens = blocks.reshape(batch, count * size, heads, width)
        seen = context.seen(pool.dtype)
        if seen is not None:
            # What nobody sees may be of a sequence that left there something not finite, which 0 times is no 0. On the
            # bits this takes a third of the time that mx.where does.
            return (tokens.view(UNSIGNED[pool.dtype.size]) & seen).view(pool.dtype).transpose(0, 2, 1, 3)
        return tokens[:, context.skip : context.skip + context.length].transpose(0, 2, 1, 3)


def _write(pool: mx.array, where: slice | mx.array, new: mx.array) -> None:
    """Set the pool's token slots `where` to `new` `[B, H, L, D]`, in place where nobody else holds the pool."""
    batch, heads, length, width = new.shape
    if width == 0:  # K without V: an index that the model searches
        return
    by_token = new if length == 1 else new.transpose(0, 2, 1, 3)
    pool[where] = by_token.reshape(batch * length, heads, width).astype(pool.dtype)


def _extended(pool: mx.array, missing: int) -> mx.array:
    return mx.concatenate([pool, mx.zeros((missing, *pool.shape[1:]), pool.dtype)])


def _narrowed(context: GroupContext, forward: Forward, window_size: int | None) -> mx.array:
    """The batch's mask, narrowed where the model asks for a window of its own on a layer that keeps everything."""
    assert context.mask is not None
    if window_size is None or (context.window is not None and context.window <= window_size):
        return context.mask
    position = mx.arange(context.length, dtype=mx.int32)
    assert context.window is None
    query = mx.array(forward.offset)[:, None] + mx.arange(forward.length, dtype=mx.int32)
    visible = (position > query[:, :, None] - window_size) | (query < 0)[:, :, None]
    return context.mask & visible[:, None]
