"""Convert a Hugging Face config to a ``ModelSpec`` and to Megatron's TransformerConfig.

Unknown settings are rejected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlhf_mcore.config.errors import ConfigError, FileProblem
from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.expected_kernels import APEX
from rlhf_mcore.families import ARCHITECTURES, FAMILIES, head_fields
from rlhf_mcore.families.mtp import MTP_KEY
from rlhf_mcore.foreign import Fields, shorten
from rlhf_mcore.geometry import LatentSizes, ModelGeometry
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.overrides import Overrides
from rlhf_mcore.platform import DTYPES, Platform
from rlhf_mcore.readers.model_files import inspect_model


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All properties of a model that do not depend on the layout."""

    geometry: ModelGeometry
    hf_config: PretrainedConfig  # config of the language model
    architecture: str
    megatron: Mapping[str, Any]  # TransformerConfig settings that the family requires
    # [head_dim / 2] rotary frequencies; for latent attention [rope_dim / 2]; empty: nothing rotates
    inv_freq: torch.Tensor
    # Multiplies the rotary sines and cosines (yarn's attention factor), except in windowed layers with own frequencies.
    rope_scale: float
    window_inv_freq: torch.Tensor | None = None  # [head_dim / 2] frequencies of windowed layers, if they differ
    vision_config: PretrainedConfig | None = None  # config of the vision tower, if any

    @property
    def has_fresh_head(self) -> bool:
        """Return whether the directory contains a language model, so that a scalar head must start at zero."""
        return ARCHITECTURES[self.architecture][1] != self.geometry.head

    @property
    def logit_cap(self) -> float | None:
        """Return the bound c of logits z, which become c tanh(z / c), or None."""
        key = FAMILIES[self.geometry.family].logit_cap_key
        return getattr(self.hf_config, key, None) if key else None

    @property
    def config_updates(self) -> dict[str, Any]:
        """Return the keys of a saved config.json that the head changes."""
        has_mtp = bool(getattr(self.hf_config, MTP_KEY, 0))
        return head_fields(self.architecture, self.geometry.head, has_mtp=has_mtp)


def load_spec(
    path: str | Path, head: str = "lm", field: str = "model.path", *, needs_weights: bool = True
) -> ModelSpec:
    """Read ``config.json`` of a Hugging Face directory. A scalar ``head`` can also be added to a language model.

    ``needs_weights``: whether the directory must contain the weights too.

    Raises:
        ConfigError: something about the model is not supported; the message names it.
    """
    _, problems = inspect_model(str(path), field, (head, "lm"))
    if not needs_weights:
        problems = [problem for problem in problems if not isinstance(problem, FileProblem)]
    if problems:
        raise ConfigError.many(problems)
    try:
        whole = AutoConfig.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
        hf = whole.get_text_config()
        family, _ = ARCHITECTURES[whole.architectures[0]]
        inv_freq, rope_scale = _rotary(hf, "full_attention") if family.rotates else (torch.empty(0), 1.0)
        own = _rotary(hf, _WINDOW)[0] if family.rotates and _WINDOW in hf.rope_parameters else None
    except ConfigError:
        raise
    except Exception as error:  # any type: transformers checks keys that we do not read
        reason = shorten(f"{type(error).__name__}: {error}", 300)
        raise ConfigError(
            f"{field}={path}: transformers rejects config.json ({reason}); export the model again"
        ) from error
    fields = Fields(whole.to_dict(), f"{field}={path}: config.json", "export the model again")
    geometry = family.geometry(fields, head)
    if family.rotates:
        _check_rotated(hf, geometry, inv_freq, f"{field}={path}")
    settings, tower = family.megatron_settings(fields), getattr(whole, "vision_config", None)
    return ModelSpec(geometry, hf, whole.architectures[0], settings, inv_freq, rope_scale, own, tower)


def _check_rotated(hf: PretrainedConfig, geometry: ModelGeometry, inv_freq: torch.Tensor, where: str) -> None:
    """Reject a config.json if transformers would rotate another part of a head than our layers do."""
    layered = hf.rope_parameters.get("full_attention", hf.rope_parameters)
    head = geometry.attention_of(geometry.num_layers - 1).rope_dim
    is_padded = layered["rope_type"] == "proportional"  # with frequencies of zero
    rotated = head if is_padded else int(head * layered.get("partial_rotary_factor", 1.0))
    if 2 * len(inv_freq) != rotated:
        raise ConfigError(
            f"{where}: config.json defines {2 * len(inv_freq)} rotated elements for a head of {head}, expected {rotated}; "
            "check head_dim, qk_rope_head_dim and partial_rotary_factor"
        )


