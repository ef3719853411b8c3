"""Compare engines with an adapter, and engines with merged weights, with a transformers model that adds B A x to each
layer's output.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.models import make
from tests.distributed.world import run_world
from tests.e2e.rollout.tiny import VOCABULARY, save_model, save_tokenizer

# Sizes in the tiny model: hidden 64, queries 128, values 64, MLP 96, two layers, rank 8, four bytes each.
A = {"q": 8 * 64, "v": 8 * 64, "o": 8 * 128, "gate": 8 * 64, "up": 8 * 64, "down": 8 * 96}
B = {"q": 128 * 8, "v": 64 * 8, "o": 64 * 8, "gate": 96 * 8, "up": 96 * 8, "down": 64 * 8}
WEIGHT = {"q": 128 * 64, "v": 64 * 64, "o": 64 * 128, "gate": 96 * 64, "up": 96 * 64, "down": 64 * 96}
ROW_PARALLEL = ("o", "down")  # the ranks of an engine share A of these layers, and each has the whole B


def test_an_engine_with_an_adapter_is_one_with_merged_weights(tmp_path: Path) -> None:
    """Two tensor-parallel ranks. Tensors that are whole on each of them are sent twice."""
    size = 2
    save_model(tmp_path, "qwen3", seed=1)
    run_world("e2e.bridge.adapter_worker", size, tmp_path)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(size)]
    for version in range(3):
        for mode in ("adapter", "merge"):
            assert ranks[0][mode][version]["gap"] < 1e-5, (mode, version)
        assert ranks[0]["adapter"][version]["tokens"] == ranks[0]["merge"][version]["tokens"]
    assert len({str(sync["tokens"]) for sync in ranks[0]["adapter"]}) == 3, "each version draws others"
    assert ranks[0]["without"] > 0.1, "an adapter of no effect would show nothing"

    sent = {
        mode: [sum(rank[mode][version]["bytes"] for rank in ranks) for version in range(3)]
        for mode in ("adapter", "merge")
    }
    copies_a = {name: 1 if name in ROW_PARALLEL else size for name in A}
    adapters = 2 * 4 * sum(copies_a[name] * A[name] + (size + 1 - copies_a[name]) * B[name] for name in A)
    assert sent["adapter"][1:] == [adapters, adapters], "the adapters' bytes, no more"
    weights, keys = 2 * 4 * sum(WEIGHT.values()), 2 * 4 * 64 * 64
    assert sent["merge"][1] == sent["merge"][2]
    assert sent["merge"][1] in (weights, weights + keys), "a layer that the engine keeps repacked is brought whole"
    assert sent["adapter"][0] == sent["merge"][0] + adapters, "the weights travel once"


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a model with experts and adapters, and an evaluation of adapters, in one world. Returns the directory of both."""
    directory = tmp_path_factory.mktemp("one_rank")
    sizes = dict(vocab_size=len(VOCABULARY), eos_token_id=1, bos_token_id=None, pad_token_id=0)
    make("qwen3_moe", directory / "mixture", **sizes)
    save_tokenizer(directory / "mixture")
    save_model(directory / "evaluation" / "model", "qwen3", seed=1)
    run_world("e2e.bridge.evaluated_worker", 1, directory, "q_proj", "v_proj", "o_proj")
    return directory


def test_a_mixture_of_experts_has_adapters_of_its_attention(one_rank: Path) -> None:
    """vLLM's experts stay unchanged. Adapters are sent without weights here too."""
    directory = one_rank / "mixture"
    seen = json.loads((directory / "rank0.json").read_text())
    for version in range(3):
        for mode in ("adapter", "merge"):
            assert seen[mode][version]["gap"] < 1e-5, (mode, version)
        assert seen["adapter"][version]["tokens"] == seen["merge"][version]["tokens"]
    assert seen["without"] > 0.05
    config = json.loads((directory / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["head_dim"] * config["num_attention_heads"]
    values = config["head_dim"] * config["num_key_value_heads"]
    numbers = 8 * ((hidden + heads) + (hidden + values) + (heads + hidden))  # A and B of queries, values, outputs
    assert [sync["bytes"] for sync in seen["adapter"][1:]] == [4 * config["num_hidden_layers"] * numbers] * 2


def test_an_evaluation_has_adapters_of_one_model_in_one_engine(one_rank: Path) -> None:
    """The models have adapters of different rank and targets, or none. The weights are loaded once."""
    found = json.loads((one_rank / "evaluation" / "findings.json").read_text())
    assert (found["built"], found["loaded"]) == (1, 1)
    for model in found["seen"]:
        assert model["gap"] < 1e-5, model["name"]
    drawn = {model["name"]: model["tokens"] for model in found["seen"]}
    assert len({str(tokens) for tokens in drawn.values()}) == 3, "each draws others"
    assert found["seen"][0] == found["seen"][-1], "an adapter draws the same after others"
