"""Recipes, pooling and what comes out, against the sentence-transformers library."""

import json
from pathlib import Path

import numpy as np
import pytest

from metalctl.engine.embedding.batches import batches
from metalctl.engine.embedding.embedder import Embedder, NotFiniteError
from metalctl.engine.embedding.load import load_embedder, makes_vectors_only
from metalctl.engine.errors import ContextLengthError, UnsupportedModelError, UsageError
from metalctl.engine.models.checkpoint import Checkpoint

from . import tiny_checkpoints as tiny

REFERENCE = np.load(tiny.HERE / "references" / "tiny.npz")


def checkpoint(folder: Path) -> Checkpoint:
    files = tuple(path for path in folder.rglob("*") if path.is_file())
    return Checkpoint(str(folder), "mlx", folder, files)


def sentence_model(folder: Path, pooling: str = "mean", *, dense: bool = False) -> Embedder:
    tiny.write_sentence_model(folder, tiny.shapes("bert"), pooling, dense=dense)
    return load_embedder(checkpoint(folder))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    return sentence_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("pooling", [*tiny.POOLINGS, "cls+mean"])
def test_vectors_are_those_of_sentence_transformers(pooling: str, tmp_path: Path) -> None:
    found = sentence_model(tmp_path, pooling)
    vectors = found.embed(tiny.SENTENCES, prompt=found.prompt("query"))
    assert np.abs(vectors - REFERENCE[f"pooling {pooling}"]).max() < 1e-5


def test_a_dense_stage_is_applied(tmp_path: Path) -> None:
    found = sentence_model(tmp_path, dense=True)
    vectors = found.embed(tiny.SENTENCES, prompt=found.prompt("query"))
    assert found.dimensions == vectors.shape[1] == 10
    assert np.abs(vectors - REFERENCE["pooling mean, dense"]).max() < 1e-5


def test_an_unknown_stage_is_refused_by_name(tmp_path: Path) -> None:
    tiny.write_sentence_model(tmp_path, tiny.shapes("bert"), "mean")
    stages = json.loads((tmp_path / "modules.json").read_text())
    stages[2]["type"] = "sentence_transformers.models.CNN"
    (tmp_path / "modules.json").write_text(json.dumps(stages))
    with pytest.raises(UnsupportedModelError, match="CNN"):
        load_embedder(checkpoint(tmp_path))


def test_pooling_in_the_newer_form_means_the_same(tmp_path: Path) -> None:
    tiny.write_sentence_model(tmp_path, tiny.shapes("bert"), "mean")
    settings = {"embedding_dimension": 32, "pooling_mode": "cls", "include_prompt": False}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    found = load_embedder(checkpoint(tmp_path))
    assert np.abs(found.embed(tiny.SENTENCES, prompt="query: ") - REFERENCE["pooling cls"]).max() < 1e-5


def test_a_batch_of_all_equals_each_text_alone(embedder: Embedder) -> None:
    together = embedder.embed(tiny.SENTENCES)
    alone = np.concatenate([embedder.embed([text]) for text in tiny.SENTENCES])
    small = embedder.embed(tiny.SENTENCES, budget=30)
    assert np.abs(together - alone).max() < 1e-6
    assert np.abs(together - small).max() < 1e-6


def test_a_vector_is_cut_first_and_then_normalised(embedder: Embedder) -> None:
    whole = embedder.embed(["the river"])[0]
    cut = embedder.embed(["the river"], dimensions=5)[0]
    assert np.allclose(cut, whole[:5] / np.linalg.norm(whole[:5]), atol=1e-6)
    assert np.isclose(np.linalg.norm(cut), 1)


def test_dimensions_may_differ_within_a_batch(embedder: Embedder) -> None:
    items = [embedder.prepare(text) for text in ("the river", "stone", "a")]
    vectors = embedder.compute(items)
    for text, vector, size in zip(("the river", "stone", "a"), vectors, (3, None, 32), strict=True):
        expected = embedder.embed([text], dimensions=size)[0]
        assert np.allclose(embedder.finish(vector, size), expected, atol=1e-6)


