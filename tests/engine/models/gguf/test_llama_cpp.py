"""Our reading of GGUF against llama.cpp's: logits of the same tiny files, tokens of the same texts.

Needs llama-cpp-python, in this environment or in one whose Python LLAMA_CPP_PYTHON names:
`LLAMA_CPP_PYTHON=... pytest -m slow tests/engine/models/gguf/test_llama_cpp.py`.
Vocabularies are those in the folder LLAMA_CPP_VOCABULARIES (`models` in llama.cpp's source has nineteen).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metalctl.engine.models.checkpoint import Checkpoint
from metalctl.engine.models.gguf.reader import read_file_header
from metalctl.engine.models.gguf.vocabulary import build_tokenizer
from metalctl.engine.models.loader import load
from tests.engine.models.gguf.corpus import texts
from tests.engine.models.gguf.tiny_models import CASES, write

pytestmark = pytest.mark.slow

TOKENS = [(7 * index * index + 3) % 288 for index in range(40)]
PYTHON = os.environ.get("LLAMA_CPP_PYTHON", sys.executable)
RUNNER = Path(__file__).with_name("llama_cpp_runner.py")

# llama.cpp gives EXAONE 4 a sliding window only when it has 64 layers.
COMPARABLE = [case for case in CASES if case != "exaone4"]
# Its GELU on a CPU is a table in float16; logits of the Gemmas here are around 30.
GELU_TABLE = {
    "gemma": 0.05,
    "gemma2": 0.05,
    "gemma3": 0.02,
    "gemma4": 0.05,
    "gemma4-experts": 0.1,
    "phi2": 5e-3,
    "starcoder2": 5e-3,
}


class LlamaCpp:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [PYTHON, str(RUNNER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[LlamaCpp]:
    if subprocess.run([PYTHON, "-c", "import llama_cpp"], capture_output=True, check=False).returncode:
        pytest.skip("llama-cpp-python is not installed")
    runner = LlamaCpp()
    yield runner
    runner.process.terminate()
    runner.process.wait()


@pytest.mark.parametrize("case", COMPARABLE)
def test_logits_agree_with_llama_cpp(case: str, tmp_path: Path, llama_cpp: LlamaCpp) -> None:
    path = tmp_path / f"{case}.gguf"
    write(case, path)
    loaded = load(Checkpoint(str(path), "gguf", path, (path,)), dtype=mx.float32)
    ours = np.array(loaded.model(mx.array([TOKENS])))[0]
    theirs = np.array(llama_cpp.ask(path=str(path), tokens=TOKENS)["logits"])
    np.testing.assert_allclose(ours, theirs, atol=GELU_TABLE.get(case, 1e-3), rtol=0)


VOCABULARIES = sorted(Path(os.environ.get("LLAMA_CPP_VOCABULARIES", "absent")).glob("*.gguf"))

# The share of texts that may differ, where we go with the models' own tokenizers and llama.cpp does not:
# WordPiece keeps spacing marks (Devanagari), unigram normalises a letter with two marks at once, and these two cut
# around white space and letters of newer Unicode as Oniguruma does.
DIFFERENT = {"bert": 0.16, "t5": 0.09, "deepseek-llm": 0.03, "deepseek-coder": 0.01, "falcon": 0.01}


@pytest.mark.parametrize("parse_special", [False, True])
@pytest.mark.parametrize("source", VOCABULARIES, ids=lambda path: path.stem)
def test_tokens_agree_with_llama_cpp(source: Path, parse_special: bool, tmp_path: Path, llama_cpp: LlamaCpp) -> None:
    path = tmp_path / "vocabulary.gguf"
    data = bytearray(source.read_bytes())
    data[4] = 3  # version 2 is laid out as version 3
    path.write_bytes(data)
    header = read_file_header(path)
    tokenizer = build_tokenizer(header)[0]
    # llama.cpp takes `</s>` for the end of an answer in any vocabulary that has it.
    corpus = [text for text in texts(500, seed=21) if "</s>" not in text]
    theirs = llama_cpp.ask(path=str(path), texts=[text.encode().hex() for text in corpus], parse_special=parse_special)
    pairs = zip(corpus, theirs["tokens"], strict=True)
    wrong = [text for text, tokens in pairs if tokenizer.encode(text, parse_special=parse_special) != tokens]
    keys = (header.metadata["tokenizer.ggml.model"], header.metadata.get("tokenizer.ggml.pre"))
    allowed = max(DIFFERENT.get(key, 0.0) for key in keys)
    assert len(wrong) <= allowed * len(corpus), wrong[:5]
