#!/usr/bin/env bash
# Trains on several machines over ssh, without SLURM:
#
#   ./contrib/ssh/multinode.sh --hosts node1,node2 --ranks-per-node 8 CONFIG [a.b=c ...]
#
# The hosts need this directory under the same path, and ssh login without a password. Signals to this script reach every
# rank. If the script ends or its connection to a host breaks, the ranks on the host end too. `--help` lists the other options.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../../launch/node.sh" rlhf_mcore.cli.main multinode "$@"
