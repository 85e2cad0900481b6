"""GGUF headers put together byte by byte, so that they can be wrong in any way."""

import struct
from dataclasses import dataclass, field

STRING, ARRAY, UINT32, FLOAT32, BOOL = 8, 9, 4, 6, 7


@dataclass
class Bytes:
    """A source in memory that notes how much of it was asked for."""

    data: bytes
    asked: int = 0
    reads: list[tuple[int, int]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        assert offset + length <= len(self.data), "read beyond the end"
        self.asked += length
        self.reads.append((offset, length))
        return self.data[offset : offset + length]


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def texts(values: list[bytes]) -> bytes:
    return struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values))


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """`shape` in GGUF's order: columns first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(
    pairs: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    start = magic + struct.pack("<IQQ", version, tensor_count, pair_count) + b"".join(pairs) + b"".join(tensors)
    return start + b"\0" * (-len(start) % 32) + data


ARCHITECTURE = pair(b"general.architecture", STRING, text(b"llama"))
SOUND = header(
    [
        ARCHITECTURE,
        pair(b"llama.block_count", UINT32, struct.pack("<I", 2)),
        pair(b"llama.ratio", FLOAT32, struct.pack("<f", 0.5)),
        pair(b"tokenizer.ggml.add_bos_token", BOOL, b"\1"),
        pair(b"tokenizer.ggml.tokens", ARRAY, texts([b"a", "é".encode(), b"", b"long token"])),
        pair(b"tokenizer.ggml.scores", ARRAY, struct.pack("<IQ3f", FLOAT32, 3, 1.0, 2.0, 3.0)),
    ],
    [tensor(b"token_embd.weight", (32, 4), 0, 0), tensor(b"output.weight", (32, 4), 8, 512)],
    bytes(512 + 4 * 34),
)
