set -x
MODEL=$HOME/models/Llama-3-8B

training_commands=$(cat <<EOF
openrlhf.cli.train_rm
   --ckpt.output_dir ./checkpoint/llama3-8b-rm
   --train.batch_size 256
   --train.micro_batch_size 1
   --model.model_name_or_path ${MODEL}
   --ds.param_dtype bf16
   --data.max_len 4096
   --adam.lr 9e-6
   --data.dataset data/pairs.parquet
   --data.apply_chat_template
   --data.chosen_key better
   --data.rejected_key worse
   --ds.packing_samples
   --train.seed 7
EOF
)
if [ "${1:-}" != "slurm" ]; then deepspeed --module $training_commands; fi
