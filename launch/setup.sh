#!/usr/bin/env bash
# Installs a locked stack and this package into .venv. Does nothing when .venv is up to date.
#
#   ./launch/setup.sh                            the CPU stack
#   RLHF_MCORE_STACK=gpu ./launch/setup.sh       the GPU stack, inside NVIDIA's PyTorch container (see Dockerfile)
#   ./launch/setup.sh --with bench               in addition TRL, for benchmarks/vs_trl.py, in a folder of its own
#   ./launch/setup.sh --with megatron-latest     in addition the Megatron-core of the GPU stack, in a folder of its own, for tests
#
# PYTHON names the interpreter to build from (3.11, for the GPU stack 3.12; looked for when not set). Package indexes, find-links folders
# and certificates are those of this machine's pip configuration. Delete .venv to start over.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

stack="${RLHF_MCORE_STACK:-cpu}"
case "$stack" in
    cpu) version=3.11 locks=(requirements/cpu.lock requirements/cpu.in requirements/oracles.lock) ;;
    gpu) version=3.12 locks=(requirements/gpu.lock requirements/vllm.lock) ;;
    *) fail "RLHF_MCORE_STACK=$stack is not a choice; it is cpu or gpu" ;;
esac
stamp="$venv/.rlhf_mcore.stamp"
unfinished="$venv/.rlhf_mcore.unfinished"

# Everything that decides what .venv holds; the path is in it because a virtual environment cannot be moved.
fingerprint() {
    (
        cd "$root"
        say "$root $stack"
        cat requirements/bootstrap.lock "${locks[@]}" setup.py launch/setup.sh launch/common.sh
    ) | sha256sum | cut -d ' ' -f 1
}

up_to_date() {
    [[ -x "$venv/bin/python" && -f "$stamp" && "$(<"$stamp")" == "$(fingerprint)" ]]
}

is_usable() {
    "$1" -c "import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-python$version}" python3 python; do
        if is_usable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no usable Python $version (the locked dependencies are for $version, and the venv and ensurepip modules are needed)." \
        "Install it, on Debian and Ubuntu with 'apt-get install python$version python$version-venv'," \
        "or name an interpreter: PYTHON=/path/to/python$version ./launch/setup.sh"
}

