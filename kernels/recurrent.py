"""The recurrences of hybrid models where mlx-lm has no kernel: on CUDA. On Metal mlx-lm's own are used."""

from functools import cache
from typing import Any

import mlx.core as mx

from metalctl.kernels import dispatch

THREADS = 128
LANES = 8  # that hold a row of the gated delta state between them
WARP = 32


def gated_delta(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """The gated delta rule over T tokens: S <- g S, then S <- S + beta (v - S k) k^T, and y = S q.

    q, k   [B, T, Hk, Dk]   Hv is a multiple of Hk: value head h reads key head h // (Hv // Hk)
    v      [B, T, Hv, Dv]
    g      [B, T, Hv] or [B, T, Hv, Dk]   decay of a head, or of each of its key dimensions
    beta   [B, T, Hv]
    state  [B, Hv, Dv, Dk] float32
    mask   [B, T] bool      a token where it is false leaves the state alone and yields zeros

    Returns y [B, T, Hv, Dv] in the dtype of q, and the state after the last token.
    """
    batch, tokens, key_heads, key_dim = q.shape
    if dispatch.body("gated_delta") != "cuda" or key_dim % LANES or key_dim > 256 or state.dtype != mx.float32:
        return gated_delta_reference(q, k, v, g, beta, state, mask)
    value_heads, value_dim = v.shape[2:]
    rows = batch * value_heads * value_dim
    everywhere = mx.ones((1,), dtype=mx.bool_) if mask is None else mask
    y, after = kernel("gated_delta")(
        inputs=[q, k, v, g.astype(mx.float32), beta.astype(mx.float32), state, everywhere],
        template=[
            *(("T", q.dtype), ("I", v.dtype), ("K", k.dtype), ("VECTOR", g.ndim == 4), ("MASK", mask is not None)),
            *(("LANES", LANES), ("WIDTH", key_dim // LANES), ("KEY_DIM", key_dim), ("VALUE_DIM", value_dim)),
            *(("KEY_HEADS", key_heads), ("VALUE_HEADS", value_heads)),
        ],
        grid=(-(-rows * LANES // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(batch, tokens, value_heads, value_dim), state.shape],
        output_dtypes=[q.dtype, state.dtype],
    )
    return y, after


def gated_delta_reference(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """`gated_delta` in plain MLX operations, a token at a time. Normative."""
    sharing = v.shape[2] // q.shape[2]
    queries, keys = (mx.repeat(part.astype(mx.float32), sharing, axis=2)[..., None, :] for part in (q, k))
    decay = (g if g.ndim == 4 else g[..., None])[..., None, :].astype(mx.float32)
    outputs = []
    for token in range(q.shape[1]):
        key = keys[:, token]
        faded = state * decay[:, token]
        remembered = (faded * key).sum(axis=-1)
        delta = (v[:, token] - remembered) * beta[:, token, :, None]
        updated = faded + delta[..., None] * key
        output = (updated * queries[:, token]).sum(axis=-1)
        if mask is not None:
            seen = mask[:, token, None, None]
            updated = mx.where(seen[..., None], updated, state)
            output = mx.where(seen, output, 0)
        state = updated.astype(state.dtype)
        outputs.append(output.astype(q.dtype))
    return mx.stack(outputs, axis=1), state


def state_space_step(
    x: mx.array, a_log: mx.array, b: mx.array, c: mx.array, d: mx.array, dt: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """One token of Mamba-2's recurrence: S <- exp(-exp(a_log) dt) S + dt x b^T, and y = S c + d x.

    x      [B, 1, H, Dh]
    a_log, d  [H]
    b, c   [B, 1, G, Ds]    H is a multiple of G
    dt     [B, 1, H]        after its bias, softplus and limits
    state  [B, H, Dh, Ds]

    Returns y [B, 1, H, Dh] in the dtype of x, and the new state in its own.
    """
    if dispatch.body("state_space") != "cuda":
        return state_space_reference(x, a_log, b, c, d, dt, state)
    batch, heads, head_dim, state_dim = state.shape
    rows = batch * heads * head_dim
    y, after = kernel("state_space")(
        inputs=[x, a_log, b, c, d, dt.astype(mx.float32), state],
        template=[
            *(("T", x.dtype), ("S", state.dtype), ("A", a_log.dtype), ("B", b.dtype), ("C", c.dtype), ("E", d.dtype)),
            *(("HEADS", heads), ("HEAD_DIM", head_dim), ("STATE_DIM", state_dim), ("GROUPS", b.shape[2])),
        ],
        grid=(-(-rows * WARP // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[x.shape, state.shape],
        output_dtypes=[x.dtype, state.dtype],
    )
    return y, after


def state_space_reference(
    x: mx.array, a_log: mx.array, b: mx.array, c: mx.array, d: mx.array, dt: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """`state_space_step` in plain MLX operations. Normative."""
    sharing = x.shape[2] // b.shape[2]
    into, out_of = (mx.repeat(part[:, 0].astype(mx.float32), sharing, axis=1)[:, :, None] for part in (b, c))
    inputs, step = x[:, 0].astype(mx.float32), dt[:, 0].astype(mx.float32)
    decay = mx.exp(-mx.exp(a_log.astype(mx.float32)) * step)
    after = decay[..., None, None] * state.astype(mx.float32) + (step[..., None] * inputs)[..., None] * into
    y = (after * out_of).sum(axis=-1) + d.astype(mx.float32)[:, None] * inputs
    return y[:, None].astype(x.dtype), after.astype(state.dtype)


@cache
def kernel(name: str) -> Any:
    """A section of this module's CUDA source as a kernel."""
    inputs = {
        "gated_delta": ["q", "k", "v", "g", "beta", "state_in", "mask"],
        "state_space": ["x", "a_log", "b", "c", "d", "dt", "state_in"],
    }
    sections = dispatch.source("recurrent.cu")
    return mx.fast.cuda_kernel(
        name=f"metalctl_{name}",
        input_names=inputs[name],
        output_names=["y", "state_out"],
        source=sections[name],
        header=sections["header"],
    )
