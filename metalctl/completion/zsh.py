"""The script for zsh."""

from metalctl.completion.surface import Command, Option, Value, surface

SCRIPT = """\
#compdef metalctl
# Completion of metalctl for zsh. Written by: metalctl completion zsh

_metalctl_models() {
  local -a names
  names=(${(f)"$(metalctl completion --models 2>/dev/null)"})
  _alternative 'models:model:compadd -a names' 'files:file:_files'
}

_metalctl() {
  local context state state_descr line
  typeset -A opt_args
  _arguments -C -s \\
%(root)s
    '1: :->command' \\
    '*:: :->arguments' && return
  case $state in
    command)
      local -a commands=(
%(names)s
      )
      _describe -t commands command commands
      ;;
    arguments)
      case $words[1] in
%(commands)s
      esac
      ;;
  esac
}

if [[ $funcstack[1] == _metalctl ]]; then
  _metalctl "$@" # found by its name in fpath
else
  compdef _metalctl metalctl # read by eval or source
fi
"""


def script() -> str:
    root, commands = surface()
    names = [f"        {_quoted(f'{command.name}:{command.help}')}" for command in commands]
    cases = [f"        {command.name})\n{_call(command)}\n          ;;" for command in commands]
    options = [f"    {_quoted(spec)} \\" for option in root.options for spec in _specs(option)]
    return SCRIPT % {"root": "\n".join(options), "names": "\n".join(names), "commands": "\n".join(cases)}


def _call(command: Command) -> str:
    specs = [spec for option in command.options for spec in _specs(option)]
    if command.argument.kind != "nothing":
        specs.append(f"{'*' if command.repeats else '1'}: :{_action(command.argument)}")
    return "          _arguments -s \\\n" + " \\\n".join(f"            {_quoted(spec)}" for spec in specs)


def _specs(option: Option) -> list[str]:
    """One for each name; names exclude each other unless the option may be repeated."""
    others = "*" if option.repeats else f"({' '.join(option.names)})"
    value = "" if option.value is None else f": :{_action(option.value)}"
    return [f"{others}{name}[{_escaped(option.help)}]{value}" for name in option.names]


def _action(value: Value) -> str:
    match value.kind:
        case "models":
            return "_metalctl_models"
        case "files":
            return "_files"
        case "words":
            return f"({' '.join(value.words)})"
        case _:
            return " "


def _escaped(text: str) -> str:
    for character in "\\[]:":
        text = text.replace(character, f"\\{character}")
    return text


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
