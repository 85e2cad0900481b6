import json

import pytest
from tiny_repositories import gguf_file, safetensors_file

from metalctl.engine.errors import CheckpointError
from metalctl.engine.models.facts import Facts, context_that_fits, read_facts

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1000,
}


class Memory:
    """A file in memory."""

    def __init__(self, data: bytes):
        self.data = data
        self.size = len(data)

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]


def folder_facts(config: dict[str, object], **files: bytes) -> Facts:
    contents = {"config.json": json.dumps(config).encode(), **{name.replace("__", "."): d for name, d in files.items()}}
    weights = [name for name in contents if name.endswith((".safetensors", ".npz"))]
    return read_facts("mlx", list(contents), weights, lambda path: Memory(contents[path]))


def test_a_matrix_of_its_own_width_is_counted_by_it() -> None:
    weights = safetensors_file(
        {
            "a.weight": ("U32", (8, 8)),  # 4 bits: 8 values a word
            "a.scales": ("BF16", (8, 1)),
            "a.biases": ("BF16", (8, 1)),
            "b.weight": ("U32", (8, 16)),  # 8 bits
            "b.scales": ("BF16", (8, 1)),
            "b.biases": ("BF16", (8, 1)),
            "b.bias": ("BF16", (8,)),
        }
    )
    config = {**CONFIG, "quantization": {"bits": 4, "group_size": 64, "b": {"bits": 8, "group_size": 64}, "c": False}}
    facts = folder_facts(config, model__safetensors=weights)
    by_type = {share.type: share for share in facts.quantisation}
    assert by_type["4-bit"].values == 8 * 64
    assert by_type["8-bit"].values == 8 * 64
    assert by_type["8-bit"].bytes == 8 * 16 * 4 + 2 * 8 * 2
    assert by_type["BF16"].values == 8
    assert facts.parameters == 2 * 8 * 64 + 8
    assert facts.weights_bytes == sum(share.bytes for share in facts.quantisation)


def test_other_modes_go_by_their_name() -> None:
    weights = safetensors_file({"a.weight": ("U32", (8, 8)), "a.scales": ("F16", (8, 1))})
    config = {**CONFIG, "quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}
    (share,) = folder_facts(config, model__safetensors=weights).quantisation
    assert (share.type, share.values) == ("mxfp4", 8 * 64)


@pytest.mark.parametrize(
    ("more", "size"),
    [
        ({}, 2 * 4 * 2 * 16 * 2),
        ({"head_dim": 32}, 2 * 4 * 2 * 32 * 2),
        ({"num_key_value_heads": None}, 2 * 4 * 4 * 16 * 2),
        ({"layer_types": ["linear_attention", "full_attention"] * 2}, 2 * 2 * 2 * 16 * 2),
        ({"full_attention_interval": 4}, 2 * 1 * 2 * 16 * 2),
        ({"kv_lora_rank": 20, "qk_rope_head_dim": 4}, 4 * 24 * 2),
        ({"hidden_size": None}, None),
    ],
)
def test_the_cache_of_a_token_is_computed_from_the_configuration(more: dict[str, object], size: int | None) -> None:
    assert folder_facts({**CONFIG, **more}).kv_bytes_per_token == size


def test_a_model_with_pictures_has_its_text_part_in_a_configuration_of_its_own() -> None:
    facts = folder_facts({"model_type": "qwen3_vl", "text_config": CONFIG})
    assert (facts.architecture, facts.layers, facts.context_length) == ("qwen3_vl", 4, 1000)


def test_what_fits_is_what_is_left_and_at_most_the_whole() -> None:
    facts = folder_facts(CONFIG)
    assert facts.kv_bytes_per_token == 512
    assert context_that_fits(facts, 512 * 300) == 300
    assert context_that_fits(facts, 512 * 5000) == 1000
    assert context_that_fits(facts, -5) == 0
    assert context_that_fits(folder_facts({}), 10**9) is None


def test_weights_without_a_header_leave_the_count_open() -> None:
    facts = folder_facts(CONFIG, weights__npz=b"PK")
    assert (facts.parameters, facts.bits_per_weight) == (0, None)


@pytest.mark.parametrize("data", [b"", b"\x05", (10**9).to_bytes(8, "little") + b"{}", b"\x02" + bytes(7) + b"{]"])
def test_a_broken_header_is_named(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        folder_facts(CONFIG, model__safetensors=data)


def test_a_broken_configuration_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_facts("mlx", ["config.json"], [], lambda _: Memory(b"{"))


def test_parts_of_a_gguf_file_are_added_up() -> None:
    files = {"a": gguf_file("Q8_0", part=(0, 2)), "b": gguf_file("F16", part=(1, 2))}
    facts = read_facts("gguf", list(files), list(files), lambda path: Memory(files[path]))
    assert facts.parameters == 2 * 32 * 256
    assert {share.type for share in facts.quantisation} == {"Q8_0", "F16"}
    assert facts.kv_bytes_per_token == 2 * 2 * 16 * 2
