"""A tiny model of every family, with random weights, and the text files that a run of it needs."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=None,  # in transformers the embedding of a padding token gets no gradient
)
_ROPE = dict(rope_type="default", rope_theta=10000.0)
_YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 64}
_DELTA = dict(
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=64,  # 64 or 128 for keys and for values; vLLM's CPU kernels support no other sizes
    linear_value_head_dim=64,
    full_attention_interval=2,
)
# The head sizes of the published models, because vLLM's kernels of latent attention support no others.
_LATENT = dict(
    rope_parameters={**_YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    q_lora_rank=24,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    head_dim=None,
    num_key_value_heads=4,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    moe_intermediate_size=64,
)
# Keys of config.json in addition to SIZES; None removes a key of SIZES. Each model contains every kind of parameter of its family.
TINY: dict[str, dict[str, Any]] = {
    "llama": dict(tie_word_embeddings=False),
    "mistral": dict(sliding_window=None),
    "qwen2": dict(head_dim=None, tie_word_embeddings=True),
    "qwen3": dict(tie_word_embeddings=True),
    "olmo2": dict(head_dim=None),
    "olmo3": dict(head_dim=None, sliding_window=5),
    "seed_oss": dict(attention_dropout=0.0),
    "ernie4_5": dict(tie_word_embeddings=True),
    "smollm3": dict(head_dim=None, no_rope_layers=[1, 0, 1, 0]),
    "exaone4": dict(sliding_window=5),
    "phi3": dict(head_dim=None),
    "glm4": dict(attention_bias=True),
    "gemma3_text": dict(sliding_window=5, sliding_window_pattern=3, query_pre_attn_scalar=24),
    "gemma4_text": dict(
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2,
        global_head_dim=64,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=4.0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=64,
    ),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen2_moe": {**_SHARED, "head_dim": None},
    "olmoe": {**_EXPERTS, "head_dim": None, "rms_norm_eps": 1e-5},
    "minimax_m2": dict(
        num_local_experts=4, num_experts_per_tok=2, rotary_dim=16, scoring_func="sigmoid", use_routing_bias=True
    ),
    "qwen3_moe": dict(_EXPERTS),
    "glm4_moe": dict(
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
    "gpt_oss": dict(
        sliding_window=5,
        rms_norm_eps=1e-5,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={**_YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    ),
    "nemotron_h": dict(
        layers_block_type=["linear_attention", "mlp", "full_attention", "moe"] * 2,
        time_step_min=1e-30,  # a limit that only transformers has, and only for prompts
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=4,
        ssm_state_size=32,
        chunk_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64,
        layer_norm_epsilon=1e-6,
    ),
    "deepseek_v2": {
        **_LATENT,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    },
    # A rotation without scaling, as in Moonlight.
    "deepseek_v3": {**_LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_parameters": _ROPE},
    "deepseek_v32": {
        **_LATENT,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 8,
    },
    "glm_moe_dsa": {
        **_LATENT,
        "rope_parameters": _ROPE,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 8,
        "index_topk_freq": 2,
        "index_skip_topk_offset": 3,
        "indexer_rope_interleave": True,
    },
    "glm4_moe_lite": {**_LATENT, "rope_parameters": _ROPE, "n_group": 1, "topk_group": 1},
    "qwen3_next": {**_SHARED, **_DELTA},
    "qwen3_5_text": {**_DELTA, "linear_num_value_heads": 4},
    "qwen3_5_moe_text": {**_SHARED, **_DELTA},
}
# vLLM's CPU kernels for these families support only this dtype.
IN_BF16 = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
QUICK = ("qwen3", "qwen3_moe", "deepseek_v3")  # one family of each kind: dense, experts, latent attention


def make_model(family: str, directory: Path) -> None:
    """Write a model with random weights in fp32, and its tokenizer.

    Norms differ from one and biases from zero, so that a missing norm or bias changes the outputs.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    settings = {**SIZES, **TINY[family]}
    config = AutoConfig.for_model(
        family, **{key: value for key, value in settings.items() if key != "head_dim" or value}
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(std=0.1)
    model.save_pretrained(directory)
    _make_tokenizer(directory)


def _make_tokenizer(directory: Path) -> None:
    """Write a tokenizer with one token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", *string.ascii_letters, *string.digits, *string.punctuation]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names[: SIZES["vocab_size"]])}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)


def make_run(family: str, folder: Path, *, on_cuda: bool) -> Path:
    """Write model, prompts and reward of a family into ``folder``. Returns the configuration of a run with them."""
    make_model(family, folder / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(10, 14)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "reward.py").write_text(_REWARD, encoding="utf-8")
    dtype = "bf16" if on_cuda or family in IN_BF16 else "fp32"
    (path := folder / "run.yaml").write_text(_RUN.format(folder=folder, dtype=dtype), encoding="utf-8")
    return path


# The scores of a prompt's responses must differ. Otherwise there is no gradient.
_REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return (sum(map(ord, solution_str)) % 17) / 16
"""
_RUN = """\
project: certificate
experiment: run
output_dir: {folder}
deterministic: true
model: {{path: {folder}/model, dtype: {dtype}}}
# A large eps keeps the first update smooth in the gradient.
actor: {{optimizer: {{lr: 1.0e-3, eps: 1.0e-3}}, moe: {{aux_loss_coef: 0}}, offload: never}}
rollout:
  engine: vllm
  kv_cache_gib: 0.02
  gpu_memory_utilization: 0.1
  max_num_seqs: 16
  sampling: {{n: 2, max_new_tokens: 12}}
algorithm: {{preset: grpo, loss_aggregation: token, kl: {{coef: 0}}, rollout_correction: {{mode: "off"}}}}
reward: {{function: "{folder}/reward.py:score"}}
data: {{train: [{folder}/train.jsonl], prompt_key: prompt, answer_key: answer, apply_chat_template: false, max_prompt_tokens: 16}}
trainer: {{num_steps: 4, prompts_per_step: 4, minibatch_size: 4, max_tokens_per_microbatch: 128}}
bridge: {{verify: digest, canary: true}}
checkpoint: {{save_steps: 1, save_total_limit: null}}
logging: {{console: plain, trackers: []}}
"""
