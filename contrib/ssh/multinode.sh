#!/usr/bin/env bash
# Trains on several machines over ssh, where there is no SLURM:
#
#   ./contrib/ssh/multinode.sh --hosts node1,node2 --ranks-per-node 8 CONFIG [a.b=c ...]
#
# The hosts see this directory under the same path and let this user in without a password. Signals to this script reach
# every rank; when it ends, or its connection to a host breaks, the ranks there end too. `--help` has the other options.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch/node.sh" rlhf_mcore.cli.main multinode "$@"
