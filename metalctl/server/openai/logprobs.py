"""Log-probabilities as OpenAI's clients read them."""

from collections.abc import Iterable
from typing import Any

from metalctl.engine.models.tokenizer import Tokenizer
from metalctl.engine.sequence import TokenLogprobs

_LOWEST = -9999.0  # JSON has no minus infinity


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TokenLogprobs]) -> dict[str, Any]:
    content = []
    for token in tokens:
        others = [*token.top, *(entry for entry in token.requested if entry not in token.top)]
        top = [_entry(tokenizer, token_id, logprob) for token_id, logprob in others]
        content.append({**_entry(tokenizer, token.token_id, token.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The parallel lists of the older route, which grow token by token. `offset` is where the first begins."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0):
        self._text = lambda token: token_text(tokenizer, token)
        self._offset = offset
        self.lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(self, entry: TokenLogprobs | None, token_id: int | None = None) -> None:
        """`entry` None: a token without a probability, the first of a prompt; it is `token_id`."""
        if entry is None:
            assert token_id is not None
            self._append(self._text(token_id), None, None)
            return
        others = {self._text(token): finite(value) for token, value in (*entry.top, *entry.requested)}
        self._append(self._text(entry.token_id), finite(entry.logprob), others)

    def _append(self, text: str, logprob: float | None, others: dict[str, float] | None) -> None:
        for name, value in (("tokens", text), ("token_logprobs", logprob), ("top_logprobs", others)):
            self.lists[name].append(value)
        self.lists["text_offset"].append(self._offset)
        self._offset += len(text)


def prompt_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """One object a prompt token, by token id; null for the first."""
    return [None if entry is None else _ranked(tokenizer, entry) for entry in entries]


def _ranked(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, Any]:
    ranked = [(token, value, rank) for rank, (token, value) in enumerate(entry.top, 1)]
    return {
        str(token): {"logprob": finite(value), "rank": rank, "decoded_token": token_text(tokenizer, token)}
        for token, value, rank in [(entry.token_id, entry.logprob, entry.rank), *ranked]
    }


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token by itself, its leading space included; what is not a whole character is U+FFFD."""
    data = tokenizer.token_bytes(token_id)
    return tokenizer.decode([token_id], skip_special_tokens=False) if data is None else data.decode("utf-8", "replace")


def finite(value: float) -> float:
    return max(value, _LOWEST)


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text = token_text(tokenizer, token_id)
    data = tokenizer.token_bytes(token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode() if data is None else data)}
