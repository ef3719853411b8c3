"""Pipeline-parallel engines (``rollout.layout.pp``): features that vLLM 0.32 lacks if it did not start the ranks itself.

Each rank schedules and samples by itself. All ranks must therefore agree on the number of cache blocks and on the drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from rlhf_mcore.parallel.collectives import all_gather_json, broadcast_json

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import RolloutConfig


@contextmanager
def patch_pipeline_engine(cfg: RolloutConfig) -> Iterator[None]:
    """Patch vLLM around the start of a pipeline-parallel engine."""
    from vllm.v1.engine import core

    with ExitStack() as patches:
        usual = core.get_kv_cache_configs
        patches.enter_context(mock.patch.object(core, "get_kv_cache_configs", _with_fewest_blocks(usual)))
        if cfg.speculative.method != "off":
            from vllm.v1.worker.gpu_model_runner import GPUModelRunner

            # The last stage builds its own drafter. On other stages vLLM looks for a drafter, and fails without this one.
            patches.enter_context(mock.patch.object(GPUModelRunner, "drafter", _listener(), create=True))
        yield


def _with_fewest_blocks(usual: Any) -> Any:
    """Use the smallest number of cache blocks of all stages. A stage with fewer layers would otherwise have more blocks."""

    def configs_of(vllm_config: Any, specs: Any, memory: Any) -> Any:
        configs = usual(vllm_config, specs, memory)
        fewest = min(all_gather_json(configs[0].num_blocks))
        if configs[0].num_blocks == fewest:
            return configs
        vllm_config.cache_config.num_gpu_blocks_override = fewest
        return usual(vllm_config, specs, memory)

    return configs_of


def _listener() -> Any:
    """Build a placeholder for the drafter on stages that receive their drafts from the last stage."""
    from vllm.v1.spec_decode.eagle import EagleProposer

    class Listener(EagleProposer):
        kv_cache_gid = 0  # the layer group that defines the lengths of requests

        def __init__(self) -> None: ...

        def load_model(self, target_model: Any) -> None: ...

        def initialize_attn_backend(self, *_: Any, **__: Any) -> None: ...

        def initialize_cudagraph_keys(self, *_: Any, **__: Any) -> None: ...

        def dummy_run(self, *_: Any, **__: Any) -> None: ...

    return Listener()


def share_drafts(runner: Any, core: Any) -> None:
    """Let the last stage draft for all stages, after vLLM has started.

    vLLM shares the model's embedding with a draft model only if there is one stage. With several stages, the draft model on
    the last stage has its own embedding. Here it becomes the model's embedding on that stage, which otherwise has none, and
    is loaded like other weights. vLLM would also start a pass before the pass that drafts for it has ended. Stages wait for
    each other anyway, so running one pass at a time loses nothing.
    """
    import torch
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.model_executor.models.utils import PPMissingLayer, _model_to_pp_missing_layer_names
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    core.batch_queue, core.step_fn = None, core.step
    stages, usual = get_pp_group(), runner.propose_draft_token_ids
    if not stages.is_last_rank:
        runner.drafter = _listener()
        runner.rejection_sampler = RejectionSampler(runner.sampler, runner.speculative_config, runner.device)
    elif (draft := runner.get_draft_model()) is not None:
        model = runner.get_model()
        assert isinstance(model.model.embed_tokens, PPMissingLayer)
        model.model.embed_tokens = draft.model.embed_tokens
        _model_to_pp_missing_layer_names.pop(id(model), None)

    def propose(*args: Any, **kwargs: Any) -> Any:
        drafted = usual(*args, **kwargs) if stages.is_last_rank else None
        told = drafted.tolist() if isinstance(drafted, torch.Tensor) else drafted
        told, is_tensor = broadcast_json([told, told is not drafted], stages.world_size - 1, stages.cpu_group)
        if stages.is_last_rank:
            return drafted
        return torch.tensor(told, device=runner.device) if is_tensor else told

    runner.propose_draft_token_ids = propose
