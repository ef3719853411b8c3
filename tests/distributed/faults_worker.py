"""Silent faults of parallelism in Megatron-core (its issue 7452), reproduced on a CPU, and numbers computed without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.moe.moe_utils import get_tokens_per_expert_and_token_count

from rlhf_mcore.mcore.groups import use_groups
from rlhf_mcore.parallel.collectives import all_gather_json
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
    # One of two ranks has three valid tokens, the other one; each chooses one of two experts.
    chosen = torch.tensor([[1, 0], [1, 0], [0, 1]] if tp.rank() == 0 else [[0, 1], [0, 0], [0, 0]])
    _, local, total = get_tokens_per_expert_and_token_count(chosen, tp, topk=1, with_padding_mask=True)
    findings["counts"] = all_gather_json([float(local), float(total)])
    if dist.get_rank() == 0:
        models.make("gpt_oss", directory / "gpt_oss")
    dist.barrier()
    model, _ = build(directory / "gpt_oss", moe_groups_of("tp2_sp_ep2_etp1_dp2", groups), platform, Settings())
    sinks = [p for chunk in model.chunks for name, p in chunk.named_parameters() if name.endswith("softmax_offset")]
    findings["sinks"] = [(len(p), bool(getattr(p, "tensor_model_parallel", False))) for p in sinks]
    finish(findings, directory)
