"""Every block type of the gguf package is loaded with the values that `gguf.dequantize` gives, or refused by name."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from metalctl.engine.errors import CheckpointError, UnsupportedModelError
from metalctl.engine.models.gguf import bits, quants
from metalctl.engine.models.gguf.quants import (
    EXACT_FORMATS,
    FLOATS,
    FORMATS,
    Format,
    Packed,
    check_type,
    dequantize,
    explain,
)

POOL = ThreadPoolExecutor(2)
ROWS, BLOCKS = 12, 8
REFUSED = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64"}


def blocks(kind: GGMLQuantizationType, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random bytes of blocks whose values are all finite, and those values, both [ROWS, ...]."""
    size = GGML_QUANT_SIZES[kind][1]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (40 * ROWS * BLOCKS, size), dtype=np.uint8)
    if kind == GGMLQuantizationType.NVFP4:
        raw[:, :4] &= 0x7F
    with np.errstate(all="ignore"):
        values = reference(raw, kind)
        sound = np.flatnonzero((np.abs(values) < 1e4).all(axis=1))[: ROWS * BLOCKS]
    assert len(sound) == ROWS * BLOCKS
    return raw[sound].reshape(ROWS, -1), values[sound].reshape(ROWS, -1)


def reference(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    if kind == GGMLQuantizationType.Q1_0:  # the gguf package has its size only: a set bit is d, a clear one -d
        scale = raw[:, :2].copy().view(np.float16).astype(np.float32)
        return np.where(np.unpackbits(raw[:, 2:], axis=1, bitorder="little"), scale, -scale)
    return gguf.dequantize(raw, kind)


def pack(tensor: str, raw: np.ndarray, kind: GGMLQuantizationType, chosen: Format) -> Packed:
    parts = list(quants.pack(tensor, raw, kind, chosen, POOL))
    biases = None if parts[0].biases is None else np.concatenate([part.biases for part in parts])
    return Packed(np.concatenate([p.weight for p in parts]), np.concatenate([p.scales for p in parts]), biases)


def loaded(raw: np.ndarray, kind: GGMLQuantizationType, chosen: Format) -> np.ndarray:
    """The values that MLX sees."""
    packed = pack("t", raw, kind, chosen)
    biases = None if packed.biases is None else mx.array(packed.biases)
    values = mx.dequantize(
        mx.array(packed.weight), mx.array(packed.scales), biases, dtype=mx.float32, **chosen.parameters
    )
    return np.array(values)


def largest(values: np.ndarray, group: int) -> np.ndarray:
    """The largest magnitude in each value's group."""
    grouped = np.abs(values).reshape(-1, group).max(axis=1, keepdims=True)
    return np.broadcast_to(grouped, (grouped.size, group)).reshape(values.shape)


EXACT = [(kind, chosen) for kind, chosen in [*FORMATS.items(), *EXACT_FORMATS.items()] if chosen.exact]


@pytest.mark.parametrize(("kind", "chosen"), EXACT, ids=lambda value: getattr(value, "name", ""))
def test_exact_types_keep_every_value(kind: GGMLQuantizationType, chosen: Format) -> None:
    raw, values = blocks(kind)
    found = loaded(raw, kind, chosen)
    assert (np.abs(found - values) <= 2**-11 * largest(values, 32)).all()
    assert np.abs(found - values).max() <= 1e-5 * np.abs(values).max()


# How far the values of a type lie apart, as a share of the largest: what the type itself could not tell apart.
SPACING = {
    "Q6_K": 1 / 32,
    "Q3_K": 1 / 4,
    "Q2_K": 1 / 3,
    "IQ3_XXS": 8 / 62,
    "IQ2_XXS": 17 / 43,
    "IQ2_XS": 17 / 43,
    "IQ2_S": 17 / 43,
    "IQ1_M": 8 / 9,
}


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if not FORMATS[kind].exact], ids=lambda kind: kind.name)
def test_rounding_is_small_beside_the_error_of_the_type_itself(kind: GGMLQuantizationType) -> None:
    raw, values = blocks(kind)
    error = loaded(raw, kind, FORMATS[kind]) - values
    step = SPACING[kind.name] * largest(values, 32)
    own = step / np.sqrt(12)
    assert np.sqrt(np.mean((error / own) ** 2)) < 0.35
    assert (np.abs(error) <= 0.5 * step).all()


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_numbers_equal_those_of_the_gguf_package(kind: GGMLQuantizationType) -> None:
    raw, values = blocks(kind, seed=1)
    np.testing.assert_array_equal(dequantize("t", raw, kind), values)


