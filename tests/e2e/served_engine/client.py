"""The client side. All ranks share one server, and only the first rank communicates with it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from rlhf_mcore.config.schema import RolloutConfig
from rlhf_mcore.protocols import EngineRank
from rlhf_mcore.rollout.engine import Engine, EngineModel
from rlhf_mcore.types import Completion, Request


class ServedEngine(Engine):
    """Requests and answers are lines of JSON. Weights are passed in a file."""

    def __init__(self, cfg: RolloutConfig, model: EngineModel) -> None:
        super().__init__(model, EngineRank(0, 1, is_lead=dist.get_rank() == 0))
        self._folder = tempfile.TemporaryDirectory()
        self._due: list[dict[str, Any]] = []
        if self.rank.is_lead:
            command = [sys.executable, "-m", "tests.e2e.served_engine.server", model.model_dir, model.tokenizer_dir]
            command += [model.dtype, str(model.max_model_len), str(cfg.max_num_seqs)]
            pipe = subprocess.PIPE
            self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def _ask(self, **order: Any) -> Any:
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(order), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())

    def submit(self, requests: Sequence[Request]) -> None:
        if self.rank.is_lead:
            super().submit(requests)

    def _begin(self, requests: Sequence[Request], limits: Sequence[int]) -> list[str]:
        self._due += [{**asdict(request), "prompt_ids": list(map(int, request.prompt_ids))} for request in requests]
        return [request.name for request in requests]

    def _step(self) -> list[Completion]:
        due, self._due = self._due, []
        return [
            Completion(
                answer["request_id"],
                np.array(answer["token_ids"], np.int32),
                np.array(answer["logprobs"], np.float32),
                ((0, self.policy_version),),
                answer["finish_reason"],
            )
            for answer in self._ask(requests=due)
        ]

    def _end(self, request_ids: Sequence[int]) -> None:
        self._due = [request for request in self._due if request["request_id"] not in request_ids]

    def _num_sampled(self) -> dict[int, int]:
        return dict.fromkeys(self._in_flight, 0)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        self.begin_load()
        file = Path(self._folder.name, "weights.safetensors")
        held = {name: tensor.detach().clone() for name, tensor in weights}  # gathering is collective
        if self.rank.is_lead:
            save_file(held, file)
            assert self._ask(weights=str(file), version=version) == version
        self.commit_load(version)

    def close(self) -> None:
        self.abandon("it was closed")
        if self.rank.is_lead:
            self._server.communicate(timeout=60)
        self._folder.cleanup()
