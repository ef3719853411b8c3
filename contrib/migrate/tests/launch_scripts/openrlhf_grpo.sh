set -x

MODEL=${MODEL:-models/Llama-3-8B}
python3 -m openrlhf.cli.train_ppo_ray \
   --actor.num_nodes 1 --actor.num_gpus_per_node 8 \
   --vllm.tensor_parallel_size 2 --train.colocate_all \
   --algo.kl.init_coef 1e-3 --algo.kl.use_loss --algo.kl.estimator k3 \
   --algo.advantage.estimator group_norm \
   --actor.model_name_or_path "$MODEL" \
   --reward.remote_url /openrlhf/reward_func.py \
   --ckpt.output_dir exp/grpo --ckpt.save_steps 20 --ckpt.save_hf \
   --train.micro_batch_size 8 --train.batch_size 128 \
   --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 \
   --data.max_len 2048 --data.max_samples 20000 \
   --ds.zero_stage 3 --ds.param_dtype bf16 \
   --actor.adam.lr 5e-7 \
   --data.prompt_dataset data/prompts.jsonl --data.input_key prompt --data.label_key answer \
   --data.apply_chat_template

# Enable tensor parallelism
#    --ds.tensor_parallel_size 2 \
