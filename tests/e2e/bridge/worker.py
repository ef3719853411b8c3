"""Trace vLLM modules of all cases and one engine on two ranks under torchrun, and write the results as JSON.

DIRECTORY contains the models a and b, and receives rank<r>.json. test_trace.py asserts on the results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from rlhf_mcore.bridge.map.engine import keep_loading_layout, reloading
from rlhf_mcore.bridge.map.pieces import view
from rlhf_mcore.bridge.map.trace import EngineMap, EngineParameter, trace
from rlhf_mcore.config.schema import RolloutConfig
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.types import Prompt, Sampling
from tests.difference import first_difference
from tests.e2e.bridge.eight_bits import GRIDS, KINDS, check_8_bits
from tests.e2e.bridge.models import MIXTURES, SIZES, Case, build, checkpoint_shapes, random_weights, vllm_config
from tests.e2e.rollout.drawing import generate

Weights = dict[str, torch.Tensor]
NAN = float("nan")


def fill(flat: torch.Tensor, parameter: EngineParameter, weights: Weights) -> None:
    """Fill a parameter from full tensors like an executor: copy every rectangle to its place, and zeros to the padding."""
    flat.fill_(NAN)
    for piece in parameter.pieces:
        view(flat, piece).copy_(weights[piece.hf_name][piece.slices])
    for begin, end in parameter.padding:
        flat[begin:end] = 0


def synchronise(model: Any, engine_map: EngineMap, weights: Weights) -> None:
    """Write all parameters: direct parameters in place, and repacked parameters through the reload."""
    views = engine_map.views(model)
    for parameter in engine_map.direct:
        fill(views[parameter.name], parameter, weights)
    for group in engine_map.repacked:
        with reloading(model, group) as staged:
            for parameter in group:
                fill(staged[parameter.name], parameter, weights)


def check_replay(model: Any, engine_map: EngineMap, weights: Weights) -> dict[str, Any]:
    """Compare replayed rectangles with vLLM's own load_weights. Tensors contain NaN before both."""
    live = dict(model.named_parameters())
    synchronise(model, engine_map, weights)
    replayed = {name: tensor.detach().clone() for name, tensor in live.items()}
    for tensor in live.values():
        tensor.data.fill_(NAN)
    model.load_weights(iter(weights.items()))
    return {
        "difference": first_difference(live, replayed),
        "names": sorted(live),
        "traced": sorted(p.name for p in engine_map.parameters),
    }


def kernel_gaps(model: Any, plain: Any) -> dict[str, float]:
    """Return for each layer the relative difference between its kernel and plain algebra on the loading layout."""
    found = {}
    for name, module in model.named_modules():
        expected = plain.get_submodule(name)
        if hasattr(module, "w13_weight"):
            found[name] = expert_gap(module, expected)
        if hasattr(module, "cpu_linear"):
            inputs = torch.randn(5, expected.weight.shape[1]).to(expected.weight.dtype)
            found[name] = gap(module.quant_method.apply(module, inputs, None), inputs @ expected.weight.t())
        elif getattr(module, "weight", None) is not None:
            found[name] = gap(module.weight, expected.weight)
        if hasattr(module, "num_embeddings_padded"):
            found[name + " looked up"] = gap(module.weight, expected.weight)
        if getattr(module, "bias", None) is not None:
            found[name + ".bias"] = gap(module.bias, expected.bias)
    return found


def expert_gap(module: Any, plain: Any) -> float:
    worst = 0.0
    for expert in range(plain.w13_weight.shape[0]):
        inputs = torch.randn(5, plain.w13_weight.shape[2]).to(plain.w13_weight.dtype)
        gate, up = (inputs @ plain.w13_weight[expert].t()).float().chunk(2, dim=-1)
        expected = (torch.nn.functional.silu(gate) * up).to(inputs.dtype) @ plain.w2_weight[expert].t()
        chosen = torch.full((5, 1), expert, dtype=torch.int32)
        result = module.quant_method.apply(module, inputs, torch.ones(5, 1), chosen, None, None)
        worst = max(worst, gap(result, expected))
    return worst


@torch.no_grad()
def gap(result: torch.Tensor, expected: torch.Tensor) -> float:
    return ((result - expected).float().norm() / expected.float().norm()).item()


def describe_map(engine_map: EngineMap) -> dict[str, Any]:
    return {
        "parameters": {
            p.name: {
                "shape": p.shape,
                "pieces": [[q.hf_name, q.start, q.shape, q.offset, q.strides] for q in p.pieces],
                "padding": p.padding,
                "aliases": p.aliases,
                "repacked": p.repacked,
            }
            for p in engine_map.parameters
        },
        "unused": engine_map.unused,
    }


def snapshot(model: Any) -> dict[str, tuple[int, torch.Tensor]]:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (tensor.data_ptr(), tensor.detach().clone()) for name, tensor in state.items()}


def change(before: dict[str, tuple[int, torch.Tensor]], after: dict[str, tuple[int, torch.Tensor]]) -> str:
    """Return the first tensor whose memory or values have changed, or ""."""
    moved = [name for name in before if name in after and before[name][0] != after[name][0]]
    tensors = ({name: tensor for name, (_, tensor) in state.items()} for state in (after, before))
    return f"{moved[0]} has moved" if moved else first_difference(*tensors)


