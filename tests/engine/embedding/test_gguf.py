"""Embedding models in GGUF files, written by the names of the gguf package's own table."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from metalctl.engine.embedding.embedder import Embedder
from metalctl.engine.embedding.gguf import makes_vectors
from metalctl.engine.embedding.load import load_embedder
from metalctl.engine.errors import CheckpointError, UnsupportedModelError
from metalctl.engine.models.checkpoint import Checkpoint

from . import tiny_checkpoints as tiny

REFERENCE = np.load(tiny.HERE / "references" / "tiny.npz")


def write(path: Path, name: str, arch: str, changes: dict[str, Any] | None = None, leave_out: str = "") -> Checkpoint:
    """The tiny checkpoint called `name` as llama.cpp's converter would write it."""
    config = tiny.CONFIGS[name]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config.get("layer_norm_eps", 1e-12))
    writer.add_causal_attention(False)
    writer.add_rope_freq_base(1000.0)
    writer.add_tokenizer_model("bert")
    writer.add_token_list([_spelled(token) for token in tiny.VOCABULARY])
    writer.add_token_types([3] * 5 + [1] * (len(tiny.VOCABULARY) - 5))
    for key, index in (("bos", 2), ("sep", 3), ("pad", 0), ("unk", 1), ("eos", 3)):
        getattr(writer, f"add_{key}_token_id")(index)
    for key, value in (changes or {}).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_string)(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT if arch == "bert" else gguf.MODEL_ARCH.NOMIC_BERT, 3)
    for tensor, values in tiny.weights(tiny.shapes(name)).items():
        stored = names.get_name(tensor, (".weight", ".bias"))
        if stored is None or "pooler" in tensor or (leave_out and leave_out in stored):
            continue
        writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Checkpoint(str(path), "gguf", path, (path,))


def _spelled(token: str) -> str:
    if token.startswith("["):
        return token
    return token.removeprefix("##") if token.startswith("##") else "\u2581" + token


def states_pooled(name: str) -> np.ndarray:
    """The mean of the reference's states of each input, normalised."""
    parts = np.split(REFERENCE[name], np.cumsum(tiny.LENGTHS)[:-1])
    means = np.stack([part.mean(axis=0) for part in parts])
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def embed_inputs(embedder: Embedder) -> np.ndarray:
    ids, present = tiny.inputs()
    return embedder.embed([row[there].tolist() for row, there in zip(ids, present, strict=True)])


@pytest.mark.parametrize(("name", "arch"), [("bert", "bert"), ("nomic-bert", "nomic-bert")])
def test_vectors_are_those_of_transformers(name: str, arch: str, tmp_path: Path) -> None:
    found = write(tmp_path / "m.gguf", name, arch)
    assert makes_vectors(found.path)
    embedder = load_embedder(found)
    assert np.abs(embed_inputs(embedder) - states_pooled(name)).max() < 1e-5


def test_the_files_own_pooling_is_used(tmp_path: Path) -> None:
    embedder = load_embedder(write(tmp_path / "m.gguf", "bert", "bert", {"bert.pooling_type": 2}))
    firsts = REFERENCE["bert"][[0, tiny.LENGTHS[0], sum(tiny.LENGTHS[:2])]]
    firsts /= np.linalg.norm(firsts, axis=1, keepdims=True)
    assert np.abs(embed_inputs(embedder) - firsts).max() < 1e-5


def test_texts_become_the_tokens_of_the_folders_tokenizer(tmp_path: Path) -> None:
    from .test_embedder import checkpoint

    ours = load_embedder(write(tmp_path / "m.gguf", "bert", "bert"))
    theirs = load_embedder(checkpoint(tiny.write(tmp_path / "folder", "bert", tiny.shapes("bert"))))
    for text in tiny.SENTENCES:
        assert ours.prepare(text).ids == theirs.prepare(text).ids


def test_a_reranker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="reranker"):
        load_embedder(write(tmp_path / "m.gguf", "bert", "bert", {"bert.pooling_type": 4}))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        load_embedder(write(tmp_path / "m.gguf", "bert", "bert", leave_out="blk.1.ffn_up"))
