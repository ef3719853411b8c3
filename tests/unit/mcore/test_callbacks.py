"""Check that each of our functions that Megatron calls accepts the arguments of its call sites, in the installed version.

The arguments are read from Megatron's source. ``launch/test.sh --with megatron-latest`` repeats this on the version of
the GPU image.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.models.common.embeddings import rope_utils

import rlhf_mcore.mcore
from rlhf_mcore.config.rules.megatron import reason_refused
from rlhf_mcore.mcore import build, dry_run, mtp, packed
from rlhf_mcore.mcore.attention import ProjectionNorm, Rotary, WholeLinear
from rlhf_mcore.mcore.core_attention import SDPACoreAttention
from rlhf_mcore.mcore.delta_net import GatedDeltaNet
from rlhf_mcore.mcore.groups import StageMessages
from rlhf_mcore.mcore.layers import NormedAdd, RMSNorm
from rlhf_mcore.mcore.mixture import Router, _BestExpertOfGroups
from rlhf_mcore.mcore.model import MegatronModel, _finalize
from rlhf_mcore.mcore.model_spec import UnevenStages
from rlhf_mcore.mcore.optimizer import aligned_within
from rlhf_mcore.mcore.route_replay import RoutedLayer, Routing
from rlhf_mcore.mcore.state_space import StateSpace
from rlhf_mcore.mcore.wide_attention import WideHeads
from rlhf_mcore.platform import base, cpu, cpu_kernels, cuda

# Megatron passes these arguments only under a setting that the configuration rejects.
REJECTED = {
    "return_schedule_plan": "overlap_moe_expert_parallel_comm",
    "checkpoint_activations_microbatch": "num_microbatches_with_partial_activation_checkpoints",
}
# Our code builds these, so Megatron never calls their constructors.
BUILT_HERE = (StageMessages, Rotary, UnevenStages, WideHeads)
SELF: Any = None

SCHEDULES = "pipeline_parallel.schedules pipeline_parallel.combined_1f1b"
ATTENTION = "transformer.attention transformer.multi_latent_attention"
LAYER, BLOCK, MLP = "transformer.transformer_layer", "transformer.transformer_block", "transformer.mlp"
MTP, MODEL = "transformer.multi_token_prediction", "models.gpt.gpt_model"
DISPATCHER, MOE_UTILS = "transformer.moe.token_dispatcher", "transformer.moe.moe_utils"
ROPE, RANDOM = "models.common.embeddings.rope_utils", "tensor_parallel.random"


class Call(NamedTuple):
    """The arguments of a call in the source of Megatron."""

    where: str
    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    is_open: bool  # whether *args or **kwargs are passed too


@cache
def calls_of(module: str) -> dict[str, list[Call]]:
    """Collect the calls in a module by the source text of the called expression."""
    calls: dict[str, list[Call]] = {}
    for node in ast.walk(ast.parse(inspect.getsource(import_module(f"megatron.core.{module}")))):
        if not isinstance(node, ast.Call):
            continue
        name, arguments = ast.unparse(node.func), node.args
        if name in ("build_module", "multi_tensor_applier") or name.endswith(
            ".checkpoint"
        ):  # they call the first argument
            name, arguments = ast.unparse(arguments[0]), arguments[1:]
        name = re.sub(r"^(?:apply_module|not_none)\((.*?)\)", r"\1", name)  # these return their argument
        call = Call(
            f"{module}:{node.lineno}",
            tuple(ast.unparse(value) for value in arguments if not isinstance(value, ast.Starred)),
            tuple(keyword.arg for keyword in node.keywords if keyword.arg is not None),
            any(isinstance(value, ast.Starred) for value in arguments) or any(k.arg is None for k in node.keywords),
        )
        calls.setdefault(name, []).append(call)
    return calls


def output_functions() -> list[Callable[..., Any]]:
    """Return the callables that receive the outputs of a forward pass, and of a pass with gradients."""
    caught: list[Any] = []
    model: Any = SimpleNamespace(
        chunks=[],
        movable=SimpleNamespace(passing=torch.no_grad),
        aux_loss_coef=0.0,
        indexer="frozen",
        _routers=lambda: (),
        _gathering_weights=torch.enable_grad,
        _run=lambda microbatches, on_outputs, forward_only: caught.append(partial(on_outputs, None)),
    )
    MegatronModel.forward(model, [], SELF)
    MegatronModel.forward_backward(model, [], SELF)
    return caught


def deferred_output() -> Callable[..., Any]:
    layer: Any = SimpleNamespace(sequence_parallel=False)
    build.defer_logits(layer, SELF)
    return layer.forward


def packed_rotation(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    plain = inspect.unwrap(rope_utils._apply_rotary_pos_emb_thd)
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_thd", plain)
    packed.rotate_packed()
    return rope_utils._apply_rotary_pos_emb_thd


def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Callable[..., Any], str, str]]:
    """Yield a callable, the modules of Megatron that call it, and the expressions by which they do."""
    step = partial(MegatronModel._forward_step, SELF, None)
    yield step, SCHEDULES, "forward_step_func"
    routing = Routing(SELF, torch.device("cpu"), 1, 1)
    yield routing.steps(step, [], SELF, learns=True), SCHEDULES, "forward_step_func"
    yield output_functions()[0], SCHEDULES, "loss_func"
    yield partial(_finalize, False, None), SCHEDULES, "config.finalize_model_grads_func"

    attention = partial(SDPACoreAttention.forward, SELF)
    yield SDPACoreAttention, ATTENTION, "submodules.core_attention"
    for ours in (attention, dry_run._attention):
        yield ours, ATTENTION, "self.core_attention"
    for recurrent in (GatedDeltaNet, StateSpace):
        yield partial(recurrent, in_proj=None, out_proj=None), LAYER, "submodules.self_attention"
        yield partial(recurrent.forward, SELF), LAYER, "self.self_attention"
    for module, names in {
        ATTENTION: "q_layernorm k_layernorm kv_layernorm",
        LAYER: "input_layernorm pre_mlp_layernorm",
        BLOCK: "final_layernorm",
        MTP: "enorm hnorm final_layernorm",
    }.items():
        for name in names.split():
            built = "layer_norm" if name == "final_layernorm" else name
            later = f"layer_classes['{name}'] {name[0]}_norm_cls"  # in 0.19
            yield RMSNorm, module, f"submodules.{built} self.submodules.{built} {later}"
            for norm in (RMSNorm.forward, ProjectionNorm.forward, dry_run._norm):
                yield partial(norm, SELF), module, f"self.{name}"
    for name in ("self_attn_bda", "mlp_bda"):
        yield partial(NormedAdd, config=None), LAYER, f"submodules.{name}"
        yield partial(NormedAdd.forward, SELF), LAYER, f"self.{name}"
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        yield partial(WholeLinear.forward, SELF), ATTENTION, f"self.{name}"
    yield partial(mtp._embed, None, False), MTP, "embedding"
    for output in (deferred_output(), partial(build.ScalarHead.forward, SELF)):
        yield output, f"{MODEL} models.common.language_module.language_module", "self.output_layer output_layer"

    yield Router, "transformer.moe.moe_layer", "submodules.router self.submodules.router"
    for replay in (RoutedLayer, _BestExpertOfGroups):
        yield partial(replay.get_replay_topk, SELF), MOE_UTILS, "router_replay.get_replay_topk"
    yield partial(dry_run._deal_evenly, SELF), DISPATCHER, "self.preprocess"
    yield partial(cuda._permute, SELF), DISPATCHER, "permute"
    yield cpu._to_host, DISPATCHER, "maybe_move_tensor_to_cpu"
    for ours in (cpu_kernels.swiglu, dry_run._swiglu):
        yield ours, MLP, "bias_swiglu_impl"
    for ours in (cpu_kernels.weighted_swiglu, dry_run._weighted_swiglu):
        yield ours, MLP, "weighted_bias_swiglu_impl"
    yield cpu_kernels.rotation(lambda: None), ROPE, "_apply_rotary_pos_emb_bshd"
    yield packed_rotation(monkeypatch), ROPE, "_apply_rotary_pos_emb_thd"
    yield cpu._get_rng_state, RANDOM, "_get_cuda_rng_state"
    yield cpu._set_rng_state, RANDOM, "_set_cuda_rng_state"
    yield cpu._all_gather, "tensor_parallel.mappings", "torch.distributed.all_gather"
    yield cpu._reduce_scatter, "tensor_parallel.mappings", "torch.distributed.reduce_scatter"
    yield dry_run._scatter, "tensor_parallel.mappings", "_reduce_scatter_along_first_dim"
    yield cpu._reduce_scatter_part, "distributed.param_and_grad_buffer", "dist_reduce_scatter_func"
    yield cpu._all_gather_parts, "distributed.param_and_grad_buffer", "dist_all_gather_func"
    yield partial(base._norm_of_all, 0), "optimizer.clip_grads", "l2_norm_impl"
    with aligned_within(SimpleNamespace(size=lambda: 1)):  # type: ignore[arg-type]
        seen = megatron_optimizer.torch.distributed
        yield seen.all_gather_object, "optimizer", "torch.distributed.all_gather_object"
        yield seen.get_world_size, "optimizer", "torch.distributed.get_world_size"


def mismatch(ours: Callable[..., Any], call: Call) -> str | None:
    """Explain why a callable rejects the arguments of a call, or return None."""
    signature = inspect.signature(ours, follow_wrapped=False)
    bind = signature.bind_partial if call.is_open else signature.bind
    try:
        bind(*call.positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        return f"{call.where} passes {call.positional} and {call.keywords} to {ours}: {error}"
    return None


def test_replaced_functions_and_modules_take_the_arguments_of_their_call_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = []
    for ours, modules, names in table(monkeypatch):
        calls = [call for m in modules.split() for name in names.split() for call in calls_of(m).get(name, [])]
        if not calls:
            problems.append(f"{modules}: no call of {names}, for {ours}; the table is out of date")
        for call in calls:
            if REJECTED.keys().isdisjoint((*call.positional, *call.keywords)):
                problems.append(mismatch(ours, call))
    assert list(filter(None, problems)) == []
    assert all(reason_refused(field) for field in REJECTED.values())


def test_the_loss_takes_the_arguments_of_a_pass_with_gradients() -> None:
    """Only a pass without gradients collects values other than the loss."""
    calls = [
        call for call in calls_of("pipeline_parallel.schedules")["loss_func"] if "non_loss_data" not in call.keywords
    ]
    assert calls and [problem for call in calls if (problem := mismatch(output_functions()[1], call))] == []


def overrides() -> Iterator[tuple[type, str, Callable[..., Any], Callable[..., Any]]]:
    """Yield each of our methods that overrides a method of Megatron, with Megatron's method."""
    for info in pkgutil.iter_modules(rlhf_mcore.mcore.__path__, "rlhf_mcore.mcore."):
        for ours in vars(import_module(info.name)).values():
            if not (inspect.isclass(ours) and ours.__module__ == info.name):
                continue
            for name, method in vars(ours).items():
                theirs = next((vars(b)[name] for b in ours.__mro__[1:] if name in vars(b)), None)
                if inspect.isfunction(method) and getattr(theirs, "__module__", "").startswith("megatron."):
                    yield ours, name, method, theirs


def test_overriding_methods_take_the_arguments_of_megatrons_own() -> None:
    found, problems = set(), []
    for ours, name, method, theirs in overrides():
        if name == "__init__" and issubclass(ours, BUILT_HERE):
            continue
        found.add(f"{ours.__name__}.{name}")
        named = [p for p in inspect.signature(theirs).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        required = tuple(p.name for p in named if p.default is p.empty)
        keywords = [p.name for p in inspect.signature(theirs).parameters.values() if p.kind is p.KEYWORD_ONLY]
        everything = Call(theirs.__qualname__, tuple(p.name for p in named), tuple(keywords), False)
        by_name = Call(theirs.__qualname__, required, tuple(p.name for p in named[len(required) :]), False)
        problems += [f"{ours.__name__}: {why}" for call in (everything, by_name) if (why := mismatch(method, call))]
    assert {"StageMessages._communicate_shapes", "Router._apply_aux_loss", "OwnRotation.forward"} <= found
    assert problems == []