_WINDOW = "sliding_attention"  # layer type of windowed layers


def _rotary(hf: PretrainedConfig, layers: str) -> tuple[torch.Tensor, float]:
    """Compute the frequencies of one layer type.

    The transformers library computes them, so that each scaling rule has only one implementation.
    """
    is_layered = layers in hf.rope_parameters
    rope = hf.rope_parameters[layers] if is_layered else hf.rope_parameters
    kind = rope["rope_type"]
    if kind != "default":
        inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](
            hf, torch.device("cpu"), **({"layer_type": layers} if is_layered else {})
        )
        if scale != 1.0 and layers == _WINDOW:
            raise ConfigError(f"model.path: a rotary attention factor ({scale}) of {_WINDOW} is not supported.")
        if scale < 1.0 and not hasattr(hf, "kv_lora_rank"):  # for these models Megatron takes the factor directly
            raise ConfigError(f"model.path: a rotary attention factor below 1 ({scale}) is not supported.")
        return inv_freq.float(), float(scale)
    if is_layered and layers in hf.layer_types:
        hf = hf.per_layer_config[layers]
    dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    dim = int(dim * rope.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / (rope["rope_theta"] ** exponents), 1.0


def transformer_config(
    spec: ModelSpec,
    groups: ModelGroups,
    platform: Platform,
    *,
    dtype: str,
    recompute: RecomputeConfig,
    fused: bool,
    deterministic: bool,
    aux_loss_coef: float = 0.0,
    overrides: Overrides | None = None,
) -> TransformerConfig:
    """Build Megatron's config for a model under a layout. ``fused`` is true if Transformer Engine is used.

    Raises:
        ConfigError: Megatron rejects the user's ``overrides``.
    """
    latent, family = isinstance(spec.geometry.attention, LatentSizes), FAMILIES[spec.geometry.family]
    settings: dict[str, Any] = {"add_bias_linear": False, "gated_linear_unit": True, **spec.megatron}
    if latent:
        # This setting puts norms inside fused layers. The gradients of standalone norms are already whole, so
        # Megatron would sum them twice.
        settings["qk_layernorm"] = fused
    if fused and groups.layout.cp > 1 and family.windows is not None:
        settings["cp_comm_type"] = "a2a"  # Transformer Engine's default, the ring, supports neither windows nor sinks
    config = (overrides or Overrides()).build(
        MLATransformerConfig if latent else TransformerConfig,
        **_sizes(spec),
        **settings,
        **_parallelism(groups, dtype),
        **_experts(spec, groups, fused, aux_loss_coef),
        **_recompute(recompute),
        **_switches(
            fused,
            deterministic,
            family.activation == "silu" and "glu_linear_offset" not in settings,
            on_host=platform.name == "cpu",
        ),
        **(fused_kernels(spec) if fused and platform.name == "cuda" else {"gradient_accumulation_fusion": False}),
    )
    if spec.rope_scale != 1.0 and not latent:
        # Attention asks for a yarn scaling factor s and multiplies by 0.1 ln(s) + 1; this s gives the factor of the HF config.
        config.yarn_rotary_scaling_factor = math.exp((spec.rope_scale - 1.0) / 0.1)
    return config


def _swish(x: torch.Tensor) -> torch.Tensor:
    """Gate the clamped SwiGLU.

    Megatron's version is compiled at its first call. A CPU machine may lack the compiler.
    """
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Square the ReLU (So et al. 2021, arXiv 2109.08668). Megatron's version is compiled, too."""
    return F.relu(x).square()


_ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"), "relu2": _squared_relu}


def _sizes(spec: ModelSpec) -> dict[str, Any]:
    g = spec.geometry
    return dict(
        num_layers=g.num_layers,
        hidden_size=g.hidden_size,
        num_attention_heads=g.num_heads,
        num_query_groups=g.num_kv_heads,
        kv_channels=g.head_dim,
        ffn_hidden_size=g.ffn_size,
        layernorm_epsilon=getattr(spec.hf_config, FAMILIES[g.family].norm_eps_key),
        normalization="RMSNorm",
        activation_func=_swish if "glu_linear_offset" in spec.megatron else _ACTIVATIONS[FAMILIES[g.family].activation],
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def _parallelism(groups: ModelGroups, dtype: str) -> dict[str, Any]:
    layout = groups.layout
    return dict(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        pipeline_model_parallel_layout=None if layout.layers_per_stage is None else UnevenStages(groups),
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=DTYPES[dtype],
        pipeline_dtype=DTYPES[dtype],
        bf16=dtype == "bf16",
        fp16=dtype == "fp16",
        variable_seq_lengths=layout.pp > 1,  # StageMessages knows the shapes
        # Megatron rejects variable_seq_lengths with the default dispatcher, in dense models too.
        moe_token_dispatcher_type="alltoall",
        # On gloo, both directions of an interleaved exchange share one peer, and batched messages are matched in
        # order. Gradients would then be mixed up silently. Unbatched, overlapped sends are matched by group.
        batch_p2p_comm=layout.vpp is None,
        # Megatron waits for the device only because torch before 1.13 could not wait for batched requests (pytorch
        # pull request 82450).
        batch_p2p_sync=False,
        overlap_p2p_comm=layout.vpp is not None,
        # The loss is already divided by the global count. Megatron must not divide it by microbatches or ranks.
        calculate_per_token_loss=True,
    )


class UnevenStages(PipelineParallelLayerLayout):
    """Megatron's table of the layers of each stage, bound to one rank.

    Megatron-core 0.16 reads the pipeline rank from its globals. It also reads there whether the pipeline is
    interleaved. If that is not set, all chunks silently get the layers of the first chunk. This table stores both
    values itself.
    """

    def __init__(self, groups: ModelGroups):
        layout = groups.layout
        assert layout.layers_per_stage is not None
        stages = [["decoder"] * count for count in layout.layers_per_stage]
        stages[0].insert(0, "embedding")
        stages[-1].append("loss")
        super().__init__(stages, layout.pp)
        self._pp_rank = groups.pp_rank

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Return the number of layers in a chunk of a rank. Default: this rank."""
        rank = self._pp_rank if pp_rank is None else pp_rank
        return int(self.layout[rank][vp_stage or 0].count(layer_type))

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Return the number of layers in the stages before a chunk."""
        rank = self._pp_rank if pp_rank is None else pp_rank
        before = (vp_stage or 0) * self.pipeline_model_parallel_size + rank
        stages = [divmod(number, self.pipeline_model_parallel_size) for number in range(before)]
        return sum(self.layout[stage][chunk].count(layer_type) for chunk, stage in stages)


def _experts(spec: ModelSpec, groups: ModelGroups, fused: bool, aux_loss_coef: float) -> dict[str, Any]:
    g, experts = spec.geometry, spec.geometry.experts
    if experts is None:
        return {}
    return dict(
        num_moe_experts=experts.count,
        moe_ffn_hidden_size=experts.ffn_size,
        moe_layer_freq=[int(g.is_moe_layer(layer)) for layer in range(g.num_layers)],
        moe_router_topk=experts.per_token,
        moe_shared_expert_intermediate_size=experts.shared_ffn_size or None,
        # 16-bit rounding must not change the experts of a token.
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss" if aux_loss_coef else "none",
        moe_aux_loss_coeff=aux_loss_coef,
        moe_grouped_gemm=fused,
        expert_model_parallel_size=groups.layout.ep,
        expert_tensor_parallel_size=groups.layout.expert_tp,
    )


def _recompute(cfg: RecomputeConfig) -> dict[str, Any]:
    if cfg.granularity == "off":
        return {}
    if cfg.granularity == "selective":
        return dict(recompute_granularity="selective", recompute_modules=list(cfg.modules))
    method = "block" if cfg.granularity == "block" else "uniform"
    return dict(recompute_granularity="full", recompute_method=method, recompute_num_layers=cfg.num_layers)


def fused_kernels(spec: ModelSpec) -> dict[str, bool]:
    """Select CUDA kernels to replace Megatron's plain code, if they are installed."""
    permutes = ("fused_permute_with_probs", "fused_sort_chunks_by_index_with_probs", "fused_unpermute")
    # For packed sequences, the fused rotation silently ignores yarn's factor and the pairing of elements.
    latent = isinstance(spec.geometry.attention, LatentSizes)
    is_plain = (
        spec.rope_scale == 1.0
        and not latent
        and spec.geometry.vision is None
        and not spec.megatron.get("rotary_interleaved")
    )
    return dict(
        apply_rope_fusion=is_plain and rope_utils.fused_apply_rotary_pos_emb_thd is not None,
        gradient_accumulation_fusion=find_spec(APEX) is not None,
        moe_permute_fusion=spec.geometry.experts is not None
        and all(getattr(moe_utils, name, None) for name in permutes),
    )


def _switches(fused: bool, deterministic: bool, has_fused_activation: bool, on_host: bool) -> dict[str, Any]:
    return dict(
        use_cpu_initialization=on_host,
        perform_initialization=False,  # weights are loaded
        deterministic_mode=deterministic,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=has_fused_activation,
        persist_layer_norm=fused,
        attention_softmax_in_fp32=True,
    )
