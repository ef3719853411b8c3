#!/usr/bin/env bash
# Trains on this machine: launch/local.sh CONFIG [a.b=c ...]. It needs what launch/setup.sh has installed.
#
# The world size is trainer.world_size or the fewest that the layouts need. A failed run is started again as often as
# trainer.max_restarts says. Exit code 75: saved before it was done; the same command goes on.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$root/launch/env.sh"

python="${RLHF_MCORE_PYTHON:-$venv/bin/python}"
[[ -x "$python" ]] || fail "no Python in $venv: run ./launch/setup.sh first"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m rlhf_mcore.cli.main train "$@"
