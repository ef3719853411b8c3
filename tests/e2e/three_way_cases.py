"""Models, engines and layouts of test_three_way.py. Nothing heavy is imported, because every tier collects that file."""

from __future__ import annotations

from importlib.util import find_spec

from rlhf_mcore.config.schema import RolloutLayoutConfig

# Engine layouts with more than a tensor-parallel size.
GRIDS = {
    "ep2": RolloutLayoutConfig(tp=2, ep=2),
    "pp2": RolloutLayoutConfig(pp=2),
    "dp2": RolloutLayoutConfig(dp=2, ep=2),
    "pp2_dp2_cut": RolloutLayoutConfig(pp=2, dp=2),  # both groups split the experts
}
Width = int | str
# vLLM's module of Qwen3.5 imports its vision tower, which needs torchvision. The CPU stack does not contain it.
DELTA_NETS = ("qwen3_next", *(["qwen3_5_text"] if find_spec("torchvision") else []))
# Model and layout of its engines, every family once. An engine starts once and receives the weights of every layout.
ENGINES: tuple[tuple[str, Width], ...] = (
    ("llama_rope3", "pp2"),
    ("mistral", 2),
    ("qwen2_yarn", 1),
    ("qwen3_seven", 2),
    ("qwen3_tied", 4),
    ("olmo2", 2),
    ("gemma3_text", 2),
    ("qwen3_moe_mixed", "pp2_dp2_cut"),
    ("qwen2_moe", "ep2"),
    ("mixtral", "dp2"),
    ("glm4_moe", 1),
    ("gpt_oss", 2),
    ("gemma4_text_moe", 2),
    ("deepseek_v3_heads", 2),
    ("nemotron_h_dense", 2),
    *((model, 2) for model in DELTA_NETS),
)
# Layers with a different packing than in other models.
FURTHER = (
    "olmo2",
    "gemma3_text",
    "glm4_moe",
    "gpt_oss",
    "gemma4_text_moe",
    "deepseek_v3_heads",
    "nemotron_h_dense",
    *DELTA_NETS,
)
EXPERTS = (
    "qwen3_moe_mixed",
    "qwen2_moe",
    "mixtral",
    "glm4_moe",
    "gpt_oss",
    "gemma4_text_moe",
    "deepseek_v3_heads",
    "qwen3_next",
)
# On a CPU, vLLM's kernels for latent attention and gated delta nets support no other dtype.
IN_BF16 = ("deepseek_v3_heads", *DELTA_NETS)
# Layouts of the trainer (tests/distributed/setting.py) whose weights engines receive.
UNEVEN_LAYOUTS = ("pp2_dp2_uneven", "pp2_vpp2_dp2_uneven", "tp2_pp2_vpp2_sp_uneven", "pp4_uneven")
DENSE_LAYOUTS = ("tp2_dp2_sp", "pp2_vpp2_dp2", "tp2_pp2", "tp4", "pp4")
OTHER_DENSE_LAYOUTS = ("dp4", "pp2_dp2", "tp2_pp2_vpp2_sp", "tp4_sp")
EXPERT_LAYOUTS = ("ep4_dp4", "tp2_sp_ep2_etp1_dp2", "tp2_sp_pp2_ep2_etp1", "pp2_ep2_dp2_uneven")
FEW_LAYOUTS_OF_DENSE, FEW_LAYOUTS_OF_EXPERTS = DENSE_LAYOUTS[:2], ("tp2_sp_ep2_etp1_dp2", "pp2_ep2_dp2_uneven")
# The ranks of an engine spin while they wait, which is slow on shared cores. They generate only for these layouts.
FEW_LAYOUTS = (
    "dp4",
    "pp2_vpp2_dp2",
    "tp2_pp2",
    "tp2_pp2_vpp2_sp_uneven",
    "tp2_sp_ep2_etp1_dp2",
    "pp2_ep2_dp2_uneven",
)


def layouts(model: str) -> tuple[str, ...]:
    """Return the layouts whose weights the engine of a model receives."""
    if model in EXPERTS:
        return (
            FEW_LAYOUTS_OF_EXPERTS if model in ("glm4_moe", "gemma4_text_moe", "deepseek_v3_heads") else EXPERT_LAYOUTS
        )
    if model == "qwen3_seven":
        return UNEVEN_LAYOUTS
    if model == "qwen3_tied":
        return OTHER_DENSE_LAYOUTS
    return FEW_LAYOUTS_OF_DENSE if model in ("olmo2", "gemma3_text", "nemotron_h_dense") else DENSE_LAYOUTS


def generates(layout: str, tp: Width) -> bool:
    """Return whether an engine generates with the weights of a layout."""
    return tp == 1 or layout in FEW_LAYOUTS
