"""Configuration: the typed tree (schema), reading it (load), its derived values (resolve) and its checks (validate).

No module here imports torch, transformers, megatron or vllm. This file imports nothing, because reward workers do not need the
tree.
"""
