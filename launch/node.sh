#!/usr/bin/env bash
# Runs a module of the package on this node, in the repository's environment: launch/node.sh MODULE [ARGUMENT...].
# For srun and ssh, which start with an environment of their own. The working directory stays the caller's.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Nodes talk over the network, so env.sh must not tie them to the loopback; the agent finds the interface.
export RLHF_MCORE_ONE_MACHINE=0
source "$root/launch/env.sh"
python="${RLHF_MCORE_PYTHON:-$venv/bin/python}"
# In the image the package is installed for everybody.
if [[ ! -x "$python" ]]; then python="$(command -v python3)" || fail "no Python: run $root/launch/setup.sh first"; fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m "$@"
