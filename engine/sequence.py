"""The facts of one request: its tokens, its parameters, and two counters that explain every phase."""

import itertools
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from metalctl.engine.errors import UsageError

if TYPE_CHECKING:
    from metalctl.engine.grammar import TokenGrammar


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the client went away or asked for it
    ERROR = "error"


class Status(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and when to stop. Raises UsageError on a value out of range.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 keep everything. A `seed` makes the text a function of
    prompt, parameters and seed alone, whatever else runs in the batch; None draws one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # nothing else can be sampled; empty: everything can
    banned_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    max_tokens: int | None = None  # None: until the context is full
    min_tokens: int = 0  # no end-of-sequence or stop string before that many
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # leave control tokens out of the text
    logprobs: int | None = None  # None: no log-probabilities; n: those of the chosen token and of the n likeliest
    logprob_token_ids: tuple[int, ...] = ()  # further tokens whose log-probabilities are wanted
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        ranges = (
            ("temperature", 0 <= self.temperature <= 100, "from 0 to 100"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 100, "above 0"),
            ("presence_penalty", -100 <= self.presence_penalty <= 100, "from -100 to 100"),
            ("frequency_penalty", -100 <= self.frequency_penalty <= 100, "from -100 to 100"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "1 or more"),
            ("min_tokens", self.min_tokens >= 0, "0 or more"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "a 64-bit integer"),
            ("stop", all(self.stop), "non-empty strings"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 100, "from 0 to 100"),
            ("prompt_logprobs", self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 100, "from 0 to 100"),
        )
        for name, holds, expected in ranges:
            if not holds:
                raise UsageError(f"{name} is {getattr(self, name)!r}; it must be {expected}.")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position: of the token that stands there, and of others that were asked for."""

    token_id: int
    logprob: float
    rank: int  # 1: the likeliest
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first
    requested: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts and times (seconds) of one request, as far as it has come."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # prompt tokens that the prefix cache had
    queue_time: float | None  # from arrival to the first step
    time_to_first_token: float | None  # from arrival
    elapsed: float  # from arrival
    preemptions: int = 0


@dataclass(slots=True)  # one is made for every token: frozen, that takes four times as long
class RequestOutput:
    """What a step brought for one request. The pieces of `text` of a request, joined, are its answer."""

    request_id: str
    text: str  # new since the last output; never part of a character, never part of a stop string
    token_ids: tuple[int, ...]  # new since the last output
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it; None for end of sequence
    usage: Usage | None = None
    error: Exception | None = None  # with finish_reason ERROR
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # once, when the prompt has been read

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


PENDING = -1  # a token that the device is sampling and Python has not read yet

_arrivals = itertools.count()


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine.

    `token_ids` holds the prompt, then what was sampled; its last may be PENDING. Two counters explain every phase:
    `num_cached_tokens` tokens are in the cache, `num_scheduled_tokens` more are computed in the present step, and
    `num_cached_tokens + num_scheduled_tokens <= num_tokens`. Prefill, a chunk of it, a prefix hit, decode and
    recomputing after preemption are all this one arithmetic.
    """

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    seed: int = 0
    cache_salt: bytes = b""  # what beside the tokens the cached content depends on: adapter, images
    grammar: "TokenGrammar | None" = None  # what its tokens are chosen from
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_prefix_hit_tokens: int = 0  # prompt tokens found in the prefix cache on first admission
    preemptions: int = 0
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    arrival: int = field(default_factory=lambda: next(_arrivals))
    arrival_time: float = field(default_factory=time.perf_counter)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position, as far as it is read

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_new_tokens(self) -> int:
        """Tokens that are not in the cache yet: 1 while decoding."""
        return len(self.token_ids) - self.num_cached_tokens

    @property
    def needs_last_token(self) -> bool:
        """Whether its next step has to wait until Python has read its last token, which its grammar goes by."""
        return self.grammar is not None and self.token_ids[-1] == PENDING

    @property
    def samples(self) -> bool:
        """Whether the present step reaches the sequence's end, so that it yields a token."""
        return self.num_cached_tokens + self.num_scheduled_tokens == len(self.token_ids)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def usage(self) -> Usage:
        def since(moment: float | None) -> float | None:
            return None if moment is None else moment - self.arrival_time

        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            output_tokens=self.num_output_tokens,
            cached_tokens=self.num_prefix_hit_tokens,
            queue_time=since(self.first_scheduled_time),
            time_to_first_token=since(self.first_token_time),
            elapsed=time.perf_counter() - self.arrival_time,
            preemptions=self.preemptions,
        )
