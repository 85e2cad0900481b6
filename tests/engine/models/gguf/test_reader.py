"""Headers are read in full, and whatever is wrong with one is refused by name, quickly and without allocating much."""

import random
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from metalctl.engine.errors import CheckpointError, MetalctlError, ModelNotFoundError, UnsupportedModelError
from metalctl.engine.models.gguf import reader
from metalctl.engine.models.gguf.reader import FileSource, map_tensor, read_file_header, read_header
from tests.engine.models.gguf.raw import (
    ARCHITECTURE,
    ARRAY,
    BOOL,
    SOUND,
    STRING,
    UINT32,
    Bytes,
    header,
    pair,
    tensor,
    text,
    texts,
)


def refusal(data: bytes) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_header(Bytes(data), "x.gguf")
    assert "x.gguf" in caught.value.message
    return caught.value


def test_sound_header_is_read_whole() -> None:
    found = read_header(Bytes(SOUND), "x.gguf")
    assert found.architecture == "llama"
    assert found.metadata["llama.block_count"] == 2
    assert found.metadata["llama.ratio"] == 0.5
    assert found.metadata["tokenizer.ggml.add_bos_token"] is True
    assert found.metadata["tokenizer.ggml.tokens"] == ["a", "é", "", "long token"]
    assert found.metadata["tokenizer.ggml.scores"].tolist() == [1, 2, 3]
    first, second = found.tensors
    assert (first.name, first.shape, first.type.name, first.nbytes) == ("token_embd.weight", (4, 32), "F32", 512)
    assert (second.type.name, second.offset - first.offset, second.nbytes) == ("Q8_0", 512, 136)
    assert second.offset + second.nbytes == len(SOUND)


