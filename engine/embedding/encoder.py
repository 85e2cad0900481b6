"""Bidirectional transformers: one set of modules for BERT, RoBERTa and XLM-R, ModernBERT and nomic-bert.

They differ in where positions come from, where norms stand, and what the MLP is; EncoderConfig says which.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh"]

_ACTIVATIONS: dict[Activation, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu,
    "gelu_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
    "tanh": mx.tanh,
}


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A classifier on top: of the first token's vector or of the mean of all, through a layer and perhaps a norm."""

    labels: int
    activation: Activation = "tanh"
    mean: bool = False
    norm: bool = False
    dense_bias: bool = True


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Sizes and form of an encoder. `max_length` is in tokens, with those that stand around a text.

    `positions` is the number of learned positions, of which the first `position_offset` are not used; 0: rotary ones,
    with `rope_bases` for each layer. `windows` holds for each layer how far a token sees to either side; None: all.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_length: int
    norm_eps: float = 1e-12
    activation: Activation = "gelu"
    gated: bool = False
    pre_norm: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    token_types: int = 0
    positions: int = 0
    position_offset: int = 0
    rope_bases: tuple[float, ...] = ()
    windows: tuple[int | None, ...] = ()
    head: HeadConfig | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.hidden_size, eps=self.norm_eps, bias=self.norm_bias)


@dataclass(frozen=True, slots=True)
class Seen:
    """Which tokens each token of a batch sees: `masks` by window, as of window_mask, and int32 `lengths` `[B]`."""

    masks: Mapping[int | None, mx.array | None]
    lengths: mx.array


class Attention(nn.Module):
    def __init__(self, config: EncoderConfig, layer: int):
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.scale = 1 / math.sqrt(config.head_dim)
        self.window = config.windows[layer] if config.windows else None
        self.query = nn.Linear(size, size, bias=config.attention_bias)
        self.key = nn.Linear(size, size, bias=config.attention_bias)
        self.value = nn.Linear(size, size, bias=config.attention_bias)
        self.output = nn.Linear(size, size, bias=config.attention_bias)
        if config.rope_bases:
            self.rope = nn.RoPE(config.head_dim, base=config.rope_bases[layer])

    def __call__(self, x: mx.array, seen: Seen) -> mx.array:
        queries, keys, values = self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))
        if "rope" in self:
            queries, keys = self.rope(queries), self.rope(keys)
        result = self.attend(queries, keys, values, seen)
        return self.output(result.transpose(0, 2, 1, 3).reshape(x.shape))

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, seen: Seen) -> mx.array:
        """`[B, H, L, D]` each, and so is the result."""
        mask = seen.masks[self.window]
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)

    def _heads(self, x: mx.array) -> mx.array:
        batch, length, _ = x.shape
        return x.reshape(batch, length, self.num_heads, -1).transpose(0, 2, 1, 3)


class MLP(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.activation = _ACTIVATIONS[config.activation]
        if config.gated:
            self.gate_proj = nn.Linear(size, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(size, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, size, bias=config.mlp_bias)

    def __call__(self, x: mx.array) -> mx.array:
        if "gate_proj" in self:
            return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(self.activation(self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self, config: EncoderConfig, layer: int):
        super().__init__()
        self.pre_norm = config.pre_norm
        self.attention = Attention(config, layer)
        self.mlp = MLP(config)
        if not (config.pre_norm and layer == 0):  # there the norm of the embeddings serves
            self.attention_norm = config.norm()
        self.mlp_norm = config.norm()

    def __call__(self, x: mx.array, seen: Seen) -> mx.array:
        if self.pre_norm:
            x = x + self.attention(self.attention_norm(x) if "attention_norm" in self else x, seen)
            return x + self.mlp(self.mlp_norm(x))
        x = self.attention_norm(x + self.attention(x, seen))
        return self.mlp_norm(x + self.mlp(x))


class Embeddings(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.offset = config.position_offset
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.positions:
            self.positions = nn.Embedding(config.positions, config.hidden_size)
        if config.token_types:
            self.types = nn.Embedding(config.token_types, config.hidden_size)
        self.norm = config.norm()

    def __call__(self, ids: mx.array, types: mx.array) -> mx.array:
        x = self.tokens(ids)
        if "positions" in self:
            x = x + self.positions(mx.arange(self.offset, self.offset + ids.shape[1]))
        if "types" in self:
            x = x + self.types(types)
        return self.norm(x)


class Head(nn.Module):
    def __init__(self, config: EncoderConfig, head: HeadConfig):
        super().__init__()
        self.activation = _ACTIVATIONS[head.activation]
        self.mean = head.mean
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=head.dense_bias)
        if head.norm:
            self.norm = config.norm()
        self.output = nn.Linear(config.hidden_size, head.labels)

    def __call__(self, hidden: mx.array, present: mx.array | None) -> mx.array:
        x = self.activation(self.dense(_mean(hidden, present) if self.mean else hidden[:, 0]))
        return self.output(self.norm(x) if "norm" in self else x)


class Encoder(nn.Module):
    """Token ids and token types `[B, L]` (int32) to `[B, L, hidden]`.

    `present` is `[B, L]` (bool), False for padding, which is on the right; None: there is none.
    """

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = [Layer(config, layer) for layer in range(config.num_layers)]
        if config.pre_norm:
            self.final_norm = config.norm()
        if config.head:
            self.head = Head(config, config.head)

    def __call__(self, ids: mx.array, types: mx.array, present: mx.array | None) -> mx.array:
        x = self.embeddings(ids, types)
        batch, length = ids.shape
        masks = {window: window_mask(present, window, length) for window in {None, *self.config.windows}}
        lengths = mx.full((batch,), length, mx.int32) if present is None else present.sum(axis=1).astype(mx.int32)
        seen = Seen(masks, lengths)
        for layer in self.layers:
            x = layer(x, seen)
        return self.final_norm(x) if "final_norm" in self else x

    def classify(self, ids: mx.array, types: mx.array, present: mx.array | None) -> mx.array:
        """The head's logits `[B, labels]`."""
        return self.head(self(ids, types, present), present)


def window_mask(present: mx.array | None, window: int | None, length: int) -> mx.array | None:
    """Which keys each query sees, `[B or 1, 1, 1 or L, L]`: those that are no padding and at most `window` away.

    None: all. `present` is as for Encoder.
    """
    mask = None if present is None else present[:, None, None, :]
    if window is None or length <= window + 1:
        return mask
    positions = mx.arange(length)
    near = (mx.abs(positions[:, None] - positions[None, :]) <= window)[None, None]
    if present is None or mask is None:
        return near
    # Padding sees padding: a row without any key would be NaN.
    return (mask & near) | (~present[:, None, :, None] & near)


def _mean(hidden: mx.array, present: mx.array | None) -> mx.array:
    if present is None:
        return hidden.mean(axis=1)
    weights = present[..., None].astype(hidden.dtype)
    return (hidden * weights).sum(axis=1) / weights.sum(axis=1)
