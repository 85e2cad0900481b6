"""Everything on the device: the one place where the model is called and arrays are evaluated."""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from operator import is_

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from metalctl.engine.cache import forward
from metalctl.engine.cache.batching import batch_mask_axes
from metalctl.engine.cache.block_manager import BlockManager
from metalctl.engine.cache.cache_set import CacheSet
from metalctl.engine.cache.forward import BatchTables, Forward
from metalctl.engine.cache.layout import CacheLayout
from metalctl.engine.compiled_decode import CompiledDecode
from metalctl.engine.last_rows import LastRows
from metalctl.engine.sampler import Logprobs, Sampled, Sampler, logprobs
from metalctl.engine.scheduler import SchedulerOutput
from metalctl.engine.sequence import PENDING, Sequence
from metalctl.kernels import dispatch

_MOST_TOKENS = 8192  # in one forward of several prompts, padding included


@dataclass(slots=True)
class InFlight:
    """A step that the device is working on. `rows` are the sequences that sample, in the scheduler's order, which is
    that of `sampled`'s rows."""

    rows: list[Sequence]
    sampled: Sampled | None
    prompt_logprobs: list[tuple[Sequence, int, Logprobs]]  # (sequence, position of the first, values)

    @property
    def tokens(self) -> list[int]:
        """Waits for the device. int `[len(rows)]`."""
        return [] if self.sampled is None else self.sampled.tokens.tolist()  # type: ignore[return-value]


