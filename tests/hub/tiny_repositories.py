"""Small real repositories: an MLX model, and a GGUF one in three quantisations, one of them split."""

import json
import random
import tempfile
from pathlib import Path

import gguf
import numpy as np

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def gguf_file(
    kind: str = "F32", *, seed: int = 0, values: int = 32 * 256, part: tuple[int, int] | None = None
) -> bytes:
    """A GGUF file of the llama family with one tensor; `part` (number from 0, of how many) makes it part of a split."""
    tensor = np.random.default_rng(seed).standard_normal((values // 32, 32)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name("Tiny")
        writer.add_license("apache-2.0")
        writer.add_context_length(2048)
        writer.add_block_count(2)
        writer.add_embedding_length(32)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_chat_template("{{ messages }}")
        if part:
            writer.add_uint16("split.no", part[0])
            writer.add_uint16("split.count", part[1])
            writer.add_int32("split.tensors.count", part[1])
        quantised = gguf.GGMLQuantizationType[kind]
        data = gguf.quantize(tensor, quantised) if kind != "F32" else tensor
        writer.add_tensor(f"blk.{part[0] if part else 0}.ffn_up.weight", data, raw_dtype=quantised)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def gguf_repository(size: int = 32 * 256) -> dict[str, bytes]:
    """Q4_0 and Q8_0 of one file, F16 of two parts, a projector, and what repositories have beside."""
    return {
        ".gitattributes": b"*.gguf filter=lfs\n",
        "README.md": b"---\nlicense: mit\n---\n",
        "tiny-Q4_0.gguf": gguf_file("Q4_0", values=size),
        "tiny-Q8_0.gguf": gguf_file("Q8_0", values=size),
        "tiny-F16-00001-of-00002.gguf": gguf_file("F16", values=size, part=(0, 2)),
        "tiny-F16-00002-of-00002.gguf": gguf_file("F16", values=size, part=(1, 2), seed=1),
        "mmproj-F16.gguf": gguf_file("F16", values=64),
    }


def safetensors_file(tensors: dict[str, tuple[str, tuple[int, ...]]], seed: int = 0) -> bytes:
    """Random bytes under a right header. `tensors`: dtype and shape by name."""
    widths = {"F32": 4, "U32": 4, "F16": 2, "BF16": 2}
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + widths[dtype] * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + random.Random(seed).randbytes(offset)


def mlx_repository(seed: int = 0) -> dict[str, bytes]:
    """A 4-bit model in two shards: 2 layers, hidden 64, heads 4 and 2, vocabulary 128."""
    quantised: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("U32", (128, 8)),
        "model.embed_tokens.scales": ("BF16", (128, 1)),
        "model.embed_tokens.biases": ("BF16", (128, 1)),
    }
    plain: dict[str, tuple[str, tuple[int, ...]]] = {"model.norm.weight": ("BF16", (64,))}
    names = {name: SHARDS[name in plain] for name in (*quantised, *plain)}
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 4096,
        "quantization": {"bits": 4, "group_size": 64},
        "seed": seed,
    }
    return {
        ".gitattributes": b"*.safetensors filter=lfs\n",
        "README.md": b"---\nlicense: mit\n---\n",
        "config.json": json.dumps(config).encode(),
        SHARDS[0]: safetensors_file(quantised, seed),
        SHARDS[1]: safetensors_file(plain, seed + 1),
        "model.safetensors.index.json": json.dumps({"weight_map": names}).encode(),
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b'{"chat_template": "{{ messages }}"}',
        "pytorch_model.bin": b"pickle",
    }
