"""Reproduce silent parallelism faults of Megatron-core (its issue 7452) on a CPU, and compute the right numbers without it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer import TransformerConfig, multi_token_prediction
from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_utils import get_tokens_per_expert_and_token_count
from torch import Tensor

from rlhf_mcore.mcore.delta_net import GatedDeltaNet
from rlhf_mcore.mcore.groups import ModelGroups, use_groups
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.platform import Platform
from tests.distributed import models
from tests.distributed.setting import Settings, build, finish, groups_of, moe_groups_of, start

LOGITS = torch.tensor([[0.0, 1.0, 2.0, 3.0], [1.0, -1.0, 0.5, 0.0]])
LABELS = torch.tensor([3, 0])


def main(directory: Path) -> None:
    platform = start()
    groups: dict[str, Any] = {}
    two = groups_of("tp2_dp2", groups)
    tp = two.collection.tp
    mine = slice(2 * tp.rank(), 2 * tp.rank() + 2)
    findings: dict[str, Any] = {
        "loss": F.cross_entropy(LOGITS, LABELS, reduction="none").tolist(),
    }
    with use_groups(two, platform):
        shard = LOGITS[:, mine].clone()
        findings["sharded"] = vocab_parallel_cross_entropy(shard.clone(), LABELS).tolist()
        findings["smoothed"] = all_gather_json(vocab_parallel_cross_entropy(shard.clone(), LABELS, 0.1).tolist())
        findings["gathered"] = vocab_parallel_cross_entropy(LOGITS.clone(), LABELS).tolist()
    # One rank has three valid tokens and the other rank has one. Each token chooses one of two experts.
    chosen = torch.tensor([[1, 0], [1, 0], [0, 1]] if tp.rank() == 0 else [[0, 1], [0, 0], [0, 0]])
    _, local, total = get_tokens_per_expert_and_token_count(chosen, tp, topk=1, with_padding_mask=True)
    findings["counts"] = all_gather_json([float(local), float(total)])
    if dist.get_rank() == 0:
        models.make("gpt_oss", directory / "gpt_oss")
    dist.barrier()
    model, _ = build(directory / "gpt_oss", moe_groups_of("tp2_sp_ep2_etp1_dp2", groups), platform, Settings())
    sinks = [p for chunk in model.chunks for name, p in chunk.named_parameters() if name.endswith("softmax_offset")]
    findings["sinks"] = [(len(p), bool(getattr(p, "tensor_model_parallel", False))) for p in sinks]
    with use_groups(two, platform):
        findings["counted"] = all_gather_json(counts_sinks(two))
    findings["predicted"] = all_gather_json(predicted_weights(int(tp.rank() == 0)))
    four = groups_of("tp4", groups)
    findings["groups"] = {
        f"{model.layout.tp} within {globally.layout.tp}": ranks_without_a_group(model, globally, platform)
        for model, globally in ((two, four), (two, two), (four, four))
    }
    findings["divided"] = all_gather_json(losses_of_schedule(int(tp.rank() == 0)))
    findings["norm"] = all_gather_json(gradient_of_norm(tp))
    if dist.get_rank() == 0:
        models.make("qwen3_5_text", directory / "qwen3_5_text")
    dist.barrier()
    findings["delta"] = {
        layout: all_gather_json(gradients_of_delta_net(directory / "qwen3_5_text", groups_of(layout, groups), platform))
        for layout in ("dp4", "tp2_dp2")
    }
    finish(findings, directory)


def predicted_weights(is_first: int) -> list[float] | None:
    """Return the loss gradient of each token that an MTP layer predicts. Ranks after the first have two tokens less.

    The loss of a token is its logit. Returns None if Megatron has no such function (before 0.17).
    """
    if not hasattr(multi_token_prediction, "process_mtp_loss"):
        return None
    hidden = torch.zeros(8, 1, 1, requires_grad=True)  # four tokens of the model and four of the MTP layer
    scale = multi_token_prediction.MTPLossAutoScaler
    scale.set_loss_scale(torch.ones(1))
    out = multi_token_prediction.process_mtp_loss(
        hidden,
        labels=torch.zeros(1, 4, dtype=torch.long),
        loss_mask=torch.tensor([[1.0, 1.0, 1.0, 1.0] if is_first else [1.0, 1.0, 0.0, 0.0]]),
        output_layer=lambda hidden, **_: (hidden, None),
        output_weight=None,
        runtime_gather_output=None,
        is_training=False,
        compute_language_model_loss=lambda labels, logits: logits[..., 0].t(),
        config=SimpleNamespace(  # type: ignore[arg-type]
            mtp_num_layers=1, mtp_detach_heads=False, mtp_loss_scaling_factor=1.0, calculate_per_token_loss=True
        ),
    )
    out.sum().backward()
    assert hidden.grad is not None
    return hidden.grad[4:, 0, 0].tolist()


def counts_sinks(groups: ModelGroups) -> bool:
    """Return whether the gradient norm includes the sinks of Megatron's attention on this rank."""
    config = _config(2, softmax_type="learnable")
    layer = DotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups.collection)
    return bool(param_is_not_tensor_parallel_duplicate(layer.softmax_offset))


