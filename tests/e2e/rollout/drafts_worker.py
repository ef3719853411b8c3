"""Run vLLM engines that draft with trained MTP layers, over both ranks of a trainer, under torchrun. test_drafts.py
checks the results.

The model is GLM-4.5 with an MTP layer. Its layers change their input very little, so model and MTP layer predict from
the last token alone. They predict the same tokens, so greedy decoding accepts all drafts. If the layers are scaled up,
they change the predictions. The acceptance then depends on attention and experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.bridge.map.trace import trace
from rlhf_mcore.config.schema import RolloutConfig, RolloutLayoutConfig, SpeculativeConfig
from rlhf_mcore.families.quantised import QUANTISATIONS, Quantisation
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.mtp import MTPLearning
from rlhf_mcore.parallel.collectives import all_gather_json, world_group
from rlhf_mcore.planning.inputs import EngineGrid
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.trainer.metrics import draft_metrics
from rlhf_mcore.types import DRAFTS, Prompt, Sampling, Trajectory
from tests.distributed import models
from tests.distributed.setting import Settings, build, finish, gatherer, load_hf, moe_groups_of, start
from tests.e2e.plain_load import sync_and_compare
from tests.e2e.rollout import drafts_of_8_bits
from tests.e2e.rollout.drawing import sampler_of
from tests.e2e.rollout.tiny import save_tokenizer
from tests.engine_layout import engine_tensors
from tests.episodes import sample_rollouts
from tests.planned_bridge import planned_bridge
from tests.unit.bridge.eight_bits import slow_values

ENGINES = {
    "tp2": RolloutLayoutConfig(tp=2),
    "dp2 ep2": RolloutLayoutConfig(dp=2, ep=2),
    "pp2": RolloutLayoutConfig(pp=2),
}
LAYOUT, DEPTH, NEW_TOKENS, TEMPERATURE = "tp2_sp_ep2_etp1_dp2", 2, 16, 0.8
MTP = "model.layers.4."
TINY, GROWN = 2.0**-20, 2.0**16  # exact in fp32
NORM, MTP_NORM = "model.norm.weight", f"{MTP}shared_head.norm.weight"  # norms before the output layer


def make(path: Path) -> None:
    models.make("glm4_moe", path)
    models.add_mtp_layer(path)
    save_tokenizer(path)
    tensors = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}
    hidden = tensors[NORM].numel()
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name] *= TINY
    tensors[f"{MTP}eh_proj.weight"] = torch.eye(hidden, 2 * hidden)  # keeps the embedding only
    tensors |= {name: torch.ones(hidden) for name in (f"{MTP}enorm.weight", f"{MTP}hnorm.weight", NORM, MTP_NORM)}
    generator = torch.Generator().manual_seed(1)
    tensors["lm_head.weight"] = torch.randn(tensors["lm_head.weight"].shape, generator=generator) * 0.3
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


class Policy:
    """The trainer's model and the same model in transformers, which move together.

    ``signs``: signs of both norms before the output layer.
    """

    def __init__(self, path: Path, model: MegatronModel) -> None:
        self.path, self.model, self.hf = path, model, load_hf(path)
        self.geometry = model.spec.geometry
        self.signs = torch.ones(self.geometry.hidden_size)

    def _scale(self, by: Any, is_meant: Callable[[str], bool]) -> None:
        tensors = [
            parameter.tensor
            for parameter in self.model.local_parameters()
            if is_meant(pieces(parameter.name, self.geometry, parameter.shard)[0].hf_name)
        ]
        with torch.no_grad():
            for tensor in [*tensors, *(tensor for name, tensor in self.hf.named_parameters() if is_meant(name))]:
                tensor.mul_(by)

    def move(self, seed: int) -> None:
        """Flip signs, so that the model and its MTP layer predict other tokens."""
        signs = torch.randint(0, 2, self.signs.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        self._scale(signs, (NORM, MTP_NORM).__contains__)
        self.signs = self.signs * signs

    def grow(self, by: float) -> None:
        self._scale(by, lambda name: "o_proj" in name or "down_proj" in name)


def sample(engine: Any, hf: torch.nn.Module) -> dict[str, Any]:
    """Return the engine's responses, their acceptance of drafts, and the difference of their logprobs from transformers."""
    prompts = [Prompt(f"p{row}", row, [3 + (7 * row + 5 * i) % 90 for i in range(4 + 3 * row)], "") for row in range(4)]
    found: dict[str, Any] = {}
    for name, sampling in {
        "greedy": Sampling(temperature=0.0, max_new_tokens=NEW_TOKENS, records_drafts=True),
        "sampled": Sampling(n=4, temperature=TEMPERATURE, max_new_tokens=NEW_TOKENS, seed=3, records_drafts=True),
    }.items():
        trajectories = [each.trajectory for each in sample_rollouts(sampler_of(engine), prompts, sampling, step=1)]
        gaps = gaps_of(trajectories, hf, sampling.temperature or 1.0)
        shares = draft_metrics(
            torch.cat([torch.zeros(0, 2), *(torch.from_numpy(t.fields[DRAFTS]) for t in trajectories)])
        )
        found[name] = shares | {
            "gap": max(all_gather_json(max(gaps, default=0.0))),
            "ids": next(filter(None, all_gather_json([t.sampled_ids.tolist() for t in trajectories]))),
        }
    found["greedy"]["expected"] = [
        likeliest(hf, prompt.prompt_ids, ids) for prompt, ids in zip(prompts, found["greedy"]["ids"], strict=True)
    ]
    return found


