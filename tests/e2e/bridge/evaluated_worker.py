"""Run an MoE model with adapters, and then models of an evaluation in the engine that it keeps for them, under torchrun.

DIRECTORY contains the models ``mixture`` and ``evaluation/model``. ``mixture`` receives rank0.json; ``evaluation`` receives two
directories of adapters and findings.json. test_adapters.py asserts on the results. Further arguments are names of linear layers of the
MoE model to adapt.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rlhf_mcore.bridge.files.hf_files import adapter_config
from rlhf_mcore.commands.evaluate import weights
from rlhf_mcore.commands.evaluate.checkpoints import checkpoint_config, find_model
from rlhf_mcore.commands.evaluate.weights import engine_adapters
from rlhf_mcore.config.load import load_config
from rlhf_mcore.geometry import AdapterSizes
from rlhf_mcore.readers.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rlhf_mcore.readers.model_files import read_geometry
from rlhf_mcore.rollout.vllm.engine import VLLMEngine
from tests.e2e.bridge.adapter_worker import SCALE, compare, random_adapters, reference, seen

CONFIG = """\
model: {{path: {model}, dtype: fp32}}
data: {{train: [none.jsonl], eval: [none.jsonl], max_prompt_tokens: 8}}
rollout: {{engine: vllm, kv_cache_gib: 0.02, max_num_seqs: 16, max_model_len: 64, sampling: {{max_new_tokens: 16}}}}
"""
ADAPTERS = {"small": (8, ("q_proj", "v_proj", "down_proj")), "large": (16, ("o_proj", "v_proj", "gate_proj"))}


def main(directory: Path, *targets: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    compare(directory / "mixture", *targets)
    evaluate(directory / "evaluation")
    dist.destroy_process_group()


def evaluate(directory: Path) -> None:
    base = directory / "model"
    (directory / "run.yaml").write_text(CONFIG.format(model=base))
    cfg, full = load_config(directory / "run.yaml"), load_file(base / "model.safetensors")
    adapters: dict[str, Any] = {"model": {}}
    for seed, (name, (rank, targets)) in enumerate(ADAPTERS.items()):
        geometry = replace(read_geometry(base), adapter=AdapterSizes(rank, SCALE * rank, targets))
        adapters[name] = random_adapters(geometry, seed)
        (directory / name).mkdir()
        save_file(adapters[name], directory / name / ADAPTER_WEIGHTS)
        (directory / name / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(geometry, str(base))))
    models = {name: find_model(str(directory / name), "evaluate.checkpoint", str(base)) for name in adapters}
    found = []
    with (
        mock.patch.object(weights, "build_engine", wraps=weights.build_engine) as built,
        mock.patch.object(VLLMEngine, "load_weights", autospec=True, side_effect=VLLMEngine.load_weights) as loaded,
    ):
        engines = weights.Engines("fp32", engine_adapters(cfg, list(models.values())))
        for name in ("small", "large", "model", "small"):
            own = checkpoint_config(cfg, models[name])
            sampler = engines.start(own, models[name], lambda: None)
            found.append({"name": name, **seen(sampler.engine, reference(base, full, adapters[name]))})
        engines.close()
    findings = {"seen": found, "built": built.call_count, "loaded": loaded.call_count}
    (directory / "findings.json").write_text(json.dumps(findings))
