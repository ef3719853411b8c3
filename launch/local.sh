#!/usr/bin/env bash
# Trains on this machine: launch/local.sh CONFIG [a.b=c ...]. Run launch/setup.sh first.
#
# The world size is trainer.world_size, else the smallest world size that the layouts allow. A failed run is restarted at most
# trainer.max_restarts times. Exit code 75: the run was saved before its end; the same command continues it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$root/launch/env.sh"

python="${RLHF_MCORE_PYTHON:-$venv/bin/python}"
[[ -x "$python" ]] || fail "no Python in $venv: run ./launch/setup.sh first"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m rlhf_mcore.cli.main train "$@"
