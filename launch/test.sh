#!/usr/bin/env bash
# Installs what is missing, then lints and runs tests.
#
#   ./launch/test.sh                       lint and the default tier: what a change needs before it is sent
#   ./launch/test.sh --full                every test; before a release, and before an issue is closed
#   ./launch/test.sh --full --shard 2/4    one of four shards of what neither the default tier nor CI runs every time
#   ./launch/test.sh --full --benchmarks   everything, and every benchmark with --quick
#   ./launch/test.sh --tiers default,ci    these tiers (tests/tiers.py)
#   ./launch/test.sh --with slurm --with browser --with docs --with megatron-latest
#                                          first install these, so that nothing skips: SLURM and Chromium with apt, the documentation's site,
#                                          and the Megatron-core of the GPU image, on which some tests run a second time
#   ./launch/test.sh tests/unit -k clip    pytest alone, with these arguments
#
# Time limits grow with the slowness of the machine, which is measured first. The last lines name every test that failed, with the
# first line of its message, then the reasons of skipped tests, then the sum of all tiers: "N passed, N failed, N skipped". A lint that
# fails counts as one failure.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# from_apt NAME PROGRAM PACKAGE...: install packages of the distribution. If that fails, the tests skip.
from_apt() {
    local name="$1" program="$2" log status=0
    shift 2
    if [[ -n "$(PATH="$PATH:/usr/sbin" command -v "$program")" ]]; then return; fi
    if ! command -v apt-get >/dev/null || [[ "$(id -u)" != 0 ]]; then
        say "--with $name: installing it needs root and apt; its tests will be skipped"
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
        say "--with $name: apt could not install it (see above); its tests will be skipped"
    fi
    rm -f "$log"
}

extras=() setups=() tiers="" full="" shard="" builds_docs="" latest="" benchmarks=""
while (($#)); do
    case "$1" in
        --with)
            case "${2:-}" in
                slurm) from_apt slurm slurmctld slurm-wlm munge ;;
                browser) from_apt browser chromium chromium && extras+=("playwright==1.65.2") ;;
                docs) builds_docs=yes ;;
                megatron-latest) latest=yes setups=(--with megatron-latest) ;;
                *) fail "--with ${2:-}: slurm, browser, docs and megatron-latest can be installed" ;;
            esac
            shift 2
            ;;
        --full) full=yes && shift ;;
        --tiers) tiers="${2:?--tiers needs names: default, ci, full}" && shift 2 ;;
        --shard) shard="${2:?--shard needs K/N, for example 2/4}" && shift 2 ;;
        --benchmarks) benchmarks=yes && shift ;;
        *) break ;;
    esac
done
if [[ -z "$tiers" && -n "$shard" ]]; then tiers=full; fi
if [[ -z "$tiers" ]]; then tiers="default${full:+,ci,full}"; fi

