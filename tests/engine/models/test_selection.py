import pytest

from metalctl.engine.errors import AmbiguousTagError, CheckpointError, ModelNotFoundError, TagNotFoundError
from metalctl.engine.models.selection import missing_shards, quantisation, select

GGUF = [
    ".gitattributes",
    "README.md",
    "config.json",
    "imatrix_unsloth.gguf",
    "Qwen3-8B-Q4_K_M.gguf",
    "Qwen3-8B-UD-Q2_K_XL.gguf",
    "Qwen3-8B-IQ4_NL.gguf",
    "Qwen3-8B-MXFP4_MOE.gguf",
    "qwen3-8b-fp16-00001-of-00002.gguf",
    "qwen3-8b-fp16-00002-of-00002.gguf",
    "BF16/Qwen3-8B-BF16-00001-of-00003.gguf",
    "BF16/Qwen3-8B-BF16-00002-of-00003.gguf",
    "BF16/Qwen3-8B-BF16-00003-of-00003.gguf",
    "F32/model.gguf",
    "mmproj-BF16.gguf",
    "mmproj-F16.gguf",
]

MLX = [
    ".gitattributes",
    "LICENSE",
    "README.md",
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "consolidated.safetensors",
    "pytorch_model.bin",
    "onnx/model.onnx",
    "onnx/config.json",
    "original/params.json",
    "figures/a.png",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "merges.txt",
    "vocab.txt",
    "qwen.tiktoken",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "modeling_x.py",
    "training_args.bin",
    "trainer_state.json",
]


@pytest.mark.parametrize(
    ("tag", "files", "found"),
    [
        ("Q4_K_M", ["Qwen3-8B-Q4_K_M.gguf"], "Q4_K_M"),
        ("q4_k_m", ["Qwen3-8B-Q4_K_M.gguf"], "Q4_K_M"),
        ("UD-Q2_K_XL", ["Qwen3-8B-UD-Q2_K_XL.gguf"], "UD-Q2_K_XL"),
        ("Q2_K_XL", ["Qwen3-8B-UD-Q2_K_XL.gguf"], "UD-Q2_K_XL"),
        ("iq4_nl", ["Qwen3-8B-IQ4_NL.gguf"], "IQ4_NL"),
        ("MXFP4_MOE", ["Qwen3-8B-MXFP4_MOE.gguf"], "MXFP4_MOE"),
        ("F16", [f"qwen3-8b-fp16-0000{n}-of-00002.gguf" for n in (1, 2)], "F16"),
        ("fp16", [f"qwen3-8b-fp16-0000{n}-of-00002.gguf" for n in (1, 2)], "F16"),
        ("bf16", [f"BF16/Qwen3-8B-BF16-0000{n}-of-00003.gguf" for n in (1, 2, 3)], "BF16"),
        ("f32", ["F32/model.gguf"], "F32"),
        ("Qwen3-8B-IQ4_NL.gguf", ["Qwen3-8B-IQ4_NL.gguf"], "IQ4_NL"),
        ("BF16/Qwen3-8B-BF16-00002-of-00003.gguf", [f"BF16/Qwen3-8B-BF16-0000{n}-of-00003.gguf" for n in (1, 2, 3)],
         "BF16"),
        (None, ["Qwen3-8B-Q4_K_M.gguf"], "Q4_K_M"),
    ],
)  # fmt: skip
def test_a_tag_finds_the_one_model_with_all_its_parts(tag: str | None, files: list[str], found: str) -> None:
    chosen = select(GGUF, tag, "o/r")
    assert chosen.format == "gguf"
    assert list(chosen.weights) == files
    assert chosen.files == (*files, "mmproj-F16.gguf")
    assert chosen.tag == found


def test_a_default_is_told_and_a_choice_is_not() -> None:
    assert "Q4_K_M" in select(GGUF, None, "o/r").notes[0]
    assert select(GGUF, "Q4_K_M", "o/r").notes == ()
    assert select(["a.gguf"], None, "o/r").notes == ()


def test_a_tag_that_is_not_there_lists_what_is() -> None:
    with pytest.raises(TagNotFoundError) as caught:
        select(GGUF, "Q3_K_S", "o/r")
    for tag in ("Q4_K_M", "UD-Q2_K_XL", "IQ4_NL", "F16", "BF16", "F32", "MXFP4_MOE"):
        assert tag in caught.value.message
    assert "Q3_K_S" in caught.value.message
    assert "imatrix" not in caught.value.message
    assert "mmproj" not in caught.value.message


