"""Our reading of GGUF against llama.cpp's, on the same tiny files.

Needs llama-cpp-python, in this environment or in one whose Python LLAMA_CPP_PYTHON names:
`LLAMA_CPP_PYTHON=... pytest -m slow tests/engine/models/gguf/test_llama_cpp.py`.
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
from metalctl.engine.models.loader import load
from tests.engine.models.gguf.tiny_models import CASES, write

pytestmark = pytest.mark.slow

TOKENS = [(7 * index * index + 3) % 288 for index in range(40)]
PYTHON = os.environ.get("LLAMA_CPP_PYTHON", sys.executable)
RUNNER = Path(__file__).with_name("llama_cpp_runner.py")

# llama.cpp gives EXAONE 4 a sliding window only when it has 64 layers.
COMPARABLE = [case for case in CASES if case != "exaone4"]
# Its GELU on a CPU is a table in float16; logits of the Gemmas here are around 30.
GELU_TABLE = {"gemma": 0.05, "gemma2": 0.05, "gemma3": 0.02, "phi2": 5e-3, "starcoder2": 5e-3}


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
