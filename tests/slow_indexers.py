"""The loss of indexers, token by token, from transformers' layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as hf_model


def indexer_divergence(hf: Any, ids: torch.Tensor, stage: str) -> torch.Tensor:
    """Sum the KL divergences of all layers and tokens of one sequence, token by token, with gradients of the indexers."""
    found: list[torch.Tensor] = []
    top_k = hf.config.index_topk if stage == "sparse" else len(ids)

    def compare(layer: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        hidden = kwargs["hidden_states"].detach()
        cos, sin = kwargs["position_embeddings"]
        indexer, length = layer.indexer, hidden.size(1)
        with torch.no_grad():
            latent = layer.q_a_layernorm(layer.q_a_proj(hidden))
            q = layer.q_b_proj(latent).view(1, length, -1, layer.qk_head_dim).transpose(1, 2)
            q_pass, q_rot = q.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
            kv, k_rot = layer.kv_a_proj_with_mqa(hidden).split([layer.kv_lora_rank, layer.qk_rope_head_dim], dim=-1)
            kv = layer.kv_b_proj(layer.kv_a_layernorm(kv)).view(1, length, q.size(1), -1).transpose(1, 2)
            k_pass = kv[..., : layer.qk_nope_head_dim]
            q_rot, k_rot = hf_model.apply_rotary_pos_emb_interleave(q_rot, k_rot[:, None], cos, sin)
            q = torch.cat([q_pass, q_rot], -1)[0]
            k = torch.cat([k_pass, k_rot.expand(-1, q.size(0), -1, -1)], -1)[0]
        index_q = indexer.wq_b(latent).view(1, length, indexer.n_heads, indexer.head_dim)
        index_k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
        rope = indexer.qk_rope_head_dim
        turned = hf_model.apply_rotary_pos_emb(index_q[..., :rope], index_k[..., :rope], cos, sin, unsqueeze_dim=2)
        index_q = torch.cat([turned[0], index_q[..., rope:]], -1)[0]
        index_k = torch.cat([turned[1], index_k[..., rope:]], -1)[0, :, 0]
        weights = indexer.weights_proj(hidden)[0] * indexer.n_heads**-0.5
        for place in range(length):
            scores = F.relu(index_q[place] @ index_k[: place + 1].T * indexer.head_dim**-0.5)
            scores = weights[place] @ scores
            keys = scores.topk(min(top_k, place + 1)).indices
            target = torch.stack([(k[h, keys] @ q[h, place] * layer.scaling).softmax(0) for h in range(len(q))]).sum(0)
            target = target / target.sum()
            found.append((target * (target.log() - scores[keys].log_softmax(0))).sum())

    hooks = [layer.self_attn.register_forward_hook(compare, with_kwargs=True) for layer in hf.model.layers]
    hf(ids[None].long())
    for hook in hooks:
        hook.remove()
    return torch.stack(found).sum()


def attend_to_all(hf: Any) -> None:
    """Let the indexers select all tokens, as in the warm-up."""
    for layer in hf.model.layers:
        layer.self_attn.indexer.index_topk = 4096
