#!/usr/bin/env bash
# Installs the locked CPU stack and this package into .venv. Does nothing when .venv is up to date.
#
#   ./launch/setup.sh
#
# PYTHON names the interpreter to build from (3.11; looked for when not set). Package indexes, find-links folders and
# certificates are those of this machine's pip configuration. Delete .venv to start over.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

stamp="$venv/.rlhf_mcore.stamp"
unfinished="$venv/.rlhf_mcore.unfinished"

# Everything that decides what .venv holds; the path is in it because a virtual environment cannot be moved.
fingerprint() {
    (
        cd "$root"
        say "$root"
        cat requirements/bootstrap.lock requirements/cpu.lock requirements/cpu.in setup.py launch/setup.sh launch/common.sh
    ) | sha256sum | cut -d ' ' -f 1
}

up_to_date() {
    [[ -x "$venv/bin/python" && -f "$stamp" && "$(<"$stamp")" == "$(fingerprint)" ]]
}

is_python_311() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3.11}" python3 python; do
        if is_python_311 "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no usable Python 3.11 (the locked dependencies are for 3.11, and the venv and ensurepip modules are needed)." \
        "Install it, on Debian and Ubuntu with 'apt-get install python3.11 python3.11-venv'," \
        "or name an interpreter: PYTHON=/path/to/python3.11 ./launch/setup.sh"
}

make_venv() {
    local python="$1" clear=()
    # What an interrupted installation or another Python left behind is not worth repairing: the download cache is warm.
    if [[ -f "$unfinished" ]] || { [[ -d "$venv" ]] && ! is_python_311 "$venv/bin/python"; }; then
        clear=(--clear)
    fi
    "$python" -m venv "${clear[@]}" "$venv"
    rm -f "$stamp"
    touch "$unfinished"
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# uv_install ARGUMENT...: with progress bars for a person who watches, and without a line per package for a log.
uv_install() {
    local quiet=()
    if [[ ! -t 2 ]]; then quiet=(--quiet); fi
    "$venv/bin/uv" pip install --python "$venv" --no-deps "${quiet[@]}" "$@"
}

# torch is a step of its own: its CPU build is not on the main package index, and its hash depends on where it comes from.
install_torch() {
    local requirement log="$venv/torch.log"
    requirement="$(grep -m 1 '^torch==' "$root/requirements/cpu.in")"
    if pip install --quiet --no-deps "$requirement+cpu" >"$log" 2>&1; then return; fi
    say "not in the indexes that pip knows here; taking the CPU build from torch's own index"
    if uv_install --torch-backend cpu "$requirement"; then return; fi
    cat "$log" >&2
    fail "the CPU build of $requirement could not be installed (pip's attempt and uv's are above)." \
        "Behind a firewall, put its wheel in a folder and set PIP_FIND_LINKS to that folder."
}

explain_failure() {
    local status=$?
    if ((status)); then say "setup: failed, for the reason above; run it again once that is put right" >&2; fi
}

install() {
    local python
    trap explain_failure EXIT
    [[ "$(uname -s)" == Linux ]] || fail "the CPU stack is locked for Linux; this is $(uname -s)"
    python="$(find_python)"
    heading "setup: $("$python" --version) in $venv"
    make_venv "$python"
    pip install --quiet --require-hashes --no-deps -r "$root/requirements/bootstrap.lock"
    heading "setup: torch"
    install_torch
    heading "setup: locked dependencies (about 3 GB; minutes if they have to be downloaded)"
    hand_on_index_settings
    # Compiled here, once: where PYTHONDONTWRITEBYTECODE is set every process would compile vLLM and torch again at each import.
    uv_install --compile-bytecode --require-hashes -r "$root/requirements/cpu.lock"
    heading "setup: rlhf_mcore"
    uv_install --no-build-isolation --editable "$root"
    rm -f "$unfinished"
    fingerprint >"$stamp.new"
    mv "$stamp.new" "$stamp"
    say "setup: done"
}

if up_to_date; then exit 0; fi
exec 9<"${BASH_SOURCE[0]}"
if ! flock -n 9; then
    say "setup: waiting for another setup of this checkout to finish"
    flock 9
fi
if up_to_date; then exit 0; fi
install
