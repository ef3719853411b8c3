"""rlhf_mcore: reinforcement learning from feedback on Megatron-core, with vLLM rollouts in the same processes."""

__version__ = "0.1.0.dev0"
