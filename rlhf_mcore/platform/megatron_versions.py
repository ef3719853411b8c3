"""Bridge the versions of Megatron-core that this program runs on: 0.16, and 0.19 (Python 3.12 and later).

Everything else is the same code for both.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

from megatron.core import __version__ as VERSION
from megatron.core import parallel_state
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayerSubmodules

SERIES = ("0.16", "0.19")  # those that the tests have run on; docs/compatibility.md has the results
LOCKED = "0.16.1"


def is_supported() -> bool:
    return VERSION.startswith(tuple(f"{series}." for series in SERIES))


# Version 0.16 sorts tokens by experts with a mask, so the host waits for the device to count them. Later versions sort by argsort.
PERMUTE_WAITS = VERSION.startswith("0.16.")

# Globals of the process that later versions read for the data-parallel group, which they may cut once more over ranks that gather
# weights again for the backward pass (GTP). That is not used here, so the groups are the same.
_LATER_GLOBALS = {
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp_cp",
}
LATER_GLOBALS = {name: axis for name, axis in _LATER_GLOBALS.items() if hasattr(parallel_state, name)}


def submodules_of(layer: Any) -> Any:
    """Return the parts that the spec of an MLP, a mixture or its experts names: a ``ModuleSpec`` in 0.16, a partial later."""
    return layer.keywords["submodules"] if isinstance(layer, partial) else layer.submodules


# The layer of a transformer within an MTP layer.
MTP_INNER = "transformer_layer"
if MTP_INNER not in {field.name for field in fields(MultiTokenPredictionLayerSubmodules)}:
    MTP_INNER = "mtp_model_layer"


def mtp_submodules(inner: ModuleSpec, collection: Any, **parts: Any) -> MultiTokenPredictionLayerSubmodules:
    """Build the parts of an MTP layer with the layer ``inner``.

    Version 0.16 builds it with the groups of its globals, not all of which are set.
    """
    if MTP_INNER == "transformer_layer":
        inner = ModuleSpec(inner.module, {**inner.params, "pg_collection": collection}, inner.submodules)
    return MultiTokenPredictionLayerSubmodules(**parts, **{MTP_INNER: inner})


class LayersOfSpec:
    """Latent attention made of the layers that its specification names, as in 0.16.

    Later versions choose them by ``qk_layernorm``: without it they refuse norms, with it they put one in front of queries that are
    projected at once, which no model has.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}
