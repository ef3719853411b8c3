"""Code that the worker scripts share: layouts, a batch, a model built under a layout, and a plain transformers oracle."""

from __future__ import annotations

import atexit
import json
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

warnings.filterwarnings("ignore")

from rlhf_mcore.bridge.files.export import Exporter  # noqa: E402
from rlhf_mcore.bridge.files.gather import Gatherer  # noqa: E402
from rlhf_mcore.bridge.files.hf_files import HFReader, load  # noqa: E402
from rlhf_mcore.config.schema import AlgorithmConfig, KLConfig, OptimizerConfig, RecomputeConfig, TrainerConfig  # noqa: E402
from rlhf_mcore.data import prefixes  # noqa: E402
from rlhf_mcore.expected_kernels import why_unshared  # noqa: E402
from rlhf_mcore.families.indexed import with_trained_indexers  # noqa: E402
from rlhf_mcore.mcore.build import BuildOptions, build_model  # noqa: E402
from rlhf_mcore.mcore.groups import GroupPool, ModelGroups, build_groups  # noqa: E402
from rlhf_mcore.mcore.model import MegatronModel  # noqa: E402
from rlhf_mcore.mcore.model_spec import load_spec  # noqa: E402
from rlhf_mcore.mcore.mtp import MTPLearning  # noqa: E402
from rlhf_mcore.mcore.overrides import Overrides  # noqa: E402
from rlhf_mcore.parallel.layout import ParallelLayout  # noqa: E402
from rlhf_mcore.platform import Platform, current_platform  # noqa: E402
from rlhf_mcore.roles.policy import Actor, replay_routes  # noqa: E402
from rlhf_mcore.roles.trained_model import MinibatchPlan, TrainedModel  # noqa: E402
from rlhf_mcore.roles.trained_weights import freeze_all_but_indexers, matrices_of  # noqa: E402
from rlhf_mcore.types import TrainBatch  # noqa: E402
from tests.rows import Row, batch_of, rows_of_padded  # noqa: E402

# name -> (tp, pp, vpp, sequence parallel). The data-parallel size fills the world of four ranks.
LAYOUTS = {
    "dp4": (1, 1, None, False),
    "tp2_dp2": (2, 1, None, False),
    "tp2_dp2_sp": (2, 1, None, True),
    "pp2_dp2": (1, 2, None, False),
    "pp2_vpp2_dp2": (1, 2, 2, False),
    "tp2_pp2": (2, 2, None, False),
    "tp2_pp2_vpp2_sp": (2, 2, 2, True),
    "tp4": (4, 1, None, False),
    "tp4_sp": (4, 1, None, True),
    "pp4": (1, 4, None, False),
}
# name -> (tp, pp, vpp, sequence parallel, layers of each chunk in network order), for models of seven layers.
UNEVEN_LAYOUTS = {
    "pp2_dp2_uneven": (1, 2, None, False, (3, 4)),
    "pp2_vpp2_dp2_uneven": (1, 2, 2, False, (1, 2, 3, 1)),
    "tp2_pp2_vpp2_sp_uneven": (2, 2, 2, True, (2, 1, 1, 3)),
    "pp4_uneven": (1, 4, None, False, (1, 2, 3, 1)),
}
# Context parallelism combined with the others. The sixth entry is its size.
CONTEXT_LAYOUTS = {
    "cp4": (1, 1, None, False, None, 4),
    "cp2_dp2": (1, 1, None, False, None, 2),
    "tp2_cp2": (2, 1, None, False, None, 2),
    "tp2_sp_cp2": (2, 1, None, True, None, 2),
    "pp2_cp2": (1, 2, None, False, None, 2),
    "pp2_vpp2_cp2": (1, 2, 2, False, None, 2),
}
# name -> (tp, pp, vpp, sequence parallel, ep, etp), for models with experts; further entries are as above.
MOE_LAYOUTS = {
    "dp4": (1, 1, None, False, 1, None),
    "ep2_dp4": (1, 1, None, False, 2, None),
    "ep4_dp4": (1, 1, None, False, 4, None),
    "ep2_etp2_dp4": (1, 1, None, False, 2, 2),
    "tp2_sp_dp2": (2, 1, None, True, 1, None),
    "tp2_sp_ep2_etp1_dp2": (2, 1, None, True, 2, 1),
    "tp2_sp_ep2_dp2": (2, 1, None, True, 2, None),
    "tp2_sp_ep4_etp1_dp2": (2, 1, None, True, 4, 1),
    "tp4_sp_ep2_etp1": (4, 1, None, True, 2, 1),
    "pp2_ep2_dp2": (1, 2, None, False, 2, None),
    "pp2_vpp2_ep2_dp2": (1, 2, 2, False, 2, None),
    "tp2_sp_pp2_ep2_etp1": (2, 2, None, True, 2, 1),
    "tp2_sp_pp2": (2, 2, None, True, 1, None),
    "cp4_ep2": (1, 1, None, False, 2, None, None, 4),
    "cp2_ep4_dp2": (1, 1, None, False, 4, None, None, 2),
    "tp2_sp_cp2_ep2_etp1": (2, 1, None, True, 2, 1, None, 2),
    "pp2_cp2_ep2": (1, 2, None, False, 2, None, None, 2),
    "pp2_ep2_dp2_uneven": (1, 2, None, False, 2, None, (1, 3)),
}
TEMPERATURE = 0.8
# Bound on the difference of two fp32 logprobs of these models, if batch shapes or layouts differ and sums therefore
# run in another order.
# Measured: below 2e-6 on an Intel processor with AMX, 2.9e-6 on an AMD processor with AVX-512.
# Losses and metrics are means and extremes of functions of logprobs. Their slope is about one or their own value, so
# they differ by at most as much, even if terms cancel.
# Between three kinds of kernels, gradient norms differ by 1.6e-6 relative, and new weights by 3.1e-7.
NOISE = 1e-5
POOL = GroupPool()  # one pool per worker process
VOCAB = 97


