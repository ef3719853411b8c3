"""The one place where Megatron's globals are set: to one model's groups, for the time of a call into Megatron."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron.core import parallel_state

from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.platform import Platform

# Globals that Megatron-core 0.16 still reads where a collection is passed in: GQA with more TP ranks than KV groups gathers over
# the default TP group (attention.py), layers (of experts too) built without a tp_group, the tied embedding's replica id.
_GLOBALS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_EMBEDDING_GROUP": "embd",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
}


@contextlib.contextmanager
def ambient(groups: ModelGroups, platform: Platform) -> Iterator[None]:
    """Enter before building, running or updating a model; leaves everything as it was found."""
    before = {name: getattr(parallel_state, name) for name in _GLOBALS}
    for name, attribute in _GLOBALS.items():
        setattr(parallel_state, name, getattr(groups.collection, attribute))
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    try:
        with platform.megatron_region():
            yield
    finally:
        for name, value in before.items():
            setattr(parallel_state, name, value)
