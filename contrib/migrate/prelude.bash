# Every bash in the sandbox that reads a launch script starts with this file (BASH_ENV). The trace (xtrace) shows the commands that the
# script would start.
#
# No command is found, and every command succeeds. A mark replaces a value that only a run would know: @{NAME}@ for an unset variable,
# @{-words}@ for the output of a command. In tests marks are empty. A value that is computed from a mark is a mark too.
shopt -s expand_aliases execfail extglob
set -T
__level=$((${__level:--1} + 1))
export __level
PS4='+@$__level@$LINENO@ '
RANDOM=0
declare -A __lent=() __kept=()
((__level)) || printf '+@0@0@ __begin\n' >&"$BASH_XTRACEFD"
for __name in HOME USER LOGNAME HOSTNAME PWD; do
  ((__level)) || export "$__name=@{$__name}@"
done
__launch='openrlhf\.cli\.|verl\.trainer|main_ppo|main_dapo|trl grpo|[[:space:]]-m[[:space:]]+(verl|recipe)\.'
__used='\$([A-Za-z_][A-Za-z_0-9]*)|\$\{([A-Za-z_][A-Za-z_0-9]*)(:?[?]|:[ 0-9]|[]#%/^,}])' # not ${NAME:-...}
__output=' (&|[0-9])?>>?[|]? ?([^[:space:]"'\''()]+|"[^"]*")( 2>&1)?$' # bash prints a redirection after all words
__sum='\$\(\((([^()]|\([^()]*\))*)\)\)'

# Runs before each command. Sets the unset variables that the command uses to marks, for this command only. Returns 1 if `$__instead` must
# run instead of the command.
__before() {
  set +eu
  PATH=@{PATH}@
  local name
  for name in "${!__lent[@]}"; do
    if [[ ${!name-} != "${__lent[$name]}" ]]; then :
    elif [[ -v __kept[$name] ]]; then printf -v "$name" %s "${__kept[$name]}"
    else unset -v "$name"; fi
  done
  __lent=() __kept=() __instead=$BASH_COMMAND
  case $BASH_COMMAND in
    '[ '* | '[[ '* | 'test '* | '(('* | 'case '*) __strip "$BASH_COMMAND" ;;
    'for '* | 'select '*) ;;
    *) __mark "$BASH_COMMAND" "$1" ;;
  esac
  [[ $__instead == "$BASH_COMMAND" ]]
}

__lend() { # NAME VALUE
  __lent[$1]=$2
  printf -v "$1" %s "$2"
}

__strip() { # remove marks from the variables of a test
  local rest=$1 name
  while [[ $rest =~ [A-Za-z_][A-Za-z_0-9]* ]]; do
    name=$BASH_REMATCH rest=${rest#*"$BASH_REMATCH"}
    if [[ ${!name-} == *@{*}@* ]]; then
      __kept[$name]=${!name}
      __lend "$name" "${!name//@\{+([^\}])\}@/}"
    fi
  done
}

__mark() {
  local rest=$1 count=$2 name number whole
  while [[ $rest =~ $__used ]]; do
    name=${BASH_REMATCH[1]}${BASH_REMATCH[2]} rest=${rest#*"$BASH_REMATCH"}
    [[ -v $name ]] || declare -p "$name" &>/dev/null || __lend "$name" "@{$name}@"
  done
  rest=$1
  while [[ $rest =~ $__sum ]]; do
    whole=$BASH_REMATCH name=${BASH_REMATCH[1]} rest=${rest#*"$BASH_REMATCH"}
    (trap - DEBUG; set -u; eval ": \"\$(($name))\"") &>/dev/null || __instead=${__instead/"$whole"/"@{-${name//[!A-Za-z0-9]/_}}@"}
  done
  if [[ $1 =~ $__launch && $1 =~ ^(cat|tee)\ [^$'\n']*'<<' && ${1%%$'\n'*} == @(tee*|*\>*) ]]; then
    whole=${1#*"<<"} # the command writes a script; run that script immediately instead
    [[ $whole =~ ^([^$'\n']*)\>+\ ?[^[:space:]]+(.*) ]] && whole=${BASH_REMATCH[1]}${BASH_REMATCH[2]}
    __instead="bash <<$whole"
  elif [[ $__instead =~ $__output && ${BASH_REMATCH[2]} == *[/$]* ]]; then # a directory that does not exist here
    __instead="${__instead%"$BASH_REMATCH"} > /dev/null"
  fi
  [[ $1 == *\'* ]] && return
  for ((number = count + 1; number < 10; number++)); do
    __instead=${__instead//"\$$number"/"@{-argument_$number}@"}
    __instead=${__instead//"\${$number}"/"@{-argument_$number}@"}
  done
}

command_not_found_handle() {
  set +x
  local place word
  for ((place = 1; place <= $#; place++)); do
    word=${!place}
    if ((place > 1)) && [[ $word == @(bash|sh|zsh) ]]; then
      "$BASH" "${@:place + 1}"
      break
    elif [[ $1 == @(ssh|sbatch|srun) && $word == *[[:space:]]* && $word =~ $__launch ]]; then
      "$BASH" -c "${word#--wrap=}"
    fi
  done
  [[ $1 == @(ssh|sbatch|srun) ]] && "$BASH" -s
  printf '+@%s@%s@ __unknown %q\n' "$__level" "${BASH_LINENO[0]}" "$*" >&"$BASH_XTRACEFD"
  word=$*
  printf '@{-%s}@' "${word//[!A-Za-z0-9]/_}"
}

__filter() { # the output for an unknown input is unknown
  local text
  text=$(command -p cat)
  if [[ $text =~ @\{-?([A-Za-z0-9_]*)\}@ ]]; then
    printf '@{-%s}@' "${BASH_REMATCH[1]}"
  else
    printf %s "$text${text:+$'\n'}" | command -p "$@"
  fi
}

for __name in awk bc cut expr grep head paste rev sed sort tail tr uniq wc; do
  eval "$__name() { set +x; __filter $__name \"\$@\"; }"
done
for __name in basename cat dirname mkdir mktemp rm seq tee touch; do
  eval "$__name() { set +x; command -p $__name \"\$@\"; }"
done
for __name in bash sh zsh; do
  eval "$__name() { set +x; \"\$BASH\" \"\$@\"; }"
done
unset -v __name
cd() { :; }
pwd() { echo .; }
realpath() { echo "${!#}"; }
readlink() { echo "${!#}"; }
exit() { # a script that finds something missing continues
  set +x
  ((${1:-$?})) || builtin exit
}
# Ends loops that wait for something.
alias sleep='((__slept++ < 5)) || break &>/dev/null; :'
# extdebug allows the trap to replace a command. If it were set before a script starts, bash would start its debugger.
trap 'set +x; shopt -s extdebug
if [[ $BASH_SOURCE == "$BASH_ENV" ]]; then :
elif __before $#; then set -x
else set -x; eval "$__instead"; ! :; fi' DEBUG
