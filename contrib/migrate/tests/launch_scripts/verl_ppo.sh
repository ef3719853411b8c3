set -x
train_files="['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']"
test_files="['$HOME/data/gsm8k/test.parquet', '$HOME/data/math/test.parquet']"

PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \
 algorithm.adv_estimator=gae \
 data.train_files="$train_files" \
 data.val_files="$test_files" \
 data.train_batch_size=1024 \
 data.max_prompt_length=1024 \
 data.max_response_length=512 \
 actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat \
 actor_rollout_ref.actor.optim.lr=1e-6 \
 actor_rollout_ref.actor.ppo_mini_batch_size=256 \
 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
 actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
 critic.optim.lr=1e-5 \
 critic.optim.lr_warmup_steps_ratio=0.05 \
 critic.model.path=deepseek-ai/deepseek-llm-7b-chat \
 critic.model.enable_gradient_checkpointing=True \
 critic.ppo_micro_batch_size_per_gpu=8 \
 algorithm.use_kl_in_reward=True \
 algorithm.kl_ctrl.kl_coef=0.001 \
 trainer.critic_warmup=10 \
 trainer.logger=['console'] \
 trainer.n_gpus_per_node=8 \
 trainer.total_epochs=15 2>&1 | tee verl_demo.log
