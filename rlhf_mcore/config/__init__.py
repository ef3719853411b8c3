"""Configuration: the typed tree (schema), reading it (load), its derived values (resolve) and its checks (validate).

Nothing here imports torch, transformers, megatron or vllm. Nor is anything imported here: a worker of rewards needs none of the tree.
"""
