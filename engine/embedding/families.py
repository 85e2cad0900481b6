"""What is called how in checkpoints of the encoder families, and what their config.json means."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from metalctl.engine.embedding.encoder import Activation, EncoderConfig, HeadConfig
from metalctl.engine.errors import CheckpointError, UnsupportedModelError

Config = Mapping[str, Any]

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
    "geglu": "gelu",
    "tanh": "tanh",
}


@dataclass(frozen=True, slots=True)
class Family:
    """`names` are patterns of a checkpoint's module names, without a leading `PREFIXES`, and ours.

    A target with several names separated by blanks cuts a matrix into as many parts of equal height. None: not needed.
    """

    config: Callable[[Config], EncoderConfig]
    names: tuple[tuple[str, str | None], ...]


PREFIXES = re.compile(r"^(bert|roberta|model|nomic_bert|base_model)\.")


def family(config: Config) -> Family:
    """Raises UnsupportedModelError for a model type that is no encoder we know."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(f"There is no encoder of the type {kind!r} here; there are {known}.")
    return FAMILIES[kind]


def is_encoder(config: Config) -> bool:
    return config.get("model_type") in FAMILIES


def place(family: Family, name: str) -> tuple[str, ...] | None:
    """Our names for the parameter `name` of a checkpoint; None: not needed. Raises KeyError for a stranger."""
    stem, _, suffix = PREFIXES.sub("", name).rpartition(".")
    suffix = {"gamma": "weight", "beta": "bias"}.get(suffix, suffix)
    for pattern, target in family.names:
        if match := re.fullmatch(pattern, stem):
            return None if target is None else tuple(f"{match.expand(part)}.{suffix}" for part in target.split())
    raise KeyError(name)


def _activation(name: Any) -> Activation:
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"The activation {name!r} is not known.", "A newer metalctl may know it.")
    return _ACTIVATIONS[name]


def _labels(config: Config) -> int | None:
    """How many scores the checkpoint's classifier gives; None where it has none."""
    if not any("ForSequenceClassification" in name for name in config.get("architectures") or ()):
        return None
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, dict) and labels else int(config.get("num_labels", 2))


def _sizes(config: Config) -> dict[str, Any]:
    return {
        "vocab_size": _number(config, "vocab_size"),
        "hidden_size": _number(config, "hidden_size", "n_embd"),
        "num_layers": _number(config, "num_hidden_layers", "n_layer"),
        "num_heads": _number(config, "num_attention_heads", "n_head"),
    }


def _number(config: Config, *keys: str) -> int:
    for key in keys:
        if isinstance(config.get(key), int):
            return int(config[key])
    raise CheckpointError(f"config.json has no {keys[0]}.", "Fetch the model again.")


# -- BERT, RoBERTa, XLM-R