def start() -> Platform:
    """Return the platform of this rank. Its process group exists until the process ends, because several workers may run in it."""
    platform = current_platform()
    prefixes.SHORTEST = 2  # rows of tests are short
    if not dist.is_initialized():
        platform.setup_process(0, 1)
        dist.init_process_group(platform.collective_backend)
        atexit.register(dist.destroy_process_group)
    return platform


def write_together(exporter: Exporter, directory: Path) -> None:
    """Write a directory. After this call, all ranks may read all of it."""
    exporter.write(directory)
    dist.barrier()


def finish(findings: Any, directory: Path) -> None:
    """Write the findings after every rank is done."""
    dist.barrier()
    if dist.get_rank() == 0:
        (directory / "findings.new").write_text(json.dumps(findings))
        (directory / "findings.new").rename(directory / "findings.json")


def groups_of(name: str, cache: dict[str, ModelGroups]) -> ModelGroups:
    """Return the groups of a layout. They are built once per layout, because every gloo group costs sockets and threads."""
    if name not in cache:
        tp, pp, vpp, sp, *rest = {**LAYOUTS, **UNEVEN_LAYOUTS, **CONTEXT_LAYOUTS}[name]
        layers, cp = [*rest, *(None, 1)[len(rest) :]]
        layout = ParallelLayout(dist.get_world_size(), tp, pp, vpp, cp, sp, layers_per_stage=layers)
        groups = build_groups(layout, POOL)
        assert groups is not None
        cache[name] = groups
    return cache[name]


def layouts_of(model: str) -> list[str]:
    """Return the layouts that fit the number of layers of a dense model."""
    return list(UNEVEN_LAYOUTS if model == "qwen3_seven" else LAYOUTS)


def moe_groups_of(name: str, cache: dict[str, ModelGroups]) -> ModelGroups:
    """Return the groups of a layout with experts, as :func:`groups_of`."""
    if name not in cache:
        tp, pp, vpp, sp, ep, etp, *rest = MOE_LAYOUTS[name]
        layers, cp = [*rest, *(None, 1)[len(rest) :]]
        layout = ParallelLayout(dist.get_world_size(), tp, pp, vpp, cp, sp, ep, etp, layers)
        groups = build_groups(layout, POOL)
        assert groups is not None
        cache[name] = groups
    return cache[name]


def sizes_of(layout: str) -> dict[str, object]:
    """Return the parallel sizes of a layout, which ``covering_rows`` pairs with other settings."""
    known = MOE_LAYOUTS if layout in MOE_LAYOUTS else {**LAYOUTS, **UNEVEN_LAYOUTS, **CONTEXT_LAYOUTS}
    tp, pp, vpp, sp, *rest = known[layout]
    ep, etp = rest[:2] if known is MOE_LAYOUTS else (1, None)
    layers, cp = [*(rest[2:] if known is MOE_LAYOUTS else rest), *(None, 1)[len(rest) - 2 * (known is MOE_LAYOUTS) :]]
    sizes = {"tp": tp, "pp": pp, "vpp": vpp or 1, "cp": cp, "dp": 4 // (tp * pp * cp), "ep": ep, "etp": etp or tp}
    return {**sizes, "sp": sp, "uneven": layers is not None}


def splits_of(layout: str) -> dict[str, object]:
    """Return the kinds of parallelism of a layout, without sizes, for checks that treat 4 ranks like 2."""
    return {name: size not in (1, False) for name, size in sizes_of(layout).items()}


def rows(seed: int = 0, count: int = 8) -> list[Row]:
    """Return prompts and responses of different lengths, one of them a single token, with invented engine logprobs.

    Two rows share a prompt, which packed rows compute once. Rows 4 and 5 also share the first tokens of their responses.
    """
    generator = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, n: int) -> list[int]:
        return torch.randint(low, high, (n,), generator=generator).tolist()

    made = []
    for number in range(count):
        prompt, response = ints(1, 7, 1)[0] + 1, 1 if number == 3 else ints(2, 15, 1)[0]
        logprobs = (-2 * torch.rand(response, generator=generator)).tolist()
        made.append(Row(ints(0, VOCAB, prompt), ints(0, VOCAB, response), logprobs, float(number % 3)))
        if number % 2:
            made[-1].prompt_ids = made[-2].prompt_ids
        if number == 5:
            made[5].response_ids[:2] = made[4].response_ids[:2]
    return made