@torch.no_grad()
def gaps_of(trajectories: Sequence[Trajectory], hf: torch.nn.Module, temperature: float) -> list[float]:
    gaps = []
    for each in trajectories:
        ids, first = torch.from_numpy(each.token_ids).long(), len(each.prompt.prompt_ids)
        logprobs = (hf(ids[None]).logits[0, first - 1 : -1] / temperature).log_softmax(-1)
        expected = logprobs.gather(1, ids[first:, None])[:, 0]
        gaps.append(float((expected - torch.from_numpy(each.sampled_logprobs)).abs().max()))
    return gaps


@torch.no_grad()
def likeliest(hf: torch.nn.Module, prompt: Sequence[int], ids: Sequence[int]) -> list[int]:
    """Return the likeliest token at every position of a response by transformers. A greedy response equals them."""
    return hf(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()


def describe_tensors(tensors: Any) -> set[str]:
    return {f"{prod(t.shape)} {sorted((p.hf_name, p.start, p.shape) for p in t.pieces)}" for t in tensors}


def of_draft(engine: Any, policy: Policy) -> dict[str, bool] | None:
    """Return whether the engine's MTP tensors equal the files bit for bit, for tensors that vLLM stores like files.

    None without drafts.
    """
    if engine._drafts.model is None:
        return None
    held, layer = load_file(policy.path / "model.safetensors"), engine.model.draft.model.layers["4"]
    return {
        "eh_proj": torch.equal(layer.eh_proj.weight, held[f"{MTP}eh_proj.weight"]),
        "norm": torch.equal(layer.shared_head.norm.weight, held[MTP_NORM] * policy.signs),
        "layer": torch.equal(layer.mtp_block.input_layernorm.weight, held[f"{MTP}input_layernorm.weight"]),
    }


def states_of(policy: Policy, layout: RolloutLayoutConfig) -> dict[str, Any]:
    """Return the responses and the memory of an engine of this layout while the policy moves, with and without its drafts."""
    geometry, parameters = policy.geometry, policy.model.local_parameters()
    speculative = SpeculativeConfig(method="mtp", num_tokens=DEPTH)
    cfg = RolloutConfig(layout=layout, kv_cache_gib=0.02, max_num_seqs=16, speculative=speculative)
    model = EngineModel(str(policy.path), str(policy.path), "fp32", 64, seed=0, shapes=hf_shapes(geometry))
    engine: Any = build_engine(cfg, model)
    engine._stops = []  # all responses have the maximum length
    traced = trace(engine.model, hf_shapes(geometry)).parameters
    grid = EngineGrid(layout.tp, layout.pp, layout.dp, layout.ep, drafts=True)
    planned = engine_tensors(geometry, grid, dist.get_rank())
    found: dict[str, Any] = {
        "unplanned": all_gather_json(sorted(describe_tensors(traced) ^ describe_tensors(planned))),
        "num_drafts": sum(all_gather_json(engine._drafts.model is not None)),
        "num_blocks": all_gather_json(engine._llm.llm_engine.vllm_config.cache_config.num_gpu_blocks),
    }
    common: dict[str, Any] = {"bucket_bytes": 20_000, "poison": True}
    whole = gatherer(policy.model)
    full = planned_bridge(parameters, geometry, engine, world_group(), verify=True, **common)
    sync_and_compare(full, whole, 0)  # compares every parameter with a plain load, bit for bit
    found["first"] = sample(engine, policy.hf)
    bridges = [
        planned_bridge(parameters, geometry, engine, world_group(), verify=True, changing=changing, **common)
        for changing in (None, list(hf_shapes(geometry.trunk)))
    ]
    changes: dict[str, tuple[Callable[[], None], int]] = {
        "synced": (lambda: policy.move(1), 0),
        "stale": (lambda: policy.move(2), 1),
        "synced again": (lambda: None, 0),
        "grown": (lambda: policy.grow(GROWN), 0),
    }
    for version, (name, (change, number)) in enumerate(changes.items(), 1):
        change()
        bridges[number].sync(version)
        found[name] = sample(engine, policy.hf) | {"bits": [*filter(None, all_gather_json(of_draft(engine, policy)))]}
    found["8 bits"] = of_8_bits(policy, engine, QUANTISATIONS["fp8" if layout.dp > 1 else "int8"])
    policy.grow(1 / GROWN)
    for seed in (1, 2):
        policy.move(seed)  # back again
    engine.close()
    return found


def of_8_bits(policy: Policy, engine: Any, kind: Quantisation) -> list[dict[str, Any]]:
    """Return responses after a sync of 8-bit weights, and after loading the same values.

    Slow versions compute these values from whole tensors.
    """
    options: dict[str, Any] = {"bucket_bytes": 20_000, "verify": True, "quantisation": kind.name}
    planned_bridge(policy.model.local_parameters(), policy.geometry, engine, world_group(), **options).sync(20)
    brought = sample(engine, policy.hf)
    whole = gatherer(policy.model)
    values = ((name, slow_values(w, kind) if kind.applies(name) else w) for name, w in whole)
    engine.load_weights(values, version=21)
    return [brought, sample(engine, policy.hf)]


def main(directory: Path) -> None:
    platform, path = start(), directory / "model"
    if dist.get_rank() == 0:
        make(path)
    dist.barrier()
    model, _ = build(path, moe_groups_of(LAYOUT, {}), platform, Settings(mtp=MTPLearning()))
    policy = Policy(path, model)
    findings = {name: states_of(policy, layout) for name, layout in ENGINES.items()}
    findings["modules"] = all_gather_json(drafts_of_8_bits.check(path, directory / "of_8_bits"))
    finish(findings, directory)