def test_header_equals_what_the_gguf_package_wrote(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("many", list(range(300)))
    writer.add_uint64("big", 1 << 60)
    writer.add_int8("negative", -5)
    writer.add_float64("double", 0.1)
    writer.add_string("text", "päivää 🙂")
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer.add_tensor("a", values)
    writer.add_tensor("b", gguf.quantize(values, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_file_header(path)
    theirs = gguf.GGUFReader(path)
    assert found.metadata["many"].tolist() == list(range(300))
    assert (found.metadata["big"], found.metadata["negative"]) == (1 << 60, -5)
    assert (found.metadata["double"], found.metadata["text"]) == (0.1, "päivää 🙂")
    for ours, other in zip(found.tensors, theirs.tensors, strict=True):
        assert (ours.name, ours.offset, ours.nbytes) == (other.name, other.data_offset, other.n_bytes)
        assert map_tensor(path, ours).tobytes() == other.data.tobytes()


def test_typed_access_refuses_other_kinds() -> None:
    found = read_header(Bytes(SOUND), "x.gguf")
    assert found.get("absent", int, 7) == 7
    assert found.get("llama.block_count", float) == 2.0
    with pytest.raises(CheckpointError, match=r"llama\.ratio is of type float; int"):
        found.get("llama.ratio", int)
    with pytest.raises(CheckpointError, match=r"add_bos_token is of type bool; int"):
        found.get("tokenizer.ggml.add_bos_token", int)
    with pytest.raises(CheckpointError, match="has no absent"):
        found.require("absent", str)


def test_every_truncation_is_refused() -> None:
    for length in range(len(SOUND)):
        with pytest.raises(CheckpointError):
            read_header(Bytes(SOUND[:length]), "x.gguf")


def test_short_tensor_data_names_the_tensor_and_the_sizes() -> None:
    error = refusal(SOUND[:-1])
    assert "'output.weight' ends at byte" in error.message
    assert str(len(SOUND) - 1) in error.message
    assert error.hint


@pytest.mark.parametrize(
    ("version", "words"),
    [(1, "version 1"), (2, "version 2"), (4, "version 4"), (3 << 24, "big-endian")],
)
def test_other_versions_are_refused_by_name(version: int, words: str) -> None:
    error = refusal(header([], [], version=version))
    assert isinstance(error, UnsupportedModelError)
    assert words in error.message


def test_other_files_are_not_gguf() -> None:
    assert "not a GGUF file" in refusal(b"PK\3\4" + bytes(100)).message
    assert "old GGML" in refusal(b"tjgg" + bytes(100)).message
    assert "0 are left" in refusal(b"").message


HUGE = 1 << 63

BROKEN = {
    "two keys alike": (header([ARCHITECTURE, ARCHITECTURE], []), "'general.architecture' occurs twice"),
    "two tensors alike": (
        header([], [tensor(b"a", (32,), 0, 0), tensor(b"a", (32,), 0, 128)], bytes(256)),
        "two tensors 'a'",
    ),
    "overlapping tensors": (
        header([], [tensor(b"a", (32,), 0, 0), tensor(b"b", (32,), 0, 96)], bytes(256)),
        "'a' and 'b' overlap",
    ),
    "tensor beyond the end": (header([], [tensor(b"a", (32,), 0, 1 << 40)], bytes(256)), "'a' ends at byte"),
    "unaligned tensor": (header([], [tensor(b"a", (32,), 0, 8)], bytes(256)), "'a' does not start at a multiple of 32"),
    "row that is no multiple of its blocks": (header([], [tensor(b"a", (33, 4), 8, 0)], bytes(256)), "(4, 33)"),
    "no rows": (header([], [tensor(b"a", (32, 0), 0, 0)], bytes(256)), "(0, 32)"),
    "a product that overflows": (header([], [tensor(b"a", (1 << 33, 1 << 33), 0, 0)], bytes(256)), "cannot have"),
    "five dimensions": (header([], [tensor(b"a", (1, 1, 1, 1, 1), 0, 0)], bytes(256)), "5 dimensions"),
    "no dimensions": (header([], [tensor(b"a", (), 0, 0)], bytes(256)), "0 dimensions"),
    "unknown tensor type": (header([], [tensor(b"a", (32,), 99, 0)], bytes(256)), "type 99"),
    "unknown value type": (header([pair(b"k", 77, bytes(8))], []), "type 77"),
    "array of arrays": (header([pair(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1))], []), "array of arrays"),
    "absurd number of keys": (header([], [], counts=(0, HUGE)), f"{HUGE} keys"),
    "absurd number of tensors": (header([], [], counts=(HUGE, 0)), f"{HUGE} tensors"),
    "absurd text": (header([pair(b"k", STRING, struct.pack("<Q", HUGE) + b"x")], []), "'k'"),
    "absurd array of texts": (header([pair(b"k", ARRAY, struct.pack("<IQ", STRING, HUGE))], []), "'k'"),
    "absurd array of numbers": (header([pair(b"k", ARRAY, struct.pack("<IQ", UINT32, HUGE))], []), "'k'"),
    "alignment of three": (
        header([pair(b"general.alignment", UINT32, struct.pack("<I", 3))], []),
        "must be a power of two",
    ),
    "alignment that is a text": (header([pair(b"general.alignment", STRING, text(b"x"))], []), "'x'"),
    "key that is not UTF-8": (header([pair(b"\xff", BOOL, b"\1")], []), "not UTF-8"),
    "long key": (header([pair(b"k" * 70000, BOOL, b"\1")], []), "70000 bytes long"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_headers_are_refused_with_what_and_where(case: str) -> None:
    data, words = BROKEN[case]
    assert words in refusal(data).message


def test_bytes_of_tokens_that_are_not_utf8_are_replaced() -> None:
    data = header([pair(b"k", ARRAY, texts([b"\xff\xfe", b"ok"]))], [])
    assert read_header(Bytes(data), "x").metadata["k"] == ["\ufffd\ufffd", "ok"]


def test_only_the_header_is_read() -> None:
    source = Bytes(header([ARCHITECTURE], [tensor(b"a", (1 << 22,), 0, 0)], bytes(1 << 24)))
    read_header(source, "x.gguf")
    assert source.asked <= reader.FIRST_READ


def test_large_header_is_read_in_pieces_that_cross_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "FIRST_READ", 16)
    words = [b"w%d" % index for index in range(2000)]
    data = header([pair(b"k", ARRAY, texts(words))], [])
    source = Bytes(data)
    assert read_header(source, "x").metadata["k"] == [word.decode() for word in words]
    assert len(source.reads) < 20


def test_large_vocabulary_takes_tenths_of_a_second() -> None:
    data = header([pair(b"k", ARRAY, texts([b"token%d" % index for index in range(150_000)]))], [])
    start = time.process_time()
    read_header(Bytes(data), "x")
    assert time.process_time() - start < 1.0


def test_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"absent\.gguf"):
        FileSource(tmp_path / "absent.gguf")


ODD_NUMBERS = (0, 1, 2**31, 2**32, 2**63, 2**64 - 1)


def mutated(rng: random.Random) -> bytes:
    """The sound header with a few bytes changed, cut, doubled or moved."""
    data = bytearray(SOUND)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        kind, at = rng.randrange(6), rng.randrange(len(data) or 1)
        if kind == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            data[at : at + 8] = struct.pack(
                "<Q", rng.choice((0, 1, 2**31, 2**32, 2**63, 2**64 - 1, rng.getrandbits(64)))
            )
        elif kind == 2:
            del data[at : at + rng.randrange(1, 9)]
        elif kind == 3:
            data[at:at] = data[max(at - 16, 0) : at]
        elif kind == 4:
            data[at : at + 1] = bytes(byte ^ 1 << rng.randrange(8) for byte in data[at : at + 1])
        else:
            del data[at + 1 :]
    return bytes(data)


def fuzz(count: int, seed: int) -> int:
    """How many were read after all; any other error than ours, a hang or a large allocation fails."""
    rng = random.Random(seed)
    read = 0
    tracemalloc.start()
    for _ in range(count):
        data = mutated(rng)
        try:
            read_header(Bytes(data), "x")
            read += 1
        except MetalctlError:
            pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
    return read


def test_mutated_headers_are_read_or_refused() -> None:
    assert 0 < fuzz(3_000, seed=1) < 3_000


@pytest.mark.slow
def test_a_hundred_thousand_mutated_headers_are_read_or_refused() -> None:
    assert 0 < fuzz(100_000, seed=2) < 100_000