make_venv() {
    local python="$1" options=()
    # What an interrupted installation or another Python left behind is not worth repairing: the download cache is warm.
    if [[ -f "$unfinished" ]] || { [[ -d "$venv" ]] && ! is_usable "$venv/bin/python"; }; then
        options=(--clear)
    fi
    if [[ "$stack" == gpu ]]; then options+=(--system-site-packages); fi # torch, Transformer Engine and apex are the container's
    "$python" -m venv "${options[@]}" "$venv"
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
# On GPUs it is there already.
install_torch() {
    local requirement log="$venv/torch.log"
    requirement="$(grep -m 1 '^torch==' "$root/requirements/cpu.in")"
    if [[ "$stack" == gpu ]]; then
        local series="${requirement#torch==}" installed
        series="${series%.*}"
        installed="$("$venv/bin/python" -c 'import torch; print(torch.__version__ if torch.version.cuda else "a build without CUDA")' 2>&1 | tail -n 1)"
        [[ "$installed" == "$series".* ]] || fail "torch here is: $installed. vLLM of requirements/gpu.in is for torch $series with CUDA: use" \
            "NVIDIA's PyTorch container that Dockerfile names"
        return
    fi
    if pip install --quiet --no-deps "$requirement+cpu" >"$log" 2>&1; then return; fi
    say "the package indexes of this machine's pip do not contain torch's CPU build; using torch's index"
    if uv_install --torch-backend cpu "$requirement"; then return; fi
    cat "$log" >&2
    fail "the CPU build of $requirement could not be installed (pip's attempt and uv's are above)." \
        "Behind a firewall, put its wheel in a folder and set PIP_FIND_LINKS to that folder."
}

# vllm_loads: each library of the installed vLLM loads, in a process of its own. Most use torch's stable interface, so its wheel, which is
# built with the released torch, fits the container's torch. A third-party library that lacks a symbol is set aside: vLLM then uses other kernels.
# The driver's library is not there while an image is built.
vllm_loads() {
    "$venv/bin/python" -c 'import ctypes, importlib.util, os, pathlib, signal, sys, torch
root = pathlib.Path(importlib.util.find_spec("vllm").origin).parent
for library in sorted(root.rglob("*.so")):
    child = os.fork()
    if not child:
        try:
            ctypes.CDLL(str(library))
            os._exit(0)
        except OSError as error:
            if "libcuda.so.1" in str(error):
                os._exit(0)
            print(f"{library.name}: {error}", file=sys.stderr, flush=True)
            os._exit(2 if "undefined symbol" in str(error) and "third_party" in library.relative_to(root).parts else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 2:
        library.rename(library.with_suffix(".so.aside"))
        print(f"{library.relative_to(root)} is set aside; vLLM uses other kernels instead")
    elif status and status != -signal.SIGILL: # then it is for other processors, and vLLM loads another one
        sys.exit(f"{library.name} does not load")'
}

explain_failure() {
    local status=$?
    if ((status)); then say "setup: failed for the reason above; correct it and run setup.sh again" >&2; fi
}

install() {
    local python
    trap explain_failure EXIT
    [[ "$(uname -s)" == Linux ]] || fail "the dependencies are locked for Linux; this is $(uname -s)"
    if [[ -z "${RLHF_MCORE_STACK:-}" ]] && has_gpu; then
        say "setup: this machine has a GPU, but this script installs the CPU stack, which does not use it. For GPUs, use the image of Dockerfile" \
            "(docs/get-started/install.md#images), or RLHF_MCORE_STACK=gpu in NVIDIA's PyTorch container. RLHF_MCORE_STACK=cpu hides this note"
    fi
    unset PIP_CONSTRAINT # the container's would refuse what is locked here
    python="$(find_python)"
    heading "setup: $("$python" --version) in $venv"
    make_venv "$python"
    pip install --quiet --require-hashes --no-deps -r "$root/requirements/bootstrap.lock"
    heading "setup: torch"
    install_torch
    heading "setup: locked dependencies (about 3 GB; minutes if they have to be downloaded)"
    export_index_settings
    # Compiled here, once: where PYTHONDONTWRITEBYTECODE is set every process would compile vLLM and torch again at each import.
    uv_install --compile-bytecode --require-hashes -r "$root/${locks[0]}"
    if [[ "$stack" != gpu ]]; then
        # For tests alone (tests/oracles, tests/beside.py), beside what others import: verl's package brings a module called tests.
        uv_install --require-hashes --target "$venv/oracles" -r "$root/requirements/oracles.lock"
    fi
    if [[ "$stack" == gpu ]]; then
        heading "setup: vLLM"
        uv_install --compile-bytecode --require-hashes --only-binary vllm -r "$root/requirements/vllm.lock"
        if ! vllm_loads; then
            heading "setup: its wheel does not load beside the container's torch: built from source (half an hour or more; MAX_JOBS limits its memory)"
            uv_install --compile-bytecode --require-hashes --no-build-isolation --no-binary vllm --reinstall-package vllm \
                -r "$root/requirements/vllm.lock"
        fi
    fi
    heading "setup: rlhf_mcore"
    uv_install --no-build-isolation --editable "$root"
    rm -f "$unfinished"
    fingerprint >"$stamp.new"
    mv "$stamp.new" "$stamp"
    say "setup: done"
}

# begin_add_on NAME LOCK...: make way for an installation into .venv/NAME. Returns 1 if that folder was made from these locks.
begin_add_on() {
    local name="$1" folder="$venv/$1"
    shift
    [[ "$stack" == cpu ]] || fail "--with $name is for the CPU stack"
    if cat "$@" | cmp --silent - "$folder/locks"; then return 1; fi
    heading "setup: $name"
    export_index_settings
    rm -rf "$folder" # what an earlier lock installed
}

# TRL runs with our own packages and this folder. It must not see .venv/oracles: transformers would import torchvision and PEFT from there.
install_bench() {
    begin_add_on bench requirements/bench.lock || return 0
    uv_install --require-hashes --target "$venv/bench" -r requirements/bench.lock
    cat requirements/bench.lock >"$venv/bench/locks"
}

# Megatron-core 0.19 is pure Python and asks for Python 3.12, but runs on 3.11. It imports triton, which vLLM's CPU build must not see.
install_megatron_latest() {
    local locks=(requirements/triton.lock requirements/megatron-latest.lock)
    begin_add_on megatron-latest "${locks[@]}" || return 0
    uv_install --compile-bytecode --require-hashes --target "$venv/megatron-latest" -r "${locks[0]}"
    uv_install --compile-bytecode --require-hashes --target "$venv/megatron-latest" --python-version 3.12 -r "${locks[1]}"
    cat "${locks[@]}" >"$venv/megatron-latest/locks"
}

if (($#)); then
    cd "$root"
    "$root/launch/setup.sh"
    case "$*" in
        "--with bench") install_bench ;;
        "--with megatron-latest") install_megatron_latest ;;
        *) fail "setup.sh $*: choose --with bench or --with megatron-latest" ;;
    esac
    exit 0
fi
if up_to_date; then exit 0; fi
exec 9<"${BASH_SOURCE[0]}"
if ! flock -n 9; then
    say "setup: waiting for another setup of this checkout to finish"
    flock 9
fi
if up_to_date; then exit 0; fi
install
