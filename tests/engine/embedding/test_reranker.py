"""Scores, against the sentence-transformers library and by hand."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metalctl.engine.embedding.decoder import hidden_of, load_decoder
from metalctl.engine.embedding.load import load_reranker, scores_pairs
from metalctl.engine.embedding.reranker import score
from metalctl.engine.errors import UnsupportedModelError, UsageError
from metalctl.engine.models.checkpoint import Checkpoint

from . import tiny_checkpoints as tiny
from .test_embedder import checkpoint

REFERENCE = np.load(tiny.HERE / "references" / "tiny.npz")
PAIRS = [("the river", "stone in the river"), ("yes", "no " * 60), ("river " * 30, "stone " * 25), ("a", "b")]


@pytest.mark.parametrize("name", ["bert-cross", "modernbert-cross"])
def test_scores_are_those_of_sentence_transformers(name: str, tmp_path: Path) -> None:
    reranker = load_reranker(checkpoint(tiny.write(tmp_path, name, tiny.shapes(name))))
    found = [score(reranker, query, [document])[0] for query, document in PAIRS]
    assert np.abs(np.array(found) - REFERENCE[f"{name} pairs"]).max() < 1e-5


def test_a_score_does_not_depend_on_what_is_scored_with_it(tmp_path: Path) -> None:
    reranker = load_reranker(checkpoint(tiny.write(tmp_path, "bert-cross", tiny.shapes("bert-cross"))))
    documents = ["stone", "the river " * 9, "a", "yes no yes"]
    together = score(reranker, "the river", documents)
    alone = [score(reranker, "the river", [document])[0] for document in documents]
    assert np.allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize(
    "named",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_a_checkpoint_may_ask_for_the_logit_itself(named: dict[str, Any], tmp_path: Path) -> None:
    shapes = tiny.shapes("bert-cross")
    plain = load_reranker(checkpoint(tiny.write(tmp_path / "a", "bert-cross", shapes)))
    asked = load_reranker(checkpoint(tiny.write(tmp_path / "b", "bert-cross", shapes, **named)))
    logit = score(asked, "the river", ["stone"])[0]
    assert np.isclose(1 / (1 + np.exp(-logit)), score(plain, "the river", ["stone"])[0], atol=1e-6)


def test_a_model_without_a_single_label_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no classifier"):
        load_reranker(checkpoint(tiny.write(tmp_path / "a", "bert", tiny.shapes("bert"))))
    shapes = {**tiny.shapes("bert-cross"), "classifier.weight": [3, 32], "classifier.bias": [3]}
    labels = {"id2label": {str(i): str(i) for i in range(3)}}
    with pytest.raises(UnsupportedModelError, match="3 labels"):
        load_reranker(checkpoint(tiny.write(tmp_path / "b", "bert-cross", shapes, **labels)))


def test_a_cross_encoder_takes_no_instruction(tmp_path: Path) -> None:
    reranker = load_reranker(checkpoint(tiny.write(tmp_path, "bert-cross", tiny.shapes("bert-cross"))))
    with pytest.raises(UsageError, match="no instruction"):
        score(reranker, "a", ["b"], instruction="c")


def long_decoder(folder: Path) -> Checkpoint:
    """A decoder whose context holds the judge's instructions, spelled letter by letter."""
    return checkpoint(tiny.write(folder, "qwen3", tiny.shapes("qwen3"), max_position_embeddings=2048))


def test_a_decoders_score_is_yes_against_no_as_its_next_token(tmp_path: Path) -> None:
    found = long_decoder(tmp_path)
    reranker = load_reranker(found)
    item = reranker.prepare("the river", "stone")
    text = reranker.tokenizer.decode(item.ids)
    assert "the river" in text and "stone" in text and text.index("the river") < text.index("stone")
    model, config = load_decoder(found.path, "again")
    states = hidden_of(model, config)(mx.array([item.ids]), mx.zeros((1, len(item.ids)), mx.int32), None)
    logits = np.array(states[0, -1] @ mx.array(tiny.weights(tiny.shapes("qwen3"))["embed_tokens.weight"]).T)
    yes, no = (np.exp(logits[tiny.VOCABULARY.index(word)]) for word in ("yes", "no"))
    assert np.isclose(score(reranker, "the river", ["stone"])[0], yes / (yes + no), atol=1e-5)


def test_an_instruction_changes_a_decoders_score(tmp_path: Path) -> None:
    reranker = load_reranker(long_decoder(tmp_path))
    plain = score(reranker, "the river", ["stone"])
    assert score(reranker, "the river", ["stone"], instruction="find the stone") != plain


def test_a_long_document_is_cut_so_that_the_question_stays_whole(tmp_path: Path) -> None:
    reranker = load_reranker(long_decoder(tmp_path))
    short, long = reranker.prepare("a", "b"), reranker.prepare("a", "stone " * 3000)
    assert len(long.ids) == reranker.max_length == 2048
    assert long.was_cut
    assert long.ids[-20:] == short.ids[-20:]


def test_which_checkpoints_score_pairs(tmp_path: Path) -> None:
    cross = checkpoint(tiny.write(tmp_path / "a", "bert-cross", tiny.shapes("bert-cross")))
    plain = checkpoint(tiny.write(tmp_path / "b", "bert", tiny.shapes("bert")))
    decoder = checkpoint(tiny.write(tmp_path / "Qwen3-Reranker-0.6B", "qwen3", tiny.shapes("qwen3")))
    assert [scores_pairs(it) for it in (cross, plain, decoder)] == [True, False, True]
    assert json.loads((cross.path / "config.json").read_text())["model_type"] == "bert"
