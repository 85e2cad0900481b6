"""`metalctl doctor REF`: a model's files, and the model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny_repositories import gguf_file, safetensors_file

from metalctl import cli
from metalctl.doctor import model
from metalctl.engine import parity
from metalctl.engine.cache.cache_set import CacheSet
from tests.engine import tiny

GB = 10**9


def states(checks: Any) -> list[str]:
    return [check.state for check in checks]


# -- files


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.gguf", gguf_file()),
        ("model.safetensors", safetensors_file({"a": ("F32", (4, 4))})),
        ("config.json", b"{}"),
        ("merges.txt", b"a b"),
    ],
)
def test_a_whole_file_is_ok_and_a_cut_one_is_not(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert model.file(path, name).state == "ok"
    path.write_bytes(content[:-1])
    check = model.file(path, name)
    if name == "merges.txt":  # nothing says how long it should be
        assert check.state == "ok"
    else:
        assert check.state == "failure" and name in check.detail and check.fix


def test_a_file_that_is_gone_fails(tmp_path: Path) -> None:
    assert model.file(tmp_path / "gone.json", "gone.json").state == "failure"


@pytest.mark.parametrize("kind", ["sha256", "git"])
def test_a_file_in_a_hubs_cache_must_have_the_hash_that_it_is_named_by(tmp_path: Path, kind: str) -> None:
    import hashlib

    data = b'{"model_type": "llama"}'
    name = hashlib.sha256(data).hexdigest() if kind == "sha256" else hashlib.sha1(b"blob 23\0" + data).hexdigest()
    blob = tmp_path / "blobs" / name
    blob.parent.mkdir()
    blob.write_bytes(data)
    link = tmp_path / "config.json"
    link.symlink_to(blob)
    check = model.file(link, "config.json")
    assert check.state == "ok" and "hash as fetched" in check.detail
    blob.write_bytes(data.replace(b"llama", b"LLAMA"))
    check = model.file(link, "config.json")
    assert check.state == "failure" and "hash differs" in check.detail


def test_a_file_of_a_package_must_have_the_hash_of_its_record(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    record = {"files": [{"name": "notes.txt", "size": 5, "sha256": "0" * 64}]}
    (tmp_path / "metalctl.json").write_text(json.dumps(record))
    assert model.file(tmp_path / "notes.txt", "notes.txt").state == "failure"


# -- the model


def test_weights_must_fit_with_something_to_spare() -> None:
    for system in ("linux", "darwin"):
        checks = [model.fits(int(size * GB), 10 * GB, 32 * GB, system) for size in (4, 8.5, 9.5)]
        assert states(checks) == ["ok", "warning", "failure"]
        assert checks[0].fix is None
        assert all(("iogpu.wired_limit_mb" in str(check.fix)) is (system == "darwin") for check in checks[1:])
    hopeless = model.fits(15 * GB, 10 * GB, 16 * GB, "darwin")
    assert hopeless.state == "failure" and "sysctl" not in str(hopeless.fix)


@dataclass
class Broken:
    """A tokenizer that loses text and cannot chat."""

    vocab_size = 10

    def encode(self, text: str) -> list[int]:
        return [1, 2]

    def decode(self, ids: list[int]) -> str:
        return "?"

    def apply_chat_template(self, messages: Any) -> list[int]:
        from metalctl.engine.errors import CheckpointError

        raise CheckpointError("there is no chat template")


def test_a_tokenizer_that_loses_text_and_a_missing_template_are_warnings() -> None:
    loaded = tiny.load(tiny.build("llama"))
    assert model.tokenizer(loaded).state == "ok"
    broken = type("Loaded", (), {"tokenizer": Broken()})()
    checks = [model.tokenizer(broken), model.template(broken)]
    assert states(checks) == ["warning", "warning"]
    assert all(check.fix for check in checks)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model as a checkpoint on disk, with a tokenizer of one token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    made = tiny.build("llama")
    folder = tmp_path / "tiny"
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(made.parameters())), {"format": "mlx"})
    config = {**tiny.BASE, "model_type": "llama", "vocab_size": tiny.VOCAB}
    (folder / "config.json").write_text(json.dumps(config))
    printable = sorted(pre_tokenizers.ByteLevel.alphabet())[: tiny.VOCAB - 1]
    letters = {token: index for index, token in enumerate([*printable, "Ġ"])}  # the last is a blank
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": "{{ messages[0]['content'] }}", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(autouse=True)
def only_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leave out what is looked at without REF, and compile no kernels."""
    from metalctl.commands import doctor
    from metalctl.engine import acceleration

    def checks(invocation: Any, reference: str, network: bool, trust_remote_code: bool) -> Any:
        return model.checks(invocation, reference, trust_remote_code)

    monkeypatch.setattr(doctor, "_checks", checks)
    from metalctl.kernels.cpu import library

    monkeypatch.setattr(acceleration, "prepare", lambda cache, notice: None)
    monkeypatch.setattr(library, "loaded", lambda: False)
    monkeypatch.setattr(model, "on_cpu", lambda: False)
    monkeypatch.setenv("METALCTL_CACHE", str(tmp_path / "own"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code = cli.main(["doctor", *arguments, "--json"])
    data = json.loads(capsys.readouterr().out)["data"]
    return code, {check["name"]: check for check in data["checks"]}


def test_a_sound_model_passes_every_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, checks = run(capsys, str(folder))
    assert code == 0, checks
    assert list(checks) == [
        "model", "file", "model memory", "kernels", "load", "tokenizer", "chat template", "self-test",
    ]  # fmt: skip
    assert {check["state"] for check in checks.values()} == {"ok"}
    assert "3 layers, stepped as a batch" in checks["self-test"]["detail"]


def test_a_cpu_without_kernels_is_a_warning(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "on_cpu", lambda: True)
    code, checks = run(capsys, str(folder))
    assert code == 0
    assert checks["kernels"]["state"] == "warning" and checks["kernels"]["fix"]


def test_a_planted_fault_is_named_by_its_layer(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spoilt(CacheSet):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            write = self.kv[1].update_and_fetch
            self.kv[1].update_and_fetch = lambda k, v: write(k, v * 1.1)  # type: ignore[method-assign]

    monkeypatch.setattr(parity, "CacheSet", Spoilt)
    code, checks = run(capsys, str(folder))
    assert code == 1
    assert checks["self-test"]["state"] == "failure"
    assert "layer 1 (TransformerBlock) is the first that differs" in checks["self-test"]["detail"]


def test_a_damaged_file_ends_the_checks_before_it_is_loaded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, checks = run(capsys, str(folder))
    assert code == 1 and "load" not in checks


def test_a_model_that_cannot_be_loaded_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text('{"model_type": "of-another-world"}')
    code, checks = run(capsys, str(folder))
    assert code == 1
    assert checks["load"]["state"] == "failure" and "of-another-world" in checks["load"]["detail"]
    assert checks["load"]["fix"]


@pytest.mark.parametrize("reference", ["someone/never-pulled", "no-such-alias", "./nowhere.gguf"])
def test_a_model_that_is_not_here_fails_and_is_not_fetched(
    reference: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was opened"))
    code, checks = run(capsys, reference)
    assert code == 1
    assert list(checks) == ["model"]
    assert checks["model"]["state"] == "failure" and checks["model"]["fix"]
