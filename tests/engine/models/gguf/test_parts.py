"""Split models are found from any part, load as one, and name what is missing or foreign."""

import shutil
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest

from metalctl.engine.errors import CheckpointError, ModelNotFoundError
from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.engine.models.gguf.parts import merge_headers, part_names, read_headers, split_parts
from metalctl.engine.models.loader import load
from tests.engine.models.gguf.tiny_models import write


def split(source: Path, count: int, folder: Path) -> list[Path]:
    """What llama-gguf-split does: metadata in the first part, tensors in all."""
    reader = gguf.GGUFReader(source)
    paths = [folder / f"{source.stem}-{number + 1:05d}-of-{count:05d}.gguf" for number in range(count)]
    shares = np.array_split(np.arange(len(reader.tensors)), count)
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        if number == 0:
            for key, item in reader.fields.items():
                if not key.startswith(("GGUF.", "general.architecture")):
                    kind = item.types[0]
                    writer.add_key_value(key, item.contents(), kind, item.types[-1] if len(item.types) > 1 else None)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for index in shares[number]:
            tensor = reader.tensors[int(index)]
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    write("llama", tmp_path / "tiny.gguf")
    return split(tmp_path / "tiny.gguf", 3, tmp_path)


def test_names_of_all_parts_follow_from_any_one() -> None:
    expected = [f"m-Q8_0-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    assert part_names("m-Q8_0-00002-of-00003.gguf") == expected
    assert part_names("m.gguf") == ["m.gguf"]
    assert part_names("m-00004-of-00003.gguf") == ["m-00004-of-00003.gguf"]


def test_split_model_has_the_logits_of_the_whole_one(parts: list[Path]) -> None:
    whole = parts[0].with_name("tiny.gguf")
    tokens = mx.array([[1, 2, 3, 4]])
    one = load(Checkpoint("w", "gguf", whole, (whole,))).model(tokens)
    found = split_parts(parts[1])
    assert found == parts
    three = load(Checkpoint("p", "gguf", found[0], tuple(found))).model(tokens)
    np.testing.assert_array_equal(np.array(one), np.array(three))


def test_merged_header_has_all_tensors(parts: list[Path]) -> None:
    headers = read_headers(parts)
    merged = merge_headers(headers)
    assert len(merged.tensors) == sum(len(header.tensors) for header in headers)
    assert merged.architecture == "llama"


def test_missing_part_is_named_before_anything_is_read(parts: list[Path]) -> None:
    parts[0].write_bytes(b"not read")
    parts[1].unlink()
    with pytest.raises(ModelNotFoundError, match=r"tiny-00002-of-00003\.gguf is missing"):
        split_parts(parts[0])
    with pytest.raises(ModelNotFoundError, match="There is no file"):
        split_parts(parts[0].with_name("absent.gguf"))


def test_foreign_part_is_named(parts: list[Path], tmp_path: Path) -> None:
    shutil.copy(parts[0], parts[1])
    with pytest.raises(CheckpointError, match=r"tiny-00002-of-00003\.gguf does not belong here"):
        read_headers(parts)


def test_part_of_another_model_is_noticed(parts: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write("smollm3", other / "tiny.gguf")
    shutil.copy(split(other / "tiny.gguf", 3, other)[1], parts[1])
    with pytest.raises(CheckpointError, match="not of one model"):
        read_headers(parts)


def test_first_part_alone_under_another_name_is_refused(parts: list[Path], tmp_path: Path) -> None:
    alone = tmp_path / "alone.gguf"
    shutil.copy(parts[0], alone)
    with pytest.raises(CheckpointError, match="has 3 parts"):
        read_headers(split_parts(alone))
