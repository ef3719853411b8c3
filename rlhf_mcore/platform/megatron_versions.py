"""Hide the differences between the supported versions of Megatron-core: 0.16, and 0.19 (Python 3.12 and later).

All other code is the same for both.
"""

from __future__ import annotations

from copy import copy
from dataclasses import fields
from functools import partial
from typing import Any

from megatron.core import __version__ as VERSION
from megatron.core import parallel_state
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayerSubmodules

SERIES = ("0.16", "0.19")  # the versions that the tests ran on; see docs/models/supported.md for results
LOCKED = "0.16.1"


def is_supported() -> bool:
    return VERSION.startswith(tuple(f"{series}." for series in SERIES))


# Version 0.16 sorts tokens by expert with a mask, so the host waits for the device to count them. Later versions use
# argsort.
PERMUTE_WAITS = VERSION.startswith("0.16.")

# Process globals that later versions read for the data-parallel group. They can split it further over ranks that
# gather weights again for the backward pass (GTP). rlhf_mcore does not use GTP, so the groups are equal.
_LATER_GLOBALS = {
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp_cp",
}
LATER_GLOBALS = {name: axis for name, axis in _LATER_GLOBALS.items() if hasattr(parallel_state, name)}


def submodules_of(layer: Any) -> Any:
    """Return the submodules in the spec of an MLP, an MoE layer or experts.

    The spec is a ``ModuleSpec`` in 0.16, and a partial in later versions.
    """
    return layer.keywords["submodules"] if isinstance(layer, partial) else layer.submodules


# Name of the transformer layer in an MTP layer.
MTP_INNER = "transformer_layer"
if MTP_INNER not in {field.name for field in fields(MultiTokenPredictionLayerSubmodules)}:
    MTP_INNER = "mtp_model_layer"


def mtp_submodules(inner: ModuleSpec, collection: Any, **parts: Any) -> MultiTokenPredictionLayerSubmodules:
    """Build the submodules of an MTP layer with the layer ``inner``.

    Version 0.16 would build it with the groups in its globals, which are not all set.
    """
    if MTP_INNER == "transformer_layer":
        inner = ModuleSpec(inner.module, {**inner.params, "pg_collection": collection}, inner.submodules)
    return MultiTokenPredictionLayerSubmodules(**parts, **{MTP_INNER: inner})


class LayersOfSpec:
    """Build latent attention from the layers in its spec, like 0.16.

    Later versions choose the layers by ``qk_layernorm``. Without it they reject norms. With it they add a norm before
    queries that are projected in one step, which no model uses.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


def grads_of_norm(optimizer: Any) -> list[Any]:
    """Return the gradients on this rank that the gradient norm includes. Version 0.16 has another name for the method."""
    names = ("get_main_grads_for_grad_norm", "get_grads_for_grad_norm")
    grads: list[Any] = next(getattr(optimizer, name) for name in names if hasattr(optimizer, name))()
    return grads


def drop_rotary_factor(attention: Any) -> None:
    """Let an attention layer rotate without yarn's factor of sines and cosines.

    Version 0.16 reads the factor from the config in every pass, and version 0.19 once.
    """
    attention.config = copy(attention.config)
    attention.config.yarn_rotary_scaling_factor = 1.0
    attention._yarn_concentration_factor = 1.0
