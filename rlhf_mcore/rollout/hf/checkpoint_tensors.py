"""Find a checkpoint's tensors in a live transformers model, for its engine and the bridge to it.

transformers stacks the experts of a layer, and their gate and up projections, in its own tensors. A checkpoint stores
them separately.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# transformers omits one level of names in a SigLIP tower that was created without loading weights.
_SIGLIP = re.compile(r"^(vision_tower\.)(?!vision_model\.)")


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """Location of the checkpoint tensor ``name`` in the live tensor ``holder``.

    ``offset`` and ``strides`` are in elements.
    """

    name: str
    holder: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    def view(self, holder: Tensor) -> Tensor:
        """Return a view of this tensor in its contiguous holder, for reading or writing."""
        return holder.as_strided(self.shape, self.strides, holder.storage_offset() + self.offset)


def checkpoint_tensors(model: nn.Module) -> list[CheckpointTensor]:
    """List the checkpoint tensors in every live parameter and buffer.

    Tied tensors are listed under each of their names.

    The conversion is done by transformers itself, as for saving. Its input is a tensor that contains the index of
    each of its elements. The function therefore needs memory for the indices of one tensor at a time.

    Raises:
        ValueError: a part is not a rectangle of its holder, so it cannot be written there.
    """
    live = model.state_dict(keep_vars=True)
    # Importing transformers takes seconds. If it is not imported, the model cannot be a transformers model.
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return [CheckpointTensor(name, name, tuple(t.shape), 0, t.stride()) for name, t in live.items()]
    from transformers.core_model_loading import revert_weight_conversion

    entries = []
    tower = getattr(model.config, "vision_config", None)
    is_siglip = tower is not None and tower.model_type == "siglip_vision_model"
    for holder, tensor in live.items():
        dtype = torch.int32 if tensor.numel() < 2**31 else torch.int64
        places = torch.arange(tensor.numel(), dtype=dtype, device="cpu")  # the default device can be meta
        for name, part in revert_weight_conversion(model, {holder: places.view(tensor.shape)}).items():
            offset = int(part.flatten()[0])
            strides = tuple(
                int(part.select(dim, 1).flatten()[0]) - offset if size > 1 else 1 for dim, size in enumerate(part.shape)
            )
            name = _SIGLIP.sub(r"\1vision_model.", name) if is_siglip else name
            entry = CheckpointTensor(name, holder, tuple(part.shape), offset, strides)
            if not torch.equal(entry.view(places), part):
                raise ValueError(f"{name} is not a rectangle of {holder} in the transformers model")
            entries.append(entry)
    return entries
