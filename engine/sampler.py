"""From logits to tokens: one vectorised sampler for a batch in which every row may want something else."""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from operator import is_

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from metalctl.engine.sequence import PENDING, SamplingParams, Sequence
from metalctl.kernels.sampling import draw

_NEVER = -float("inf")


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen for the rows of a step, still on the device.

    `tokens` is int32 `[N]`. With log-probabilities asked for by any row: `logprob` float32 `[N]` of the chosen,
    `rank` int32 `[N]`, `top_ids` and `top_logprobs` `[N, n]`, likeliest first, and `requested` `[N, m]`.
    """

    tokens: mx.array
    logprobs: "Logprobs | None" = None

    @property
    def arrays(self) -> list[mx.array]:
        return [self.tokens, *(self.logprobs.arrays if self.logprobs else [])]


@dataclass(frozen=True, slots=True)
class Logprobs:
    logprob: mx.array
    rank: mx.array
    top_ids: mx.array
    top_logprobs: mx.array
    requested: mx.array

    @property
    def arrays(self) -> list[mx.array]:
        return [self.logprob, self.rank, self.top_ids, self.top_logprobs, self.requested]


class Sampler:
    """Chooses a token for each row: adjust, scale, filter, draw.

    Adjusting: logit bias, penalties, allowed, banned and not-yet-allowed tokens. Then temperature; then top-k, top-p
    over what top-k keeps, and min-p relative to the likeliest token; then one draw a row by inverting the cumulative
    distribution at a uniform number that depends on the request's seed and the position alone.
    """

    def __init__(self, eos_token_ids: frozenset[int]):
        self._eos = sorted(eos_token_ids)
        self._rows: _Rows | None = None
        self._last: tuple[list[Sequence], mx.array] | None = None  # the step before: who sampled, and what

    def __call__(self, logits: mx.array, sequences: Many[Sequence], positions: Many[int]) -> Sampled:
        """`logits` `[N, V]`; row i belongs to `sequences[i]`, and what it yields stands at `positions[i]`."""
        rows = self._rows_for(sequences, logits.shape[-1])
        raw = logits.astype(mx.float32)
        adjusted = self._adjust(raw, rows)
        tokens = mx.argmax(adjusted, axis=-1)
        if rows.any_random:
            tokens = mx.where(rows.greedy, tokens, rows.draw(adjusted, positions))
        tokens = tokens.astype(mx.int32)
        rows.count(tokens)
        self._last = (rows.sequences, tokens)
        return Sampled(tokens, rows.logprobs(raw, tokens))

    def _adjust(self, logits: mx.array, rows: "_Rows") -> mx.array:
        if rows.bias is not None:
            logits = logits.at[rows.bias[0], rows.bias[1]].add(rows.bias[2])
        if rows.penalties is not None:
            logits = rows.penalties(logits)
        if rows.allowed is not None:
            logits = mx.where(rows.allowed, logits, _NEVER)
        if rows.has_grammar:
            logits = mx.where(rows.grammatical(), logits, _NEVER)
        banned = rows.banned(self._eos)
        if banned is not None:
            logits[banned[0], banned[1]] = _NEVER
        return logits

    def _rows_for(self, sequences: Many[Sequence], width: int) -> "_Rows":
        rows = self._rows
        same = rows is not None and len(rows.sequences) == len(sequences)
        if rows is None or not same or not rows.still_holds(sequences):
            rows = self._rows = _Rows(list(sequences), width, self._last)
        return rows


class _Rows:
    """The parameters of a batch's rows as arrays, made when the batch changes and kept while it does not."""

    def __init__(self, sequences: list[Sequence], width: int, last: tuple[list[Sequence], mx.array] | None):
        params = [sequence.params for sequence in sequences]
        self.sequences = sequences
        self.width = width
        self.any_random = any(p.temperature > 0 for p in params)
        self.greedy = mx.array([p.temperature == 0 for p in params])
        self.temperature = _column([p.temperature or 1.0 for p in params])
        self.any_filter = any(p.temperature > 0 and (p.top_k or p.top_p < 1 or p.min_p) for p in params)
        self.top_k = _column([min(p.top_k or width, width) for p in params])
        self.top_p = _column([p.top_p for p in params])
        self.min_p = _column([p.min_p for p in params])
        self.bias = _triples([(i, t, b) for i, p in enumerate(params) for t, b in p.logit_bias if t < width])
        self.allowed = self._allowed()
        self.has_grammar = any(sequence.grammar is not None for sequence in sequences)
        self.penalties = _Penalties(sequences, width, last) if any(map(_is_penalised, params)) else None
        self._unended = [i for i, p in enumerate(params) if p.min_tokens]  # that may have to go on
        self._banned = [(i, t) for i, p in enumerate(params) for t in p.banned_token_ids if t < width]
        self._seeds = np.array([sequence.seed % 2**64 for sequence in sequences], np.uint64)
        self._top = max((p.logprobs for p in params if p.logprobs is not None), default=None)
        self._requested = [p.logprob_token_ids for p in params]

    def still_holds(self, sequences: Many[Sequence]) -> bool:
        """Whether these rows are those of `sequences`, with every token counted that they have."""
        if not all(map(is_, self.sequences, sequences)):
            return False
        return self.penalties is None or self.penalties.is_current(sequences)

    def draw(self, logits: mx.array, positions: Many[int]) -> mx.array:
        """One token a row from `logits` `[N, V]`."""
        uniform = mx.array(self._uniform(positions))
        settings = (self.temperature, self.top_k, self.top_p, self.min_p)
        return draw(logits, *settings, uniform, keeps_all=not self.any_filter)

    def _uniform(self, positions: Many[int]) -> NDArray[np.float32]:
        """A random number in [0, 1) a row, `[N, 1]`, from seed and position: the generator splitmix64 (Steele, Lea and
        Flood 2014, doi 10.1145/2660193.2660195), which yields its n-th number without those before."""
        with np.errstate(over="ignore"):
            x = self._seeds + np.array(positions, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x ^= x >> np.uint64(31)
        return ((x >> np.uint64(40)).astype(np.float32) * np.float32(2**-24))[:, None]

    def banned(self, eos: list[int]) -> tuple[mx.array, mx.array] | None:
        """(row, token) pairs that cannot be sampled in this step."""
        pairs = self._banned
        for row in self._unended:
            sequence = self.sequences[row]
            params = sequence.params
            if sequence.num_output_tokens < params.min_tokens:
                pairs = pairs + [(row, t) for t in (*eos, *params.stop_token_ids) if t < self.width]
        if not pairs:
            return None
        return mx.array([row for row, _ in pairs]), mx.array([token for _, token in pairs])

    def grammatical(self) -> mx.array:
        """What the rows' grammars allow in this step, bool `[N, V]`."""
        allowed = np.ones((len(self.sequences), self.width), bool)
        for row, sequence in enumerate(self.sequences):
            if sequence.grammar is not None:
                sequence.grammar.fill(allowed[row])
        return mx.array(allowed)

    def count(self, tokens: mx.array) -> None:
        if self.penalties is not None:
            self.penalties.count(tokens)

    def logprobs(self, logits: mx.array, tokens: mx.array) -> Logprobs | None:
        """Of the model's own distribution: before bias, penalties, temperature and filters."""
        requested = max(map(len, self._requested), default=0)
        if self._top is None and not requested:
            return None
        ids = [list(row) + [0] * (requested - len(row)) for row in self._requested]
        return logprobs(logits, tokens, self._top or 0, mx.array(ids, mx.int32).reshape(len(ids), requested))

    def _allowed(self) -> mx.array | None:
        if not any(sequence.params.allowed_token_ids for sequence in self.sequences):
            return None
        allowed = np.ones((len(self.sequences), self.width), bool)
        for row, sequence in enumerate(self.sequences):
            if sequence.params.allowed_token_ids:
                allowed[row] = False
                allowed[row, [t for t in sequence.params.allowed_token_ids if t < self.width]] = True
        return mx.array(allowed)


class _Penalties:
    """Repetition, presence and frequency penalties.

    Repetition (Keskar et al. 2019, arXiv 1909.05858): the logit of every token of prompt and output is divided by the
    penalty where it is positive and multiplied by it where it is negative. Presence and frequency (OpenAI's API): the
    logit loses the presence penalty once and the frequency penalty for each time the token is in the output.
    Counts stay on the device, so that a token that Python has not read yet is counted too.
    """

    def __init__(self, sequences: list[Sequence], width: int, last: tuple[list[Sequence], mx.array] | None):
        self._repetition = _column([s.params.repetition_penalty for s in sequences])
        self._presence = _column([s.params.presence_penalty for s in sequences])
        self._frequency = _column([s.params.frequency_penalty for s in sequences])
        counts = np.zeros((len(sequences), width), np.float32)
        seen = np.zeros((len(sequences), width), bool)
        for row, sequence in enumerate(sequences):
            output = sequence.token_ids[sequence.num_prompt_tokens :]
            np.add.at(counts[row], [t for t in output if 0 <= t < width], 1)
            seen[row, [t for t in sequence.token_ids if 0 <= t < width]] = True
        self._counts, self._seen = mx.array(counts), mx.array(seen)
        self._lengths = [s.num_tokens for s in sequences]
        self._count_pending(sequences, last)

    def __call__(self, logits: mx.array) -> mx.array:
        repeated = mx.where(logits > 0, logits / self._repetition, logits * self._repetition)
        logits = mx.where(self._seen, repeated, logits)
        return logits - self._presence * (self._counts > 0) - self._frequency * self._counts

    def count(self, tokens: mx.array) -> None:
        """Count what was just sampled, int32 `[N]`."""
        self._add(mx.arange(tokens.shape[0]), tokens)
        self._lengths = [length + 1 for length in self._lengths]

    def is_current(self, sequences: Many[Sequence]) -> bool:
        return all(s.num_tokens == length for s, length in zip(sequences, self._lengths, strict=True))

    def _count_pending(self, sequences: list[Sequence], last: tuple[list[Sequence], mx.array] | None) -> None:
        """Count the tokens of the step before, where Python has not read them yet."""
        rows = [row for row, s in enumerate(sequences) if s.token_ids[-1] == PENDING]
        if last is not None and rows:
            origin = {id(sequence): index for index, sequence in enumerate(last[0])}
            self._add(mx.array(rows), last[1][mx.array([origin[id(sequences[row])] for row in rows])])

    def _add(self, rows: mx.array, tokens: mx.array) -> None:
        self._counts = self._counts.at[rows, tokens].add(1.0)
        self._seen[rows, tokens] = True


def logprobs(logits: mx.array, tokens: mx.array, top: int, requested: mx.array) -> Logprobs:
    """Log-probabilities under softmax of `logits` `[N, V]`: of `tokens` `[N]`, of the `top` likeliest, of `requested`
    `[N, m]`. A token's rank is 1 plus how many are likelier."""
    values = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(values, tokens[:, None], axis=-1)
    rank = 1 + (values > chosen).sum(axis=-1)
    top_ids = mx.argsort(-values, axis=-1)[:, :top]
    return Logprobs(
        chosen[:, 0],
        rank,
        top_ids,
        mx.take_along_axis(values, top_ids, axis=-1),
        mx.take_along_axis(values, requested, axis=-1),
    )


def _is_penalised(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)


def _column(values: Many[float]) -> mx.array:
    return mx.array(list(values), mx.float32)[:, None]


def _triples(entries: list[tuple[int, int, float]]) -> tuple[mx.array, mx.array, mx.array] | None:
    if not entries:
        return None
    rows, tokens, values = zip(*entries, strict=True)
    return mx.array(rows), mx.array(tokens), mx.array(values, mx.float32)
