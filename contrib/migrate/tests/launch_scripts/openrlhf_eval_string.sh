#!/bin/sh
BASE="python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path models/Llama-3-8B"
OPTS="--algo.advantage.estimator reinforce --actor.num_gpus_per_node 4"
OPTS="$OPTS --rollout.batch_size 64 --train.batch_size 64 --data.max_len 1024 --rollout.max_new_tokens 512"
if [ "$DEBUG" = 1 ] && [ -f debug.env ]; then
  OPTS="$OPTS --train.seed 1"
else
  OPTS="$OPTS --train.seed 3"
fi
CMD="$BASE $OPTS --data.prompt_dataset data/p.jsonl"
echo $CMD
eval "$CMD"