def test_normalising_can_be_turned_off(embedder: Embedder) -> None:
    plain = embedder.embed(["the river"], normalize=False)[0]
    assert not np.isclose(np.linalg.norm(plain), 1, atol=1e-3)
    assert np.allclose(plain / np.linalg.norm(plain), embedder.embed(["the river"])[0], atol=1e-6)


@pytest.mark.parametrize("dimensions", [0, -1, 33])
def test_bad_dimensions_are_refused(embedder: Embedder, dimensions: int) -> None:
    with pytest.raises(UsageError, match="from 1 to 32"):
        embedder.embed(["a"], dimensions=dimensions)


def test_a_long_text_is_cut_and_keeps_its_end_token(embedder: Embedder) -> None:
    item = embedder.prepare("stone " * 40)
    assert len(item.ids) == embedder.max_length == 24
    assert item.length == 42
    assert item.was_cut
    assert item.ids[-1] == tiny.VOCABULARY.index("[SEP]")


def test_a_long_text_is_refused_with_both_numbers_when_it_must_not_be_cut(embedder: Embedder) -> None:
    with pytest.raises(ContextLengthError, match=r"42 tokens.*24"):
        embedder.prepare("stone " * 40, truncate=False)


def test_token_ids_are_taken_as_they_are(embedder: Embedder) -> None:
    ids = embedder.prepare("the river").ids
    assert np.array_equal(embedder.embed([ids]), embedder.embed(["the river"]))


def test_control_tokens_in_a_text_are_plain_text(embedder: Embedder) -> None:
    assert embedder.prepare("a[SEP]b").ids.count(tiny.VOCABULARY.index("[SEP]")) == 1


def test_an_unknown_prompt_is_refused_with_those_there_are(embedder: Embedder) -> None:
    with pytest.raises(UsageError) as caught:
        embedder.prompt("passage")
    assert caught.value.hint == "It has: query, document."


def test_a_vector_that_is_not_finite_is_an_error(embedder: Embedder) -> None:
    for bad in (np.nan, np.inf):
        with pytest.raises(NotFiniteError):
            embedder.finish(np.array([1, bad], np.float32))


def test_weights_that_are_not_finite_are_noticed(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = tiny.write_sentence_model(tmp_path, tiny.shapes("bert"), "mean")
    arrays = load_file(folder / "model.safetensors")
    arrays["encoder.layer.1.output.dense.bias"][3] = np.nan
    save_file(arrays, folder / "model.safetensors")
    with pytest.raises(NotFiniteError):
        load_embedder(checkpoint(folder)).embed(["a"])


def test_a_decoder_gives_its_last_tokens_state(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, "qwen3", tiny.shapes("qwen3"))
    found = load_embedder(checkpoint(folder))
    ids, present = tiny.inputs()
    texts = [row[there].tolist() for row, there in zip(ids, present, strict=True)]
    last = np.cumsum(tiny.LENGTHS) - 1
    expected = REFERENCE["qwen3"][last]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.abs(found.embed(texts) - expected).max() < 1e-5


def test_which_checkpoints_are_for_vectors_only(tmp_path: Path) -> None:
    encoder = tiny.write(tmp_path / "a", "modernbert", tiny.shapes("modernbert"))
    decoder = tiny.write(tmp_path / "b", "qwen3", tiny.shapes("qwen3"))
    assert makes_vectors_only(checkpoint(encoder))
    assert not makes_vectors_only(checkpoint(decoder))
    (decoder / "modules.json").write_text("[]")
    assert makes_vectors_only(checkpoint(decoder))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, "bert", tiny.shapes("bert"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="pickles"):
        load_embedder(checkpoint(folder))


def test_batches_keep_to_the_budget_and_lose_nothing() -> None:
    rng = np.random.default_rng(0)
    for budget in (1, 64, 500):
        lengths = rng.integers(1, 200, 300).tolist()
        found = batches(lengths, budget)
        assert sorted(index for batch in found for index in batch) == list(range(300))
        for batch in found:
            longest = max(lengths[index] for index in batch)
            assert len(batch) == 1 or longest * len(batch) <= budget


def test_batches_hold_texts_of_similar_lengths() -> None:
    assert batches([5, 100, 6, 101], 210) == [[3, 1], [2, 0]]