def batch_for(all_rows: list[Row], owners: list[int] | None = None) -> TrainBatch:
    """Return a batch with two samples per prompt. ``owners``: the rank that stores each row; None: distribute rows over all ranks."""
    return batch_of(all_rows, group_ids=[i // 2 for i in range(len(all_rows))], owners=owners)


def batch_of_learner(model: TrainedModel) -> TrainBatch:
    """Return the batch of ``rows()`` as in reinforcement learning: a row is on a rank that learns from it."""
    owners, replicas = model.choose_owners(batch_for(rows()).sizes)
    batch = batch_for(rows(), owners.tolist())
    batch.replicas = replicas
    return batch


@dataclass(slots=True)
class Settings:
    """The settings that checks vary."""

    max_tokens: int = 64
    packing: bool = True
    dtype: str = "fp32"
    recompute: RecomputeConfig | None = None
    algorithm: AlgorithmConfig | None = None
    optimizer: OptimizerConfig | None = None
    aux_loss_coef: float = 0.0
    expert_bias_rate: float = 0.0
    megatron: dict[str, Any] = field(default_factory=dict)
    epochs: int = 1
    logit_chunk_tokens: int | None = None
    mtp: MTPLearning | None = None
    indexer: str = "frozen"
    layer_spec: str = "local"
    router_replay: str = "off"


def algorithm(aggregation: str = "token") -> AlgorithmConfig:
    return AlgorithmConfig(
        loss_aggregation=aggregation,
        constant_length=20,
        clip_low=0.1,
        clip_high=0.3,
        entropy_coef=0.02,
        kl=KLConfig(coef=0.05),
    )


def build(path: Path, groups: ModelGroups, platform: Platform, settings: Settings) -> tuple[MegatronModel, Actor]:
    spec = load_spec(path)
    if settings.mtp is not None:
        spec = replace(spec, geometry=replace(spec.geometry, mtp_layers=spec.hf_config.num_nextn_predict_layers))
    if settings.indexer != "frozen":
        spec = replace(spec, geometry=with_trained_indexers(spec.geometry))
    options = BuildOptions(
        settings.dtype,
        settings.layer_spec,
        settings.recompute or RecomputeConfig(),
        True,
        False,
        0,
        settings.aux_loss_coef,
        Overrides("actor.megatron", settings.megatron),
        logit_chunk_tokens=settings.logit_chunk_tokens,
        expert_bias_rate=settings.expert_bias_rate,
        mtp=settings.mtp,
        indexer=settings.indexer,
        freeze=freeze_all_but_indexers if settings.indexer == "warm_up" else None,
    )
    model = build_model(spec, groups, platform, options)
    load(model.local_parameters(), spec.geometry, HFReader(path))
    # A large eps keeps Adam's first step smooth in the gradient: without it rounding decides the sign of tiny ones.
    cfg = settings.optimizer or OptimizerConfig(lr=1e-2, eps=1e-3, clip_grad=0.5, weight_decay=0.1)
    trainer = TrainerConfig(max_tokens_per_microbatch=settings.max_tokens, packing=settings.packing)
    chosen = settings.algorithm or algorithm()
    plan = MinibatchPlan(1000, settings.epochs, chosen.loss_aggregation, chosen.constant_length)
    model.add_optimizer(cfg, matrices_of(spec.geometry))
    trained = TrainedModel(groups.layout, model, spec, trainer, optimizer=cfg, plan=plan, name="actor")
    trained.unshared_because = why_unshared(spec.geometry, groups.layout.cp, has_gpu=False)
    if settings.router_replay != "off":
        replay_routes(trained)
    return model, Actor(trained, TEMPERATURE, chosen, router_replay=settings.router_replay)


def gatherer(model: MegatronModel) -> Gatherer:
    pgs = model.groups.collection
    return Gatherer(model.local_parameters(), model.spec.geometry, pgs.tp, pgs.pp, pgs.tp_ep)


def hf_logprobs(hf: torch.nn.Module, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprobs and entropies of the response tokens of one row, without padding, packing or index tricks."""
    ids = torch.tensor([row.prompt_ids + row.response_ids])
    log_p = torch.log_softmax(hf(ids).logits[0].float() / TEMPERATURE, dim=-1)
    start, count = len(row.prompt_ids), len(row.response_ids)
    at = [start + t - 1 for t in range(count)]
    logprobs = torch.stack([log_p[a, row.response_ids[t]] for t, a in enumerate(at)])
    return logprobs, -(log_p[at].exp() * log_p[at]).sum(-1)


def load_hf(path: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()


def response_values(batch: TrainBatch, values: torch.Tensor) -> dict[int, list[float]]:
    """Return the values at the response tokens for each row of the step. Collective over the world."""
    return dict(enumerate(rows_of_padded(batch, values)))


def plain(settings: Settings) -> dict[str, Any]:
    return asdict(settings)
