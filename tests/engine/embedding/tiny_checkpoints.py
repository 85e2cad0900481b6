"""Tiny checkpoints with weights that follow from their names alone, so that two programs can make the same ones.

Needs numpy and safetensors only. `REFERENCES` says which tensors the transformers library stores for each config.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HERE = Path(__file__).parent
SHAPES = HERE / "references" / "shapes.json"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_WORDS = ("query", "the", "river", "stone", "yes", "no")
VOCABULARY = [*_SPECIAL, *_LETTERS, ":", ".", *("##" + letter for letter in _LETTERS), *_WORDS]
LENGTHS = (5, 20, 12)  # of the three inputs

_SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
_BERT = {**_SIZES, "model_type": "bert", "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12}
_XLMR = {**_BERT, "model_type": "xlm-roberta", "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
_MODERN = {
    **_SIZES,
    "model_type": "modernbert",
    "local_attention": 8,
    "global_attn_every_n_layers": 3,
    "num_hidden_layers": 4,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    **{"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3},
}
_DECODER = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
_GEMMA = {
    **_DECODER,
    "model_type": "gemma3_text",
    "use_bidirectional_attention": True,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 8,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "pad_token_id": 0,
}
_ONE = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}

CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {**_BERT, "architectures": ["BertModel"]},
    "bert-tanh-gelu": {**_BERT, "architectures": ["BertModel"], "hidden_act": "gelu_new"},
    "xlm-roberta": {**_XLMR, "architectures": ["XLMRobertaModel"]},
    "modernbert": {**_MODERN, "architectures": ["ModernBertModel"]},
    "nomic-bert": {
        **_SIZES,
        "model_type": "nomic_bert",
        "architectures": ["NomicBertModel"],
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "embeddinggemma": {**_GEMMA, "architectures": ["Gemma3TextModel"]},
    "qwen3": {
        **_DECODER,
        "model_type": "qwen3",
        "architectures": ["Qwen3Model"],
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    },
    "bert-cross": {**_BERT, **_ONE, "architectures": ["BertForSequenceClassification"]},
    "xlm-roberta-cross": {**_XLMR, **_ONE, "architectures": ["XLMRobertaForSequenceClassification"]},
    "modernbert-cross": {
        **_MODERN,
        **_ONE,
        "architectures": ["ModernBertForSequenceClassification"],
        "classifier_pooling": "mean",
    },
}


def inputs() -> tuple[np.ndarray, np.ndarray]:
    """Token ids `[3, 20]` padded on the right, and which of them are there."""
    rng = np.random.default_rng(5)
    present = np.arange(max(LENGTHS))[None, :] < np.array(LENGTHS)[:, None]
    ids = np.where(present, rng.integers(5, len(VOCABULARY), present.shape), 0)
    return ids.astype(np.int32), present


def shapes(name: str) -> dict[str, list[int]]:
    return json.loads(SHAPES.read_text())[name]


def weights(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Norm weights and biases are away from their neutral values."""
    return {name: _values(name, shape) for name, shape in shapes.items()}


def write(folder: Path, name: str, shapes: dict[str, list[int]], **changes: Any) -> Path:
    """The checkpoint called `name` in a folder, with its tokenizer; `changes` go into its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}))
    save_file(weights(shapes), folder / "model.safetensors", {"format": "pt"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 40}
    settings["model_input_names"] = ["input_ids", "attention_mask"]
    if CONFIGS[name].get("type_vocab_size") == 2:
        settings["model_input_names"].append("token_type_ids")
    specials = {
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "unk_token": "[UNK]",
        "mask_token": "[MASK]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **specials}))
    return folder


def tokenizer_json() -> dict[str, Any]:
    """A WordPiece tokenizer that writes [CLS] a [SEP] b [SEP]."""
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    special = [
        {
            "id": ids[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token in VOCABULARY[:5]
    ]
    mark = {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in ("[CLS]", "[SEP]")}
    single = [_special("[CLS]", 0), _sequence("A", 0), _special("[SEP]", 0)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, _sequence("B", 1), _special("[SEP]", 1)],
            "special_tokens": mark,
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": ids},
    }  # fmt: skip


def _special(token: str, kind: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": kind}}


def _sequence(name: str, kind: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": kind}}


def _values(name: str, shape: list[int]) -> np.ndarray:
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        return 0.3 * values + (1 if name.endswith("weight") and "gemma" not in name else 0)
    return values * np.float32(0.7 if "embed" in name else 1.5 * shape[-1] ** -0.5)


# -- what the sentence-transformers library keeps beside a model

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
PROMPT = "query: "
SENTENCES = ("the river", "stone", "no stone in the river. yes", "abc def ghi jkl", "a", "query the stone " * 12)


def write_sentence_model(folder: Path, shapes: dict[str, list[int]], pooling: str, *, dense: bool = False) -> Path:
    """A BERT with the files that say how its vectors are made: prompts are not pooled, texts are cut at 24 tokens."""
    write(folder, "bert", shapes)
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), "Normalize"]
    stages = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    _json(folder / "modules.json", stages)
    flags = {f"pooling_mode_{_OLD_NAMES.get(mode, mode)}": mode in pooling.split("+") for mode in POOLINGS}
    size = 32 * len(pooling.split("+"))
    _json(folder / "1_Pooling/config.json", {"word_embedding_dimension": 32, **flags, "include_prompt": False})
    _json(folder / "sentence_bert_config.json", {"max_seq_length": 24, "do_lower_case": False})
    prompts = {"query": PROMPT, "document": ""}
    _json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    if dense:
        activation = "torch.nn.modules.activation.Tanh"
        sizes = {"in_features": size, "out_features": 10, "bias": True, "activation_function": activation}
        _json(folder / "2_Dense/config.json", sizes)
        arrays = {"linear.weight": _values("dense.weight", [10, size]), "linear.bias": _values("dense.bias", [10])}
        save_file(arrays, folder / "2_Dense/model.safetensors", {"format": "pt"})
    return folder


_OLD_NAMES = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "weightedmean": "weightedmean_tokens"}


def _json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
