"""The command ``convert``: convert a model from one format to another. Start reading at ``conversion``."""

SUMMARY = "convert a model between formats: Hugging Face, Megatron, FSDP, our checkpoints"
