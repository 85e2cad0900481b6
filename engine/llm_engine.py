"""The engine: requests in, outputs out, one step at a time. Schedule, run, update."""

import itertools
import secrets
import time
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from metalctl.engine import attention
from metalctl.engine.cache.block_manager import BlockManager
from metalctl.engine.cache.block_pool import BlockPool
from metalctl.engine.cache.layout import read_layout
from metalctl.engine.config import EngineConfig
from metalctl.engine.errors import ContextLengthError, UsageError
from metalctl.engine.last_rows import LastRows
from metalctl.engine.memory import device_memory, plan
from metalctl.engine.model_runner import InFlight, ModelRunner
from metalctl.engine.models.checkpoint import LoadedModel
from metalctl.engine.sampler import Logprobs, Sampler
from metalctl.engine.scheduler import Scheduler, SchedulerOutput, chunk_size
from metalctl.engine.sequence import (
    FinishReason,
    RequestOutput,
    SamplingParams,
    Sequence,
    TokenLogprobs,
)
from metalctl.engine.text_stream import TextStream
from metalctl.kernels import dispatch

if TYPE_CHECKING:
    from metalctl.engine.grammar import TokenGrammar

_DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and what is true now."""

    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    errors: int = 0
    running: int = 0
    waiting: int = 0
    cache_bytes: int = 0
    cache_blocks_used: int = 0
    cache_blocks_limit: int = 0


@dataclass(slots=True)
class _Launched:
    in_flight: InFlight
    sampled: list[tuple[Sequence, int]]  # (sequence, index in its token_ids where the token goes)
    sequences: list[Sequence]


class LLMEngine:
    """Runs many requests over one model. Not thread-safe: one thread makes it and calls it (see EngineThread).

    Raises OutOfMemoryError or UnsupportedModelError when the model cannot be served.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig | None = None):
        self.config = config = config or EngineConfig()
        self.loaded = loaded
        self.tokenizer = loaded.tokenizer
        attention.install()
        last_rows = LastRows(loaded.model)
        self.layout = layout = read_layout(loaded.model, _DTYPES.get(config.kv_cache_dtype))
        self.vocab_size = _vocab_size(loaded)
        chunk = chunk_size(config.max_num_batched_tokens, config.block_size)
        self.memory = plan(
            layout,
            config,
            loaded.context_length,
            weights=_parameter_bytes(loaded),
            forward=_forward_bytes(loaded, config, self.vocab_size, last_rows),
            device=device_memory(),
        )
        self.max_model_len = self.memory.max_model_len
        self.blocks = BlockManager(
            layout.groups,
            [BlockPool(limit) for limit in self.memory.group_limits],
            config.block_size,
            states=BlockPool(self.memory.slot_limit, initial=8) if layout.has_states else None,
            root=f"{loaded.fingerprint} {config.kv_cache_dtype}".encode(),
            enabled=config.prefix_cache != "off" and layout.shares_prefixes,
            grid=chunk if config.prefix_cache == "exact" else None,
        )
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=self._most_running(),
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            cut_at_prompt_end=layout.has_states and config.prefix_cache == "on",
        )
        sampler = Sampler(loaded.tokenizer.eos_token_ids)
        batch_prefill = False if config.prefix_cache == "exact" else config.batch_prefill
        self.runner = ModelRunner(
            loaded.model, layout, self.blocks, sampler, last_rows, config.compile_decode, batch_prefill
        )
        self._sequences: dict[str, Sequence] = {}
        self._texts: dict[str, TextStream] = {}
        self._launched: _Launched | None = None
        self._in_step: list[Sequence] = []  # whose computing is to blame if something is thrown now
        self._names = itertools.count()
        self._stats = EngineStats()

    def _most_running(self) -> int:
        """Sequences that may run at once; with a prefix cache half of the state slots are left to checkpoints."""
        if self.blocks.states is None:
            return self.config.max_num_seqs
        slots = self.blocks.states.limit - 1
        return min(self.config.max_num_seqs, slots if self.config.prefix_cache == "off" else max(1, slots // 2))

    # -- requests

    def check(self, token_ids: Many[int], params: SamplingParams) -> None:
        """Raise ContextLengthError or UsageError for a request that can never be served. Safe in any thread."""
        if not token_ids:
            raise UsageError("the prompt is empty.")
        if not all(0 <= token < self.vocab_size for token in token_ids):
            raise UsageError(f"the prompt has token ids outside of the vocabulary (0 to {self.vocab_size - 1}).")
        wanted = len(token_ids) + (params.max_tokens or 1)
        if wanted > self.max_model_len:
            asked = f" and {params.max_tokens} are to follow" if params.max_tokens else ""
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens{asked}, but the context holds {self.max_model_len}.",
                "Shorten the prompt" + (" or lower max_tokens." if params.max_tokens else "."),
            )

    def add_request(
        self,
        token_ids: Many[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        cache_salt: bytes = b"",
        grammar: "TokenGrammar | None" = None,
    ) -> str:
        """Queue a request; `step` yields what comes of it. Raises as `check` does, and UsageError for an id in use."""
        params = params or SamplingParams()
        self.check(token_ids, params)
        name = request_id or f"request-{next(self._names)}"
        if name in self._sequences:
            raise UsageError(f"a request with the id {name!r} is already running.")
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        sequence = Sequence(name, list(token_ids), params, seed=seed, cache_salt=cache_salt, grammar=grammar)
        self._sequences[name] = sequence
        self._texts[name] = TextStream(self.tokenizer.detokenizer(params.skip_special_tokens), params.stop)
        self.scheduler.add(sequence)
        self._stats.requests += 1
        self._stats.prompt_tokens += len(token_ids)
        return name

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and free its blocks. Returns its last output; None if it has ended already."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._end(sequence, FinishReason.ABORT)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._launched is not None

    def stats(self) -> EngineStats:
        stats = EngineStats(**asdict(self._stats))
        stats.running, stats.waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        stats.cache_bytes = self.runner.caches.nbytes
        stats.cache_blocks_used = sum(pool.num_used for pool in self.blocks.pools)
        stats.cache_blocks_limit = sum(pool.limit - 1 for pool in self.blocks.pools)
        return stats

    # -- the loop

    def step(self) -> list[RequestOutput]:
        """Decide a step and send it to the device; then read what the step before brought."""
        try:
            output = self.scheduler.schedule()
            launched = self._launch(output)
            previous, self._launched = self._launched, launched
            return self._update(previous)
        except Exception as error:  # noqa: BLE001  whatever it is, it ends the request that caused it and no other
            return self._recover(error)

    def _launch(self, output: SchedulerOutput) -> _Launched | None:
        if not output:
            return None
        self._stats.steps += 1
        self._in_step = output.sequences
        in_flight = self.runner.launch(output)
        return _Launched(in_flight, self.scheduler.advance(output), output.sequences)

    def _update(self, launched: _Launched | None) -> list[RequestOutput]:
        """Give the sampled tokens to their sequences: text, stops, outputs."""
        if launched is None:
            return []
        self._in_step = launched.sequences
        tokens = launched.in_flight.tokens
        _keep_prompt_logprobs(launched.in_flight)
        details = _token_logprobs(launched.in_flight, tokens)
        outputs = []
        for row, ((sequence, index), token) in enumerate(zip(launched.sampled, tokens, strict=True)):
            if sequence.finished:
                continue
            sequence.token_ids[index] = token
            if self.scheduler.isolated:
                self.scheduler.isolated.discard(sequence)
            try:
                outputs.append(self._output(sequence, index, details[row] if details else None))
            except Exception as error:  # noqa: BLE001  in its detokenizer, say: it ends, the others go on
                outputs.append(self._end(sequence, FinishReason.ERROR, error=error))
        self._stats.output_tokens += len(outputs)
        return outputs

    def _output(self, sequence: Sequence, index: int, detail: TokenLogprobs | None) -> RequestOutput:
        """What the token at `index` brings: text, and perhaps the end."""
        params, token = sequence.params, sequence.token_ids[index]
        count = index + 1 - sequence.num_prompt_tokens
        first = count == 1 and sequence.first_token_time is None
        if first:
            sequence.first_token_time = time.perf_counter()
        stream = self._texts[sequence.request_id]
        reason: FinishReason | None = None
        stop_reason: str | int | None = None
        text = ""
        if token in self.tokenizer.eos_token_ids and not params.ignore_eos:
            reason = FinishReason.STOP
        elif token in params.stop_token_ids:
            reason, stop_reason = FinishReason.STOP, token
        else:
            text = stream.add(token, watch=count >= params.min_tokens)
            if self._completes(sequence, token):
                reason = FinishReason.STOP
            elif stream.stopped_by is None and (count == params.max_tokens or index + 1 >= self.max_model_len):
                reason = FinishReason.LENGTH
        if reason is not None:
            text += stream.finish()
        if stream.stopped_by is not None:
            reason, stop_reason = FinishReason.STOP, stream.stopped_by
        if reason is not None:
            del sequence.token_ids[index + 1 :]
            return self._end(sequence, reason, stop_reason, text, (token,), detail, first)
        return RequestOutput(
            sequence.request_id,
            text,
            (token,),
            logprobs=() if detail is None else (detail,),
            prompt_logprobs=_prompt_logprobs(sequence) if first else None,
        )

    def _completes(self, sequence: Sequence, token: int) -> bool:
        """Whether the sequence's grammar has come to its end with this token."""
        if sequence.grammar is None:
            return False
        sequence.grammar.advance(token)
        return sequence.grammar.is_stopped

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        detail: TokenLogprobs | None = None,
        first: bool = False,
        error: Exception | None = None,
    ) -> RequestOutput:
        """Take a sequence out of the engine and make its last output."""
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self.scheduler.remove(sequence)
        del self._sequences[sequence.request_id], self._texts[sequence.request_id]
        self._stats.cached_tokens += sequence.num_prefix_hit_tokens
        self._stats.preemptions += sequence.preemptions
        self._stats.errors += error is not None
        return RequestOutput(
            sequence.request_id,
            text,
            token_ids,
            reason,
            stop_reason,
            sequence.usage(),
            error,
            logprobs=() if detail is None else (detail,),
            prompt_logprobs=_prompt_logprobs(sequence) if first else None,
        )

    # -- when a step fails

    def _recover(self, error: Exception) -> list[RequestOutput]:
        """Find out who made a step fail. A request that was alone in it ends with the error; several are computed
        anew, each alone until it has got through a step. What the cache holds is not certain any more and is dropped.
        """
        suspects = [sequence for sequence in self._in_step if not sequence.finished]
        self._in_step = []
        self._launched = None
        self.scheduler.preempt_all()
        self.blocks.forget()
        self.runner.reset()
        if not suspects:  # not in a request's step: a fault of our own, nothing of which can be trusted
            return [self._end(sequence, FinishReason.ERROR, error=error) for sequence in list(self._sequences.values())]
        if len(suspects) == 1:
            return [self._end(suspects[0], FinishReason.ERROR, error=error)]
        self.scheduler.isolated.update(suspects)
        return []


def _keep_prompt_logprobs(in_flight: InFlight) -> None:
    for sequence, position, values in in_flight.prompt_logprobs:
        tokens = sequence.token_ids[position : position + values.logprob.shape[0]]
        for index, entry in enumerate(_entries(values, tokens, [values.top_ids.shape[1]] * len(tokens))):
            sequence.prompt_logprobs[position + index] = entry


def _prompt_logprobs(sequence: Sequence) -> tuple[TokenLogprobs | None, ...] | None:
    """One entry a prompt token; the first has none, since nothing stands before it."""
    if sequence.params.prompt_logprobs is None:
        return None
    return tuple(sequence.prompt_logprobs.get(position) for position in range(sequence.num_prompt_tokens))


def _token_logprobs(in_flight: InFlight, tokens: list[int]) -> list[TokenLogprobs | None] | None:
    values = in_flight.sampled.logprobs if in_flight.sampled else None
    if values is None:
        return None
    params = [sequence.params for sequence in in_flight.rows]
    entries = _entries(values, tokens, [p.logprobs or 0 for p in params])
    wanted = [p.logprobs is not None or p.logprob_token_ids for p in params]
    requested = _rows(values.requested)
    return [
        replace(entry, requested=tuple(zip(p.logprob_token_ids, row, strict=False))) if asked else None
        for entry, p, row, asked in zip(entries, params, requested, wanted, strict=True)
    ]


def _entries(values: Logprobs, tokens: list[int], tops: list[int]) -> list[TokenLogprobs]:
    columns = (values.logprob, values.rank, values.top_ids, values.top_logprobs)
    chosen, ranks, top_ids, top_values = map(_rows, columns)
    return [
        TokenLogprobs(token, chosen[i], ranks[i], tuple(zip(top_ids[i][:top], top_values[i][:top], strict=True)))
        for i, (token, top) in enumerate(zip(tokens, tops, strict=True))
    ]


def _rows(array: mx.array) -> list[Any]:
    """The array as a list over its first axis."""
    return array.tolist()  # type: ignore[return-value]


def _vocab_size(loaded: LoadedModel) -> int:
    """Rows of the embedding: ids from 0 to one less can be fed to the model."""
    config = loaded.config.get("text_config") or loaded.config
    return int(config.get("vocab_size") or loaded.config.get("vocab_size") or loaded.tokenizer.vocab_size)


def _parameter_bytes(loaded: LoadedModel) -> int:
    return sum(int(array.nbytes) for array in _parameters(loaded))


def _parameters(loaded: LoadedModel) -> list[mx.array]:
    return list(dict(tree_flatten(loaded.model.parameters())).values())


def _forward_bytes(loaded: LoadedModel, config: EngineConfig, vocab_size: int, last_rows: LastRows) -> int:
    """What one step needs beside weights and cache: logits and their copies in the sampler for every sequence, and one
    chunk's forward, measured. On a CPU, where that would take longer than a start may, an upper bound of it: some
    arrays as wide as the widest layer for each token."""
    sampling = 4 * 6 * config.max_num_seqs * vocab_size
    if dispatch.platform() != "cpu":
        return sampling + measured_forward(loaded.model, config.max_num_batched_tokens, last_rows)
    matrices = [array.shape for array in _parameters(loaded) if array.ndim >= 2]
    width = max((max(shape[-2:]) for shape in matrices if vocab_size not in shape), default=1)
    return sampling + 4 * 8 * config.max_num_batched_tokens * width


def measured_forward(model: nn.Module, length: int, last_rows: LastRows) -> int:
    """Bytes that a forward of `length` tokens takes at its peak, its K and V included."""
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with last_rows.only(True):
        mx.eval(model(mx.zeros((1, length), mx.int32), cache=make_prompt_cache(model)))
    return max(0, int(mx.get_peak_memory()) - before)
