"""A rank of a certificate: compare one family under every layout with transformers and with its engine."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.bridge.map.rules import hf_shapes, part_of
from rlhf_mcore.bridge.run.sync import EngineWeights, PlannedBridge, SentWeights, SyncOptions
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore.config.schema import Config
from rlhf_mcore.own_processes import end_with_parent, raise_open_files
from rlhf_mcore.parallel.collectives import all_gather_json, world_group
from rlhf_mcore.platform import DTYPES, Platform, current_platform, eager_imports
from rlhf_mcore.protocols import SyncMismatch
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import Engine, EngineModel, LiveEngine
from rlhf_mcore.trainer.advantages import AdvantageComputer
from rlhf_mcore.trainer.batches import BatchSampler, SampledBatch, scored_rollouts
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.trainer.publishers import canary_prompts
from rlhf_mcore.types import Sampling, Score, TrainBatch, Trajectory

if TYPE_CHECKING:
    from rlhf_mcore.roles.policy import Actor  # which imports Megatron-core

TIMEOUT = timedelta(minutes=5)
PROMPTS = canary_prompts(4, 7, 90)


def main() -> None:
    """Certify the layouts in a file, and write the measurements next to it. Collective over the world."""
    end_with_parent(signal.SIGKILL)
    raise_open_files()
    path = Path(sys.argv[1])
    cells = json.loads(path.read_text(encoding="utf-8"))
    platform = current_platform()
    platform.setup_process(int(os.environ["LOCAL_RANK"]), 1)
    dist.init_process_group(platform.collective_backend, timeout=TIMEOUT)
    try:
        with eager_imports():
            rows = list(_certify(platform, cells["config"], cells["layouts"], path.parent))
        if dist.get_rank() == 0:
            path.with_name("rows.json").write_text(json.dumps(rows), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def _certify(platform: Platform, config: str, layouts: dict[str, list[str]], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for every layout. The same engine receives the weights of all layouts."""
    from rlhf_mcore.cli.models import ModelBuilder

    engine: Engine | None = None
    for number, (name, overrides) in enumerate(layouts.items()):
        cfg = resolve(load_config(config, overrides))
        builder = ModelBuilder(cfg, platform)
        actor = builder.actor()
        spec, parameters = actor.model.spec, actor.model.local_parameters()
        dtype = platform.dtype(cfg.model.dtype)
        engine = engine or build_engine(cfg.rollout, EngineModel.of(cfg, dtype, hf_shapes(spec.geometry.trunk)))
        assert isinstance(engine, LiveEngine), "each of ours is one"
        # Buckets of a quarter of the largest tensor, so that its pieces are sent separately. Poison shows unwritten elements.
        bucket = max(all_gather_json(max(parameter.tensor.nbytes for parameter in parameters))) // 4
        trunk, kind = spec.geometry.trunk, engine_kind(cfg.rollout.engine)
        assert kind.weights != "full", "each of ours is one"
        sent = SentWeights(part_of(parameters, spec.geometry, trunk), trunk, quantisation=cfg.rollout.quantization)
        weights = EngineWeights(engine, kind.weights, poison=True)
        bridge = PlannedBridge(sent, weights, world_group(), SyncOptions(bucket, verify=True))
        row: dict[str, Any] = {"layout": name, "dtype": dtype, "engine": cfg.rollout.engine}
        try:
            bridge.sync(number)
            row["sync"] = "equal"
            row["sleep"] = _sleep(platform, engine, partial(bridge.sync, number)) if number == 0 else ""
        except SyncMismatch as error:
            row["sync"] = str(error)
        row["saved"] = _compare_saved(cfg, actor, folder / name)
        row |= _agreement(platform, cfg, actor, engine)  # last: it makes an update
        builder.release()
        yield row
    assert engine is not None
    engine.close()


def _agreement(platform: Platform, cfg: Config, actor: Actor, engine: Engine) -> dict[str, Any]:
    """Measure the mean errors of logprobs of trainer and engine, and the relative error of the gradient's norm.

    Collective over the world.

    All are against transformers in fp32. ``noise`` is the error of transformers itself in the dtype of the run.
    """
    batch = _rollouts(cfg, engine)
    batch.old_logprobs = actor.compute_logprobs(batch)
    AdvantageComputer(cfg.algorithm)(batch)
    with actor.model.on_device():
        update = actor.deliver_update(batch)()
    assert update is not None
    norm = update.grad_norm
    count, exact_model = float(batch.num_sampled.sum()), _transformers(cfg, platform, torch.float32)
    exact, exact_norm = _forward_backward(exact_model, batch, count)
    rounded = exact
    if (dtype := DTYPES[platform.dtype(cfg.model.dtype)]) != torch.float32:
        with torch.no_grad():
            rounded = _logprobs(_transformers(cfg, platform, dtype), batch)

    def error(values: Tensor, other: Tensor = exact) -> float:
        return sum(all_gather_json(float((values - other).abs().sum()))) / count

    of_trainer, of_engine = batch.old_logprobs[batch.loss_mask], batch.rollout_logprobs[batch.loss_mask]
    return {
        "trainer": error(of_trainer),
        "rollout": error(of_engine),
        "agreement": error(of_trainer, of_engine),
        "noise": error(rounded),
        "gradient": abs(norm - exact_norm) / exact_norm,
        "tokens": count,
    }


