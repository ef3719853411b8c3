"""Ranks of vLLM engines in processes outside the trainer's world. tests/distributed/engine_processes.py controls them.

    engine_rank.py SOCKET ORDER...

ORDER is JSON: name, rank, layout, and the directories of the model and of the engine's own store. Ranks are forks of this process,
which has imported vLLM.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.schema import RolloutConfig, SpeculativeConfig
from rlhf_mcore.config.schema.rollout import RolloutLayoutConfig
from rlhf_mcore.families.mtp import MTP_KEY
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.platform import current_platform
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.types import Request, Sampling
from tests.distributed.engine_processes import Served, serve
from tests.distributed.nccl_rules import enforce

PROMPTS = [[5, 9, 33], [7, 70, 12, 3, 18, 2]]


class VLLM(Served):
    def answer(self, do: str, given: dict[str, Any]) -> Any:
        if do == "load":  # like vLLM, from full tensors
            known = self._engine._expected.shapes  # files repeat the embedding and the output layer in an MTP layer
            held = {name: tensor for name, tensor in load_file(given["path"]).items() if name in known}
            self._engine.load_weights(iter(held.items()), version=99)
            return None
        if do == "seen":
            return self._seen()
        return super().answer(do, given)

    def _seen(self) -> dict[str, Any]:
        """Return hashes of the non-empty parameters, the engine's responses, and their logprobs."""
        sampling = Sampling(temperature=0.0, max_new_tokens=6)
        requests = [Request(number, f"p{number}", prompt, sampling, 0) for number, prompt in enumerate(PROMPTS)]
        drawn = {found.request_id: found for found in self._engine.generate(requests)}
        return {
            "live": {
                name: blake2b(p.detach().contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
                for name, p in self._engine.model.named_parameters()
                if p.numel() and not p.is_meta
            },
            "said": [[drawn[n].token_ids.tolist(), drawn[n].logprobs.tolist()] for n in sorted(drawn)],
            "version": self._engine.policy_version,
        }


def main(socket_path: str, order: dict[str, Any]) -> None:
    platform, model = current_platform(), order["model"]
    platform.setup_process(0, 1)
    layout = RolloutLayoutConfig(**order["layout"])
    store = dist.FileStore(str(Path(order["store"]) / order["engine"]), layout.num_ranks)
    dist.init_process_group(platform.collective_backend, store=store, rank=order["rank"], world_size=layout.num_ranks)
    cfg, spec = RolloutConfig(layout=layout, kv_cache_gib=0.02, max_num_seqs=16), load_spec(model)
    if count := getattr(spec.hf_config, MTP_KEY, 0):
        cfg.speculative = SpeculativeConfig(method="mtp")
    shapes = hf_shapes(replace(spec.geometry, mtp_layers=count))
    engine = build_engine(cfg, EngineModel(model, model, "fp32", 64, seed=0, shapes=shapes))
    serve(socket_path, f"{order['engine']}.{order['rank']}", VLLM(engine))


def fork(socket_path: str, orders: Sequence[str]) -> None:
    engine_kind("vllm").preload()
    enforce()
    for order in orders:
        if os.fork() == 0:
            try:
                main(socket_path, json.loads(order))
            except BaseException:
                traceback.print_exc()
            os._exit(0)
    for _ in orders:
        os.wait()


if __name__ == "__main__":
    fork(sys.argv[1], sys.argv[2:])
