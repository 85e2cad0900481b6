"""What a GGUF header tells about its model, without any weights."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from metalctl.engine.config import Precision
from metalctl.engine.models.gguf.quants import HALVES, explain, quantised_format
from metalctl.engine.models.gguf.reader import Header


@dataclass(frozen=True, slots=True)
class TypeShare:
    """The tensors of one block type: their number, bytes in the file, values, and how matrices of it are loaded."""

    type: str
    tensors: int
    bytes: int
    values: int
    loaded_as: str


def quantisation_mix(header: Header, precision: Precision = "size") -> list[TypeShare]:
    """The block types in the file, largest share first."""
    tensors, sizes, values = Counter[Any](), Counter[Any](), Counter[Any]()
    for info in header.tensors:
        tensors[info.type] += 1
        sizes[info.type] += info.nbytes
        values[info.type] += info.size
    return [
        TypeShare(kind.name, tensors[kind], size, values[kind], explain(kind, precision))
        for kind, size in sizes.most_common()
    ]


def rounding(header: Header) -> list[str]:
    """A line for each block type whose values are rounded when it is loaded, unless precision is asked for."""
    return [
        f"{share.type}, {share.tensors} of {len(header.tensors)} tensors, is {share.loaded_as} when loaded; "
        "--precision exact keeps its values"
        for share in quantisation_mix(header)
        if share.loaded_as.startswith("rounded")
    ]


def loaded_bytes(header: Header, precision: Precision = "size", float_bytes: int = 2, halves_stay: bool = False) -> int:
    """What the weights take once loaded, nearly.

    `float_bytes` is the size of a number that is not quantised; with `halves_stay` matrices of 16 bits keep theirs.
    """
    total = 0.0
    for info in header.tensors:
        chosen = quantised_format(info.type, precision) if len(info.shape) > 1 else None
        if chosen is None:
            half = halves_stay and len(info.shape) > 1 and info.type in HALVES
            total += info.size * (2 if half else float_bytes)
        else:
            scales = 2 * float_bytes if chosen.mode == "affine" else 1
            total += info.size * (chosen.bits / 8 + scales / chosen.group_size)
    return int(total)


def describe(header: Header, precision: Precision = "size") -> dict[str, Any]:
    """Facts for `show`: sizes in bytes, counts, and None for what the file does not say."""
    architecture = header.get("general.architecture", str)
    values = sum(info.size for info in header.tensors)
    size = sum(info.nbytes for info in header.tensors)
    templates = [key for key in header.metadata if key.startswith("tokenizer.chat_template")]
    return {
        "architecture": architecture,
        "name": header.get("general.name", str),
        "licence": header.get("general.license", str),
        "parameters": values,
        "bits_per_weight": round(8 * size / values, 2) if values else None,
        "weights_bytes": size,
        "loaded_bytes": loaded_bytes(header, precision),
        "tensors": len(header.tensors),
        "context_length": _architecture_number(header, "context_length"),
        "layers": _architecture_number(header, "block_count"),
        "hidden_size": _architecture_number(header, "embedding_length"),
        "vocabulary": _length(header, "tokenizer.ggml.tokens"),
        "tokenizer": header.get("tokenizer.ggml.model", str),
        "pre_tokenizer": header.get("tokenizer.ggml.pre", str),
        "chat_template": bool(templates),
        "chat_templates": sorted(_template_name(key) for key in templates if key != "tokenizer.chat_templates"),
        "split_parts": header.get("split.count", int) or 1,
        "quantisation": [asdict(share) for share in quantisation_mix(header, precision)],
    }


def _architecture_number(header: Header, key: str) -> int | None:
    return header.get(f"{header.metadata.get('general.architecture')}.{key}", int)


def _length(header: Header, key: str) -> int | None:
    value = header.metadata.get(key)
    return len(value) if isinstance(value, list) else None


def _template_name(key: str) -> str:
    return key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default"