class ModelRunner:
    """Turns what the scheduler decided into arrays, calls the model, samples, and sends the work to the device.

    `launch` does not wait: a step is built on the tokens of the one before while those are still being computed.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: CacheLayout,
        blocks: BlockManager,
        sampler: Sampler,
        last_rows: LastRows,
        compile_decode: bool | None = None,
        batch_prefill: bool | None = None,
    ):
        self.model = model
        self.blocks = blocks
        self.sampler = sampler
        self.caches = CacheSet(layout, blocks.block_size)
        self._tables = BatchTables(blocks.groups, blocks.block_size)
        axes = batch_mask_axes(model, layout)
        self.decodes_as_batch = axes is not None
        if axes is not None:
            self.caches.use_mask_axes(axes)
        self._has_states = layout.has_states
        self._last_rows = last_rows
        on_gpu = dispatch.platform() != "cpu"
        compiles = on_gpu if compile_decode is None else compile_decode
        batches = on_gpu if batch_prefill is None else batch_prefill
        self._batches_prefill = batches and self.decodes_as_batch and not self._has_states
        self._compiled = CompiledDecode(model, self.caches, blocks.groups) if compiles else None
        self._previous: InFlight | None = None

    def launch(self, output: SchedulerOutput) -> InFlight:
        """Send one step to the device."""
        self.caches.grow(self.blocks)
        self.caches.copy(output.restores)
        logits: list[mx.array] = []
        rows: list[Sequence] = []
        prompt: list[tuple[Sequence, int, Logprobs]] = []
        if output.decodes:
            logits.append(self._decode(output.decodes))
            rows.extend(output.decodes)
        for together in self._batches(output.prefills):
            last = self._prefill(together[0], prompt) if len(together) == 1 else self._prefill_batch(together)
            ends = [row for row, sequence in enumerate(together) if sequence.samples]
            if ends:
                logits.append(last if len(ends) == len(together) else last[mx.array(ends)])
                rows.extend(together[row] for row in ends)
        wanted = [sequence for sequence in output.sequences if sequence.samples]
        sampled = self._sample(logits, rows, wanted)
        self.caches.copy(output.checkpoints)
        arrays = [*(sampled.arrays if sampled else []), *(a for _, _, values in prompt for a in values.arrays)]
        mx.async_eval(*arrays, *self.caches.arrays)
        self._previous = InFlight(wanted, sampled, prompt)
        return self._previous

    def reset(self) -> None:
        """Forget the step under way and empty the pools, after a step that failed."""
        self._previous = None
        self.caches.clear()

    # -- forwards

    def _decode(self, sequences: Many[Sequence]) -> mx.array:
        """Logits `[B, V]` of the token after each sequence's last."""
        tokens = self._last_tokens(sequences)
        if not self.decodes_as_batch or (len(sequences) == 1 and self._compiled is None):
            rows = [self._call(tokens[i : i + 1, None], self._single(s)) for i, s in enumerate(sequences)]
            return rows[0] if len(rows) == 1 else mx.concatenate(rows)
        tables = [self.blocks.tables(sequence) for sequence in sequences]
        slots = [self.blocks.slot(sequence) for sequence in sequences] if self._has_states else None
        offsets = [sequence.num_cached_tokens for sequence in sequences]
        if self._compiled is not None:
            return self._sent(self._compiled(tokens, tables, offsets, slots))
        step = self._tables.arrays(tables, offsets, slots).forward(self.blocks.groups, self.blocks.block_size)
        return self._call(tokens[:, None], step)

    def _prefill(self, sequence: Sequence, prompt: list[tuple[Sequence, int, Logprobs]]) -> mx.array:
        """Logits `[1, V]` after the scheduled tokens of one sequence; prompt log-probabilities on the way."""
        start = sequence.num_cached_tokens
        end = start + sequence.num_scheduled_tokens
        tokens = mx.array([sequence.token_ids[start:end]], mx.int32)
        wanted = sequence.params.prompt_logprobs
        targets = sequence.token_ids[start + 1 : min(end + 1, sequence.num_prompt_tokens)]
        if wanted is None or not targets:
            return self._call(tokens, self._single(sequence))
        logits = self._call(tokens, self._single(sequence), all_rows=True)
        values = logits[: len(targets)].astype(mx.float32)
        none = mx.zeros((len(targets), 0), mx.int32)
        prompt.append((sequence, start + 1, logprobs(values, mx.array(targets, mx.int32), wanted, none)))
        return logits[-1:]

    def _batches(self, prefills: Many[Sequence]) -> list[list[Sequence]]:
        """Which prompts are read in one forward: each by itself, or those of similar length together."""
        if not self._batches_prefill:
            return [[sequence] for sequence in prefills]
        batches: list[list[Sequence]] = []
        for sequence in sorted(prefills, key=lambda s: s.num_scheduled_tokens):
            length, alone = sequence.num_scheduled_tokens, sequence.params.prompt_logprobs is not None
            last = batches[-1] if batches else None
            if alone or last is None or last[0].params.prompt_logprobs is not None or not _similar(last, length):
                batches.append([sequence])
            else:
                last.append(sequence)
        return batches

    def _prefill_batch(self, sequences: Many[Sequence]) -> mx.array:
        """Logits `[B, V]` after the scheduled tokens of each sequence; shorter rows are padded in front."""
        lengths = [sequence.num_scheduled_tokens for sequence in sequences]
        tokens = np.zeros((len(sequences), max(lengths)), np.int32)
        for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            start = sequence.num_cached_tokens
            tokens[row, -length:] = sequence.token_ids[start : start + length]
        tables = [self.blocks.tables(sequence) for sequence in sequences]
        offsets = [sequence.num_cached_tokens for sequence in sequences]
        step = forward.batch(self.blocks.groups, tables, self.blocks.block_size, offsets, None, lengths)
        return self._call(mx.array(tokens), step)

    def _single(self, sequence: Sequence) -> Forward:
        slot = self.blocks.slot(sequence) if self._has_states else None
        tables = self.blocks.tables(sequence)
        offset, length = sequence.num_cached_tokens, sequence.num_scheduled_tokens
        return forward.single(self.blocks.groups, tables, self.blocks.block_size, offset, length, slot)

    def _call(self, tokens: mx.array, step: Forward, all_rows: bool = False) -> mx.array:
        """One call of the model on `tokens` `[B, L]`: logits `[B, V]` of the last position, or `[L, V]` of all."""
        with self._last_rows.only(not all_rows):
            logits = self.caches.call(self.model, tokens, step)
        return self._sent(logits[0] if all_rows else logits[:, -1])

    def _sent(self, logits: mx.array) -> mx.array:
        """Each call goes to the device by itself: a later one's writes then find that nobody reads the pools."""
        mx.async_eval(logits, *self.caches.arrays)
        return logits

    def _last_tokens(self, sequences: Many[Sequence]) -> mx.array:
        """The last token of each sequence, int32 `[B]`, from the step under way where Python has not read it."""
        last = [sequence.token_ids[-1] for sequence in sequences]
        if PENDING not in last:
            return mx.array(last, mx.int32)
        assert self._previous is not None and self._previous.sampled is not None
        tokens = self._previous.sampled.tokens
        if sequences == self._previous.rows and last.count(PENDING) == len(last):
            return tokens
        known = mx.array(last, mx.int32)
        row_of = {id(sequence): row for row, sequence in enumerate(self._previous.rows)}
        rows = [row_of.get(id(s), 0) if token == PENDING else 0 for s, token in zip(sequences, last, strict=True)]
        return mx.where(known == PENDING, tokens[mx.array(rows, mx.int32)], known)

    def _sample(self, logits: list[mx.array], rows: list[Sequence], wanted: list[Sequence]) -> Sampled | None:
        """Samples for `wanted`, in the scheduler's order; `rows` is that of the logits."""
        if not wanted:
            return None
        together = logits[0] if len(logits) == 1 else mx.concatenate(logits)
        if not all(map(is_, rows, wanted)):
            row_of = {id(sequence): row for row, sequence in enumerate(rows)}
            together = together[mx.array([row_of[id(sequence)] for sequence in wanted])]
        return self.sampler(together, wanted, [sequence.num_tokens for sequence in wanted])


def _similar(batch: Many[Sequence], longest: int) -> bool:
    """Whether a row of `longest` tokens may join these, none of which is longer: at most a third is padding, and the
    whole is no more than a few long prompts."""
    rows = len(batch) + 1
    used = sum(sequence.num_scheduled_tokens for sequence in batch) + longest
    return rows * longest * 2 <= used * 3 and rows * longest <= _MOST_TOKENS
