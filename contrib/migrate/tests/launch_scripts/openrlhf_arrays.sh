#!/bin/bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export MODEL_PATH="${MODEL_PATH:-models/Llama-3-8B}"
SAVE_PATH="${SAVE_PATH:-./exp/dapo}"

CKPT_ARGS=(
   --actor.model_name_or_path "${MODEL_PATH}"
   --ckpt.output_dir "${SAVE_PATH}"
   # --ckpt.load_enable
)
ROLLOUT_ARGS=(
   --rollout.batch_size 128
   --rollout.n_samples_per_prompt 8
   --train.batch_size 1024
   --train.dynamic_batch_enable
   --train.max_tokens_per_gpu 16192
   --data.max_len 8192
   --rollout.max_new_tokens 7168
)
DAPO_ARGS=(
   --algo.dynamic_filtering_enable
   --algo.dynamic_filtering_range 0.0 1.0
   --actor.eps_clip_low_high 0.2 0.28
   --reward.overlong_buffer_len 1024
   --reward.overlong_penalty_factor 0.5
   --algo.advantage.estimator reinforce_baseline
   --algo.kl.init_coef 0
)
if [[ -n "${WANDB_KEY:-}" ]]; then
   CKPT_ARGS+=(--logger.wandb.key "$WANDB_KEY")
fi

ray start --head --num-gpus 8
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \
   ${CKPT_ARGS[@]} \
   ${ROLLOUT_ARGS[@]} \
   "${DAPO_ARGS[@]}" \
   --data.prompt_dataset "data/a.jsonl,data/b.jsonl" --data.input_key prompt --actor.num_gpus_per_node 8
