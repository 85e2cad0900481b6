"""Measures how GGUF files of each block type load: python tests/benchmarks/gguf_load.py [TYPE ...] [--gigabytes 1]

For each type a Llama of random blocks is written to a temporary folder and loaded in processes of their own, through
the same function as every command uses: into MLX, and then with what packing it for the CPU kernels takes too. Prints
a Markdown table: seconds on the clock and of the processors, the size of the result in MLX, and by how much the memory
grew at most, without the mapped file, as a multiple of that (on Linux).
"""

import argparse
import datetime
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from mlx.utils import tree_flatten

from metalctl.engine.acceleration import prepare
from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.engine.models.gguf import unpack
from metalctl.engine.models.gguf.quants import FLOATS, FORMATS, dequantize_blocks
from metalctl.engine.models.loader import load
from metalctl.engine_start import kernel_cache

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.engine.models.gguf.writer import add_byte_vocabulary, add_value

HIDDEN, FEED_FORWARD, KEYS, VOCABULARY = 4096, 14336, 1024, 320
METADATA = {
    "block_count": 0,
    "context_length": 4096,
    "embedding_length": HIDDEN,
    "feed_forward_length": FEED_FORWARD,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "vocab_size": VOCABULARY,
}
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KEYS, HIDDEN),
    "attn_v": (KEYS, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (FEED_FORWARD, HIDDEN),
    "ffn_up": (FEED_FORWARD, HIDDEN),
    "ffn_down": (HIDDEN, FEED_FORWARD),
}


def numbers(blocks: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    unpacker = getattr(unpack, kind.name.lower(), None)
    if unpacker:
        return dequantize_blocks(unpacker(blocks))
    return blocks.view(np.float64) if kind.name == "F64" else gguf.dequantize(blocks, kind)


def random_rows(kind: GGMLQuantizationType, shape: tuple[int, int]) -> np.ndarray:
    """Rows of random blocks, uint8 [rows, bytes], whose values are all finite and small."""
    block, size = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (1 << 16, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        values = numbers(blocks, kind)
        sound = blocks[(np.abs(values) < 100).all(axis=1)]
    count = math.prod(shape) // block
    return np.resize(sound, (count, size)).reshape(shape[0], -1)


def write_model(path: Path, kind: GGMLQuantizationType, size: float) -> None:
    """A Llama of about `size` bytes."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    layer = sum(math.prod(shape) for shape in MATRICES.values()) / block * block_bytes
    layers = max(round(size / layer), 1)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (METADATA | {"block_count": layers}).items():
        add_value(writer, f"llama.{key}", value)
    add_byte_vocabulary(writer, VOCABULARY)
    norm = np.ones(HIDDEN, np.float32)
    rows = {name: random_rows(kind, shape) for name, shape in MATRICES.items()}
    writer.add_tensor("token_embd.weight", np.ones((VOCABULARY, HIDDEN), np.float16))
    writer.add_tensor("output_norm.weight", norm)
    for number in range(layers):
        for name, data in rows.items():
            writer.add_tensor(f"blk.{number}.{name}.weight", data, raw_dtype=kind)
        writer.add_tensor(f"blk.{number}.attn_norm.weight", norm)
        writer.add_tensor(f"blk.{number}.ffn_norm.weight", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class PeakMemory(threading.Thread):
    """Watches this process's own memory, without files that are mapped; 0 where the system does not tell."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._before = self._peak = _own_memory()
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.01):
            self._peak = max(self._peak, _own_memory())

    def stop(self) -> int:
        """Bytes at most, more than at the start."""
        self._done.set()
        self.join()
        return self._peak - self._before


def _own_memory() -> int:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def measure(path: Path, kernels: bool) -> dict[str, Any]:
    """Loads the file in this process."""
    if kernels:
        prepare(kernel_cache(), lambda text: print(text, file=sys.stderr))
    mx.eval(mx.zeros(1))
    memory = PeakMemory()
    memory.start()
    wall, processor = time.perf_counter(), time.process_time()
    model = load(Checkpoint(str(path), "gguf", path, (path,))).model
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    peak = memory.stop()
    size = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    return {"file": path.stat().st_size, "wall": wall, "processor": processor, "result": size, "peak": peak}


def measure_type(kind: GGMLQuantizationType, size: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Without the CPU kernels and with them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(path, kind, size)
        command = [sys.executable, __file__, "--load", str(path)]
        plain, packed = (
            json.loads(subprocess.run([*command, *options], check=True, stdout=subprocess.PIPE, text=True).stdout)
            for options in ([], ["--kernels"])
        )
    return plain, packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="all that can be loaded without it")
    parser.add_argument("--gigabytes", type=float, default=1, help="of the file")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kernels", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        print(json.dumps(measure(arguments.load, arguments.kernels)))
        return
    print(f"MLX {mx.__version__}, {os.cpu_count()} cores, {datetime.date.today()}\n")
    print("| type | file GB | in MLX GB | s | processor s | peak | with kernels s | processor s | peak |")
    print("| --- |" + " ---: |" * 8)
    for kind in [*FORMATS, *FLOATS]:
        if arguments.types and kind.name not in arguments.types:
            continue
        plain, packed = measure_type(kind, arguments.gigabytes * 1e9)
        times = (
            f"{one['wall']:.1f} | {one['processor']:.1f} | {one['peak'] / plain['result']:.2f}"
            for one in (plain, packed)
        )
        sizes = f"{plain['file'] / 1e9:.2f} | {plain['result'] / 1e9:.2f}"
        print(f"| {kind.name} | {sizes} | {' | '.join(times)} |", flush=True)


if __name__ == "__main__":
    main()
