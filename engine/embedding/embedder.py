"""Texts to vectors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metalctl.engine.embedding.batches import CPU_BATCH_TOKENS, GPU_BATCH_TOKENS, batches
from metalctl.engine.embedding.decoder import Hidden
from metalctl.engine.embedding.pooling import Dense, Vector, pool, shorten
from metalctl.engine.embedding.recipe import Recipe
from metalctl.engine.errors import ContextLengthError, MetalctlError, UsageError
from metalctl.engine.models.tokenizer import Tokenizer


class NotFiniteError(MetalctlError):
    """A vector with an infinite value, or one that is not a number."""

    type = "not_finite"


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as it goes into the model. The first `skip` are not pooled; `length` is what it had before it was cut."""

    ids: list[int]
    skip: int
    length: int
    types: list[int] | None = None  # token types; None: all 0

    @property
    def was_cut(self) -> bool:
        return self.length > len(self.ids)


class Embedder:
    """A model that makes vectors of `dimensions` numbers of texts of up to `max_length` tokens.

    `prepare` and `finish` may be called in any thread, `compute` in the one that loaded the model.
    """

    def __init__(
        self,
        hidden: Hidden,
        tokenizer: Tokenizer,
        recipe: Recipe,
        *,
        hidden_size: int,
        max_length: int,
        fingerprint: str = "",
        notes: Sequence[str] = (),
    ):
        self.tokenizer = tokenizer
        self.recipe = recipe
        self.max_length = min(max_length, recipe.max_length or max_length)
        self.fingerprint = fingerprint
        self.notes = tuple(notes)
        self._hidden = hidden
        self._dense = [Dense(stage) for stage in recipe.dense]
        pooled = hidden_size * len(recipe.poolings)
        self.dimensions = recipe.dense[-1].out_features if recipe.dense else pooled

    def prompt(self, name: str | None = None) -> str:
        """The prompt of that name; without one the checkpoint's default. Raises UsageError."""
        name = name or self.recipe.default_prompt
        if not name:
            return ""
        if name not in self.recipe.prompts:
            known = ", ".join(self.recipe.prompts) or "none"
            raise UsageError(f"the model has no prompt {name!r}.", f"It has: {known}.")
        return self.recipe.prompts[name]

    def prepare(self, text: str | Sequence[int], prompt: str = "", *, truncate: bool = True) -> Tokens:
        """Tokens of a text behind a prompt, or token ids as they are.

        Raises ContextLengthError for what is too long and not to be truncated, UsageError for what has no tokens.
        """
        prefix, suffix = self.tokenizer.prefix_ids, self.tokenizer.suffix_ids
        if isinstance(text, str):
            lower = self.recipe.lowercase
            body = self.tokenizer.encode(prompt + (text.lower() if lower else text))
        else:
            prefix, suffix, body = [], [], list(text)
        length = len(prefix) + len(body) + len(suffix)
        if not length:
            raise UsageError("the text is empty.", "Leave empty texts out.")
        if length > self.max_length and not truncate:
            raise ContextLengthError(
                f"a text has {length} tokens, but the model takes {self.max_length}.", "Cut it into parts."
            )
        ids = [*prefix, *body[: max(0, self.max_length - len(prefix) - len(suffix))], *suffix]
        skip = 0
        if prompt and not self.recipe.pools_prompt:
            skip = min(len(prefix) + len(self.tokenizer.encode(prompt)), len(ids) - 1)
        return Tokens(ids, skip, length)

    def compute(self, items: Sequence[Tokens]) -> list[Vector]:
        """The vectors of one batch, of full size and not normalised."""
        batch = pad(items)
        hidden = self._hidden(batch.ids, batch.types, batch.present)
        starts = mx.array([item.skip for item in items], mx.int32)
        vectors = pool(hidden, self.recipe.poolings, starts, batch.lengths)
        for dense in self._dense:
            vectors = dense(vectors)
        return list(to_numpy(vectors))

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise UsageError unless vectors can be cut to that."""
        if dimensions is not None and not 1 <= dimensions <= self.dimensions:
            raise UsageError(f"dimensions is {dimensions}; it must be from 1 to {self.dimensions}.")

    def finish(self, vector: Vector, dimensions: int | None = None, normalize: bool | None = None) -> Vector:
        """A vector of `compute` as it is given out: cut, then brought to length one.

        `normalize` None is what the checkpoint says. Raises NotFiniteError, and UsageError for bad `dimensions`.
        """
        self.check_dimensions(dimensions)
        if not np.isfinite(vector).all():
            raise NotFiniteError(
                "the model gave a vector with values that are not finite.",
                "Its weights may be damaged, or overflow in 16 bits: fetch it again, or use a version in float32.",
            )
        return shorten(vector, dimensions, self.recipe.normalize if normalize is None else normalize)

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: bool = True,
        budget: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """Vectors `[len(texts), dimensions]`. `prompt` None is the checkpoint's default. Raises as its parts do."""
        self.check_dimensions(dimensions)
        before = self.prompt() if prompt is None else prompt
        items = [self.prepare(text, before, truncate=truncate) for text in texts]
        result = np.empty((len(items), dimensions or self.dimensions), np.float32)
        for indices, vectors in computed(self.compute, items, budget):
            for index, vector in zip(indices, vectors, strict=True):
                result[index] = self.finish(vector, dimensions, normalize)
        return result


def computed(
    compute: Callable[[Sequence[Tokens]], list[Vector]], items: Sequence[Tokens], budget: int | None = None
) -> Iterator[tuple[list[int], list[Vector]]]:
    """Batch after batch: the indices of its items, and what `compute` made of these."""
    for indices in batches([len(item.ids) for item in items], budget or batch_tokens()):
        yield indices, compute([items[index] for index in indices])


def batch_tokens() -> int:
    """How many tokens are best computed together on this device."""
    return CPU_BATCH_TOKENS if mx.default_device() == mx.cpu else GPU_BATCH_TOKENS


@dataclass(frozen=True, slots=True)
class Padded:
    """A batch: `ids` and `types` int32 `[B, L]`, `lengths` int32 `[B]`, `present` bool `[B, L]`; None: no padding."""

    ids: mx.array
    types: mx.array
    lengths: mx.array
    present: mx.array | None


def pad(items: Sequence[Tokens]) -> Padded:
    """One array of all items, padded on the right with zeros."""
    lengths = [len(item.ids) for item in items]
    ids, types = (np.zeros((len(items), max(lengths)), np.int32) for _ in range(2))
    for row, item in enumerate(items):
        ids[row, : len(item.ids)] = item.ids
        if item.types:
            types[row, : len(item.ids)] = item.types
    present = None
    if min(lengths) < ids.shape[1]:
        present = mx.array(np.arange(ids.shape[1])[None, :] < np.array(lengths)[:, None])
    return Padded(mx.array(ids), mx.array(types), mx.array(lengths, mx.int32), present)


def to_numpy(array: mx.array) -> npt.NDArray[np.float32]:
    return np.array(array.astype(mx.float32))
