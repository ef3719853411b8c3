set -x

read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \
   --save_path ./checkpoint/llama3-8b-dpo \
   --train_batch_size 256 \
   --micro_train_batch_size 1 \
   --pretrain models/Llama-3-8B \
   --bf16 \
   --max_epochs 1 \
   --max_len 2048 \
   --learning_rate 5e-7 \
   --beta 0.15 \
   --label_smoothing 0.1 \
   --nll_loss_coef 0.2 \
   --dataset data/pairs.parquet \
   --apply_chat_template \
   --chosen_key better \
   --rejected_key worse \
   --packing_samples \
   --gradient_checkpointing
EOF

deepspeed --module $training_commands