@pytest.mark.parametrize("kind", FLOATS, ids=lambda kind: kind.name)
def test_floats_equal_those_of_the_gguf_package(kind: GGMLQuantizationType) -> None:
    values = np.linspace(-3, 3, 64, dtype=np.float32).reshape(2, 32)
    raw = values.astype(np.float64).view(np.uint8) if kind.name == "F64" else gguf.quantize(values, kind).view(np.uint8)
    expected = values if kind.name == "F64" else gguf.dequantize(raw, kind)
    np.testing.assert_array_equal(dequantize("t", raw, kind), expected)


def test_every_type_of_the_gguf_package_is_loaded_or_refused_by_name() -> None:
    for kind in GGMLQuantizationType:
        if kind.name not in REFUSED:
            check_type("t", kind)
            continue
        with pytest.raises(UnsupportedModelError, match=f"'t' is stored as {kind.name}"):
            check_type("t", kind)


def test_precision_exact_rounds_nothing() -> None:
    for kind in FORMATS:
        chosen = quants.quantised_format(kind, "exact")
        assert chosen is None or chosen.exact
        assert "rounded" not in explain(kind, "exact")
    assert explain(GGMLQuantizationType.Q6_K) == "rounded to 8 bits in groups of 32"
    assert explain(GGMLQuantizationType.Q4_K) == "repacked exactly as 4 bits in groups of 32"


def test_parts_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, _ = blocks(GGMLQuantizationType.Q5_K)
    whole = pack("t", raw, GGMLQuantizationType.Q5_K, FORMATS[GGMLQuantizationType.Q5_K])
    monkeypatch.setattr(quants, "VALUES_AT_ONCE", 5 * BLOCKS * 256)
    monkeypatch.setattr(quants, "MOST_AHEAD", 1)
    assert len(list(quants.pack("t", raw, GGMLQuantizationType.Q5_K, FORMATS[GGMLQuantizationType.Q5_K], POOL))) == 3
    chunked = pack("t", raw, GGMLQuantizationType.Q5_K, FORMATS[GGMLQuantizationType.Q5_K])
    np.testing.assert_array_equal(whole.weight, chunked.weight)
    np.testing.assert_array_equal(whole.biases, chunked.biases)


def test_scale_that_is_no_number_names_the_tensor() -> None:
    raw, _ = blocks(GGMLQuantizationType.Q8_0)
    raw[3, :2] = np.frombuffer(np.float16("nan").tobytes(), np.uint8)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight"):
        pack("blk.0.ffn_up.weight", raw, GGMLQuantizationType.Q8_0, FORMATS[GGMLQuantizationType.Q8_0])
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight"):
        dequantize("blk.0.ffn_up.weight", raw, GGMLQuantizationType.Q8_0)


@pytest.mark.parametrize("width", [2, 4, 5, 8])
def test_bits_are_packed_in_the_order_that_mlx_reads(width: int) -> None:
    codes = np.random.default_rng(width).integers(0, 1 << width, (4, 64), dtype=np.uint8)
    packed = mx.array(bits.pack_bits(codes, width).view(np.uint32))
    ones, zeros = mx.ones((4, 2)), mx.zeros((4, 2))
    np.testing.assert_array_equal(np.array(mx.dequantize(packed, ones, zeros, 32, width)), codes)


def seconds(work: Callable[[], object]) -> float:
    """Of this thread's processor, at best."""

    def once() -> float:
        start = time.thread_time()
        work()
        return time.thread_time() - start

    return min(once() for _ in range(4))


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind.name != "Q1_0"], ids=lambda kind: kind.name)
def test_packing_takes_less_than_half_of_what_the_gguf_package_takes_for_numbers(kind: GGMLQuantizationType) -> None:
    block, size = GGML_QUANT_SIZES[kind]
    raw = np.resize(blocks(kind)[0].reshape(-1, size), ((1 << 19) // block, size))
    assert seconds(lambda: FORMATS[kind].pack(raw)) < 0.5 * seconds(lambda: gguf.dequantize(raw, kind))