def _config(tp: int, **fields: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        perform_initialization=False,
        **fields,
    )


def ranks_without_a_group(model: ModelGroups, globally: ModelGroups, platform: Platform) -> list[int]:
    """Return the tensor-parallel size that three parts of Megatron use with the groups of ``model``, which they ignore.

    The parts are the heads of cross attention, the tokens of LLaVA's vision model, and the padding of tokens in a GPT model.
    """
    column: Any = partial(_without_name, ColumnParallelLinear)
    with use_groups(globally, platform):
        cross = CrossAttention(
            _config(model.layout.tp),
            CrossAttentionSubmodules(column, column, core_attention=IdentityOp, linear_proj=RowParallelLinear),
            layer_number=1,
            pg_collection=model.collection,
        )
        tokens = scatter_to_sequence_parallel_region(torch.zeros(8, 1))
        # The part before the decoder, for a model without rotary embeddings
        gpt: Any = mock.Mock(
            pre_process=True, training=True, position_embedding_type="none", pg_collection=model.collection
        )
        gpt.config.sequence_parallel = True
        rows = torch.zeros(1, 8)
        padding = GPTModel._preprocess(gpt, rows, rows, padding_mask=rows)[5]
        assert padding is not None
        return [8 // len(cross.linear_q.weight), 8 // len(tokens), 8 // padding.size(1)]


def _without_name(kind: Any, *args: Any, name: str | None = None, **kwargs: Any) -> torch.nn.Module:
    return kind(*args, **kwargs)


def losses_of_schedule(is_first: int) -> dict[str, float]:
    """Return the schedule's result for a loss of 6 over three tokens or 4 over one, with and without division by Megatron."""
    sums, count = (6.0, 3) if is_first else (4.0, 1)
    found = {}
    for ours in (False, True):
        config = SimpleNamespace(timers=None, calculate_per_token_loss=ours, num_moe_experts=None, mtp_num_layers=None)
        loss = partial(_outputs, torch.tensor(sums), torch.tensor(0 if ours else count))
        value, _ = forward_step_calc_loss(
            None, None, loss, config, None, False, 1, [], cp_group_size=2, is_last_stage=True
        )
        found["ours" if ours else "theirs"] = float(value)
    return found


def _outputs(value: Tensor, count: Tensor, _: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    return value.clone(), count, {}


def gradient_of_norm(tp: dist.ProcessGroup) -> list[float]:
    """Return the gradient of a norm within a head-parallel layer after Megatron's reduction, if it is 1 on every rank before."""
    chunk = torch.nn.Module()
    chunk.out_norm = torch.nn.RMSNorm(1)
    chunk.ddp_config = SimpleNamespace(use_megatron_fsdp=False)  # type: ignore[assignment]
    chunk.out_norm.weight.main_grad = torch.ones(1)  # type: ignore[attr-defined]
    config: Any = SimpleNamespace(sequence_parallel=False, qk_layernorm=True)
    _allreduce_non_tensor_model_parallel_grads([chunk], config, tp)
    return chunk.out_norm.weight.main_grad.tolist()  # type: ignore[union-attr]


def gradients_of_delta_net(path: Path, groups: ModelGroups, platform: Platform) -> list[float]:
    """Return the norm's gradient in the first gated delta net, for a loss that weights the layer's outputs unevenly."""
    model, _ = build(path, groups, platform, Settings())
    layer = next(module for chunk in model.chunks for module in chunk.modules() if isinstance(module, GatedDeltaNet))
    size = model.spec.geometry.hidden_size
    generator = torch.Generator().manual_seed(3)
    hidden, weights = torch.randn(2, 5, 1, size, generator=generator)
    with use_groups(groups, platform):
        loss = (layer(hidden, None)[0] * weights).sum()
        return torch.autograd.grad(loss, layer.out_norm.weight)[0].tolist()
