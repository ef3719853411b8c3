"""Run the updates of one rank on the fake device, with the role's own code and Megatron's model, schedule and optimizer."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from transformers import PretrainedConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig

from benchmarks.fake_cuda.device import Counts, fake_device
from rlhf_mcore.algorithms.registry import find_policy_loss
from rlhf_mcore.config.schema import AlgorithmConfig, OptimizerConfig, RecomputeConfig, TrainerConfig
from rlhf_mcore.data.collate import RowTokens
from rlhf_mcore.geometry import AdapterSizes
from rlhf_mcore.mcore import momentum
from rlhf_mcore.mcore import optimizer as own_optimizer
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.dry_run import fake_world
from rlhf_mcore.mcore.groups import build_groups
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform.cuda import CudaPlatform
from rlhf_mcore.roles import trained_model
from rlhf_mcore.roles.adapters import add_adapters
from rlhf_mcore.roles.policy import PolicyObjective
from rlhf_mcore.roles.scalar_models import ValueObjective
from rlhf_mcore.roles.trained_model import MinibatchPlan, Objective, TrainedModel
from rlhf_mcore.roles.trained_weights import matrices_of
from rlhf_mcore.types import Ragged

ROW_LENGTHS = (24, 40)  # lengths of the two rows of a microbatch
TOKENS = sum(ROW_LENGTHS)
PASSES, UPDATE = "passes", "rest of the update"
_EXPERTS, _TOP_K = 8, 2


@dataclass(frozen=True, slots=True)
class Case:
    """A counted training setup. ``rank``: the counted rank. ``quick``: the case belongs to a set that covers every mechanism."""

    name: str
    layout: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0
    experts: bool = False
    critic: bool = False
    packing: bool = True
    recompute: str = "off"
    delta: bool = False
    truncated: bool = False  # tokens were sampled from a part of the vocabulary
    adapters: bool = False
    quick: bool = False


CASES = (
    Case("dense, padded", packing=False, quick=True),
    Case("dense, packed"),
    Case("dense, packed, recomputed", recompute="full"),
    Case("dense, packed, top_p", truncated=True, quick=True),
    Case("adapters", adapters=True),
    Case("critic", critic=True, quick=True),
    Case("tensor parallel 2", {"tp": 2, "sequence_parallel": True, "world_size": 2}),
    Case(
        "tensor parallel 2, adapters", {"tp": 2, "sequence_parallel": True, "world_size": 2}, adapters=True, quick=True
    ),
    Case("context parallel 2", {"cp": 2, "world_size": 2}),
    Case("pipeline 2, first stage", {"pp": 2, "world_size": 2}),
    Case("pipeline 2, last stage", {"pp": 2, "world_size": 2}, rank=1, quick=True),
    Case("gated delta nets", delta=True),
    Case("gated delta nets, context parallel 2", {"cp": 2, "world_size": 2}, delta=True, quick=True),
    Case("experts", {"world_size": 2}, experts=True, quick=True),
    Case("experts parallel 2", {"world_size": 2, "ep": 2}, experts=True, quick=True),
)


def count_update(case: Case, folder: Path, num_layers: int, num_microbatches: int) -> Counts:
    """Count one update with ``num_microbatches`` microbatches, after an uncounted update."""
    layout = ParallelLayout(**{"world_size": 1, **case.layout})
    path = _write_config(case, folder, num_layers)
    with fake_world(case.rank, layout.world_size), fake_device(_TOP_K / _EXPERTS) as counts, _stand_ins(counts):
        trained = _build(case, path, layout)
        held = _rows(case, num_microbatches)
        objective = _objective(case)
        trained._update(objective, held)
        counts.total, counts.places = Counter(), Counter()
        with counts.during(UPDATE):
            trained._update(objective, held)
    return counts


def _write_config(case: Case, folder: Path, num_layers: int) -> Path:
    sizes: dict[str, Any] = dict(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    experts = dict(num_experts=_EXPERTS, num_experts_per_tok=_TOP_K, moe_intermediate_size=64, norm_topk_prob=True)
    config: PretrainedConfig
    if case.experts:
        config = Qwen3MoeConfig(**sizes, **experts, architectures=["Qwen3MoeForCausalLM"])
    elif case.delta:
        # With context parallelism, both ranks hold values for the second of three key heads.
        heads = dict(linear_num_key_heads=3, linear_num_value_heads=6) if "cp" in case.layout else {}
        heads = heads or dict(linear_num_key_heads=2, linear_num_value_heads=2)
        widths = {f"linear_{name}": 16 for name in ("key_head_dim", "value_head_dim")}
        kinds = ["linear_attention", "full_attention"] * (num_layers // 2)
        settings = {**sizes, **heads, **widths, "layer_types": kinds}
        config = Qwen3_5TextConfig(**settings, architectures=["Qwen3_5ForCausalLM"])
    else:
        config = Qwen3Config(**sizes, architectures=["Qwen3ForCausalLM"])
    path = folder / f"{case.name}-{num_layers}"
    config.save_pretrained(path)
    return path


def _build(case: Case, path: Path, layout: ParallelLayout) -> TrainedModel:
    spec = load_spec(path, "token" if case.critic else "lm", needs_weights=False)
    platform = CudaPlatform()
    platform.prepare_megatron()
    groups = build_groups(layout)
    assert groups is not None
    recompute = RecomputeConfig(granularity=case.recompute)
    options = BuildOptions("bf16", "local", recompute, True, False, 0)
    if case.adapters:
        adapters = replace(spec.geometry, adapter=AdapterSizes(8, 16.0, ("all-linear",)))
        options = replace(options, add_adapters=partial(add_adapters, geometry=adapters, layout=layout, dropout=0.0))
    model = build_model(spec, groups, platform, options)
    optimizer = OptimizerConfig(lr=1e-3)
    model.add_optimizer(optimizer, matrices_of(spec.geometry))
    assert model.optimizer is not None
    trainer = TrainerConfig(max_tokens_per_microbatch=TOKENS, packing=case.packing)
    plan = MinibatchPlan(1)
    trained = TrainedModel(layout, model, spec, trainer, optimizer=optimizer, plan=plan, name="actor")
    trained.unshared_because = "gated delta nets run by flash-linear-attention" if case.delta else None
    return trained


def _objective(case: Case) -> Objective:
    if case.critic:
        return ValueObjective(0.2)
    cfg = AlgorithmConfig()
    return PolicyObjective(cfg, find_policy_loss(cfg), 1.0, kl_coef=0.01)


def _rows(case: Case, num_microbatches: int) -> RowTokens:
    """Return rows that fill the microbatches, with the fields that the loss of the case reads."""
    lengths = list(ROW_LENGTHS if case.packing else (TOKENS,)) * num_microbatches
    names = ("old_values", "returns") if case.critic else ("advantages", "old_logprobs", "ref_logprobs")
    fields = {name: torch.ones(sum(lengths)) for name in ("weights", *names)}
    fields["token_ids"] = torch.ones(sum(lengths), dtype=torch.int32)
    drawn_from = torch.cat([torch.tensor([0] + [3] * (length - 1), dtype=torch.int32) for length in lengths])
    support = Ragged(drawn_from, torch.arange(3, dtype=torch.int32).repeat(sum(lengths) - len(lengths)))
    return RowTokens(list(range(len(lengths))), lengths, fields, {"support": support} if case.truncated else {})


@contextmanager
def _stand_ins(counts: Counts) -> Iterator[None]:
    """Replace results that need data or other ranks."""
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(owner, name, value))

        stack.enter_context(patch.dict(sys.modules, _linear_attention()))
        replace(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        # A torch for the CPU has no sparse CUDA tensors. The empty gradient of the output layer's weight is one.
        replace(torch, "sparse_coo_tensor", lambda size, check_invariants, **like: torch.zeros(size, **like))
        replace(own_optimizer, "all_gather_json", lambda value, group: [value] * group.size())
        replace(
            momentum,
            "all_gather_json",
            lambda value, group: [value if r == group.rank() else [] for r in range(group.size())],
        )
        replace(trained_model, "broadcast_json", lambda value, source, group: value or {"loss": 1.0})
        replace(param_and_grad_buffer, "_coalescing_manager", lambda *_, **__: nullcontext(_Done()))
        replace(MegatronModel, "_run", _counted_as(counts, MegatronModel._run))
        counted = _BalancedExperts()
        dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
        replace(dispatcher, "cuda_dtoh_stream", None)  # class attribute, shared by all instances
        replace(dispatcher, "preprocess", counted.preprocess(dispatcher.preprocess))
        replace(
            token_dispatcher, "maybe_move_tensor_to_cpu", counted.to_host(token_dispatcher.maybe_move_tensor_to_cpu)
        )
        yield


def _linear_attention() -> dict[str, ModuleType]:
    """Replace flash-linear-attention's kernels by one operation for each of their inputs. Their own launches are not counted."""

    def convolve(x: Tensor, weight: Tensor, *, activation: str, cu_seqlens: Any, cu_seqlens_cpu: None = None) -> tuple:
        return x * weight[:, -1], None

    def rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, cu_seqlens_cpu: None = None, **_: Any
    ) -> tuple:
        return v * (q * k * (g * beta)[..., None]).sum(-1, keepdim=True).to(v.dtype), None

    modules = {name: ModuleType(name) for name in ("fla", "fla.modules", "fla.ops")}
    for name, kernel, stand_in in (
        ("fla.modules.convolution", "causal_conv1d", convolve),
        ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", rule),
    ):
        modules[name] = ModuleType(name)
        setattr(modules[name], kernel, stand_in)
    return modules


