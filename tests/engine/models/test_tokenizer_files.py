"""The tokenizer of a folder, from whatever files it has."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers, processors
from tokenizers.models import WordLevel

from metalctl.engine.errors import CheckpointError, UnsupportedModelError
from metalctl.engine.models.tokenizer_files import tokenizer_from_folder

WORDS = {"[UNK]": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}


def save(folder: Path, processor: object = None, **settings: object) -> Path:
    backend = Backend(WordLevel(WORDS, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    if processor:
        backend.post_processor = processor
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_what_the_post_processor_adds_stands_around_a_text(tmp_path: Path) -> None:
    template = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    made = tokenizer_from_folder(save(tmp_path, template, bos_token="<s>", eos_token="</s>"), {}, {})
    assert made.encode("a b", add_special_tokens=True) == [1, 3, 4, 2]
    assert made.encode("a b") == [3, 4]
    assert made.bos_token_id == 1


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    made = tokenizer_from_folder(save(tmp_path, bos_token={"content": "<s>"}, eos_token={"content": "</s>"}), {}, {})
    assert (made.bos_token_id, made.eos_token_ids) == (1, {2})


def test_ends_are_gathered_from_all_files(tmp_path: Path) -> None:
    config = {"eos_token_id": 3, "text_config": {"eos_token_id": [4]}}
    made = tokenizer_from_folder(save(tmp_path, eos_token="</s>"), config, {"eos_token_id": [0]})
    assert made.eos_token_ids == {0, 2, 3, 4}


def test_special_tokens_reach_the_template(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    folder = save(tmp_path, bos_token="<s>", eos_token="</s>", chat_template=template)
    made = tokenizer_from_folder(folder, {}, {})
    assert made.apply_chat_template([{"role": "user", "content": "a"}]) == [1, 3, 2]


def test_vocabulary_of_sentencepiece_alone_is_converted(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\nhello world\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=310,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    made = tokenizer_from_folder(tmp_path, {"model_type": "llama"}, {})
    assert made.decode(made.encode("the quick é 你")) == "the quick é 你"
    assert made.eos_token_ids == {2}


def test_tokenizer_that_is_code_is_not_run(tmp_path: Path) -> None:
    settings = {"auto_map": {"AutoTokenizer": ["tokenization.Homemade", None]}, "tokenizer_class": "Homemade"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    marker = tmp_path / "ran"
    (tmp_path / "tokenization.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(UnsupportedModelError, match="auto_map"):
        tokenizer_from_folder(tmp_path, {}, {})
    assert not marker.exists()


def test_folder_without_any_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        tokenizer_from_folder(tmp_path, {"model_type": "llama"}, {})
