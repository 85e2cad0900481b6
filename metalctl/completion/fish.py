"""The script for fish."""

from metalctl.completion.surface import Command, Option, Value, surface

HEAD = """\
# Completion of metalctl for fish. Written by: metalctl completion fish

function __metalctl_models
    metalctl completion --models 2>/dev/null
    __fish_complete_path (commandline -ct)
end

complete -c metalctl -f
"""


def script() -> str:
    root, commands = surface()
    names = " ".join(command.name for command in commands)
    before = f"not __fish_seen_subcommand_from {names}"
    lines = [_option(option, before) for option in root.options]
    lines += [f"complete -c metalctl -n {_quoted(before)} -a {c.name} -d {_quoted(c.help)}" for c in commands]
    for command in commands:
        lines += _command(command)
    return HEAD + "\n".join(lines) + "\n"


def _command(command: Command) -> list[str]:
    condition = f"__fish_seen_subcommand_from {command.name}"
    lines = [_option(option, condition) for option in command.options]
    if words := _words(command.argument):
        lines.append(f"complete -c metalctl -n {_quoted(condition)} {words}")
    return lines


def _option(option: Option, condition: str) -> str:
    names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    value = "" if option.value is None else f" -r {_words(option.value) or '-f'}"
    return f"complete -c metalctl -n {_quoted(condition)} {' '.join(names)}{value} -d {_quoted(option.help)}"


def _words(value: Value) -> str:
    match value.kind:
        case "models":
            return "-f -a '(__metalctl_models)'"
        case "files":
            return "-F"
        case "words":
            return f"-f -a '{' '.join(value.words)}'"
        case _:
            return ""


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
