#!/usr/bin/env bash
# Installs what is missing, then lints and runs every tier of tests.
#
#   ./launch/test.sh                     everything
#   ./launch/test.sh --with slurm --with browser --with docs   everything; first SLURM and Chromium, where apt can, so that
#                                        nothing skips; the documentation is built as a site too
#   ./launch/test.sh --with megatron-latest          the same tests on the newest Megatron-core and Python 3.12; no lint
#   ./launch/test.sh tests/unit -k clip  pytest alone, with these arguments
#
# The last lines name every test that failed, with the first line of its message, then say what was skipped for want of what, and then
# add up all tiers: "N passed, N failed, N skipped", where a lint that fails counts as one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# from_apt NAME PROGRAM PACKAGE...: packages of the distribution. Where that cannot be, the tests skip, and say so.
from_apt() {
    local name="$1" program="$2" log status=0
    shift 2
    if [[ -n "$(PATH="$PATH:/usr/sbin" command -v "$program")" ]]; then return; fi
    if ! command -v apt-get >/dev/null || [[ "$(id -u)" != 0 ]]; then
        say "--with $name: only root can install it, and only with apt; its tests will be skipped"
        return
    fi
    heading "$name"
    log="$(mktemp)"
    export DEBIAN_FRONTEND=noninteractive
    timeout 300 apt-get install -y --no-install-recommends "$@" >"$log" 2>&1 \
        || { timeout 120 apt-get update && timeout 300 apt-get install -y --no-install-recommends "$@"; } >"$log" 2>&1 \
        || status=$?
    if ((status)); then
        tail -n 5 "$log"
        say "--with $name: apt could not install it (above); its tests will be skipped"
    fi
    rm -f "$log"
}

extras=() builds_docs=""
while [[ "${1:-}" == --with ]]; do
    case "${2:-}" in
        slurm) from_apt slurm slurmctld slurm-wlm munge ;;
        browser) from_apt browser chromium chromium && extras+=("playwright==1.65.2") ;;
        docs) builds_docs=yes ;;
        megatron-latest) export RLHF_MCORE_STACK=megatron-latest ;;
        *) fail "--with ${2:-}: slurm, browser, docs and megatron-latest can be installed" ;;
    esac
    shift 2
done

