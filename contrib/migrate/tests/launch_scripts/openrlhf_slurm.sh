#!/bin/bash
#SBATCH -N 4

# project settings
WORK_DIR=/openrlhf
JOBLOG="$(pwd)/train-$SLURM_JOB_ID.log"
export GPUS_PER_NODE=8
readonly training_script="train.sh"

cat > $training_script <<'EOF'
python3 -m openrlhf.cli.train_ppo_ray --something else
EOF

nodes_array=( $(scontrol show hostnames $SLURM_JOB_NODELIST | tr '\n' ' ') )
for ((i = 1; i < ${#nodes_array[@]}; i++)); do
    srun -w "${nodes_array[$i]}" ray start --address "$ip_head" --block &
    sleep 1s
done

srun --overlap --nodes=1 -J "submit" -- bash -c \
"pip install ray \
&& ray job submit --address=http://localhost:8265 -- python3 -m openrlhf.cli.train_ppo_ray \
   --actor.num_nodes 4 --actor.num_gpus_per_node $GPUS_PER_NODE \
   --actor.model_name_or_path models/Llama-3-8B \
   --algo.advantage.estimator rloo --rollout.n_samples_per_prompt 4 \
   --rollout.batch_size 256 --train.batch_size 256 --rollout.max_new_tokens 1024 --data.max_len 2048 \
   --data.prompt_dataset data/prompts.parquet \
   --ckpt.output_dir $WORK_DIR/out" &>> ${JOBLOG}