_BERT_NAMES = (
    (r"embeddings\.word_embeddings", "embeddings.tokens"),
    (r"embeddings\.position_embeddings", "embeddings.positions"),
    (r"embeddings\.token_type_embeddings", "embeddings.types"),
    (r"embeddings\.LayerNorm", "embeddings.norm"),
    (r"embeddings", None),  # position_ids
    (r"encoder\.layer\.(\d+)\.attention\.self\.(query|key|value)", r"layers.\1.attention.\2"),
    (r"encoder\.layer\.(\d+)\.attention\.output\.dense", r"layers.\1.attention.output"),
    (r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm", r"layers.\1.attention_norm"),
    (r"encoder\.layer\.(\d+)\.intermediate\.dense", r"layers.\1.mlp.up_proj"),
    (r"encoder\.layer\.(\d+)\.output\.dense", r"layers.\1.mlp.down_proj"),
    (r"encoder\.layer\.(\d+)\.output\.LayerNorm", r"layers.\1.mlp_norm"),
    (r"(cls|lm_head)\..*|lm_head", None),
)


def _bert(config: Config, offset: int = 0) -> EncoderConfig:
    kind = config.get("position_embedding_type", "absolute")
    if kind not in ("absolute", None):
        raise UnsupportedModelError(f"Positions of the kind {kind!r} are not known.")
    positions = _number(config, "max_position_embeddings")
    labels = _labels(config)
    return EncoderConfig(
        **_sizes(config),
        intermediate_size=_number(config, "intermediate_size"),
        max_length=positions - offset,
        norm_eps=config.get("layer_norm_eps", 1e-12),
        activation=_activation(config.get("hidden_act", "gelu")),
        token_types=int(config.get("type_vocab_size", 2)),
        positions=positions,
        position_offset=offset,
        head=None if labels is None else HeadConfig(labels),
    )


def _roberta(config: Config) -> EncoderConfig:
    return _bert(config, offset=int(config.get("pad_token_id", 1)) + 1)


# -- ModernBERT

_MODERN_NAMES = (
    (r"embeddings\.tok_embeddings", "embeddings.tokens"),
    (r"embeddings\.norm", "embeddings.norm"),
    (r"layers\.(\d+)\.attn_norm", r"layers.\1.attention_norm"),
    (
        r"layers\.(\d+)\.attn\.Wqkv",
        r"layers.\1.attention.query layers.\1.attention.key layers.\1.attention.value",
    ),
    (r"layers\.(\d+)\.attn\.Wo", r"layers.\1.attention.output"),
    (r"layers\.(\d+)\.mlp_norm", r"layers.\1.mlp_norm"),
    (r"layers\.(\d+)\.mlp\.Wi", r"layers.\1.mlp.gate_proj layers.\1.mlp.up_proj"),
    (r"layers\.(\d+)\.mlp\.Wo", r"layers.\1.mlp.down_proj"),
    (r"final_norm", "final_norm"),
    (r"head\.(dense|norm)", r"head.\1"),
    (r"classifier", "head.output"),
    (r"decoder", None),
)


def _modernbert(config: Config) -> EncoderConfig:
    layers = _number(config, "num_hidden_layers")
    every = int(config.get("global_attn_every_n_layers", 3))
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer % every else "full_attention" for layer in range(layers)
    ]
    everywhere = _rope_base(config, "full_attention", "global_rope_theta") or 160_000.0
    nearby = _rope_base(config, "sliding_attention", "local_rope_theta")
    if nearby is None:  # a null says that all layers are alike; silence, that the model's own default holds
        nearby = everywhere if "local_rope_theta" in config else 10_000.0
    window = int(config.get("local_attention", 128)) // 2
    labels = _labels(config)
    return EncoderConfig(
        **_sizes(config),
        intermediate_size=_number(config, "intermediate_size"),
        max_length=_number(config, "max_position_embeddings"),
        norm_eps=config.get("norm_eps", 1e-5),
        activation=_activation(config.get("hidden_activation", "gelu")),
        gated=True,
        pre_norm=True,
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        norm_bias=bool(config.get("norm_bias", False)),
        rope_bases=tuple(everywhere if kind == "full_attention" else nearby for kind in kinds),
        windows=tuple(None if kind == "full_attention" else window for kind in kinds),
        head=None if labels is None else _modern_head(config, labels),
    )


def _rope_base(config: Config, kind: str, old_key: str) -> float | None:
    parameters = (config.get("rope_parameters") or {}).get(kind) or {}
    base = parameters.get("rope_theta") or config.get(old_key)
    return None if base is None else float(base)


def _modern_head(config: Config, labels: int) -> HeadConfig:
    return HeadConfig(
        labels,
        _activation(config.get("classifier_activation", "gelu")),
        mean=config.get("classifier_pooling", "cls") == "mean",
        norm=True,
        dense_bias=bool(config.get("classifier_bias", False)),
    )


# -- nomic-bert, by its first names and by those of transformers

