"""Measure the share of equal keys that indexers of a trainer and of an engine select, and the difference of logprobs.

A small DeepSeek-V3.2 with random weights reads random tokens. Its indexers have the published sizes: 64 heads of 128. They select
1 key in 4 of the longest context. The trainer in bf16 is compared with four others. The first is the trainer in fp32. The second is
transformers in bf16, which decodes token by token with a cache, as ``rollout.engine=hf`` does. In the third, the trainer's indexers
compute in fp8 with one scale per head and token, a power of two, as in vLLM. The fourth also rotates by a Hadamard matrix, as the
authors' code does.

fp8 is emulated: rounded queries and keys are multiplied in fp32. vLLM itself needs a GPU. Random weights give flatter scores than
trained weights, so more keys are close to the limit.

The last line is the share of equal keys between trainer and fp8, averaged over layers and tokens with more keys than selected.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import report
from rlhf_mcore.bridge.files.hf_files import HFReader, load
from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.data.collate import RowTokens, make_microbatches
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.groups import ModelGroups, build_groups
from rlhf_mcore.mcore.indexed_attention import Indexer
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import current_platform

GOAL = 0.9
LAYERS, HEADS, HEAD_DIM, VOCABULARY = 4, 64, 128, 4096
FP8_MAX = 448.0  # the largest e4m3 number
Quantise = Callable[[Tensor], Tensor]


def in_fp8(x: Tensor) -> Tensor:
    """Round heads [..., 128] to fp8 with one scale, the next power of two."""
    scale = (x.float().abs().amax(-1, keepdim=True).clamp_min(1e-4) / FP8_MAX).log2().ceil().exp2()
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


def hadamard(size: int) -> Tensor:
    """Return Sylvester's orthogonal matrix [size, size]."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def rotated_in_fp8(x: Tensor) -> Tensor:
    return in_fp8((x.float() @ hadamard(x.size(-1))).to(x.dtype))


@contextmanager
def recording_selections(quantise: Quantise | None = None) -> Iterator[list[Tensor]]:
    """Record the selections [s, top_k] of all layers of the trainer, and round queries and keys."""
    found: list[Tensor] = []
    select, rotate = Indexer.select, Indexer._rotate

    def recording(indexer: Indexer, *inputs: Tensor) -> Tensor:
        found.append(select(indexer, *inputs))
        return found[-1]

    def rounding(indexer: Indexer, *inputs: Tensor) -> Tensor:
        turned = rotate(indexer, *inputs)
        return turned if quantise is None else quantise(turned)

    with patch.object(Indexer, "select", recording), patch.object(Indexer, "_rotate", rounding):
        yield found


def by_trainer(
    directory: Path, groups: ModelGroups, dtype: str, tokens: Tensor, quantise: Quantise | None = None
) -> tuple[list[Tensor], Tensor]:
    """Return the selections of the trainer's layers, and the next tokens' logprobs [s]."""
    spec = load_spec(directory, "lm")
    model = build_model(
        spec, groups, current_platform(), BuildOptions(dtype, "local", RecomputeConfig(), False, False, 0)
    )
    load(model.local_parameters(), spec.geometry, HFReader(directory))
    row = RowTokens([0], [len(tokens)], {"token_ids": tokens.int()})
    batches = make_microbatches(row, max_tokens=len(tokens), packing=True)
    with recording_selections(quantise) as found:
        (logprobs,) = model.forward(batches, lambda out, part: model.logprobs_and_entropy(out, part, 1.0)[0])
    return found, logprobs.flatten()


def by_transformers(directory: Path, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the same of transformers in bf16, one token at a time."""
    from transformers import AutoModelForCausalLM
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    found: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    for layer, indexer in enumerate(m for m in model.modules() if isinstance(m, DeepseekV32Indexer)):
        indexer.register_forward_hook(lambda _m, _i, out, held=found[layer]: held.append(out[0, -1].long()))
    cache, logprobs = None, []
    with torch.no_grad():
        for place, token in enumerate(tokens[:-1]):
            out = model(token.view(1, 1), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logprobs.append(out.logits[0, -1].float().log_softmax(-1)[tokens[place + 1]])
    return [torch.nn.utils.rnn.pad_sequence(held, batch_first=True, padding_value=-1) for held in found], torch.stack(
        logprobs
    )


def equal_share(ours: list[Tensor], theirs: list[Tensor], top_k: int) -> list[float]:
    """Return the mean share of equal keys for each layer. Tokens with at most ``top_k`` keys are not counted."""
    shares = []
    for one, other in zip(ours, theirs, strict=True):
        rows = range(top_k, min(len(one), len(other)))
        equal = [int(torch.isin(one[row], other[row]).sum()) for row in rows]
        shares.append(sum(equal) / (len(equal) * top_k))
    return shares


def make(directory: Path, top_k: int) -> None:
    """Write the model in bf16."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    config = DeepseekV32Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=LAYERS,  # without experts, whose choice would differ too
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        index_n_heads=HEADS,
        index_head_dim=HEAD_DIM,
        index_topk=top_k,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        routed_scaling_factor=2.5,
        initializer_range=0.06,  # about one by the root of the width
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    torch.manual_seed(0)
    DeepseekV32ForCausalLM(config).bfloat16().save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short sequence")
    args = parser.parse_args()
    length, top_k = (128, 32) if args.quick else (1024, 256)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        groups = build_groups(ParallelLayout(1))
        assert groups is not None
        make(directory, top_k)
        tokens = torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(1))
        ours, own = by_trainer(directory, groups, "bf16", tokens)
        others = {
            "trainer in fp32": by_trainer(directory, groups, "fp32", tokens),
            "transformers in bf16, with a cache": by_transformers(directory, tokens),
            "fp8 without rotation, as in vLLM": by_trainer(directory, groups, "bf16", tokens, in_fp8),
            "fp8 with rotation, as by the authors": by_trainer(directory, groups, "bf16", tokens, rotated_in_fp8),
        }
    measured: dict[str, Any] = {}
    for name, (theirs, logprobs) in others.items():
        difference = (own[: length - 1] - logprobs[: length - 1]).abs()[top_k:]
        measured[name] = {
            "equal_keys": (shares := equal_share(ours, theirs, top_k)),
            "mean": sum(shares) / len(shares),
            "logprob_diff_mean": float(difference.mean()),
            "logprob_diff_max": float(difference.max()),
        }
        print(name, measured[name], flush=True)
    details = {"tokens": length, "top_k": top_k, "heads": HEADS, "head_dim": HEAD_DIM, "against": measured}
    share = min(found["mean"] for name, found in measured.items() if name.startswith("fp8"))
    report("selected_keys", details, ratio=share, goal=GOAL, quick=args.quick)


if __name__ == "__main__":
    main()
