"""Chat templates: from messages to the text that a model was trained on.

A template is Jinja from a file that someone else made, so it runs in a sandbox: no attributes that lead to Python's
insides, no files, no loops without end. The names that templates expect are those of transformers.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from metalctl.engine.errors import CheckpointError, MetalctlError, UsageError

Message = Mapping[str, Any]

DEFAULT = "default"


class ChatTemplates:
    """The named templates of one model. `default` is used unless another is asked for, and `tool_use` with tools.

    `special_tokens` are the variables that hold token texts, such as `bos_token`.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str] | None = None):
        self.sources = dict(sources)
        self.special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, jinja2.Template] = {}

    def __bool__(self) -> bool:
        return bool(self.sources)

    @property
    def names(self) -> list[str]:
        return sorted(self.sources)

    def choose(self, name: str | None, tools: Sequence[Any] | None) -> str:
        """The template's name. Raises UsageError when there is none, or none of that name."""
        if not self.sources:
            raise UsageError(
                "This model has no chat template, so it cannot chat.",
                "Use a model that was tuned for chat (often named -Instruct or -it), or complete plain text.",
            )
        if name is None:
            name = "tool_use" if tools and "tool_use" in self.sources else DEFAULT
            return name if name in self.sources else self.names[0]
        if name not in self.sources:
            raise UsageError(f"The model has no chat template {name!r}.", f"It has: {', '.join(self.names)}.")
        return name

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text.

        `variables` reach the template, and override the special tokens. Raises UsageError when the template itself
        rejects the messages, CheckpointError when the template is broken; both name the line.
        """
        name = self.choose(template, tools)
        values = {
            **self.special_tokens,
            "messages": [dict(message) for message in messages],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            return self._compile(name).render(values)
        except MetalctlError:
            raise
        except Exception as error:  # a template can fail in any way that an expression can
            raise CheckpointError(
                f"The chat template {name!r} of the model failed{_line(error)}: {error}",
                "Check that each message has a role and content that this template knows.",
            ) from error

    def _compile(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            try:
                self._compiled[name] = _environment().from_string(self.sources[name])
            except jinja2.TemplateSyntaxError as error:
                line = self.sources[name].splitlines()[error.lineno - 1 : error.lineno]
                raise CheckpointError(
                    f"The chat template {name!r} of the model is broken at line {error.lineno}: {error.message}"
                    + (f" in {line[0].strip()[:120]!r}" if line else ""),
                    "Use another file of this model, or report it to its publisher.",
                ) from error
        return self._compiled[name]


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model wrote, for training; here it only stands aside."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Iterable[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter this does not escape for HTML: models read plain JSON."""
    pair = None if separators is None else tuple(separators)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)  # type: ignore[arg-type]


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"The model's chat template does not accept these messages: {message}")


def _line(error: BaseException) -> str:
    """Where in the template the error came up: Jinja gives its frames the template's own line numbers."""
    line, traceback = None, error.__traceback__
    while traceback:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return "" if line is None else f" at line {line}"


# For checkpoints without a template: formats that are known by the control tokens in the vocabulary.
_FAMILIES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "ChatML",
        ("<|im_start|>", "<|im_end|>"),
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ),
    (
        "Llama 3",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ),
    (
        "Gemma",
        ("<start_of_turn>", "<end_of_turn>"),
        "{{ bos_token }}{% set ns = namespace(lead='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.lead = m.content + '\n\n' %}{% else %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ ns.lead + m.content | trim }}<end_of_turn>\n"
        "{% set ns.lead = '' %}{% endif %}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    ),
    (
        "Phi",
        ("<|user|>", "<|assistant|>", "<|end|>"),
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    ),
    (
        "Mistral",
        ("[INST]", "[/INST]"),
        "{{ bos_token }}{% set ns = namespace(lead='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.lead = m.content + '\n\n' %}{% elif m.role == 'user' %}[INST] {{ ns.lead + m.content }} [/INST]"
        "{% set ns.lead = '' %}{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    ),
)


def default_template(vocabulary: Mapping[str, int]) -> tuple[str, str] | None:
    """(family, template) of the first known format whose control tokens are all in the vocabulary; None: unknown."""
    for family, tokens, template in _FAMILIES:
        if all(token in vocabulary for token in tokens):
            return family, template
    return None
