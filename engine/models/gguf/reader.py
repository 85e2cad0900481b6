"""The header of a GGUF file, read with every length checked against the file.

Only the header is read: key-value pairs and tensor descriptions. Tensor data is mapped into memory on demand. The gguf
package names the types and block sizes; its own reader takes seconds for a large vocabulary, this one takes tenths.
"""

import itertools
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from metalctl.engine.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT = 32

# Bounds that no sound file comes near; what lies beyond is damage.
MAX_HEADER_BYTES = 256 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 1 << 16
MAX_ALIGNMENT = 1 << 24

FIRST_READ = 1 << 20

T = TypeVar("T")


class Source(Protocol):
    """Bytes that can be read anywhere: a local file, or a remote one by ranges."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; the caller keeps within `size`."""
        ...


class FileSource:
    """A local file. Raises ModelNotFoundError when it is not there."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.size = path.stat().st_size
        except FileNotFoundError as error:
            raise ModelNotFoundError(f"There is no file {path}.", "Check the path.") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error

    def read(self, offset: int, length: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                return file.read(length)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}.") from error


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is in the order of numpy, rows first; `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int

    @property
    def size(self) -> int:
        """Number of values."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says about itself.

    `metadata` holds Python scalars and strings, lists of strings, and numpy arrays of numbers.
    """

    name: str
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    file_size: int

    @property
    def architecture(self) -> str:
        return self.require("general.architecture", str)

    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """The value of `key`, or `default` when it is absent. Raises CheckpointError when it is of another kind."""
        value = self.metadata.get(key)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"{self.name}: {key} is of type {_kind_name(value)}; {kind.__name__} was expected.")
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """The value of `key`. Raises CheckpointError when it is absent or of another kind."""
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"{self.name} has no {key}.", "The file is incomplete: convert or download it again.")
        return value


def read_header(source: Source, name: str = "The GGUF file") -> Header:
    """Reads and checks the header. `name` stands for the file in messages.

    Raises CheckpointError when the file is not GGUF, damaged or cut short, and UnsupportedModelError when it is of
    another version, another byte order, or has tensors of a type that is not known.
    """
    stream = _Stream(source, name)
    _check_preamble(stream)
    tensor_count, key_count = stream.unpack("<QQ", "the counts")
    _check_count(name, "tensors", tensor_count, MAX_TENSORS)
    _check_count(name, "keys", key_count, MAX_KEYS)
    metadata = _read_metadata(stream, key_count)
    alignment = _alignment(name, metadata)
    infos = [_read_tensor_info(stream) for _ in range(tensor_count)]
    data_offset = -(-stream.position // alignment) * alignment
    tensors = tuple(_place(name, info, data_offset, alignment) for info in infos)
    _check_layout(name, tensors, source.size)
    return Header(name, metadata, tensors, data_offset, source.size)


def read_file_header(path: Path) -> Header:
    """The header of a local file; errors name it."""
    return read_header(FileSource(path), str(path))


def map_tensor(path: Path, info: TensorInfo) -> npt.NDArray[np.uint8]:
    """The tensor's bytes as stored, mapped read-only: uint8, one row of the matrix a row, leading dimensions kept."""
    block, block_bytes = GGML_QUANT_SIZES[info.type]
    shape: tuple[int, ...] = (*info.shape[:-1], info.shape[-1] // block * block_bytes)
    mapped: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r", offset=info.offset, shape=shape)
    return mapped


class _Stream:
    """Reads forward through a source, buffered, and never beyond its end or MAX_HEADER_BYTES."""

    def __init__(self, source: Source, name: str):
        self.source = source
        self.name = name
        self.limit = min(source.size, MAX_HEADER_BYTES)
        self.buffer = b""
        self.position = 0

    def need(self, length: int, what: str) -> None:
        """Makes sure that `length` more bytes are in the buffer. Raises CheckpointError when the file has fewer."""
        end = self.position + length
        if end > self.limit:
            raise CheckpointError(
                f"{self.name} is damaged or cut short: {what} at byte {self.position} needs {length} bytes, and "
                f"{max(self.limit - self.position, 0)} are left.",
                "Download or convert the file again.",
            )
        while len(self.buffer) < end:
            wanted = min(max(end, 2 * len(self.buffer), FIRST_READ), self.limit) - len(self.buffer)
            piece = self.source.read(len(self.buffer), wanted)
            if not piece:
                raise CheckpointError(
                    f"{self.name} became shorter while it was read.", "Is another program writing it?"
                )
            self.buffer += piece

    def take(self, length: int, what: str) -> bytes:
        self.need(length, what)
        self.position += length
        return self.buffer[self.position - length : self.position]

    def unpack(self, layout: str, what: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))

    def text(self, what: str, longest: int = MAX_HEADER_BYTES) -> str:
        (length,) = self.unpack("<Q", what)
        if length > longest:
            raise CheckpointError(f"{self.name} is damaged: {what} at byte {self.position} is {length} bytes long.")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.name} is damaged: {what} before byte {self.position} is not UTF-8."
            ) from error

    def texts(self, count: int, what: str) -> list[str]:
        """`count` strings. Bytes that are not UTF-8 become U+FFFD: vocabularies of the wild have some."""
        self.need(8 * count, what)
        result: list[str] = []
        while len(result) < count:
            self._take_buffered_texts(count, result)
            if len(result) < count:
                (length,) = self.unpack("<Q", what)
                result.append(self.take(length, what).decode(errors="replace"))
        return result

    def _take_buffered_texts(self, count: int, result: list[str]) -> None:
        """The hot loop: appends the strings that lie whole in the buffer."""
        buffer, position, end = self.buffer, self.position, len(self.buffer)
        unpack, append = struct.Struct("<Q").unpack_from, result.append
        for _ in range(count - len(result)):
            start = position + 8
            if start > end:
                break
            stop = start + unpack(buffer, position)[0]
            if stop > end:
                break
            append(buffer[start:stop].decode(errors="replace"))
            position = stop
        self.position = position


