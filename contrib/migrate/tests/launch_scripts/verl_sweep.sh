#!/bin/bash
# one run for each learning rate
for lr in 1e-6 5e-7; do
  for seed in {1..2}; do
    name=lr_${lr}
    python3 -m verl.trainer.main_ppo \
      algorithm.adv_estimator=reinforce_plus_plus_baseline \
      data.train_files=data/train.parquet data.train_batch_size=128 data.max_response_length=2048 \
      actor_rollout_ref.model.path=models/Qwen2.5-7B actor_rollout_ref.rollout.n=8 \
      actor_rollout_ref.actor.ppo_mini_batch_size=64 \
      actor_rollout_ref.actor.optim.lr=$lr \
      actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \
      trainer.experiment_name=$name || exit 1
  done
done
