"""`metalctl embed` from the outside, on a tiny model."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metalctl import cli
from metalctl.engine.embedding.load import load_embedder
from tests.engine.embedding import tiny_checkpoints as tiny
from tests.engine.embedding.test_embedder import checkpoint

TEXTS = ["the river", "stone", "a b c"]


class Pipe:
    """Standard input that is a pipe."""

    def __init__(self, content: bytes):
        self.buffer = io.BytesIO(content)

    def isatty(self) -> bool:
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_sentence_model(tmp_path_factory.mktemp("model"), tiny.shapes("bert"), "mean")


@pytest.fixture(scope="module")
def expected(model: Path) -> np.ndarray:
    return load_embedder(checkpoint(model)).embed(TEXTS)


@pytest.fixture
def run(
    model: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, bytes, str]]:
    """Run the command on the tiny model; returns exit code, stdout and stderr."""

    monkeypatch.setattr("metalctl.engine.acceleration.prepare", lambda cache, notice: "none")  # for other tests' sake

    def run(*arguments: str, pipe: bytes | None = None) -> tuple[int, bytes, str]:
        monkeypatch.setattr("sys.stdin", Pipe(pipe or b""))
        code = cli.main(["embed", str(model), *arguments])
        out, error = capfdbinary.readouterr()
        return code, out, error.decode()

    return run


def close(found: Any, expected: np.ndarray) -> bool:
    return np.shape(found) == expected.shape and bool(np.abs(np.array(found) - expected).max() < 1e-5)


def test_texts_become_an_array_of_arrays(run: Any, expected: np.ndarray) -> None:
    code, out, _ = run(*TEXTS)
    assert code == 0
    assert close(json.loads(out), expected)


def test_lines_are_piped_in(run: Any, expected: np.ndarray) -> None:
    _, out, _ = run(pipe=("\ufeff" + "\r\n".join(TEXTS) + "\n").encode())
    assert close(json.loads(out), expected)


def test_a_pipe_can_be_one_text(run: Any, model: Path) -> None:
    _, out, _ = run("--input-format", "text", pipe=b"the river\nstone\n")
    assert close(json.loads(out), load_embedder(checkpoint(model)).embed(["the river\nstone"]))


def test_json_lines_keep_their_ids(run: Any, expected: np.ndarray, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"id": f"n{i}", "content": text}) for i, text in enumerate(TEXTS)) + "\n\n")
    _, out, _ = run("--file", str(file), "--format", "jsonl")
    records = [json.loads(line) for line in out.splitlines()]
    assert [(record["index"], record["id"]) for record in records] == [(0, "n0"), (1, "n1"), (2, "n2")]
    assert close([record["embedding"] for record in records], expected)


def test_a_csv_column_is_read(run: Any, expected: np.ndarray, tmp_path: Path) -> None:
    file = tmp_path / "texts.csv"
    file.write_text("id,body\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(TEXTS)))
    _, out, _ = run("-f", str(file), "--field", "body")
    assert close(json.loads(out), expected)
    code, _, error = run("-f", str(file))
    assert code == 2
    assert "id, body" in error


def test_base64_is_little_endian_float32(run: Any, expected: np.ndarray) -> None:
    _, out, _ = run(*TEXTS, "--format", "base64")
    assert close([np.frombuffer(base64.b64decode(line), "<f4") for line in out.splitlines()], expected)


def test_npy_goes_through_a_pipe_or_into_a_file(run: Any, expected: np.ndarray, tmp_path: Path) -> None:
    _, out, _ = run(*TEXTS, "--format", "npy")
    assert close(np.load(io.BytesIO(out)), expected)
    code, out, _ = run(*TEXTS, "--format", "npy", "-o", str(tmp_path / "v.npy"), "--json")
    assert code == 0
    assert close(np.load(tmp_path / "v.npy"), expected)
    data = json.loads(out)["data"]
    assert (data["texts"], data["dimensions"], data["path"]) == (3, 32, str(tmp_path / "v.npy"))
    assert list(tmp_path.iterdir()) == [tmp_path / "v.npy"]


def test_npy_is_not_mixed_with_json(run: Any) -> None:
    code, out, _ = run("a", "--format", "npy", "--json")
    assert code == 2
    assert json.loads(out)["error"]["type"] == "usage"


def test_the_envelope_holds_counts_and_vectors(run: Any, expected: np.ndarray) -> None:
    code, out, _ = run(*TEXTS, "--json")
    answer = json.loads(out)
    assert (code, answer["status"], answer["command"]) == (0, "ok", "embed")
    data = answer["data"]
    assert (data["texts"], data["truncated"]) == (3, 0)
    assert data["tokens"] == sum(entry["tokens"] for entry in data["embeddings"])
    assert close([entry["embedding"] for entry in data["embeddings"]], expected)


def test_json_lines_with_json_are_events(run: Any) -> None:
    _, out, _ = run(*TEXTS, "--json", "--format", "jsonl")
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events] == ["embedding"] * 3 + ["done"]


def test_dimensions_prompts_and_lengths_are_the_users(run: Any, model: Path) -> None:
    embedder = load_embedder(checkpoint(model))
    _, out, _ = run("stone", "--dimensions", "5")
    assert close(json.loads(out), embedder.embed(["stone"], dimensions=5))
    _, out, _ = run("stone", "--prompt-name", "query")
    assert close(json.loads(out), embedder.embed(["stone"], prompt="query: "))
    _, out, _ = run("stone", "--prompt", "query: ", "--no-normalize")
    assert close(json.loads(out), embedder.embed(["stone"], prompt="query: ", normalize=False))


def test_a_text_that_is_cut_is_told_of(run: Any) -> None:
    code, _, error = run("stone " * 40, "a")
    assert code == 0
    assert "1 text was cut to the 24 tokens" in error
    code, _, error = run("a", "stone " * 40, "--no-truncate")
    assert code == 1
    assert "text 2" in error and "42 tokens" in error


@pytest.mark.parametrize(
    ("arguments", "pipe", "said"),
    [
        (["a", "--dimensions", "33"], b"", "from 1 to 32"),
        (["a", "--prompt-name", "passage"], b"", "query, document"),
        (["a", "--prompt-name", "query", "--prompt", "x"], b"", "exclude each other"),
        (["--input-format", "jsonl"], b'"a"\n{"text": 3}\n', "standard input, line 2"),
        (["--input-format", "jsonl"], b"{", "not JSON"),
        ([], b"\xff\xfe", "UTF-8"),
        ([], b"", "no text"),
    ],
)
def test_what_is_wrong_is_said(run: Any, arguments: list[str], pipe: bytes, said: str) -> None:
    code, _, error = run(*arguments, pipe=pipe)
    assert code == 2
    assert said in error


def test_a_file_that_is_not_there_is_an_error(run: Any) -> None:
    code, _, error = run("--file", "/nowhere/at.all")
    assert code == 1
    assert "/nowhere/at.all" in error


def test_texts_are_read_a_window_at_a_time_in_their_order(
    run: Any, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metalctl.commands.embed.WINDOW", 2)
    _, out, _ = run(*TEXTS, *TEXTS, "--batch-tokens", "1")
    assert close(json.loads(out), np.concatenate([expected, expected]))