class _Done:
    """The handle of a collective that has ended."""

    def wait(self) -> None: ...


def _counted_as(counts: Counts, run: Callable[..., Any]) -> Callable[..., Any]:
    def count_pass(*args: Any, **kwargs: Any) -> Any:
        with counts.during(PASSES):
            return run(*args, **kwargs)

    return count_pass


class _BalancedExperts:
    """Token counts that a dispatcher reads from the device. Every expert gets the same number of tokens."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def preprocess(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def count_tokens(dispatcher: Any, routing_map: Tensor) -> Tensor:
            total = original(dispatcher, routing_map)
            ranks, tp, local = dispatcher.ep_size, dispatcher.tp_size, dispatcher.num_local_experts
            share = len(routing_map) * dispatcher.config.moe_router_topk // (ranks * local)
            self._numbers = {
                id(total): share * tp * ranks,
                id(dispatcher.input_splits): share * local,
                id(dispatcher.output_splits): share * local,
                id(dispatcher.output_splits_tp): share * local * ranks,
                id(getattr(dispatcher, "num_global_tokens_per_local_expert", None)): share,
            }
            return total

        return count_tokens

    def to_host(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def move(tensor: Any, as_numpy: bool = False, **kwargs: Any) -> Any:
            number = self._numbers.get(id(tensor))
            found = original(tensor, **kwargs)
            if torch.is_tensor(tensor) and number is not None:
                found = torch.full(tensor.shape, number)
            return np.asarray(found) if as_numpy and torch.is_tensor(found) else found

        return move
