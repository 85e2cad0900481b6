# Completion of metalctl for bash. Written by: metalctl completion bash

_metalctl_describe() { # COMMAND: sets options, valued, argument, repeats
  case "$1" in
    '') options='--version --json --offline --quiet -q --verbose -v --debug --help -h' valued='' argument='nothing' repeats= ;;
    'bench') options='--prompt -p --generate -n --depth -d --batch -b --repeats -r --warmup --no-warmup --compare --concurrency --requests --shared-prefix --url --api-key --kernels --output -o --seed --context --precision --trust-remote-code --json --offline --quiet -q --verbose -v --debug --help -h' valued='--prompt -p --generate -n --depth -d --batch -b --repeats -r --compare --concurrency --requests --shared-prefix --url --api-key --output -o --seed --context --precision' argument='models' repeats= ;;
    'chat') options='--system -s --continue -c --temperature --top-p --top-k --min-p --repeat-penalty --max-tokens -n --seed --stop --think --no-think --markdown --raw --stats --stream --context --remember --forget --precision --trust-remote-code --json --offline --quiet -q --verbose -v --debug --help -h' valued='--system -s --temperature --top-p --top-k --min-p --repeat-penalty --max-tokens -n --seed --stop --context --precision' argument='models' repeats= ;;
    'completion') options='--json --offline --quiet -q --verbose -v --debug --help -h' valued='' argument='words bash zsh fish' repeats= ;;
    'doctor') options='--network --trust-remote-code --json --offline --quiet -q --verbose -v --debug --help -h' valued='' argument='models' repeats= ;;
    'embed') options='--file -f --input-format --field --format --output -o --dimensions --prompt-name --prompt --normalize --no-normalize --truncate --no-truncate --batch-tokens --trust-remote-code --json --offline --quiet -q --verbose -v --debug --help -h' valued='--file -f --input-format --field --format --output -o --dimensions --prompt-name --prompt --batch-tokens' argument='models' repeats= ;;
    'list') options='--aliases --json --offline --quiet -q --verbose -v --debug --help -h' valued='' argument='nothing' repeats= ;;
    'pull') options='--revision --token --dry-run --json --offline --quiet -q --verbose -v --debug --help -h' valued='--revision --token' argument='models' repeats=1 ;;
    'rm') options='--yes -y --json --offline --quiet -q --verbose -v --debug --help -h' valued='' argument='models' repeats=1 ;;
    'serve') options='--host --port -p --served-name --cached --api-key --api-key-file --no-auth --allowed-host --cors-origin --context --max-num-seqs --max-num-batched-tokens --max-queue --gpu-memory-utilization --kv-cache-dtype --prefix-cache --max-loaded --memory-budget --keep-alive --pin --max-body --drain-timeout --precision --trust-remote-code --json --offline --quiet -q --verbose -v --debug --help -h' valued='--host --port -p --served-name --api-key --api-key-file --allowed-host --cors-origin --context --max-num-seqs --max-num-batched-tokens --max-queue --gpu-memory-utilization --kv-cache-dtype --prefix-cache --max-loaded --memory-budget --keep-alive --pin --max-body --drain-timeout --precision' argument='models' repeats=1 ;;
    'show') options='--revision --token --json --offline --quiet -q --verbose -v --debug --help -h' valued='--revision --token' argument='models' repeats= ;;
    *) ;;
  esac
}

_metalctl_value() { # COMMAND OPTION: sets kind, words
  case "$1 $2" in
    'bench --output' | 'bench -o') kind=words words='md json jsonl csv' ;;
    'bench --precision') kind=words words='size exact' ;;
    'chat --precision') kind=words words='size exact' ;;
    'embed --file' | 'embed -f') kind=files ;;
    'embed --output' | 'embed -o') kind=files ;;
    'serve --api-key-file') kind=files ;;
    'serve --kv-cache-dtype') kind=words words='auto float16 bfloat16 float32' ;;
    'serve --prefix-cache') kind=words words='on exact off' ;;
    'serve --precision') kind=words words='size exact' ;;
    *) kind=nothing ;;
  esac
}

_metalctl_offer() { # KIND WORDS: sets COMPREPLY
  case "$1" in
    models)
      local IFS=$'\n'
      case "$current" in
        .* | /* | '~'*) _metalctl_offer files ;;
        *) COMPREPLY=($(compgen -W "$(metalctl completion --models 2>/dev/null)" -- "$current")) ;;
      esac
      ;;
    files)
      local IFS=$'\n'
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
    _metalctl_offer words 'bench chat completion doctor embed list pull rm serve show'
  elif [[ $position -eq 0 || -n $repeats ]]; then
    _metalctl_offer "${argument%% *}" "${argument#* }"
  fi
  # What stands before the last colon is on the line already.
  if [[ $current == *:* && $COMP_WORDBREAKS == *:* ]]; then
    local before=${current%"${current##*:}"}
    for ((index = 0; index < ${#COMPREPLY[@]}; index++)); do
      COMPREPLY[index]=${COMPREPLY[index]#"$before"}
    done
  fi
}

complete -F _metalctl metalctl
