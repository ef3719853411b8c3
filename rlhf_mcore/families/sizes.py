"""Read the sizes of a model from its config.json: typed, within bounds, with transformers' defaults for missing keys."""

from __future__ import annotations

from rlhf_mcore.foreign import Fields

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Two to eight times the largest published values. Tables of layers, heads, experts and tokens are built before any
# weight is read. Beyond these bounds a damaged or malicious config.json would fill the machine's memory.
MAX_SIZES = {
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 4096,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "moe_intermediate_size": 2**20,
    "shared_expert_intermediate_size": 2**20,
    "num_experts": 4096,
    "num_local_experts": 4096,
    "n_routed_experts": 4096,
    "q_lora_rank": 2**16,
    "kv_lora_rank": 2**16,
    "qk_nope_head_dim": 4096,
    "qk_rope_head_dim": 4096,
    "v_head_dim": 4096,
    "index_n_heads": 1024,
    "index_head_dim": 4096,
    "index_topk": 2**20,
    "linear_num_key_heads": 1024,
    "linear_num_value_heads": 1024,
    "linear_key_head_dim": 4096,
    "linear_value_head_dim": 4096,
    "linear_conv_kernel_dim": 64,
    "mamba_num_heads": 4096,
    "mamba_head_dim": 4096,
    "n_groups": 1024,
    "ssm_state_size": 4096,
    "conv_kernel": 64,
    "moe_shared_expert_intermediate_size": 2**20,
    "num_experts_per_tok": 4096,
    "vocab_size": 2**20,
    "max_position_embeddings": 2**31,
}
MAX_EXPERTS = 2**15  # in all layers together
# In all layers together, nearly twice the largest published number. A plan places each head separately.
MAX_KV_HEADS = 2**14


def size(hf_config: Fields, key: str, default: int | None = None) -> int:
    """Read a size of the model, from 1 to its entry in ``MAX_SIZES``.

    Raises:
        ConfigError: the size is missing without a default, not an integer, or out of range.
    """
    number = hf_config.integer(key, 1, MAX_SIZES[key], default=default)
    if number is None:
        raise hf_config.wrong(key, f"an integer from 1 to {MAX_SIZES[key]}")
    return number


def num_experts(hf_config: Fields) -> int:
    """Read the number of experts per layer, in transformers' key since version 5, or in DeepSeek's or Qwen's key.

    Raises:
        ConfigError: as ``size``, or all layers together have too many experts.
    """
    key = next((name for name in ("num_local_experts", "n_routed_experts") if name in hf_config), "num_experts")
    experts, num_layers = size(hf_config, key), size(hf_config, "num_hidden_layers")
    if experts * num_layers > MAX_EXPERTS:
        raise hf_config.wrong(
            key, f"at most {MAX_EXPERTS // num_layers}: {num_layers} layers have up to {MAX_EXPERTS} experts"
        )
    return experts


def dense_layers(hf_config: Fields) -> tuple[int, ...]:
    """List the layers of an MoE model that have a dense MLP (``decoder_sparse_step``, ``mlp_only_layers``)."""
    step = hf_config.integer("decoder_sparse_step", 1, default=1)
    listed = set(hf_config.integers("mlp_only_layers", default=()))
    return tuple(i for i in range(size(hf_config, "num_hidden_layers")) if i in listed or (i + 1) % step)


def num_kv_heads(hf_config: Fields, *, may_be_absent: bool) -> int:
    """Read the number of key and value heads, a divisor of the query heads. Null means one per query head.

    ``may_be_absent``: a missing key means this, too. In other families, transformers has a fixed default.

    Raises:
        ConfigError: as ``size``, or it is not a divisor.
    """
    num_heads = size(hf_config, "num_attention_heads")
    has_default = may_be_absent or "num_key_value_heads" in hf_config.content
    heads = size(hf_config, "num_key_value_heads", num_heads if has_default else None)
    if num_heads % heads:
        raise hf_config.wrong("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    num_layers = size(hf_config, "num_hidden_layers")
    if heads * num_layers > MAX_KV_HEADS:
        raise hf_config.wrong(
            "num_key_value_heads", f"at most {MAX_KV_HEADS // num_layers} in each of {num_layers} layers"
        )
    return heads


def head_dim(hf_config: Fields, default: int | None) -> int:
    """Return the size of a head.

    ``default`` None: hidden size / number of heads. Rotary embeddings require an even size.

    Raises:
        ConfigError: as ``size``, or it is odd.
    """
    num_heads, hidden = size(hf_config, "num_attention_heads"), size(hf_config, "hidden_size")
    if hidden < num_heads:
        raise hf_config.wrong("hidden_size", f"at least num_attention_heads={num_heads}")
    dim = size(hf_config, "head_dim", default or hidden // num_heads)
    if dim % 2:
        raise hf_config.wrong("head_dim", "an even number, as rotary embeddings need it")
    return dim


def rotary(hf_config: Fields) -> Fields:
    """Read the rotary parameters of layers with full attention, or return an empty object if config.json has none."""
    rope = hf_config.object("rope_scaling", default=None) or hf_config.object("rope_parameters", default=None)
    if rope is not None and "full_attention" in rope:
        rope = rope.object("full_attention")
    return rope or Fields({}, hf_config.where, hf_config.remedy)


def rope_type(hf_config: Fields) -> str:
    """Return the kind of rotary scaling in layers with full attention."""
    return scaling(rotary(hf_config))


def scaling(rope: Fields) -> str:
    """Return the kind of rotary scaling in one set of rotary parameters."""
    return rope.text("rope_type", default=rope.text("type", default="default"))


def max_positions(hf_config: Fields, *, is_stretched: bool = False) -> int:
    """Return the maximum sequence length in tokens, or 0 if config.json does not define it.

    yarn and linear scaling extend config.json's value. For llama3, or with ``is_stretched``, the value is already
    extended.
    """
    key = "max_position_embeddings"
    if key not in hf_config:
        return 0
    stated, rope = size(hf_config, key), rotary(hf_config)
    original = rope.integer("original_max_position_embeddings", 1, default=stated)
    factor = rope.number("factor", 0.0, 1e6, default=1.0)
    stretches = rope_type(hf_config) in ("yarn", "linear") and not is_stretched
    return max(stated, int(original * factor)) if stretches else stated