def test_several_models_of_a_tag_are_an_error_that_names_them() -> None:
    with pytest.raises(AmbiguousTagError) as caught:
        select(["a-7b-Q8_0.gguf", "a-13b-Q8_0.gguf"], "Q8_0", "o/r")
    assert "a-7b-Q8_0.gguf" in caught.value.message
    assert "a-13b-Q8_0.gguf" in caught.value.message
    assert "o/r:a-13b-Q8_0.gguf" in str(caught.value.hint)


def test_several_models_and_no_usual_one_ask_which() -> None:
    with pytest.raises(AmbiguousTagError) as caught:
        select(["a-Q8_0.gguf", "a-Q4_0.gguf"], None, "o/r")
    assert "Q4_0, Q8_0" in caught.value.message


def test_the_only_model_needs_no_tag() -> None:
    assert select(["whatever.gguf", "README.md"], None, "o/r").files == ("whatever.gguf",)


def test_a_missing_part_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"x-Q8_0-00002-of-00003\.gguf"):
        select(["x-Q8_0-00001-of-00003.gguf", "x-Q8_0-00003-of-00003.gguf"], "Q8_0", "o/r")
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors"):
        select(["config.json", "model-00002-of-00002.safetensors"], None, "o/r")


def test_a_folder_model_takes_weights_configuration_tokenizer_and_processor() -> None:
    chosen = select(MLX, None, "o/r")
    assert chosen.format == "mlx"
    assert chosen.weights == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert set(chosen.files) == {
        "config.json", "generation_config.json", *chosen.weights, "model.safetensors.index.json", "tokenizer.json",
        "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "merges.txt", "vocab.txt",
        "qwen.tiktoken", "chat_template.jinja", "additional_chat_templates/tool_use.jinja", "preprocessor_config.json",
        "processor_config.json", "modeling_x.py",
    }  # fmt: skip


def test_the_stages_of_an_embedding_model_are_taken() -> None:
    paths = ["config.json", "model.safetensors", "modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors",
             "2_Dense/config.json", "sentence_bert_config.json", "openvino/openvino_model.xml"]  # fmt: skip
    assert set(select(paths, None, "o/r").files) == set(paths) - {"openvino/openvino_model.xml"}


@pytest.mark.parametrize(
    "paths",
    [
        ["adapter_config.json", "adapter_model.safetensors"],
        ["adapter_config.json", "adapters.safetensors", "0000100_adapters.safetensors"],
        ["config.json", "weights.npz"],
        ["config.json", "weights.safetensors"],
    ],
)
def test_adapters_and_other_names_of_weights_are_models_too(paths: list[str]) -> None:
    chosen = select(paths, None, "o/r")
    assert set(chosen.files) == set(paths)


def test_a_repository_of_both_kinds_obeys_the_tag() -> None:
    paths = ["config.json", "model.safetensors", "x-Q8_0.gguf"]
    assert select(paths, None, "o/r").format == "mlx"
    assert select(paths, "q8_0", "o/r").files == ("x-Q8_0.gguf",)


def test_a_tag_on_a_repository_without_gguf_files_is_refused() -> None:
    with pytest.raises(TagNotFoundError, match="no GGUF"):
        select(MLX, "Q4_K_M", "o/r")


def test_pickles_are_refused_by_that_name() -> None:
    with pytest.raises(CheckpointError, match="pickles"):
        select(["config.json", "pytorch_model.bin"], None, "o/r")


@pytest.mark.parametrize("paths", [[], ["README.md"], ["config.json", "tokenizer.json"], ["mmproj-F16.gguf"]])
def test_what_is_no_model_is_said_to_be_none(paths: list[str]) -> None:
    with pytest.raises(ModelNotFoundError, match="no model"):
        select(paths, None, "o/r")


@pytest.mark.parametrize(
    ("path", "tag"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("llama-2-7b.Q5_K_S.gguf", "Q5_K_S"),
        ("model.i1-IQ2_XXS.gguf", "IQ2_XXS"),
        ("x-q4_k_m-imat.gguf", "Q4_K_M"),
        ("x-TQ1_0.gguf", "TQ1_0"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("ggml-model-f16.gguf", "F16"),
        ("bf16/model.gguf", "BF16"),
        ("q8_0.gguf", "Q8_0"),
        ("Q4_0_4_4/x-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("Q-former-7b.gguf", None),
        ("tq2.gguf", None),
        ("model.gguf", None),
    ],
)
def test_the_quantisation_is_read_from_names_as_they_occur(path: str, tag: str | None) -> None:
    assert quantisation(path) == tag


def test_shards_that_the_index_names_and_are_not_there() -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    assert missing_shards(["model-00001-of-00002.safetensors"], index) == ("model-00002-of-00002.safetensors",)
    assert missing_shards([], {}) == ()