@torch.no_grad()
def check_case(case: Case, directory: Path, tp: int) -> dict[str, Any]:
    shapes, weights = checkpoint_shapes(case), random_weights(case, seed=3)
    seen: dict[str, Any] = {}
    with vllm_config(case, directory, tp) as config:
        plain = build(config, is_processed=False)
        plain_map = trace(plain, shapes, probe=False)
        seen["map"] = describe_map(plain_map)
        seen["replay"] = check_replay(plain, plain_map, weights)  # leaves ``plain`` in the state after load_weights

        packed = build(config, is_processed=True)
        before = snapshot(packed)
        packed_map = trace(packed, shapes)
        seen["change by tracing"] = change(before, snapshot(packed))
        seen["deterministic"] = trace(packed, shapes) == packed_map
        seen["packed"] = describe_map(packed_map)
        synchronise(packed, packed_map, weights)
        seen["packed gaps"] = kernel_gaps(packed, plain)
        seen["packed again"] = trace(packed, shapes) == packed_map
        seen["live"] = check_live(packed, plain, shapes, case)
        seen["with both names"] = check_both_names(plain, shapes)
        seen["incomplete"] = error_of_incomplete(plain, shapes)
    return seen


def check_live(model: Any, plain: Any, shapes: dict[str, tuple[int, ...]], case: Case) -> dict[str, Any]:
    """Check plain kernels on live parameters with other weights. vLLM's reload must leave them live."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    changed = keep_loading_layout(model)
    engine_map = trace(model, shapes)
    weights = random_weights(case, seed=4)
    synchronise(model, engine_map, weights)
    plain.load_weights(iter(weights.items()))
    seen = {"changed": changed, "map": describe_map(engine_map), "gaps": kernel_gaps(model, plain)}
    if case.family not in MIXTURES:  # vLLM 0.32 reloads experts on the CPU without packing them
        from vllm.config import get_current_vllm_config

        pointers = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
        weights = random_weights(case, seed=5)
        plain.load_weights(iter(weights.items()))
        reload_weights(get_current_vllm_config(), model, iter(weights.items()), None, True)
        seen["reloaded gaps"] = kernel_gaps(model, plain)
        seen["moved"] = [name for name, tensor in model.named_parameters() if tensor.data_ptr() != pointers[name]]
        seen["reloaded map is equal"] = trace(model, shapes) == engine_map
    return seen


def check_both_names(plain: Any, shapes: dict[str, tuple[int, ...]]) -> Any:
    """Check a tied checkpoint that also contains the output layer."""
    both = {**shapes, "lm_head.weight": shapes["model.embed_tokens.weight"]}
    return describe_map(trace(plain, both, probe=False))


def error_of_incomplete(plain: Any, shapes: dict[str, tuple[int, ...]]) -> str:
    kept = {name: shape for name, shape in shapes.items() if "layers.1.self_attn.k_proj.weight" not in name}
    try:
        trace(plain, kept, probe=False)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def check_engine(directory: Path) -> dict[str, Any]:
    """Load the weights b into a whole engine: by its own load, through the traced map, and in place."""
    from transformers import AutoModelForCausalLM

    model_dir = str(directory / "a")
    engine: Any = build_engine(RolloutConfig(engine="vllm"), EngineModel(model_dir, model_dir, "fp32", 64, seed=0))
    hf = {letter: AutoModelForCausalLM.from_pretrained(directory / letter, dtype=torch.float32) for letter in "ab"}
    weights = {letter: {n: t.detach() for n, t in model.named_parameters()} for letter, model in hf.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights["a"].items()}
    seen: dict[str, Any] = {}

    def responses(letter: str, version: int) -> Any:
        engine.load_weights(iter(weights[letter].items()), version=version)
        return greedy()

    def greedy() -> Any:
        prompts = [Prompt(f"p{i}", i, [3 + (7 * i + 5 * j) % 90 for j in range(6)], "") for i in range(3)]
        drawn = generate(engine, prompts, Sampling(temperature=0.0, max_new_tokens=16), step=0)
        return [t.sampled_ids.tolist() for t in drawn]

    def update(worker: Any, letter: str, live: bool) -> EngineMap:
        from vllm.config import set_current_vllm_config

        model = worker.get_model()
        with torch.no_grad(), set_current_vllm_config(worker.vllm_config):
            if live:
                keep_loading_layout(model)
            engine_map = trace(model, shapes)
            synchronise(model, engine_map, weights[letter])
        return engine_map

    seen["b loaded"], seen["a loaded"] = responses("b", 0), responses("a", 1)
    engine._llm.collective_rpc(update, args=("b", False))
    engine._llm.reset_prefix_cache()
    seen["b through the map"] = greedy()
    responses("a", 2)
    [engine_map] = engine._llm.collective_rpc(update, args=("b", True))
    engine._llm.reset_prefix_cache()
    seen["repacked when live"] = [p.name for group in engine_map.repacked for p in group]
    seen["b in place"] = greedy()
    seen["a loaded again"] = responses("a", 3)
    engine.close()
    return seen


def check_without_packing(case: Case, directory: Path) -> dict[str, Any]:
    """Check layers without packed kernels, which pass their weight to torch, as on CPUs that vLLM has no packed kernel for."""
    import vllm.model_executor.layers.utils as kernels

    with (
        vllm_config(case, directory, 1) as config,
        mock.patch.object(kernels, "check_cpu_sgl_kernel", lambda *sizes: False),
        mock.patch.object(kernels.ops, "_supports_onednn", False),
    ):
        return describe_map(trace(build(config, is_processed=True), checkpoint_shapes(case)))


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seen: dict[str, Any] = {"engine": check_engine(directory)}
    from vllm.distributed.parallel_state import destroy_model_parallel

    for tp, cases in SIZES.items():
        seen[f"tp{tp}"] = {case.key: check_case(case, directory, tp) for case in cases}
        if tp == 1:
            seen["without packing"] = {case.key: check_without_packing(case, directory) for case in cases}
        destroy_model_parallel()
    for name, grid in GRIDS.items():
        seen[f"8 bits-{name}"] = {kind.name: check_8_bits(kind, directory, grid) for kind in KINDS}
        destroy_model_parallel()
    (directory / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()
