#!/bin/bash
#SBATCH --job-name=verl
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
nodes_array=($nodes)
head_node=${nodes_array[0]}
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)
if [[ "$head_node_ip" == *" "* ]]; then
    IFS=' ' read -ra ADDR <<<"$head_node_ip"
    head_node_ip=${ADDR[0]}
fi
port=6379
srun --nodes=1 --ntasks=1 -w "$head_node" docker exec train \
    ray start --head --node-ip-address="$head_node_ip" --port=$port --block &
sleep 10
worker_num=$((SLURM_JOB_NUM_NODES - 1))
for ((i = 1; i <= worker_num; i++)); do
    srun --nodes=1 -w "${nodes_array[$i]}" ray start --address "$head_node_ip:$port" --block &
done
until ray status; do sleep 5; done

srun --overlap --nodes=1 -w "$head_node" bash -c "
    cd $HOME/verl && python3 -m verl.trainer.main_ppo \
        algorithm.adv_estimator=grpo \
        data.train_files=$HOME/data/train.parquet \
        data.train_batch_size=256 \
        actor_rollout_ref.model.path=models/Qwen2.5-7B \
        actor_rollout_ref.rollout.n=5 \
        trainer.n_gpus_per_node=8 \
        trainer.nnodes=2 \
        trainer.experiment_name=slurm
"
