# Sourced by the other scripts: paths of the repository, messages and errors, settings of the package index.
# shellcheck shell=bash

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"

say() { printf '%s\n' "$*"; }

# show_help: prints the comment at the beginning of the script.
show_help() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }
case "${1:-}" in -h | --help) show_help && exit ;; esac # arguments of the script

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# heading TEXT: a section heading on a line of its own.
heading() { printf '\n== %s ==\n' "$*"; }

# has_gpu: succeeds if NVIDIA's driver answers.
has_gpu() { nvidia-smi -L >/dev/null 2>&1; }

# cuda_devices PYTHON: prints the number of GPUs that its torch sees; 0 if it lacks torch for CUDA, Megatron-core or vLLM.
cuda_devices() {
    "$1" -c 'import importlib.util, torch
print(torch.cuda.device_count() if all(map(importlib.util.find_spec, ("megatron.core", "vllm"))) else 0)' 2>/dev/null || say 0
}

# pip_setting NAME: a setting of this machine's pip (environment first, then its files), or nothing.
pip_setting() {
    local variable="PIP_${1^^}"
    variable="${variable//-/_}"
    if [[ -n "${!variable:-}" ]]; then
        say "${!variable}"
        return
    fi
    "$venv/bin/python" -m pip config get "install.$1" 2>/dev/null \
        || "$venv/bin/python" -m pip config get "global.$1" 2>/dev/null \
        || true
}

# export_index_settings: uv reads none of pip's settings, so give it those that it was not given in its own variables.
export_index_settings() {
    local index extra links certificates
    index="$(pip_setting index-url)"
    extra="$(pip_setting extra-index-url)"
    links="$(pip_setting find-links)"
    certificates="$(pip_setting cert)"
    if [[ -n "$index" ]]; then export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"; fi
    if [[ -n "$extra" ]]; then export UV_INDEX="${UV_INDEX:-$(words "$extra")}"; fi
    if [[ -n "$links" ]]; then export UV_FIND_LINKS="${UV_FIND_LINKS:-$(words "$links" ,)}"; fi
    if [[ -n "$certificates" ]]; then export SSL_CERT_FILE="${SSL_CERT_FILE:-$certificates}"; fi
    # pip looks for a version in every index. Hashes in the lock make it irrelevant which index serves a file.
    export UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}"
}

# words LIST [SEPARATOR]: the whitespace-separated words of LIST on one line.
words() {
    local -a parts
    read -r -d '' -a parts <<<"$1" || true
    local IFS="${2:- }"
    say "${parts[*]}"
}
