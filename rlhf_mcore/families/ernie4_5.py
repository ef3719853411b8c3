"""Dense language models of ERNIE 4.5 (Baidu 2025): Llama with pairs of neighbouring channels that rotate together."""

from rlhf_mcore.families.base import DECODER, Family

FAMILY = Family(
    "ernie4_5",
    "Ernie4_5",
    DECODER,
    megatron={"rotary_interleaved": True},
    head_dim=128,
    tied=True,
    flags={"use_bias": False},
)
