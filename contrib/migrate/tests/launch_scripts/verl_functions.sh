#!/bin/bash
set -euo pipefail
trap 'echo failed' ERR

log() { echo "[$(date '+%F %T')] $*"; }

usage() {
    echo "usage: $0 [--gpus N]" >&2
    exit 1
}

gpus=4
while [[ $# -gt 0 ]]; do
    case "$1" in
        --gpus) gpus="$2"; shift 2 ;;
        -h|--help) usage ;;
        *) break ;;
    esac
done

build_args() {
    local model=$1 batch=$2
    ARGS=(
        data.train_files=data/train.parquet
        data.train_batch_size=${batch}
        actor_rollout_ref.model.path=${model}
        actor_rollout_ref.actor.ppo_mini_batch_size=$((batch / 4))
        trainer.n_gpus_per_node=${gpus}
    )
}

case "${SIZE:-small}" in
    small) model=models/Qwen2.5-7B batch=128 ;;
    large) model=models/Qwen2.5-32B batch=512 ;;
    *) usage ;;
esac

[ -d logs ] || mkdir -p logs
[[ -n "${WANDB_API_KEY:-}" ]] && LOGGER="['console','wandb']" || LOGGER="['console','tensorboard']"

main() {
    log "training $model"
    build_args "$model" "$batch"
    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo "${ARGS[@]}" \
        actor_rollout_ref.rollout.n=4 trainer.logger="$LOGGER" "$@" > logs/run.txt
}
main "$@"
