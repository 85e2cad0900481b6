"""Who runs in this step. Plain Python, no arrays."""

import time
from collections import deque
from dataclasses import dataclass, field

from metalctl.engine.cache.block_manager import BlockManager, PoolExhausted, StateCopy
from metalctl.engine.sequence import PENDING, Sequence, Status


@dataclass(slots=True)
class SchedulerOutput:
    """What one step computes. Each sequence's `num_scheduled_tokens` says how much of it."""

    decodes: list[Sequence] = field(default_factory=list)  # one token each, computed as one batch
    prefills: list[Sequence] = field(default_factory=list)  # several tokens each, computed one after the other
    restores: list[StateCopy] = field(default_factory=list)  # before the step
    checkpoints: list[StateCopy] = field(default_factory=list)  # after the step

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.decodes, *self.prefills]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)


class Scheduler:
    """Decode first, then chunks of prompts under a token budget, in the order of arrival.

    A prompt is cut at absolute multiples of the chunk size, never where the load of the moment would cut it, so that
    what is computed for a request does not depend on who else is there; therefore a step's first chunk may exceed the
    budget by the number of decodes. Under pressure the youngest sequence is preempted and computed anew later.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        cut_at_prompt_end: bool = False,
    ):
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.isolated: set[Sequence] = set()  # run one at a time, until each has got through a step
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.chunk_size = chunk_size(max_num_batched_tokens, blocks.block_size)
        self._cut_at_prompt_end = cut_at_prompt_end

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> SchedulerOutput:
        """Decide one step, and give every sequence in it the blocks that it needs."""
        output = SchedulerOutput()
        before = len(self.running)
        self._schedule_decodes(output)
        budget = self.max_num_batched_tokens - len(output.decodes)
        budget = self._schedule_chunks(output, budget)
        if len(self.running) == before:  # nobody was preempted
            self._admit(output, budget)
        if self.blocks.states is not None:
            for sequence in output.sequences:
                self.blocks.checkpoint(sequence)
        output.restores, self.blocks.restores = self.blocks.restores, []
        output.checkpoints, self.blocks.checkpoints = self.blocks.checkpoints, []
        return output

    def advance(self, output: SchedulerOutput) -> list[tuple[Sequence, int]]:
        """Note that a step is under way: its tokens count as cached, and what it samples as PENDING.

        Returns the sequences that sample, each with the index in `token_ids` where its token will stand.
        """
        sampled = []
        for sequence in output.sequences:
            samples = sequence.samples
            sequence.num_cached_tokens += sequence.num_scheduled_tokens
            sequence.num_scheduled_tokens = 0
            if samples:
                sampled.append((sequence, sequence.num_tokens))
                sequence.token_ids.append(PENDING)
        return sampled

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out for good, and its blocks back."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self.blocks.publish(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        self.blocks.release(sequence)
        self.isolated.discard(sequence)
        sequence.status = Status.FINISHED

    def preempt_all(self) -> None:
        """Send everyone back to the queue, without the tokens that Python has not read, and offer nothing for reuse."""
        for sequence in reversed(self.running):
            self.blocks.release(sequence)
            while sequence.token_ids[-1] == PENDING:
                sequence.token_ids.pop()
            self._requeue(sequence)
        self.running.clear()
        self.blocks.restores.clear()
        self.blocks.checkpoints.clear()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # -- inner

    def _schedule_decodes(self, output: SchedulerOutput) -> None:
        for sequence in self.running[:]:
            if sequence.num_new_tokens != 1 or sequence.needs_last_token or sequence.status is not Status.RUNNING:
                continue
            if self._wants_more(sequence) and self._place(sequence, 1, output):
                output.decodes.append(sequence)

    def _schedule_chunks(self, output: SchedulerOutput, budget: int) -> int:
        for sequence in [s for s in self.running if s.num_new_tokens > 1]:
            length = self._chunk_length(sequence)
            if not self._fits_budget(length, budget, output):
                break
            if sequence.status is Status.RUNNING and self._place(sequence, length, output):
                output.prefills.append(sequence)
                budget -= length
        return budget

    def _admit(self, output: SchedulerOutput, budget: int) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if self.running and (sequence in self.isolated or not self.isolated.isdisjoint(self.running)):
                return
            if not self._fits_budget(1, budget, output):
                return
            try:
                self.blocks.admit(sequence)
            except PoolExhausted:
                return
            length = sequence.num_scheduled_tokens = self._chunk_length(sequence)
            try:
                if not self._fits_budget(length, budget, output):
                    raise PoolExhausted
                self.blocks.extend(sequence, spread=bool(self.running))
            except PoolExhausted:
                self._withdraw(sequence)
                return
            self._start(sequence)
            # A sequence without a past computes by itself: recurrent layers then begin from their own initial state.
            (output.decodes if length == 1 and sequence.num_cached_tokens else output.prefills).append(sequence)
            budget -= length

    def _start(self, sequence: Sequence) -> None:
        self.waiting.popleft()
        position = len(self.running)
        while position and self.running[position - 1].arrival > sequence.arrival:
            position -= 1
        self.running.insert(position, sequence)
        sequence.status = Status.RUNNING
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = time.perf_counter()
            sequence.num_prefix_hit_tokens = sequence.num_cached_tokens

    def _withdraw(self, sequence: Sequence) -> None:
        self.blocks.restores = [
            copy for copy in self.blocks.restores if copy.target != self.blocks.slot(sequence)
        ]  # its slot goes back
        self.blocks.release(sequence)
        sequence.num_cached_tokens = sequence.num_scheduled_tokens = 0

    def _wants_more(self, sequence: Sequence) -> bool:
        """False for one whose last token is being sampled already: it has reached a limit that is known beforehand."""
        tokens, limit = len(sequence.token_ids), sequence.params.max_tokens
        return tokens < self.max_model_len and (limit is None or tokens - sequence.num_prompt_tokens < limit)

    def _chunk_length(self, sequence: Sequence) -> int:
        """Tokens up to the next absolute multiple of the chunk size, the prompt's last whole block (before its last
        token, so that the same prompt hits there), or the end."""
        start = sequence.num_cached_tokens
        end = min(sequence.num_tokens, (start // self.chunk_size + 1) * self.chunk_size)
        if self._cut_at_prompt_end:
            cut = (sequence.num_prompt_tokens - 1) // self.blocks.block_size * self.blocks.block_size
            if start < cut < end:
                end = cut
        return end - start

    def _fits_budget(self, length: int, budget: int, output: SchedulerOutput) -> bool:
        return not output.prefills or length <= budget

    def _place(self, sequence: Sequence, length: int, output: SchedulerOutput) -> bool:
        """Get the blocks for `length` more tokens, preempting the youngest until there are enough."""
        sequence.num_scheduled_tokens = length
        while True:
            try:
                self.blocks.extend(sequence)
                return True
            except PoolExhausted:
                victim = self.running[-1]
                self._preempt(victim, output)
                if victim is sequence:
                    return False

    def _preempt(self, victim: Sequence, output: SchedulerOutput) -> None:
        self.running.remove(victim)
        for chosen in (output.decodes, output.prefills):
            if victim in chosen:
                chosen.remove(victim)
        self.blocks.publish(victim)
        self.blocks.release(victim)
        self._requeue(victim)

    def _requeue(self, sequence: Sequence) -> None:
        sequence.num_cached_tokens = sequence.num_scheduled_tokens = 0
        sequence.preemptions += 1
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)


def chunk_size(max_num_batched_tokens: int, block_size: int) -> int:
    """Tokens between the places where prompts are cut: the budget of a step in whole blocks, at least one."""
    return max(1, max_num_batched_tokens // block_size) * block_size
