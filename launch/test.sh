#!/usr/bin/env bash
# Installs what is missing, then lints and runs every tier of tests.
#
#   ./launch/test.sh                     everything
#   ./launch/test.sh tests/unit -k clip  pytest alone, with these arguments
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

"$root/launch/setup.sh"
source "$root/launch/env.sh"
cd "$root"
export PATH="$venv/bin:$PATH"

if (($#)); then exec python -m pytest "$@"; fi

failed=()

# section NAME COMMAND...: runs the command under a heading and remembers a failure, so that one run shows all of them.
section() {
    local name="$1" started=$SECONDS
    shift
    heading "$name"
    if ! "$@"; then failed+=("$name"); fi
    say "($name: $((SECONDS - started)) s)"
}

# tier FOLDER: the tests of one tier.
tier() {
    if [[ -z "$(find "$1" -name 'test_*.py' -print -quit)" ]]; then
        say "no tests yet"
        return
    fi
    python -m pytest "$1"
}

section "ruff" ruff check .
section "mypy" mypy
section "import-linter" lint-imports
section "tests/unit (no processes)" tier tests/unit
section "tests/distributed (gloo, torchrun)" tier tests/distributed
section "tests/e2e (real vLLM)" tier tests/e2e
section "tests/gpu (skipped without a GPU)" tier tests/gpu

heading "result"
if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
say "all sections passed in $SECONDS s"
