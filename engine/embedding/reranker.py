"""How well documents answer a query: cross-encoders, and decoders that are asked for a yes or no."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from tokenizers import Encoding

from metalctl.engine.embedding.decoder import Hidden
from metalctl.engine.embedding.embedder import NotFiniteError, Tokens, computed, pad, to_numpy
from metalctl.engine.embedding.encoder import Encoder
from metalctl.engine.embedding.pooling import Vector
from metalctl.engine.errors import UnsupportedModelError, UsageError
from metalctl.engine.models.tokenizer import Tokenizer


class Reranker(Protocol):
    """Scores pairs. `prepare` and `finish` may be called in any thread, `compute` in the one that loaded the model."""

    tokenizer: Tokenizer
    max_length: int
    notes: Sequence[str]

    def prepare(self, query: str, document: str, instruction: str | None = None) -> Tokens:
        """Tokens of a pair, the document cut to fit. Raises UsageError."""

    def compute(self, items: Sequence[Tokens]) -> list[Vector]:
        """One number for each item of a batch, as an array of one."""

    def finish(self, vector: Vector) -> float:
        """The score. Raises NotFiniteError."""


def score(
    reranker: Reranker,
    query: str,
    documents: Sequence[str],
    *,
    instruction: str | None = None,
    budget: int | None = None,
) -> list[float]:
    """One score a document; the higher, the better it answers the query."""
    items = [reranker.prepare(query, document, instruction) for document in documents]
    scores = [0.0] * len(items)
    for indices, vectors in computed(reranker.compute, items, budget):
        for index, vector in zip(indices, vectors, strict=True):
            scores[index] = reranker.finish(vector)
    return scores


def _finite(value: float) -> float:
    if not np.isfinite(value):
        raise NotFiniteError("the model gave a score that is not finite.", "Its weights may be damaged.")
    return value


def _sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x))) if x >= 0 else float(np.exp(x) / (1 + np.exp(x)))


class CrossEncoder:
    """An encoder with a classifier that reads query and document together.

    The score is the sigmoid of its one logit, unless the checkpoint's config.json names another function.
    """

    def __init__(self, encoder: Encoder, tokenizer: Tokenizer, config: Mapping[str, Any], max_length: int):
        head = encoder.config.head
        if head is None or head.labels != 1:
            labels = "no classifier" if head is None else f"{head.labels} labels"
            raise UnsupportedModelError(
                f"The model has {labels}, so it does not score documents.", "Use a reranker, such as bge-reranker-base."
            )
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.notes: Sequence[str] = ()
        self._encoder = encoder
        self._is_logit = _names_identity(config)
        self._lock = threading.Lock()

    def prepare(self, query: str, document: str, instruction: str | None = None) -> Tokens:
        if instruction is not None:
            raise UsageError("the model takes no instruction.", "Leave it out.")
        first, second = (self._encode(text) for text in (query, document))
        backend = self.tokenizer.backend
        around = backend.num_special_tokens_to_add(is_pair=True)
        length = len(first.ids) + len(second.ids) + around
        keep_first, keep_second = _longest_first(len(first.ids), len(second.ids), self.max_length - around)
        first.truncate(keep_first)
        second.truncate(keep_second)
        joined = backend.post_process(first, second, True)
        return Tokens(list(joined.ids), 0, length, list(joined.type_ids))

    def _encode(self, text: str) -> Encoding:
        with self._lock:
            self.tokenizer.backend.encode_special_tokens = True  # text of a user never becomes a control token
            return self.tokenizer.backend.encode(text, add_special_tokens=False)

    def compute(self, items: Sequence[Tokens]) -> list[Vector]:
        batch = pad(items)
        return list(to_numpy(self._encoder.classify(batch.ids, self._types(batch.types), batch.present)))

    def _types(self, types: mx.array) -> mx.array:
        return mx.minimum(types, max(0, self._encoder.config.token_types - 1))

    def finish(self, vector: Vector) -> float:
        logit = _finite(float(vector[0]))
        return logit if self._is_logit else _sigmoid(logit)


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """What remains of two lengths in `room`: the longer one is cut, until both are alike and share what there is."""
    if first + second <= room:
        return first, second
    short, long = sorted((first, second))
    if 2 * short > room:
        short = room // 2
    long = room - short
    return (long, short) if first > second else (short, long)


def _names_identity(config: Mapping[str, Any]) -> bool:
    named = (config.get("sentence_transformers") or {}).get("activation_fn")
    name = str(named or config.get("sbert_ce_default_activation_function") or "Sigmoid").rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise UnsupportedModelError(f"The scores go through {name!r}, which is not known.")
    return name == "Identity"


Answers = Callable[[mx.array], mx.array]

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class YesNoReranker:
    """A decoder in the manner of Qwen3-Reranker: the score is the probability of "yes" against "no" as next token.

    `answers` takes states `[B, hidden]` to the logits `[B, 2]` of no and yes.
    """

    def __init__(self, hidden: Hidden, answers: Answers, tokenizer: Tokenizer, max_length: int):
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.notes: Sequence[str] = ()
        self._hidden = hidden
        self._answers = answers
        self._before = tokenizer.encode(_BEFORE, parse_special=True)
        self._after = tokenizer.encode(_AFTER, parse_special=True)

    def prepare(self, query: str, document: str, instruction: str | None = None) -> Tokens:
        wanted = instruction or INSTRUCTION
        body = self.tokenizer.encode(f"<Instruct>: {wanted}\n<Query>: {query}\n<Document>: {document}")
        around = len(self._before) + len(self._after)
        if self.max_length <= around:
            raise UsageError(f"the context of {self.max_length} tokens is too small for a judgement.")
        ids = [*self._before, *body[: self.max_length - around], *self._after]
        return Tokens(ids, 0, len(body) + around)

    def compute(self, items: Sequence[Tokens]) -> list[Vector]:
        batch = pad(items)
        states = self._hidden(batch.ids, batch.types, batch.present)
        last = mx.take_along_axis(states, (batch.lengths - 1)[:, None, None], axis=1)[:, 0]
        logits = self._answers(last).astype(mx.float32)
        return list(to_numpy(logits[:, 1:] - logits[:, :1]))

    def finish(self, vector: Vector) -> float:
        return _sigmoid(_finite(float(vector[0])))


def yes_and_no(model: Any, tokenizer: Tokenizer) -> Answers:
    """The rows of a model's output projection for the tokens "no" and "yes". Raises UnsupportedModelError."""
    tokens = [tokenizer.backend.token_to_id(word) for word in ("no", "yes")]
    if None in tokens:
        raise UnsupportedModelError("The vocabulary has no single tokens for yes and no, so the model cannot judge.")
    chosen = mx.array(tokens, mx.int32)
    if "lm_head" in model:
        return lambda states: model.lm_head(states)[:, chosen]
    rows = model.model.embed_tokens(chosen)
    mx.eval(rows)
    return lambda states: states @ rows.T
