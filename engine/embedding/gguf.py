"""Embedding models in GGUF files: encoders of the BERT kind, and decoders whose metadata say how to pool."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from metalctl.engine.embedding.decoder import hidden_of
from metalctl.engine.embedding.embedder import Embedder
from metalctl.engine.embedding.encoder import Encoder, EncoderConfig
from metalctl.engine.embedding.native import accelerate_encoder
from metalctl.engine.embedding.recipe import Recipe
from metalctl.engine.errors import UnsupportedModelError
from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.engine.models.gguf.mapping import Architecture, Array, Config, Keys, Names, to
from metalctl.engine.models.gguf.parts import merge_headers, read_headers
from metalctl.engine.models.gguf.reader import Header, read_file_header
from metalctl.engine.models.gguf.vocabulary import build_tokenizer
from metalctl.engine.models.gguf.weights import build_model

_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}  # as the files number them
_RANK = 4


def makes_vectors(path: Path) -> bool:
    """Whether a GGUF file is an embedding model."""
    header = read_file_header(path)
    return header.architecture in ENCODERS or _pooling(header) is not None


def embedder_from_gguf(checkpoint: Checkpoint) -> Embedder:
    """Raises CheckpointError and UnsupportedModelError."""
    headers = read_headers(list(checkpoint.files))
    header = merge_headers(headers)
    row = ENCODERS.get(header.architecture)
    if row is None:
        return _from_decoder(checkpoint, _pooling(header))
    if _pooling(header) == _RANK or any(info.name.startswith("cls.") for info in header.tensors):
        raise UnsupportedModelError(f"{header.name} is a reranker, and these are not loaded from GGUF.")
    tokenizer, notes = build_tokenizer(header)
    dtype = mx.float32 if mx.default_device() == mx.cpu else mx.float16
    parts = list(zip(checkpoint.files, headers, strict=True))
    model = build_model(header, parts, dtype, "size", row)
    assert isinstance(model.module, Encoder)
    config = model.module.config
    return Embedder(
        model.module,
        tokenizer,
        _recipe(_pooling(header), "mean"),
        hidden_size=config.hidden_size,
        max_length=config.max_length,
        notes=(*notes, *model.notes, *accelerate_encoder(model.module, model.filling)),
    )


def _from_decoder(checkpoint: Checkpoint, pooling: int | None) -> Embedder:
    from metalctl.engine.models.loader import load

    loaded = load(checkpoint)
    return Embedder(
        hidden_of(loaded.model, loaded.config),
        loaded.tokenizer,
        _recipe(pooling, "lasttoken"),
        hidden_size=int(loaded.config["hidden_size"]),
        max_length=loaded.context_length,
        notes=loaded.notes,
    )


def _pooling(header: Header) -> int | None:
    kind = header.get(f"{header.architecture}.pooling_type", int)
    return kind or None


def _recipe(pooling: int | None, otherwise: str) -> Recipe:
    """The files do not say whether vectors are normalised; programs that read them do so."""
    return Recipe(poolings=(otherwise if pooling is None else _POOLINGS[pooling],), normalize=True)


# -- the architectures


def _thirds(array: Array, config: Config) -> tuple[Array, ...]:
    third = array.shape[0] // 3
    return array[:third], array[third : 2 * third], array[2 * third :]


_NAMES: Names = {
    "token_embd": "embeddings.tokens",
    "token_types": "embeddings.types",
    "position_embd": "embeddings.positions",
    "token_embd_norm": "embeddings.norm",
}
_LAYERS: Names = {
    "attn_q": "attention.query",
    "attn_k": "attention.key",
    "attn_v": "attention.value",
    "attn_qkv": to("attention.query", "attention.key", "attention.value", rows=_thirds),
    "attn_output": "attention.output",
    "attn_output_norm": "attention_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "layer_output_norm": "mlp_norm",
}


def _bert(keys: Keys) -> Config:
    config = _common(keys)
    positions = keys.rows("position_embd.weight")
    return _row(replace(config, positions=positions, max_length=min(positions, config.max_length)))


def _nomic(keys: Keys) -> Config:
    config = _common(keys)
    bases = (keys.number("rope.freq_base", 1000.0),) * config.num_layers
    return _row(replace(config, rope_bases=bases, gated=True, activation="silu"))


def _common(keys: Keys) -> EncoderConfig:
    return EncoderConfig(
        vocab_size=keys.rows("token_embd.weight"),
        hidden_size=keys.integer("embedding_length"),
        num_layers=keys.integer("block_count"),
        num_heads=keys.integer("attention.head_count"),
        intermediate_size=keys.integer("feed_forward_length"),
        max_length=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_epsilon"),
        attention_bias=keys.has("blk.0.attn_output.bias"),
        mlp_bias=keys.has("blk.0.ffn_down.bias"),
        token_types=keys.rows("token_types.weight") if keys.has("token_types.weight") else 0,
    )


def _row(config: EncoderConfig) -> Config:
    return {"model_type": "encoder", "encoder": config}


def _module(config: Config) -> Encoder:
    return Encoder(config["encoder"])


ENCODERS: dict[str, Architecture] = {
    "bert": Architecture(_bert, _NAMES, _LAYERS, layer_path="layers.{}.", module=_module),
    "nomic-bert": Architecture(_nomic, _NAMES, _LAYERS, layer_path="layers.{}.", module=_module),
}
