"""Configuration: the typed tree (schema), reading it (load), its derived values (derive) and its checks (validate).

Nothing here imports torch, transformers, megatron or vllm.
"""

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config

__all__ = ["Config", "ConfigError"]
