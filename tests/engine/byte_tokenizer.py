"""A real tokenizer that needs no training: every byte is a token, with some longer ones and control tokens."""

from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from metalctl.engine.models.chat_template import ChatTemplates
from metalctl.engine.models.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISIBLE = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_MERGES = (("{", '"'), ('"', ":"), ("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the"), ("}", "}"))


def byte_tokenizer(
    template: str | None = CHATML, special: Sequence[str] = SPECIAL, visible: Sequence[str] = VISIBLE
) -> Tokenizer:
    """`special` are control tokens, `visible` further tokens that are part of the text."""
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for pair in _MERGES:
        vocabulary["".join(pair)] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=list(_MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    backend.add_tokens([AddedToken(text, special=False) for text in visible])
    templates: Mapping[str, str] = {} if template is None else {"default": template}
    eos = backend.token_to_id("<|im_end|>")
    return Tokenizer(backend, eos_token_ids=[eos], chat_templates=ChatTemplates(templates))
