"""Build MTP layers of a trained model and compute their loss (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2).

The layers are Megatron-core's own block, after the last layer of the last pipeline stage. The k-th layer combines the
hidden state of token i with the embedding of token i + k. From the resulting hidden state, the model's output layer
predicts token i + k + 1.

Megatron's forward pass does not run the block, because that would need the logits of all tokens. The block runs when
the loss of a microbatch is computed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from torch import Tensor

from rlhf_mcore.data.collate import one_later
from rlhf_mcore.families.base import Family
from rlhf_mcore.geometry import LatentSizes, ModelGeometry
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.layers import layer_spec, norm_and_linear
from rlhf_mcore.mcore.packed import PackedSequences
from rlhf_mcore.mcore.weights import unwrap
from rlhf_mcore.platform.megatron_versions import mtp_submodules
from rlhf_mcore.types import Microbatch

if TYPE_CHECKING:
    from rlhf_mcore.mcore.model import MegatronModel


@dataclass(frozen=True, slots=True)
class MTPLearning:
    """Settings for training MTP layers.

    If ``alone``, only MTP layers learn from their loss, and their gradient is clipped by its own norm. Otherwise the
    whole model learns from the loss, with weight ``coef``. ``temperature`` is the sampling temperature.
    """

    alone: bool = True
    coef: float = 1.0
    temperature: float = 1.0


def add_mtp_layers(
    chunk: GPTModel, geometry: ModelGeometry, groups: ModelGroups, kind: str, family: Family, *, alone: bool
) -> None:
    """Add MTP layers to the last chunk of a model.

    If it is not the first chunk too, also add a copy of the embedding.

    Call it for every chunk before the chunk is wrapped. ``kind``: kind of layers, as in ``decoder_spec``.
    """
    if geometry.mtp_layers and groups.layout.num_stages > 1 and chunk.pre_process:
        # a separate bucket, split equally on both stages
        chunk.embedding.word_embeddings.weight.shared_embedding = True
    if not geometry.mtp_layers or not chunk.post_process:
        return
    config = copy.copy(chunk.config)
    config.mtp_num_layers = geometry.mtp_layers
    # Megatron does not pass the padding mask to these layers, so their experts are not balanced.
    config.moe_router_load_balancing_type, config.moe_aux_loss_coeff = "none", 0.0
    if config.recompute_granularity == "full":
        config.recompute_granularity = None  # for these layers Megatron would save packed borders as a tensor, and fail
    if not chunk.pre_process:
        chunk.embedding = LanguageModelEmbedding(
            config,
            chunk.vocab_size,
            chunk.max_sequence_length,
            position_embedding_type="rope",
            tp_group=groups.collection.tp,
        )
        weight = chunk.embedding.word_embeddings.weight
        weight.shared = weight.shared_embedding = True  # the gradient norm counts only the first embedding
    norm, linear = norm_and_linear(kind)
    layers = []
    for number in geometry.mtp_numbers:
        inner = layer_spec(config, kind, family, geometry.layer_kind(number))
        parts = mtp_submodules(inner, groups.collection, enorm=norm, hnorm=norm, eh_proj=linear, layer_norm=norm)
        layers.append(ModuleSpec(MultiTokenPredictionLayer, submodules=parts))
    chunk.mtp = MultiTokenPredictionBlock(
        config, MultiTokenPredictionBlockSubmodules(layers), chunk.vp_stage, groups.collection
    )
    for parameter in chunk.mtp.parameters():
        parameter.is_clipped_alone = alone


def sum_embedding_gradients(chunks: Iterable[torch.nn.Module], group: dist.ProcessGroup) -> None:
    """Add up the gradients of the embedding and of its copy, so that both stay equal.

    ``group`` joins the first and the last pipeline stage.
    """
    for chunk in map(unwrap, chunks):
        embedding = getattr(chunk, "embedding", None)
        if embedding is not None and group.size() > 1 and hasattr(embedding.word_embeddings.weight, "main_grad"):
            dist.all_reduce(embedding.word_embeddings.weight.main_grad, group=group)


def mtp_loss(
    model: MegatronModel, outputs: Tensor, microbatch: Microbatch, packed: PackedSequences | None, learning: MTPLearning
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Compute the weighted loss of the tokens that MTP layers predict.

    Also return their negative log-likelihood and their number. ``outputs``: hidden states [b, T, h] of the last
    stage, after the final norm. A token has the same weight (``microbatch.fields``) as in the model's loss. The loss
    is the mean over MTP layers of the weighted sums. Sequences do not see each other.
    """
    chunk, config, tp = unwrap(model.chunks[-1]), model.config, model.groups.collection.tp
    device, count = outputs.device, len(chunk.mtp.layers)
    hidden = outputs.transpose(0, 1).to(config.params_dtype)
    weight = chunk.output_layer.weight
    if learning.alone:
        # Recomputed layers have gradients only if their input has.
        hidden, weight = hidden.detach().requires_grad_(), weight.detach()
    if config.sequence_parallel:
        hidden = scatter_to_sequence_parallel_region(hidden, group=tp)
    latent = isinstance(model.spec.geometry.attention, LatentSizes)  # latent attention computes its rotation itself
    hidden_states = chunk.mtp(
        input_ids=microbatch.placed["token_ids"],
        position_ids=microbatch.placed["position_ids"],
        hidden_states=hidden,
        attention_mask=None,
        rotary_pos_emb=None if latent else chunk.rotary_pos_emb(microbatch.max_seqlen, packed_seq=packed is not None),
        packed_seq_params=packed,
        embedding=partial(_embed, chunk.embedding, learning.alone),
    )
    labels, weights = microbatch.fields["labels"], microbatch.fields["weights"]
    loss, nll, tokens = outputs.new_zeros(()), outputs.new_zeros(()), 0
    for states in hidden_states.chunk(1 + count, dim=0)[1:]:
        if config.sequence_parallel:
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False, group=tp)
        labels, weights = one_later(labels, microbatch), one_later(weights, microbatch)
        shifted = replace(microbatch, fields={"labels": labels, "weights": weights}, ragged={}, placed={})
        logprobs = model.logprobs_and_entropy(
            states.transpose(0, 1), shifted, learning.temperature, with_entropy=False, output_weight=weight
        ).logprobs
        loss = loss - (logprobs * weights.to(device)).sum() * (learning.coef / count)
        nll = nll - logprobs.detach().sum()  # zero for tokens without weight
        tokens += int((weights != 0).sum())
    return loss, (nll, nll.new_full((), tokens))


def _embed(embedding: torch.nn.Module, alone: bool, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    embedded: Tensor = embedding(input_ids=input_ids, position_ids=position_ids)
    return embedded.detach() if alone else embedded