_NOMIC_NAMES = (
    (r"embeddings\.word_embeddings", "embeddings.tokens"),
    (r"embeddings\.token_type_embeddings", "embeddings.types"),
    (r"emb_ln|embeddings\.LayerNorm", "embeddings.norm"),
    (
        r"encoder\.layers\.(\d+)\.attn\.Wqkv",
        r"layers.\1.attention.query layers.\1.attention.key layers.\1.attention.value",
    ),
    (r"encoder\.layers\.(\d+)\.attn\.out_proj", r"layers.\1.attention.output"),
    (r"encoder\.layers\.(\d+)\.norm1", r"layers.\1.attention_norm"),
    (r"encoder\.layers\.(\d+)\.norm2", r"layers.\1.mlp_norm"),
    (r"encoder\.layers\.(\d+)\.mlp\.fc11", r"layers.\1.mlp.up_proj"),
    (r"encoder\.layers\.(\d+)\.mlp\.fc12", r"layers.\1.mlp.gate_proj"),
    (r"encoder\.layers\.(\d+)\.mlp\.fc2", r"layers.\1.mlp.down_proj"),
    (r"layers\.(\d+)\.self_attn\.q_proj", r"layers.\1.attention.query"),
    (r"layers\.(\d+)\.self_attn\.k_proj", r"layers.\1.attention.key"),
    (r"layers\.(\d+)\.self_attn\.v_proj", r"layers.\1.attention.value"),
    (r"layers\.(\d+)\.self_attn\.o_proj", r"layers.\1.attention.output"),
    (r"layers\.(\d+)\.post_attention_layernorm", r"layers.\1.attention_norm"),
    (r"layers\.(\d+)\.post_mlp_layernorm", r"layers.\1.mlp_norm"),
    (r"layers\.(\d+)\.mlp\.(gate|up|down)_proj", r"layers.\1.mlp.\2_proj"),
    (r".*\.rotary_emb|cls\..*|pooler\..*", None),
)


def _nomic(config: Config) -> EncoderConfig:
    activation = config.get("activation_function") or config.get("hidden_act", "swiglu")
    for key, expected in (("prenorm", False), ("num_experts", 0), ("rotary_emb_interleaved", False)):
        if config.get(key, expected) not in (expected, None):
            raise UnsupportedModelError(f"nomic-bert with {key} {config[key]!r} is not known.")
    if config.get("rotary_emb_fraction", 1.0) != 1.0 or activation not in ("swiglu", "geglu", "silu"):
        raise UnsupportedModelError("This form of nomic-bert is not known.", "Version 1 and 1.5 are.")
    rope = config.get("rope_parameters") or {}
    base = float(config.get("rotary_emb_base") or rope.get("rope_theta") or 1000.0)
    return EncoderConfig(
        **_sizes(config),
        intermediate_size=_number(config, "n_inner", "intermediate_size"),
        max_length=_number(config, "n_positions", "max_position_embeddings"),
        norm_eps=float(config.get("layer_norm_epsilon") or config.get("layer_norm_eps") or 1e-12),
        activation=_activation(activation),
        gated=True,
        attention_bias=bool(config.get("qkv_proj_bias", False)),
        mlp_bias=bool(config.get("mlp_fc1_bias", False)),
        token_types=int(config.get("type_vocab_size", 2)),
        rope_bases=(base,) * _number(config, "num_hidden_layers", "n_layer"),
    )


_HEADED_BERT = (*_BERT_NAMES, (r"pooler\.dense", "head.dense"), (r"classifier", "head.output"))
_HEADED_ROBERTA = (
    *_BERT_NAMES,
    (r"classifier\.dense", "head.dense"),
    (r"classifier\.out_proj", "head.output"),
    (r"pooler\.dense", None),
)

FAMILIES: dict[str, Family] = {
    "bert": Family(_bert, _HEADED_BERT),
    "roberta": Family(_roberta, _HEADED_ROBERTA),
    "xlm-roberta": Family(_roberta, _HEADED_ROBERTA),
    "camembert": Family(_roberta, _HEADED_ROBERTA),
    "modernbert": Family(_modernbert, _MODERN_NAMES),
    "nomic_bert": Family(_nomic, _NOMIC_NAMES),
}