"$root/launch/setup.sh" "${setups[@]}"
if [[ -n "$benchmarks" ]]; then "$root/launch/setup.sh" --with bench; fi # TRL, for benchmarks/vs_trl.py
source "$root/launch/env.sh"
cd "$root"
export PATH="$venv/bin:$PATH"
if ((${#extras[@]})) && ! python -m pip install --quiet --disable-pip-version-check "${extras[@]}"; then
    say "${extras[*]} could not be installed (see above); tests that need it will be skipped"
fi

if [[ -n "$builds_docs" ]] && ! "$root/launch/docs.sh" install; then
    say "--with docs: mkdocs-material could not be installed (see above); the site will not be built"
    builds_docs=""
fi

RLHF_MCORE_TEST_SLOWNESS="${RLHF_MCORE_TEST_SLOWNESS:-$(python -m tests.machine_speed)}"
export RLHF_MCORE_TEST_SLOWNESS
# limit SECONDS: scaled by the slowness of the machine.
limit() { awk -v s="$1" -v f="$RLHF_MCORE_TEST_SLOWNESS" 'BEGIN { printf "%d", s * f }'; }

if (($#)); then exec python -m pytest --timeout="$(limit 600)" "$@"; fi

# Each worker of the unit tier imports torch, transformers, Megatron and vLLM: seconds, and 2 GB.
workers="$(env -u OMP_NUM_THREADS nproc)" # with it nproc counts threads
if ((workers > 8)); then workers=8; fi
# Hundreds of processes are started. Each would compile what it imports of this repository.
unset PYTHONDONTWRITEBYTECODE

failed=() failed_lints=0
reports="${RLHF_MCORE_TEST_REPORTS:-}" # a folder that keeps the JUnit files, for tools/test_costs.py
if [[ -z "$reports" ]]; then
    reports="$(mktemp -d)"
    trap 'rm -rf "$reports"' EXIT
fi
mkdir -p "$reports"
trap 'exit 130' INT # else Ctrl-C ends one tier and the next one begins

# section NAME COMMAND...: runs the command under a heading and remembers a failure, so that one run shows all of them.
section() {
    local name="$1" started=$SECONDS
    shift
    heading "$name"
    if ! "$@"; then failed+=("$name"); fi
    say "($name: $((SECONDS - started)) s)"
}

# run_tests NAME PATH... [OPTION...]: the chosen tests of some folders, one folder after the other. They run in workers of xdist, even if one is
# enough: a test that ends its process then fails with its name, and the rest still run. A test that hangs below Python ends its worker
# after 720 s, and a section that hangs anywhere else ends after an hour; both limits are scaled.
# shellcheck disable=SC2329 # section calls it
run_tests() {
    local report="$reports/$1" status=0
    shift
    touch "$report.xml" "$report.log" # the first stays empty if pytest is killed, which then counts
    # In the background Ctrl-C would be ignored, and what the tests have started would live on. Not through a pipe: a process
    # that a test has left behind would hold it open.
    env --default-signal=INT timeout --foreground --kill-after=60 "$(limit 3600)" python -m pytest "$@" \
        --timeout="$(limit 600)" --durations=10 --durations-min=10 \
        -o faulthandler_timeout="$(limit 720)" -o faulthandler_exit_on_timeout=true \
        --junitxml="$report.xml" >"$report.log" 2>&1 &
    tail --pid=$! --sleep-interval=0.3 --lines=+1 --follow "$report.log"
    wait $! || status=$?
    return $((status == 5 ? 0 : status)) # 5: none of the chosen tests is here
}

choice=(--tier "$tiers")
if [[ -n "$shard" ]]; then choice+=(--shard "$shard"); fi
say "tiers $tiers${shard:+, shard $shard of tier full}; time limits are scaled by $RLHF_MCORE_TEST_SLOWNESS, the slowness of this machine"
if [[ ",$tiers," == *,default,* ]]; then
    section "ruff" ruff check .
    section "mypy" mypy
    section "import-linter" lint-imports
fi
if [[ -n "$builds_docs" ]]; then section "docs (mkdocs, strict)" "$root/launch/docs.sh"; fi
failed_lints=${#failed[@]}
section "tests/gpu (skipped without a GPU)" run_tests gpu tests/gpu -n 1 "${choice[@]}"
section "tests/unit, tests/oracles (on $workers cores)" run_tests unit tests/unit tests/oracles -n "$workers" --dist worksteal "${choice[@]}"
section "tests/processes (commands, workers, sandboxes)" run_tests processes tests/processes -n "$workers" --dist worksteal "${choice[@]}"
section "tests/distributed (gloo, torchrun)" run_tests distributed tests/distributed -n 1 -v "${choice[@]}"
section "tests/e2e (real vLLM)" run_tests e2e tests/e2e -n 1 -v "${choice[@]}"
section "contrib (plug-ins)" run_tests contrib contrib -n 1 -v "${choice[@]}"
section "tests/slurm (real SLURM; skipped without it)" run_tests slurm tests/slurm -n 1 -v "${choice[@]}"
if [[ -n "$latest" ]]; then
    export PYTHONPATH="$venv/megatron-latest${PYTHONPATH:+:$PYTHONPATH}"
    section "the Megatron-core of the GPU image: tests/unit" run_tests megatron-latest-unit tests/unit/mcore tests/unit/platform \
        -n "$workers" --dist worksteal --tier default
    section "the Megatron-core of the GPU image: tests/distributed" run_tests megatron-latest-distributed tests/distributed/test_layers.py \
        -n 1 -v --tier default
    unset PYTHONPATH
fi
if [[ -n "$benchmarks" ]]; then section "benchmarks" python -m benchmarks.run --quick; fi

heading "result"
if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}"
else
    say "all sections passed in $SECONDS s"
fi
python tools/count_tests.py --failed "$failed_lints" "$reports"/*.xml
exit $((${#failed[@]} > 0))