def _check_preamble(stream: _Stream) -> None:
    magic = stream.take(4, "the signature")
    if magic != MAGIC:
        what = "is an old GGML file" if magic in (b"lmgg", b"fmgg", b"tjgg", b"algg") else "is not a GGUF file"
        raise CheckpointError(f"{stream.name} {what}: it starts with {magic!r}.", "Only GGUF files can be loaded.")
    (version,) = stream.unpack("<I", "the version")
    if version == VERSION:
        return
    if version and not version & 0xFFFF:
        raise UnsupportedModelError(
            f"{stream.name} is a big-endian GGUF file.", "Convert it with gguf-convert-endian from the gguf package."
        )
    raise UnsupportedModelError(
        f"{stream.name} is GGUF version {version}; version {VERSION} can be loaded.",
        "gguf-new-metadata from the gguf package rewrites version 2 as version 3." if version < VERSION else None,
    )


def _check_count(name: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise CheckpointError(f"{name} is damaged: it claims to have {count} {what}.", "Download the file again.")


_SCALARS: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


def _read_metadata(stream: _Stream, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = stream.text("a key", MAX_NAME_BYTES)
        if key in metadata:
            raise CheckpointError(f"{stream.name} is damaged: the key {key!r} occurs twice.")
        metadata[key] = _read_value(stream, key)
    return metadata


def _value_type(stream: _Stream, key: str) -> GGUFValueType:
    (number,) = stream.unpack("<I", f"the type of {key!r}")
    try:
        return GGUFValueType(number)
    except ValueError as error:
        raise CheckpointError(
            f"{stream.name} is damaged: {key!r} is of type {number}, which GGUF does not have."
        ) from error


def _read_value(stream: _Stream, key: str) -> Any:
    kind = _value_type(stream, key)
    if kind is GGUFValueType.STRING:
        return stream.text(f"the value of {key!r}")
    if kind is not GGUFValueType.ARRAY:
        return _numbers(stream, kind, 1, key)[0].item()
    kind = _value_type(stream, key)
    (count,) = stream.unpack("<Q", f"the length of {key!r}")
    if kind is GGUFValueType.ARRAY:
        raise CheckpointError(f"{stream.name}: {key!r} is an array of arrays, which no GGUF file needs.")
    if kind is GGUFValueType.STRING:
        return stream.texts(count, f"the array {key!r}")
    return _numbers(stream, kind, count, key)


def _numbers(stream: _Stream, kind: GGUFValueType, count: int, key: str) -> npt.NDArray[Any]:
    dtype = np.dtype(_SCALARS[kind])
    raw = stream.take(dtype.itemsize * count, f"the value of {key!r}")
    numbers: npt.NDArray[Any] = np.frombuffer(raw, dtype)
    return numbers.view(np.uint8) != 0 if dtype == np.bool_ else numbers


def _alignment(name: str, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    sound = isinstance(alignment, int) and 0 < alignment <= MAX_ALIGNMENT and not alignment & (alignment - 1)
    if not sound:
        raise CheckpointError(f"{name} is damaged: general.alignment is {alignment!r}; it must be a power of two.")
    return int(alignment)


def _read_tensor_info(stream: _Stream) -> TensorInfo:
    """A tensor's description; its `offset` still counts from the start of the data."""
    name = stream.text("a tensor's name", MAX_NAME_BYTES)
    (dimensions,) = stream.unpack("<I", f"tensor {name!r}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise CheckpointError(f"{stream.name} is damaged: tensor {name!r} has {dimensions} dimensions.")
    *shape, number, offset = stream.unpack(f"<{dimensions}QIQ", f"tensor {name!r}")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{stream.name}: tensor {name!r} is stored as type {number}, which this version does not know.",
            "A newer metalctl may know it; or take another quantisation of the model.",
        ) from error
    shape.reverse()
    return TensorInfo(name, tuple(shape), kind, offset, _byte_count(stream.name, name, shape, kind))


def _byte_count(file: str, name: str, shape: list[int], kind: GGMLQuantizationType) -> int:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    count = math.prod(shape)
    if not 0 < count < 1 << 62 or shape[-1] % block:
        raise CheckpointError(
            f"{file} is damaged: tensor {name!r} of type {kind.name} cannot have the shape {tuple(shape)}."
        )
    return int(count // block * block_bytes)


def _place(name: str, info: TensorInfo, data_offset: int, alignment: int) -> TensorInfo:
    if info.offset % alignment:
        raise CheckpointError(
            f"{name} is damaged: tensor {info.name!r} does not start at a multiple of {alignment} bytes."
        )
    return TensorInfo(info.name, info.shape, info.type, data_offset + info.offset, info.nbytes)


def _check_layout(name: str, tensors: tuple[TensorInfo, ...], file_size: int) -> None:
    """No name twice, every tensor inside the file, none over another."""
    seen: set[str] = set()
    for info in tensors:
        if info.name in seen:
            raise CheckpointError(f"{name} is damaged: there are two tensors {info.name!r}.")
        seen.add(info.name)
        if info.offset + info.nbytes > file_size:
            raise CheckpointError(
                f"{name} is cut short: tensor {info.name!r} ends at byte {info.offset + info.nbytes}, and the file has "
                f"{file_size} bytes.",
                "The download may not be complete: fetch the file again.",
            )
    for before, after in itertools.pairwise(sorted(tensors, key=lambda info: info.offset)):
        if before.offset + before.nbytes > after.offset:
            raise CheckpointError(f"{name} is damaged: the tensors {before.name!r} and {after.name!r} overlap.")


def _kind_name(value: object) -> str:
    return f"array of {len(value)}" if isinstance(value, list | np.ndarray) else type(value).__name__
