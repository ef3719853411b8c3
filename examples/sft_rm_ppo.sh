#!/usr/bin/env bash
# From a base model to PPO in three runs: fine-tuning on right answers, a reward model on pairs, and PPO with this reward model.
# Run ./launch/quickstart.sh first.
#
#   ./examples/sft_rm_ppo.sh                       some minutes per run on two cores
#   ./examples/sft_rm_ppo.sh trainer.num_steps=5   further arguments override keys of all three runs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ! -d quickstart ]]; then
    printf 'error: there is no quickstart/; run ./launch/quickstart.sh first\n' >&2
    exit 2
fi

.venv/bin/rlhf-mcore train configs/quickstart/sft.yaml "$@"
.venv/bin/rlhf-mcore train configs/quickstart/reward_model.yaml model.path=outputs/quickstart/sft/latest/actor "$@"
.venv/bin/rlhf-mcore train configs/quickstart/ppo.yaml model.path=outputs/quickstart/sft/latest/actor reward.rules=[] \
    reward.model.path=outputs/quickstart/reward_model/latest/reward "$@"
.venv/bin/rlhf-mcore report outputs/quickstart/sft outputs/quickstart/reward_model outputs/quickstart/ppo --out sft_rm_ppo.html
