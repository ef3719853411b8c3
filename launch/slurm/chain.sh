#!/usr/bin/env bash
# Submits jobs of which each starts when the one before it has ended well, and prints their numbers. Stages are separated by --,
# and the options before the first -- are those of all stages (see submit.sh):
#
#   ./launch/slurm/chain.sh --nodes 2 --gpus-per-node 8 --time 12:00:00 -- sft.yaml -- rm.yaml -- ppo.yaml model.path=outputs/my/sft/latest/actor
#
# A stage may have options of its own: -- ppo.yaml --nodes 4. A job that goes back into the queue is not over, so those after it wait.
set -euo pipefail
submit="$(dirname "${BASH_SOURCE[0]}")/submit.sh"

common=()
while (($#)) && [[ "$1" != -- ]]; do
    common+=("$1")
    shift
done
if ! (($#)); then
    sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}" >&2
    exit 2
fi

# Every stage is tried without submitting first: a mistake in the last one must not be found when the first is in the queue.
previous=""
for mode in --dry-run ""; do
    stages=("$@")
    while ((${#stages[@]})); do
        stages=("${stages[@]:1}") # the --
        stage=()
        while ((${#stages[@]})) && [[ "${stages[0]}" != -- ]]; do
            stage+=("${stages[0]}")
            stages=("${stages[@]:1}")
        done
        if [[ -n "$mode" ]]; then
            "$submit" "${common[@]}" "${stage[@]}" --dry-run >/dev/null
            continue
        fi
        # An afterok that can no longer come true ends the rest of the chain.
        previous="$("$submit" "${common[@]}" "${stage[@]}" ${previous:+--dependency "afterok:$previous"})"
        printf '%s\n' "$previous"
    done
done
