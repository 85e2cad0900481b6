"""What a file is, told from its header alone."""

from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from metalctl.engine.errors import CheckpointError
from metalctl.engine.models.gguf.describe import describe, rounding
from metalctl.engine.models.gguf.reader import read_file_header, read_header
from tests.engine.models.gguf.raw import ARCHITECTURE, STRING, Bytes, header, pair, tensor, text
from tests.engine.models.gguf.tiny_models import write

Type = GGMLQuantizationType


def mixed(name: str, value: np.ndarray) -> GGMLQuantizationType:
    if value.ndim < 2 or "attn" in name:
        return Type.F32
    return Type.Q8_0 if "ffn_down" in name else Type.Q4_0


def test_facts_of_a_model(tmp_path: Path) -> None:
    write("llama", tmp_path / "x.gguf", kind=mixed)
    facts = describe(read_file_header(tmp_path / "x.gguf"))
    assert facts["architecture"] == "llama"
    assert (facts["context_length"], facts["layers"], facts["hidden_size"], facts["vocabulary"]) == (512, 3, 64, 288)
    assert (facts["tokenizer"], facts["pre_tokenizer"]) == ("gpt2", "gpt-2")
    assert facts["chat_template"] is True
    assert facts["chat_templates"] == ["default"]
    assert facts["parameters"] == 2 * 288 * 64 + 3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64) + 64


def test_types_are_counted_with_bytes_and_how_they_load(tmp_path: Path) -> None:
    write("llama", tmp_path / "x.gguf", kind=mixed)
    shares = {share["type"]: share for share in describe(read_file_header(tmp_path / "x.gguf"))["quantisation"]}
    assert shares["Q8_0"]["tensors"] == 3
    assert shares["Q8_0"]["values"] == 3 * 96 * 64
    assert shares["Q8_0"]["bytes"] == 3 * 96 * 64 // 32 * 34
    assert shares["Q4_0"]["loaded_as"] == "repacked exactly as 4 bits in groups of 32"
    assert shares["F32"]["loaded_as"] == "floating point"
    assert sum(share["bytes"] for share in shares.values()) == (
        sum(info.nbytes for info in read_file_header(tmp_path / "x.gguf").tensors)
    )


@pytest.mark.parametrize(
    ("kind", "precision", "words"),
    [
        (Type.Q6_K, "size", "rounded to 8 bits in groups of 32"),
        (Type.Q6_K, "exact", "dequantised to floating point"),
        (Type.IQ3_S, "exact", "repacked exactly as 4 bits in groups of 32"),
        (Type.MXFP4, "size", "mxfp4, as stored"),
        (Type.I32, "size", "cannot be loaded"),
    ],
)
def test_choice_for_each_type_is_told(kind: GGMLQuantizationType, precision: str, words: str) -> None:
    data = header([ARCHITECTURE], [tensor(b"a", (256,), int(kind), 0)], bytes(4096))
    share = describe(read_header(Bytes(data)), precision)["quantisation"][0]  # type: ignore[arg-type]
    assert share["loaded_as"] == words


def test_types_that_are_rounded_are_told() -> None:
    data = header([ARCHITECTURE], [tensor(b"a", (256,), int(Type.Q6_K), 0), tensor(b"b", (32,), 8, 224)], bytes(512))
    (line,) = rounding(read_header(Bytes(data)))
    assert line.startswith("Q6_K, 1 of 2 tensors, is rounded to 8 bits in groups of 32 when loaded")


def test_what_a_file_does_not_say_is_none() -> None:
    facts = describe(read_header(Bytes(header([], []))))
    assert facts["architecture"] is facts["context_length"] is facts["bits_per_weight"] is None
    assert facts["chat_template"] is False


def test_wrong_kinds_are_refused() -> None:
    data = header([ARCHITECTURE, pair(b"llama.block_count", STRING, text(b"many"))], [])
    with pytest.raises(CheckpointError, match=r"llama\.block_count is of type str"):
        describe(read_header(Bytes(data)))
