"""A model in one format enters, the same model in another leaves. Begin with ``conversion``."""

SUMMARY = "convert a model between formats: Hugging Face, Megatron, FSDP, our checkpoints"
