"""Nemotron-H (NVIDIA 2025, arXiv 2504.03624) and Nemotron 3 Nano (arXiv 2512.20848): one block per layer, mostly state spaces."""

from rlhf_mcore.families.base import Family
from rlhf_mcore.families.mtp import MTP_KEY
from rlhf_mcore.families.one_block import FLAGS, OLD_KEYS, ONE_BLOCK_DECODER, BlockMixture, OneBlock

FAMILY = Family(
    "nemotron_h",
    "NemotronH",
    ONE_BLOCK_DECODER,
    one_block=OneBlock(),
    mixture=BlockMixture(),
    megatron={"gated_linear_unit": False},
    head_dim=128,
    rotates=False,
    norm_eps_key="layer_norm_epsilon",
    activation="relu2",
    flags={**FLAGS, "tie_word_embeddings": False},
    # vLLM multiplies the size of the shared expert by their number, and transformers does not.
    numbers={"n_shared_experts": 1, MTP_KEY: 0},
    absent=("moe_latent_size", *OLD_KEYS),
    window_switch="sliding_window",
    # transformers limits the time steps of prompts, but not of responses (huggingface/transformers#48989).
    of_transformers={"time_step_min": 1e-30},
)
