"""The script for bash, also the one of 2007 that comes with macOS: no arrays by name, no negative indices."""

from metalctl.completion.surface import Command, Value, surface

SCRIPT = """\
# Completion of metalctl for bash. Written by: metalctl completion bash

_metalctl_describe() { # COMMAND: sets options, valued, argument, repeats
  case "$1" in
%(commands)s
  esac
}

_metalctl_value() { # COMMAND OPTION: sets kind, words
  case "$1 $2" in
%(values)s
    *) kind=nothing ;;
  esac
}

_metalctl_offer() { # KIND WORDS: sets COMPREPLY
  case "$1" in
    models)
      local IFS=$'\\n'
      case "$current" in
        .* | /* | '~'*) _metalctl_offer files ;;
        *) COMPREPLY=($(compgen -W "$(metalctl completion --models 2>/dev/null)" -- "$current")) ;;
      esac
      ;;
    files)
      local IFS=$'\\n'
      COMPREPLY=($(compgen -f -- "$current"))
      compopt -o filenames 2>/dev/null
      ;;
    words) COMPREPLY=($(compgen -W "$2" -- "$current")) ;;
  esac
}

_metalctl() {
  COMPREPLY=()
  # Bash splits words at colons, which references have; so the line is split anew.
  local line=${COMP_LINE:0:$COMP_POINT} typed current word command='' pending='' index position=0
  local options='' valued='' argument='' repeats='' kind='' words=''
  read -ra typed <<< "$line"
  case "$line" in *[[:space:]]) typed+=('') ;; esac
  current=${typed[${#typed[@]}-1]}
  _metalctl_describe ''
  for ((index = 1; index < ${#typed[@]} - 1; index++)); do
    word=${typed[index]}
    if [[ -n $pending ]]; then
      pending=''
    elif [[ $word == -* ]]; then
      [[ " $valued " == *" $word "* ]] && pending=$word
    elif [[ -z $command ]]; then
      command=$word
      _metalctl_describe "$command"
    else
      position=$((position + 1))
    fi
  done
  if [[ -n $pending ]]; then
    _metalctl_value "$command" "$pending"
    _metalctl_offer "$kind" "$words"
  elif [[ $current == -* ]]; then
    _metalctl_offer words "$options"
  elif [[ -z $command ]]; then
    _metalctl_offer words '%(names)s'
  elif [[ $position -eq 0 || -n $repeats ]]; then
    _metalctl_offer "${argument%%%% *}" "${argument#* }"
  fi
  # What stands before the last colon is on the line already.
  if [[ $current == *:* && $COMP_WORDBREAKS == *:* ]]; then
    local before=${current%%"${current##*:}"}
    for ((index = 0; index < ${#COMPREPLY[@]}; index++)); do
      COMPREPLY[index]=${COMPREPLY[index]#"$before"}
    done
  fi
}

complete -F _metalctl metalctl
"""


def script() -> str:
    root, commands = surface()
    rows = [_row("", root), *(_row(command.name, command) for command in commands), "    *) ;;"]
    values = [
        line for command in (root, *commands) for line in _values(command, "" if command is root else command.name)
    ]
    names = " ".join(command.name for command in commands)
    return SCRIPT % {"commands": "\n".join(rows), "values": "\n".join(values), "names": names}


def _row(name: str, command: Command) -> str:
    options = " ".join(each for option in command.options for each in option.names)
    valued = " ".join(each for option in command.options if option.value for each in option.names)
    argument = " ".join((command.argument.kind, *command.argument.words))
    settings = f"options='{options}' valued='{valued}' argument='{argument}' repeats={'1' if command.repeats else ''}"
    return f"    '{name}') {settings} ;;"


def _values(command: Command, name: str) -> list[str]:
    return [
        f"    {' | '.join(repr(f'{name} {each}') for each in option.names)}) {_set(option.value)} ;;"
        for option in command.options
        if option.value is not None and option.value.kind != "nothing"
    ]


def _set(value: Value) -> str:
    return f"kind={value.kind}" + (f" words='{' '.join(value.words)}'" if value.words else "")
