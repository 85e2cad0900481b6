"""`metalctl chat`: one answer, or a conversation."""

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metalctl.app import Invocation, command
from metalctl.commands.options import Context, GGUFPrecision, TrustRemoteCode
from metalctl.engine.config import EngineConfig
from metalctl.engine.errors import UsageError
from metalctl.engine.sequence import FinishReason
from metalctl.engine_start import RunningEngine, running_engine
from metalctl.output import Output

if TYPE_CHECKING:
    from metalctl.repl.conversation import Conversation

STARTER = "smollm2"


@command("chat")
def chat(
    invocation: Invocation,
    reference: Annotated[str | None, typer.Argument(metavar="REF", help="The model.")] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="What to ask it, after what is piped in. - is that alone."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="System prompt.")] = None,
    continue_: Annotated[bool, typer.Option("--continue", "-c", help="Go on with the last conversation.")] = False,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this share.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep that many of the likeliest tokens; 0 keeps all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest.")] = None,
    repeat_penalty: Annotated[float | None, typer.Option(help="Above 1 makes repetition less likely.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-n", help="End the answer there.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")] = None,
    think: Annotated[
        bool | None, typer.Option("--think/--no-think", help="Ask the model to reason first, or not to.")
    ] = None,
    markdown: Annotated[
        bool | None, typer.Option("--markdown/--raw", help="Render the answer, or not. On a terminal it is rendered.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Token counts and speed after each answer.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="With --json: an event a line as the answer comes.")] = False,
    context: Context = None,
    remember: Annotated[
        bool, typer.Option("--remember/--forget", help="Keep the conversation for --continue, and the lines typed.")
    ] = True,
    precision: GGUFPrecision = "size",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Ask a model once, or hold a conversation with it.

    With a PROMPT or piped input there is one answer on stdout; without, a conversation in which /help lists the
    commands. REF may be left out when config.toml or METALCTL_MODEL names a model.
    """
    from metalctl.repl.options import ChatOptions

    if stream and not invocation.output.json:
        raise UsageError("--stream needs --json.", "Without --json the answer is streamed anyway.")
    sampling = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repeat_penalty,
        "max_tokens": max_tokens,
        "seed": seed,
        "stop": tuple(stop) if stop else None,
    }
    options = ChatOptions(sampling, think, stats, markdown)
    options.params({})  # a value out of range is found before the model is loaded
    words = [reference, *(prompt or [])] if reference else []
    conversation, message = _begin(invocation, words, system, continue_)
    assert conversation.model
    config = EngineConfig(max_model_len=context, max_num_seqs=1, precision=precision)
    with running_engine(invocation, conversation.model, config, trust_remote_code=trust_remote_code) as engine:
        from metalctl.repl.chat import Chat

        talk = Chat(engine.thread, engine.generation_defaults, conversation, options, invocation.output, remember)
        if message is not None:
            _answer_once(talk, message, engine, stream)
        else:
            _converse(talk)


def _begin(
    invocation: Invocation, words: list[str], system: str | None, continue_: bool
) -> "tuple[Conversation, str | None]":
    """The conversation, with its model and system prompt decided, and the message to answer when there is just one."""
    from metalctl.repl.conversation import Conversation, last_conversation, load

    output = invocation.output
    conversation = load(last_conversation()) if continue_ else Conversation()
    model, prompt = _model_and_prompt(words, conversation.model or invocation.settings.model)
    message = _with_piped_input(prompt, output)
    if message is None:
        _require_terminal(output)
    conversation.model = model or _starter(output)
    conversation.system = system if system is not None else conversation.system
    return conversation, message


def _model_and_prompt(words: list[str], default: str | None) -> tuple[str | None, str | None]:
    """What the positional words mean. With a default model, a single one with blanks in it is the prompt."""
    if default and len(words) == 1 and any(map(str.isspace, words[0])) and not Path(words[0]).expanduser().exists():
        return default, words[0]
    if not words:
        return default, None
    return words[0], " ".join(words[1:]) or None


def _with_piped_input(prompt: str | None, output: Output) -> str | None:
    """What came in through a pipe, then the prompt. Raises UsageError for a pipe that brings nothing, or no text."""
    piped = _piped_input(output, wanted=prompt == "-")
    if piped is None:
        return prompt
    prompt = None if prompt == "-" else prompt
    text = "\n\n".join(part for part in (piped.strip("\n"), prompt) if part and part.strip())
    if not text:
        raise UsageError("there is no prompt: standard input is empty.", 'For example: metalctl chat REF "Hello"')
    return text


def _piped_input(output: Output, wanted: bool) -> str | None:
    """All of standard input; None when it is closed, or a terminal that nobody `wanted` to be read."""
    if sys.stdin is None or (sys.stdin.isatty() and not wanted):
        return None
    # A pipe that nobody closes, as some programs leave it to their children, would look like a hang.
    patience = threading.Timer(2.0, output.note, ["Reading standard input; `< /dev/null` says that there is none."])
    patience.daemon = True
    patience.start()
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"standard input is not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start}."
        raise UsageError(message, "`iconv -t utf-8` converts it.") from error
    finally:
        patience.cancel()


def _require_terminal(output: Output) -> None:
    if output.json or not sys.stdout.isatty():
        raise UsageError(
            "a conversation needs a terminal, and there is no prompt to answer.",
            'Give the prompt as an argument, as in `metalctl chat REF "Hello"`, or pipe it in.',
        )


def _starter(output: Output) -> str:
    """Offer the starter model to one who named none. Raises UsageError where nobody can be asked."""
    offer = f"{STARTER} is the starter: SmolLM2-135M-Instruct, 98 MB, Apache-2.0, needs no account."
    hint = f"{offer} `metalctl chat {STARTER}` runs it; `model = ...` in config.toml sets a default."
    if not (output.interactive and sys.stdin.isatty()):
        raise UsageError("no model was named.", hint)
    output.stderr.print(f"No model was named. {offer}", highlight=False)
    if not typer.confirm("Use it?", default=True, err=True):
        raise UsageError("no model was named.", hint)
    return STARTER


def _answer_once(talk: Any, prompt: str, engine: RunningEngine, stream: bool) -> None:
    from metalctl.repl.display import EventDisplay, TextDisplay, renders

    output = talk.output
    display = EventDisplay(output, stream) if output.json else TextDisplay(output, renders(talk.options.markdown))
    turn = talk.say(prompt, display)
    if turn.finish_reason is FinishReason.ABORT:
        raise KeyboardInterrupt
    talk.remark(turn)
    if stream:
        output.event("done", status="ok", data=_record(turn, engine))
    else:
        output.result(_record(turn, engine))


def _record(turn: Any, engine: RunningEngine) -> dict[str, Any]:
    from metalctl.repl.chat import timings

    usage = turn.usage
    return {
        "model": engine.checkpoint.reference,
        "text": turn.text,
        "reasoning": turn.reasoning or None,
        "finish_reason": turn.finish_reason,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
        },
        "timings": {"load": engine.load_seconds, **timings(turn)},
    }


def _converse(talk: Any) -> None:
    from metalctl.repl.loop import Repl

    limit = talk.thread.engine.max_model_len
    talk.output.note(f"{talk.conversation.model}, {limit} tokens of context. /help lists the commands.")
    Repl(talk).run()
