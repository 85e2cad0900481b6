"""The tokenizer of a checkpoint folder: `tokenizer.json` and the files beside it."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from metalctl.engine.errors import CheckpointError, UnsupportedModelError
from metalctl.engine.models.chat_template import ChatTemplates
from metalctl.engine.models.tokenizer import Tokenizer

# Tokens that end a turn. Many configs name only the one that ends a document.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|eot|>", "<turn|>")

PROBE = "a"


def tokenizer_from_folder(
    folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any], trust_remote_code: bool = False
) -> Tokenizer:
    """`config` and `generation` are the contents of config.json and generation_config.json.

    Without a tokenizer.json the transformers library converts what there is. Raises CheckpointError when there is none.
    """
    settings = _read(folder / "tokenizer_config.json")
    settings = {**_read(folder / "special_tokens_map.json"), **settings}
    backend = _backend(folder, settings, trust_remote_code)
    texts = {key: _text(value) for key, value in settings.items() if key.endswith("_token") and _text(value)}
    templates = ChatTemplates(_templates(folder, settings), {"bos_token": "", "eos_token": "", **texts})
    prefix, suffix = _surroundings(backend)
    return Tokenizer(
        backend,
        bos_token_id=_id(backend, texts.get("bos_token"), config.get("bos_token_id")),
        eos_token_ids=_end_ids(backend, texts, config, generation, templates),
        prefix_ids=prefix,
        suffix_ids=suffix,
        chat_templates=templates,
    )


def _backend(folder: Path, settings: Mapping[str, Any], trust_remote_code: bool) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path} cannot be read: {error}", "Fetch the model again.") from error
    if settings.get("auto_map") and not trust_remote_code:
        raise UnsupportedModelError(
            "The checkpoint's tokenizer is code of its own (auto_map), which is not run.",
            "If you trust its publisher, allow that with --trust-remote-code.",
        )
    return _converted(folder, trust_remote_code)


def _converted(folder: Path, trust_remote_code: bool) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # whatever its many converters raise
        raise CheckpointError(f"There is no usable tokenizer in {folder}: {error}", "Fetch the model again.") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UnsupportedModelError(
            f"The tokenizer in {folder} ({type(tokenizer).__name__}) has no fast form.", "Use another conversion of it."
        )
    return backend


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """By name, from all the places where they have been kept; files win over fields."""
    found: dict[str, str] = {}
    field = settings.get("chat_template") or _read(folder / "chat_template.json").get("chat_template")
    if isinstance(field, str):
        found["default"] = field
    elif isinstance(field, list):
        found.update({entry["name"]: entry["template"] for entry in field if {"name", "template"} <= set(entry)})
    if (folder / "chat_template.jinja").is_file():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    return found


def _end_ids(
    backend: tokenizers.Tokenizer,
    texts: Mapping[str, str],
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    templates: ChatTemplates,
) -> set[int]:
    text_config = config.get("text_config") or {}
    ids = {*_as_ids(generation.get("eos_token_id")), *_as_ids(config.get("eos_token_id"))}
    ids |= set(_as_ids(text_config.get("eos_token_id")))
    own = _id(backend, texts.get("eos_token"), None)
    if own is not None:
        ids.add(own)
    for token in TURN_ENDS:
        index = backend.token_to_id(token)
        if index is not None and any(token in source for source in templates.sources.values()):
            ids.add(index)
    return ids


def _as_ids(value: Any) -> Iterable[int]:
    values = value if isinstance(value, list) else [value]
    return [entry for entry in values if isinstance(entry, int)]


def _id(backend: tokenizers.Tokenizer, text: str | None, fallback: Any) -> int | None:
    index = backend.token_to_id(text) if text else None
    if index is None and isinstance(fallback, int):
        return fallback
    return index


def _surroundings(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer's post-processor puts before and after a text; some files would pad or cut it, too."""
    backend.no_padding()
    backend.no_truncation()
    bare = backend.encode(PROBE, add_special_tokens=False).ids
    full = backend.encode(PROBE, add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if bare and full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _text(value: Any) -> str:
    """A special token's text: a string, or an object with the field `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", "Fetch the model again.") from error
    return value if isinstance(value, dict) else {}
