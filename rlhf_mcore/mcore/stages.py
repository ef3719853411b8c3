"""Pipeline stages with different numbers of layers."""

from __future__ import annotations

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from rlhf_mcore.mcore.groups import ModelGroups


class UnevenStages(PipelineParallelLayerLayout):
    """Megatron's table of which stage has which layers, as one rank asks it.

    Megatron-core 0.16 asks its globals for the pipeline rank, and for whether the pipeline is interleaved: where the latter is not
    set, all chunks silently get the layers of the first one. This table knows both itself.
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
        """Layers of a chunk of a rank (this one, if none is named)."""
        rank = self._pp_rank if pp_rank is None else pp_rank
        return int(self.layout[rank][vp_stage or 0].count(layer_type))

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Layers in the stages before a chunk."""
        rank = self._pp_rank if pp_rank is None else pp_rank
        before = (vp_stage or 0) * self.pipeline_model_parallel_size + rank
        stages = [divmod(number, self.pipeline_model_parallel_size) for number in range(before)]
        return sum(self.layout[stage][chunk].count(layer_type) for chunk, stage in stages)
