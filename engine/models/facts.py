"""What a model is, told from the headers of its files alone, wherever they lie."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from metalctl.engine.errors import CheckpointError
from metalctl.engine.models.checkpoint import Format
from metalctl.engine.models.gguf.describe import describe
from metalctl.engine.models.gguf.reader import Header, Source, read_header

KV_BYTES = 2  # of a number in the cache: 16 bits
MAX_SAFETENSORS_HEADER = 100 << 20
MAX_JSON = 64 << 20

Open = Callable[[str], Source]  # the file at a path inside the model


@dataclass(frozen=True, slots=True)
class Share:
    """The tensors of one number format: bytes in the files, and values that they stand for."""

    type: str
    tensors: int
    bytes: int
    values: int
    loaded_as: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """None is what the files do not say. Sizes in bytes; `kv_bytes_per_token` is at most, windows left aside."""

    architecture: str | None
    name: str | None
    parameters: int
    weights_bytes: int
    context_length: int | None
    layers: int | None
    hidden_size: int | None
    vocabulary: int | None
    chat_template: bool
    licence: str | None
    quantisation: tuple[Share, ...]
    kv_bytes_per_token: int | None

    @property
    def bits_per_weight(self) -> float | None:
        return round(8 * self.weights_bytes / self.parameters, 2) if self.parameters else None


def read_facts(format: Format, files: Sequence[str], weights: Sequence[str], open_file: Open) -> Facts:
    """The facts of the model whose files are `files`. Raises CheckpointError where a header is broken."""
    if format == "gguf":
        return _gguf_facts([read_header(open_file(path), path) for path in weights])
    return _folder_facts(files, weights, open_file)


def context_that_fits(facts: Facts, usable: int) -> int | None:
    """Tokens of context that fit in `usable` bytes beside the weights, at most what the model was trained for."""
    if facts.kv_bytes_per_token is None or facts.context_length is None:
        return None
    left = usable - facts.weights_bytes
    return max(0, min(facts.context_length, left // max(facts.kv_bytes_per_token, 1)))


def _gguf_facts(headers: Sequence[Header]) -> Facts:
    parts = [describe(header) for header in headers]
    first = parts[0]
    merged: dict[str, Share] = {}
    for share in (Share(**share) for part in parts for share in part["quantisation"]):
        old = merged.get(share.type, Share(share.type, 0, 0, 0))
        merged[share.type] = Share(
            share.type,
            old.tensors + share.tensors,
            old.bytes + share.bytes,
            old.values + share.values,
            share.loaded_as,
        )
    return Facts(
        first["architecture"],
        first["name"],
        sum(part["parameters"] for part in parts),
        sum(part["weights_bytes"] for part in parts),
        first["context_length"],
        first["layers"],
        first["hidden_size"],
        first["vocabulary"],
        first["chat_template"],
        first["licence"],
        tuple(sorted(merged.values(), key=lambda share: -share.bytes)),
        _gguf_kv_bytes(headers[0]),
    )


def _gguf_kv_bytes(header: Header) -> int | None:
    def number(key: str) -> Any:
        return header.metadata.get(f"{header.metadata.get('general.architecture')}.{key}")

    layers, heads, width = number("block_count"), number("attention.head_count"), number("embedding_length")
    if not layers or not width or heads is None:
        return None
    if rank := number("attention.kv_lora_rank"):
        return int(layers) * (int(rank) + int(number("rope.dimension_count") or 0)) * KV_BYTES
    kv_heads = number("attention.head_count_kv")
    per_layer = _numbers(heads if kv_heads is None else kv_heads, int(layers))
    default = int(width) // max(_numbers(heads, 1))
    lengths = int(number("attention.key_length") or default) + int(number("attention.value_length") or default)
    return sum(per_layer) * lengths * KV_BYTES


def _numbers(value: Any, layers: int) -> list[int]:
    """A count for each layer, from one for all or a list."""
    return [int(one) for one in value] if hasattr(value, "__len__") else [int(value)] * layers


def _folder_facts(files: Sequence[str], weights: Sequence[str], open_file: Open) -> Facts:
    config = _read_json("config.json", files, open_file)
    text: dict[str, Any] = {**config, **config.get("text_config", {})}
    tensors: dict[str, Any] = {}
    for path in weights:
        if path.endswith(".safetensors"):
            tensors |= _safetensors_header(open_file(path), path)
    shares = _shares(tensors, config.get("quantization") or {})
    tokenizer = _read_json("tokenizer_config.json", files, open_file)
    return Facts(
        config.get("model_type"),
        config.get("_name_or_path"),
        sum(share.values for share in shares),
        sum(share.bytes for share in shares),
        text.get("max_position_embeddings") or text.get("n_positions"),
        text.get("num_hidden_layers") or text.get("n_layer"),
        text.get("hidden_size") or text.get("n_embd"),
        text.get("vocab_size"),
        "chat_template" in tokenizer or any("chat_template" in path for path in files),
        None,
        tuple(shares),
        _config_kv_bytes(text),
    )


def _read_json(path: str, files: Sequence[str], open_file: Open) -> dict[str, Any]:
    if path not in files:
        return {}
    source = open_file(path)
    try:
        content = json.loads(source.read(0, min(source.size, MAX_JSON)))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}.", "Fetch the model again.") from error
    return content if isinstance(content, dict) else {}


def _safetensors_header(source: Source, path: str) -> dict[str, Any]:
    length = int.from_bytes(source.read(0, 8), "little") if source.size >= 8 else 0
    if not 2 <= length <= min(source.size - 8, MAX_SAFETENSORS_HEADER):
        raise CheckpointError(f"{path} is damaged or cut short: its header says {length} bytes.", "Fetch it again.")
    try:
        header = json.loads(source.read(8, length))
    except ValueError as error:
        raise CheckpointError(f"The header of {path} is damaged: {error}.", "Fetch it again.") from error
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _shares(tensors: Mapping[str, Any], quantisation: Mapping[str, Any]) -> list[Share]:
    """Tensors by format; scales and biases of a quantised matrix count as bytes of it, and not as values."""
    count, sizes, values = Counter[str](), Counter[str](), Counter[str]()
    for name, entry in tensors.items():
        start, stop = entry["data_offsets"]
        base, _, kind = name.rpartition(".")
        quantised = f"{base}.scales" in tensors
        own = quantisation.get(base)  # where single matrices are stored in another way
        settings = {**quantisation, **(own if isinstance(own, dict) else {})} if quantised else {}
        label = _label(settings) if quantised and kind in ("weight", "scales", "biases") else entry["dtype"]
        sizes[label] += stop - start
        if quantised and kind in ("scales", "biases"):
            continue
        packed = quantised and kind == "weight"
        values[label] += (stop - start) * 8 // int(settings.get("bits", 4)) if packed else prod(entry["shape"])
        count[label] += 1
    return [Share(label, count[label], size, values[label]) for label, size in sizes.most_common()]


def _label(settings: Mapping[str, Any]) -> str:
    mode = settings.get("mode", "affine")
    return f"{settings.get('bits', 4)}-bit" if mode == "affine" else str(mode)


def _config_kv_bytes(text: Mapping[str, Any]) -> int | None:
    layers, heads, width = (text.get(key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if not layers or not heads or not width:
        return None
    if kinds := text.get("layer_types"):
        layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
    elif interval := text.get("full_attention_interval"):
        layers = layers // interval
    if rank := text.get("kv_lora_rank"):
        return int(layers * (rank + (text.get("qk_rope_head_dim") or 0)) * KV_BYTES)
    head = text.get("head_dim") or width // heads
    return int(2 * layers * (text.get("num_key_value_heads") or heads) * head * KV_BYTES)