def _rollouts(cfg: Config, engine: Engine) -> TrainBatch:
    """Sample rows from the engines, equal under every layout. Their scores alternate, so that every group has a gradient."""
    sampling = Sampling(**vars(cfg.rollout.sampling), seed=cfg.seed)
    groups = _sampler(engine).sample_step(PROMPTS, sampling, step=0, begin_scores=_alternating_scores)
    batch, _ = RowExchange(sampling.n)(SampledBatch(PROMPTS, scored_rollouts(groups)))
    return batch


def _alternating_scores(trajectories: Sequence[Trajectory]) -> Future[list[Score]]:
    scores: Future[list[Score]] = Future()
    scores.set_result([Score(float(trajectory.sample % 2)) for trajectory in trajectories])
    return scores


def _sampler(engine: Engine) -> BatchSampler:
    return BatchSampler(engine, engine.rank, lambda rows: [""] * len(rows), ranks=engine.ranks)


def _transformers(cfg: Config, platform: Platform, dtype: Any) -> Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=dtype, local_files_only=True)
    return model.to(platform.device()).eval()


def _logprobs(model: Module, batch: TrainBatch) -> Tensor:
    """Compute logprobs of the sampled tokens of this rank's rows, one row at a time: no padding, no packing."""
    sizes, logprobs = batch.lengths[batch.rows].tolist(), [torch.zeros(0)]
    for ids, mask in zip(batch.token_ids.split(sizes), batch.loss_mask.split(sizes), strict=True):
        tokens = ids.long().to(next(model.parameters()).device)
        logits = model(tokens[None]).logits[0, :-1].float()
        drawn = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0]
        logprobs.append(drawn[mask[1:].to(drawn.device)].cpu())
    return torch.cat(logprobs)


def _forward_backward(model: Module, batch: TrainBatch, count: float) -> tuple[Tensor, float]:
    """Compute logprobs, and the norm of the policy gradient with all ratios one. Collective over the world."""
    assert batch.advantages is not None
    logprobs = _logprobs(model, batch)
    (
        -(logprobs * batch.advantages[batch.loss_mask]).sum() / count + 0 * sum(p.sum() for p in model.parameters())
    ).backward()
    total = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        assert parameter.grad is not None
        gradient = parameter.grad.double().cpu()
        dist.all_reduce(gradient)
        total += gradient.square().sum()
    return logprobs.detach(), float(total.sqrt())


def _greedy(engine: Engine) -> list[Any]:
    """Return the greedy responses of all engines to fixed prompts, with logprobs. Collective over the world."""
    drawn = _sampler(engine).sample(PROMPTS, Sampling(temperature=0.0, max_new_tokens=8), step=0)
    return list(all_gather_json([[t.sampled_ids.tolist(), t.sampled_logprobs.tolist()] for t in drawn]))


def _sleep(platform: Platform, engine: Engine, sync: Callable[[], object]) -> str:
    """Return whether an engine gives the same responses after a sleep of level 1, and of level 2 followed by a sync."""
    before = _greedy(engine)
    for level in (1, 2):
        engine.sleep(level)
        engine.wake()
        if level == 2:
            sync()
        if _greedy(engine) != before:
            return f"differs after level {level}"
    return "equal" if platform.name == "cuda" else "equal; frees nothing on a CPU"


def _compare_saved(cfg: Config, actor: Actor, folder: Path) -> str:
    """Return whether the saved model equals the loaded model, bit for bit. Collective over the world."""
    model = actor.model
    parameters, source = model.local_parameters(), cfg.model.path
    exporter = Exporter(parameters, model.spec.geometry, [source], world_group(), bucket_bytes=1 << 16)
    exporter.write(folder)
    dist.barrier()
    given, saved = dict(HFReader(source).tensors()), dict(HFReader(folder).tensors())
    differing = given.keys() ^ saved.keys() or {
        name for name, tensor in saved.items() if not torch.equal(tensor, given[name].to(tensor.dtype))
    }
    return f"{min(differing)} differs" if differing else "equal"


if __name__ == "__main__":
    main()
