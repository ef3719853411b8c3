#!/usr/bin/env bash
set -xeuo pipefail

# every value may come from the environment
NNODES=${NNODES:-2}
GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
DATA_HOME=${DATA_HOME:-"${HOME}/verl"}
MODEL_PATH=${MODEL_PATH:-"${DATA_HOME}/models/Qwen2.5-7B"}
TRAIN_FILE=${TRAIN_FILE:-"${DATA_HOME}/data/train.parquet"}
TEST_FILE=${TEST_FILE:-"['${DATA_HOME}/data/aime.parquet', '${DATA_HOME}/data/math.parquet']"}
project_name=${PROJECT:-defaults}
exp_name="${project_name}-$(basename "$MODEL_PATH")"
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
max_tokens=$(((max_prompt_length + max_response_length) * 2))

python3 -m verl.trainer.main_ppo \
    data.train_files="${TRAIN_FILE}" data.val_files="${TEST_FILE}" \
    data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} \
    data.train_batch_size=64 data.truncation='left' \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${max_tokens} \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    trainer.nnodes="${NNODES}" trainer.n_gpus_per_node="${GPUS_PER_NODE}" \
    trainer.project_name="${project_name}" trainer.experiment_name="${exp_name}" \
    trainer.default_local_dir="${CKPTS_DIR:-${DATA_HOME}/ckpts/${project_name}/${exp_name}}" \
    trainer.total_training_steps=200 trainer.resume_mode=auto
