"""Text models of Gemma 4 (Google 2026): wide heads in layers that attend to all tokens, scaled layers, bounded logits."""

from rlhf_mcore.families.base import QK_NORM, SANDWICH_DECODER, Family
from rlhf_mcore.families.beside_mlp import MixtureBesideMLP, with_experts_beside_mlp
from rlhf_mcore.families.wide import LAYER_SCALE, WindowsAndWideHeads, with_wide_heads

FAMILY = Family(
    "gemma4_text",
    "Gemma4",
    with_experts_beside_mlp(with_wide_heads(SANDWICH_DECODER + QK_NORM)) + LAYER_SCALE,
    megatron={"qk_layernorm": True, "softmax_scale": 1.0},
    head_dim=256,
    mixture=MixtureBesideMLP(),
    experts_beside_mlp=True,
    flags={"attention_bias": False},
    numbers={"num_kv_shared_layers": 0},
    stated={"hidden_size_per_layer_input": 0},
    norms="both",
    norm_of_values=True,
    scales_layers=True,
    activation="gelu_pytorch_tanh",
    tied=True,
    scales_embeddings=True,
    logit_cap_key="final_logit_softcapping",
    rotates_proportionally=True,
    windows=WindowsAndWideHeads(every=6),
)
