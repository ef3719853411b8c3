"""The server: a transformers model in a process without connection to the trainer's ranks.

It writes a line to ``served.txt`` for every received version of weights, with the number of responses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from rlhf_mcore.config.schema import RolloutConfig
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.rollout.hf.engine import HFEngine
from rlhf_mcore.types import Request, Sampling


def serve(engine: HFEngine, order: dict[str, Any]) -> Any:
    if "weights" in order:
        engine.load_weights(load_file(order["weights"]).items(), version=order["version"])
        return order["version"]
    requests = [Request(**{**asked, "sampling": Sampling(**asked["sampling"])}) for asked in order["requests"]]
    with Path("served.txt").open("a") as log:
        log.write(f"{engine.policy_version} {len(requests)}\n")
    return [
        {
            "request_id": drawn.request_id,
            "token_ids": drawn.token_ids.tolist(),
            "logprobs": drawn.logprobs.tolist(),
            "finish_reason": drawn.finish_reason,
        }
        for drawn in engine.generate(requests)
    ]


def main(model_dir: str, tokenizer_dir: str, dtype: str, max_model_len: str, max_num_seqs: str) -> None:
    model = EngineModel(model_dir, tokenizer_dir, dtype, int(max_model_len), seed=0)
    engine = HFEngine(RolloutConfig(engine="hf", max_num_seqs=int(max_num_seqs)), model)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(serve(engine, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
