"""What is asked, whatever API it came by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from metalctl.server.chat_format.tool_grammars import AUTO, ToolChoice

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}


@dataclass(frozen=True)
class ChatTask:
    """What every API's chat request comes down to.

    `messages` and `tools` are in OpenAI's form. `sampling` has the names of SamplingParams, with None for what was not
    given. `grammar` is one of metalctl.engine.grammar. `variables` reach the chat template. With `clamp`, max_tokens is
    lowered to what the context still holds.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = AUTO
    parallel_tool_calls: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    grammar: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None  # of reasoning; "none" asks for no reasoning
    effort_is_a_wish: bool = False  # a model without that switch answers all the same
    clamp: bool = False
    context: int | None = None  # tokens that prompt and answer may have, if that is less than the model's
    raw: str | None = None  # a prompt that is taken as it is, instead of messages
    continues: bool = False  # the last message is the beginning of the answer
