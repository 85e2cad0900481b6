"""The loop of a conversation: read, do, show."""

from typing import TYPE_CHECKING

from metalctl.engine.errors import ContextLengthError, MetalctlError
from metalctl.output import Output
from metalctl.repl import slash
from metalctl.repl.chat import Chat
from metalctl.repl.display import TextDisplay, renders
from metalctl.repl.keyboard import silent_keyboard
from metalctl.repl.prompt import CommandCompleter, prompt_session, unquote
from metalctl.settings import state_folder

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

_REMEDY = "/undo takes back the last exchange, /clear starts anew."


class Repl:
    """A conversation at a terminal. No error ends it, except one that leaves no engine to talk to."""

    def __init__(self, chat: Chat, session: "PromptSession[str] | None" = None):
        self.chat = chat
        self._session = session or _session(chat)
        self._about_to_leave = False

    @property
    def output(self) -> Output:
        return self.chat.output

    def run(self) -> None:
        """Until the user leaves."""
        if self.chat.conversation.messages:
            self.recall()
        while (line := self._read()) is not None:
            if not line.strip():
                continue
            try:
                self._do(line)
            except slash.Leave:
                return
            except MetalctlError as error:
                self._report(error)
            except KeyboardInterrupt:
                self.output.note("Interrupted.")

    def answer(self, text: str) -> None:
        """Send a message and show what comes back."""
        with silent_keyboard():
            turn = self.chat.say(text, TextDisplay(self.output, renders(self.chat.options.markdown)))
        self.chat.remark(turn, _REMEDY)
        self.say("")

    def say(self, text: str) -> None:
        """The program's own words, on the terminal but not among the data."""
        self.output.stderr.print(text, highlight=False, markup=False, soft_wrap=True)

    def recall(self) -> None:
        """Where the conversation stands, for one that is taken up again."""
        messages = self.chat.conversation.messages
        said = next((message.content for message in reversed(messages) if message.role == "user"), "")
        self.say(f"Going on after {len(messages)} messages; you had said: {slash.shortened(said)}")

    def _read(self) -> str | None:
        """A line or several, None to leave: at the end of input, or at the second Ctrl-C in a row."""
        while True:
            try:
                line = self._session.prompt(">>> ")
            except EOFError:
                return None
            except KeyboardInterrupt:
                if self._about_to_leave:
                    return None
                self._about_to_leave = not self._session.default_buffer.text
                if self._about_to_leave:
                    self.output.note("Ctrl-C again, Ctrl-D or /bye leaves.")
                continue
            self._about_to_leave = False
            return line

    def _do(self, line: str) -> None:
        command = line.strip()
        if command in ("exit", "quit"):
            raise slash.Leave
        if command.startswith("/") and not command.startswith("//"):
            slash.run(self, command)
        else:
            self.answer(unquote(line.replace("//", "/", 1) if command.startswith("//") else line))

    def _report(self, error: MetalctlError) -> None:
        if isinstance(error, ContextLengthError):
            error.hint = f"The conversation is as it was. {_REMEDY}"
        self.output.error(error)
        if not self.chat.thread.alive:
            raise error


def _session(chat: Chat) -> "PromptSession[str]":
    summaries = {name: summary for name, (summary, _) in slash.COMMANDS.items()}
    history = state_folder() / "history" if chat.remember else None
    return prompt_session(history, CommandCompleter(summaries, slash.ARGUMENTS))
