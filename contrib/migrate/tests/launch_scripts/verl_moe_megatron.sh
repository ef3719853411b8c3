set -x
# ---- model
HF_MODEL=${1:-models/Qwen3-30B-A3B}
declare -A LAYOUT=([tp]=4 [pp]=2 [ep]=8 [etp]=1)
common_args=(
    algorithm.adv_estimator=grpo
    data.train_files=data/dapo.parquet
    data.train_batch_size=128   # prompts
    data.max_prompt_length=1024
    data.max_response_length=3072
)
layout_args=(
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${LAYOUT[tp]}
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=${LAYOUT[pp]}
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=${LAYOUT[ep]}
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=${LAYOUT[etp]}
)
if [[ "${OFFLOAD:-true}" == true ]]; then
    common_args+=(
        actor_rollout_ref.actor.megatron.param_offload=True
        actor_rollout_ref.actor.megatron.optimizer_offload=True
    )
fi

python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer \
    "${common_args[@]}" \
    "${layout_args[@]}" \
    actor_rollout_ref.model.path="$HF_MODEL" \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.clip_ratio_low=3e-4 actor_rollout_ref.actor.clip_ratio_high=4e-4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    trainer.nnodes=4 trainer.n_gpus_per_node=8 "${@:2}"
