"""A conversation with an engine: one exchange after another, kept and shown."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from metalctl.engine.errors import StorageError
from metalctl.engine.sequence import FinishReason
from metalctl.output import Output
from metalctl.repl.conversation import Conversation, Message, last_conversation, save
from metalctl.repl.display import Display
from metalctl.repl.options import ChatOptions
from metalctl.repl.turn import Turn

if TYPE_CHECKING:
    from metalctl.engine.engine_thread import EngineThread

_NEARLY_FULL = 0.9


@dataclass
class Chat:
    """`remember` says whether each exchange is written to the file that `--continue` reads."""

    thread: "EngineThread"
    generation_defaults: Mapping[str, Any]
    conversation: Conversation
    options: ChatOptions
    output: Output
    remember: bool = True

    def say(self, text: str, display: Display) -> Turn:
        """Send `text` and show the answer. The conversation is as before when that fails, or brings nothing."""
        messages = self.conversation.messages
        messages.append(Message("user", text))
        try:
            params = self.options.params(self.generation_defaults)
            prompt = self.conversation.for_template()
            turn = Turn(self.thread, prompt, params, self.options.template_variables)
            with display:
                for piece in turn:
                    display.show(piece)
        except BaseException:
            messages.pop()
            raise
        if turn.text or turn.reasoning:
            messages.append(Message("assistant", turn.text, turn.reasoning))
            self._save()
        else:
            messages.pop()
        return turn

    def remark(self, turn: Turn, remedy: str = "") -> None:
        """What a person should know about an answer that has ended; `remedy` is for a context that fills up."""
        note, params = self.output.note, self.options.params(self.generation_defaults)
        if self.options.stats:
            self.output.stderr.print(statistics(turn), style="dim", highlight=False)
        limit = self.thread.engine.max_model_len
        if turn.context_is_full:
            self.output.warn(f"the context of {limit} tokens is full: the answer was cut. {remedy}".rstrip())
        elif turn.finish_reason is FinishReason.LENGTH:
            note(f"The answer was cut at max_tokens, {params.max_tokens}.")
        elif remedy and turn.context_used >= _NEARLY_FULL:
            note(f"The context is {turn.context_used:.0%} full, of {limit} tokens. {remedy}")
        if turn.finish_reason is FinishReason.ABORT:
            note("Stopped; what was said is kept." if turn.text or turn.reasoning else "Stopped.")
        elif not turn.text:
            note("The model reasoned, but gave no answer." if turn.reasoning else "The model said nothing.")

    def _save(self) -> None:
        if not self.remember:
            return
        try:
            save(self.conversation, last_conversation())
        except StorageError as error:
            self.remember = False
            self.output.warn(f"{error.message}; this conversation is not kept.")


def timings(turn: Turn) -> dict[str, float | None]:
    """Seconds and tokens per second; None where there was nothing to measure."""
    usage = turn.usage
    if usage is None or usage.time_to_first_token is None:
        return dict.fromkeys(("time_to_first_token", "elapsed", "prompt_per_second", "output_per_second"))
    reading = usage.time_to_first_token - (usage.queue_time or 0.0)
    writing = usage.elapsed - usage.time_to_first_token
    return {
        "time_to_first_token": usage.time_to_first_token,
        "elapsed": usage.elapsed,
        "prompt_per_second": _rate(usage.prompt_tokens - usage.cached_tokens, reading),
        "output_per_second": _rate(usage.output_tokens - 1, writing),
    }


def statistics(turn: Turn) -> str:
    """One line: `prompt 23 tokens (16 cached) at 310/s · answer 40 tokens at 60/s · first token 0.12 s · 0.9 s`."""
    usage, times = turn.usage, timings(turn)
    if usage is None:
        return "no statistics"
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    parts = [
        f"prompt {usage.prompt_tokens} tokens{cached}{_at(times['prompt_per_second'])}",
        f"answer {usage.output_tokens} tokens{_at(times['output_per_second'])}",
    ]
    if usage.time_to_first_token is not None:
        parts.append(f"first token {usage.time_to_first_token:.2f} s")
    return " · ".join([*parts, f"{usage.elapsed:.2f} s"])


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def _at(rate: float | None) -> str:
    return "" if rate is None else f" at {rate:.1f}/s" if rate < 100 else f" at {rate:.0f}/s"
