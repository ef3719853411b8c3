"""Find a checkpoint's tensors in a live model of transformers, for its engine and the bridge to it.

transformers stacks the experts of a layer, and their gate and up projections, in its own tensors; a checkpoint stores them one by one.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# A level of names is left out of a tower of SigLIP's that transformers has made and not loaded.
_SIGLIP = re.compile(r"^(vision_tower\.)(?!vision_model\.)")


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """The tensor ``name`` of a checkpoint is in the live tensor ``holder``, at ``offset`` with ``strides`` (both in elements)."""

    name: str
    holder: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    def view(self, holder: Tensor) -> Tensor:
        """View it in its contiguous holder, to be read or written."""
        return holder.as_strided(self.shape, self.strides, holder.storage_offset() + self.offset)


def checkpoint_tensors(model: nn.Module) -> list[CheckpointTensor]:
    """List the tensors of every live parameter and buffer of a checkpoint; tied ones under each of their names.

    transformers itself is asked: it takes a tensor that holds the position of each of its elements apart, as it does to save it. So
    memory is needed for the positions of one tensor at a time.

    Raises:
        ValueError: a part is no rectangle of its holder, so it cannot be written there.
    """
    live = model.state_dict(keep_vars=True)
    # Where transformers has not been imported, which takes seconds, the model is none of its.
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return [CheckpointTensor(name, name, tuple(t.shape), 0, t.stride()) for name, t in live.items()]
    from transformers.core_model_loading import revert_weight_conversion

    entries = []
    tower = getattr(model.config, "vision_config", None)
    is_siglip = tower is not None and tower.model_type == "siglip_vision_model"
    for holder, tensor in live.items():
        dtype = torch.int32 if tensor.numel() < 2**31 else torch.int64
        places = torch.arange(tensor.numel(), dtype=dtype, device="cpu")  # the default device may be meta
        for name, part in revert_weight_conversion(model, {holder: places.view(tensor.shape)}).items():
            offset = int(part.flatten()[0])
            strides = tuple(
                int(part.select(dim, 1).flatten()[0]) - offset if size > 1 else 1 for dim, size in enumerate(part.shape)
            )
            name = _SIGLIP.sub(r"\1vision_model.", name) if is_siglip else name
            entry = CheckpointTensor(name, holder, tuple(part.shape), offset, strides)
            if not torch.equal(entry.view(places), part):
                raise ValueError(f"{name} is not one rectangle of {holder} of the transformers model")
            entries.append(entry)
    return entries