"$root/launch/setup.sh"
source "$root/launch/common.sh" # again: which .venv
source "$root/launch/env.sh"
cd "$root"
export PATH="$venv/bin:$PATH"
if ((${#extras[@]})) && ! python -m pip install --quiet --disable-pip-version-check "${extras[@]}"; then
    say "${extras[*]} could not be installed (above); what needs it will be skipped"
fi

if [[ -n "$builds_docs" ]] && ! "$root/launch/docs.sh" install; then
    say "--with docs: mkdocs-material could not be installed (above); the site will not be built"
    builds_docs=""
fi

if (($#)); then exec python -m pytest "$@"; fi

# Each worker of the unit tier imports torch, transformers, Megatron and vLLM: seconds, and 2 GB.
workers="$(env -u OMP_NUM_THREADS nproc)" # with it nproc counts threads
if ((workers > 8)); then workers=8; fi
# Hundreds of processes are started. Each would compile what it imports of this repository.
unset PYTHONDONTWRITEBYTECODE

failed=() failed_lints=0
reports="$(mktemp -d)"
trap 'rm -rf "$reports"' EXIT
trap 'exit 130' INT # else Ctrl-C ends one tier and the next one begins

# section NAME COMMAND...: runs the command under a heading and remembers a failure, so that one run shows all of them.
section() {
    local name="$1" started=$SECONDS
    shift
    heading "$name"
    if ! "$@"; then failed+=("$name"); fi
    say "($name: $((SECONDS - started)) s)"
}

# tier NAME PATH [OPTION...]: a part of the tests. They run in workers of xdist, even where one is enough: a test that ends its
# process then fails with its name, and the rest still run. A test has 600 s (pyproject.toml); where it hangs below Python its
# worker ends after 720, and a tier that hangs anywhere else ends too, after an hour.
tier() {
    local report="$reports/$1"
    shift
    if [[ -z "$(find "$1" -name 'test_*.py' -print -quit 2>/dev/null)" ]]; then
        say "no tests yet"
        return
    fi
    touch "$report.xml" "$report.log" # the first stays empty if pytest is killed, which then counts
    # In the background Ctrl-C would be ignored, and what the tests have started would live on. Not through a pipe: a process
    # that a test has left behind would hold it open.
    env --default-signal=INT timeout --foreground --kill-after=60 3600 python -m pytest "$@" \
        --durations=25 --durations-min=10 -o faulthandler_timeout=720 -o faulthandler_exit_on_timeout=true \
        --junitxml="$report.xml" >"$report.log" 2>&1 &
    tail --pid=$! --sleep-interval=0.3 --lines=+1 --follow "$report.log"
    wait $!
}

# start NAME PATH [OPTION...]: a tier that runs beside the others, until finish shows what it has printed.
declare -A in_background=()
start() {
    tier "$@" >/dev/null 2>&1 &
    in_background[$1]=$!
}

# finish NAME: wait for a tier that was started.
finish() {
    local status=0
    wait "${in_background[$1]}" || status=$?
    if [[ -f "$reports/$1.log" ]]; then cat "$reports/$1.log"; fi
    return "$status"
}

# memory_gib: what this machine has free, or a container may use.
memory_gib() {
    local kib limit
    kib="$(awk '/^MemAvailable/ {print $2}' /proc/meminfo)"
    for limit in /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes; do
        if [[ -f "$limit" && "$(<"$limit")" =~ ^[0-9]{1,15}$ ]]; then
            limit=$(($(<"$limit") / 1024))
            if ((limit < kib)); then kib=$limit; fi
        fi
    done
    say $((kib / 1024 / 1024))
}

if [[ "${RLHF_MCORE_STACK:-cpu}" == cpu ]]; then
    section "ruff" ruff check .
    section "mypy" mypy
    section "import-linter" lint-imports
fi
if [[ -n "$builds_docs" ]]; then section "docs (mkdocs, strict)" "$root/launch/docs.sh"; fi
failed_lints=${#failed[@]}
section "tests/gpu (skipped without a GPU)" tier gpu tests/gpu -n 1
section "tests/unit (on $workers cores)" tier unit tests/unit -n "$workers" --dist worksteal
# The others wait for much of their time: for ranks that start, for engines, for SLURM. So they run beside one another where
# there is memory: each takes up to 5 GB. The end-to-end tests are cut in two halves that take about as long (xdist would do it with
# --dist loadfile, but runs a test that has ended its worker again and again).
memory="$(memory_gib)"
runs=(resume asynchronous environments supervised_chain task_to_model three_way train_command)
runs=("${runs[@]/#/tests/e2e/test_}")
runs=("${runs[@]/%/.py}")
start slurm tests/slurm -n 1 -v
if ((memory >= 18)); then start distributed tests/distributed -n 1 -v; fi
section "tests/processes (workers, sandboxes, scripts)" tier processes tests/processes -n "$workers" --dist worksteal
section "tests/oracles (published functions of verl and TRL)" tier oracles tests/oracles -n 1
if ((memory < 18)); then section "tests/distributed (gloo, torchrun)" tier distributed tests/distributed -n 1 -v; fi
if ((memory >= 10)); then start e2e-runs "${runs[@]}" -n 1 -v; fi
section "tests/e2e (real vLLM)" tier e2e tests/e2e -n 1 -v "${runs[@]/#/--ignore=}"
if ((memory < 10)); then start e2e-runs "${runs[@]}" -n 1 -v; fi
section "tests/e2e (whole runs: killed, with environments, from a task to a model)" finish e2e-runs
if ((memory >= 18)); then section "tests/distributed (gloo, torchrun)" finish distributed; fi
section "tests/slurm (real SLURM; skipped without it)" finish slurm

heading "result"
if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}"
else
    say "all sections passed in $SECONDS s"
fi
python tools/count_tests.py --failed "$failed_lints" "$reports"/*.xml
exit $((${#failed[@]} > 0))
