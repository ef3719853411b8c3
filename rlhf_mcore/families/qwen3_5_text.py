"""Dense language models of Qwen3.5 (Qwen Team 2026): Qwen3-Next's layers without experts."""

from rlhf_mcore.families.base import Family
from rlhf_mcore.families.delta import DeltaNet
from rlhf_mcore.families.hybrid import APART, GATED_DECODER, GATED_FLAGS, HYBRID_SETTINGS, delta_net

FAMILY = Family(
    "qwen3_5_text",
    "Qwen3_5",
    GATED_DECODER + delta_net("delta", **APART),
    megatron=HYBRID_SETTINGS,
    head_dim=256,
    delta=DeltaNet(),
    flags={"attention_bias": False, **GATED_FLAGS},
    rotates_partly=True,
    window_switch="use_sliding_window",
)
