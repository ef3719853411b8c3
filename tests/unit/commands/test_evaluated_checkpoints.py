from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.commands.evaluate.checkpoints import (
    EvaluatedModel,
    checkpoint_config,
    default_checkpoint,
    find_model,
    validate_evaluation,
)
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.readers.tokenizer_match import token_problems, tokenizer_size

GOOD = ["data.eval=[train.jsonl]", "evaluate.checkpoint=model"]


def problems(*overrides: str, world_size: int | None = None) -> list[str]:
    try:
        validate_evaluation(load_config("run.yaml", [*GOOD, *overrides]), world_size)
    except ConfigError as error:
        return error.problems
    return []


def write_tokenizer(workspace: Any, folder: str, num_tokens: int) -> None:
    vocab = {f"t{i}": i for i in range(num_tokens - 1)}
    added = [{"id": num_tokens - 1, "content": "<end>"}]
    workspace.write(f"{folder}/tokenizer.json", json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))


def test_a_training_configuration_will_do(workspace: Any) -> None:
    assert problems() == []


def test_what_only_training_needs_is_not_asked_for(workspace: Any) -> None:
    workspace.write("run.yaml", "model: {path: gone}\n")
    assert problems("actor.layout.pp=3", "trainer.minibatch_size=7", "data.train=[gone.parquet]") == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["evaluate.checkpoint=gone"], "evaluate.checkpoint=gone is not a directory"),
        (["data.eval=[gone.jsonl]"], "data.eval: data file gone.jsonl: no such file"),
        (
            ["rollout.layout.tp=3", "trainer.world_size=2"],
            "rollout.layout.tp=3 does not divide the number of processes 2",
        ),
        (["rollout.layout.tp=2", "rollout.engine=hf"], "rollout.engine=hf is not sharded"),
        (["evaluate.max_new_tokens=4000"], "max_position_embeddings=1024 is less than the 4512 tokens"),
        (["reward.model.path=rm", "reward.model.layout.tp=2", "trainer.world_size=3"], "reward.model.layout.tp"),
        (["evaluate.samples=4"], "evaluate.samples=4 with evaluate.temperature=0.0"),
        (["reward.rules=[{name: nonsense}]"], "reward.rules[0].name='nonsense' is not a choice"),
    ],
)
def test_mistakes_name_field_and_remedy(workspace: Any, overrides: list[str], expected: str) -> None:
    assert any(expected in problem for problem in problems(*overrides)), problems(*overrides)


def test_without_a_checkpoint_the_configurations_own_run_is_evaluated(workspace: Any) -> None:
    cfg = load_config("run.yaml", ["checkpoint.load_best_model_at_end=true"])
    assert default_checkpoint(cfg) is None
    run = "outputs/rlhf_mcore/default"
    for step, link in ((3, "latest"), (2, "best")):
        workspace.write_hf_config(f"{run}/checkpoint-{step}/actor")
        (workspace.root / run / link).symlink_to(f"checkpoint-{step}")
    assert default_checkpoint(cfg) == f"{run}/best"
    cfg.checkpoint.load_best_model_at_end = False
    assert default_checkpoint(cfg) == f"{run}/latest"


def test_shards_of_other_trainers_are_found(workspace: Any) -> None:
    for rank in (0, 1):
        workspace.write(f"other/model_world_size_2_rank_{rank}.pt", "")
    assert find_model("other", "f", "model") == EvaluatedModel(
        "fsdp", "other", "model"
    )  # the model it was trained from
    assert problems("evaluate.checkpoint=other") == []
    workspace.write_hf_config("other/huggingface", num_attention_heads=6, num_key_value_heads=6)
    assert find_model("other", "f", "model") == EvaluatedModel("fsdp", "other", "other/huggingface")
    assert any("num_attention_heads=6" in p for p in problems("evaluate.checkpoint=other", "rollout.layout.tp=4"))


def test_shards_without_any_config_are_refused_with_the_remedy(workspace: Any) -> None:
    workspace.write("other/model_world_size_1_rank_0.pt", "")
    found = problems("evaluate.checkpoint=other", "model.path=gone")
    assert any("other contains fsdp shards, but neither it nor" in p and "other/huggingface" in p for p in found)
    assert find_model("model", "f", "model").format == "hf"


def test_sizes_are_those_of_the_checkpoint(workspace: Any) -> None:
    workspace.write_hf_config("other", num_attention_heads=6, num_key_value_heads=6)
    workspace.write("other/model.safetensors", "")
    workspace.write("other/tokenizer.json", "{}")
    found = problems("evaluate.checkpoint=other", "rollout.layout.tp=4")
    assert any("rollout.layout.tp=4 does not divide num_attention_heads=6 of evaluate.checkpoint" in p for p in found)


def test_an_architecture_that_cannot_be_trained_can_be_evaluated(workspace: Any) -> None:
    workspace.write("other/config.json", json.dumps({"architectures": ["GPT2LMHeadModel"], "n_layer": 2}))
    workspace.write("other/model.safetensors", "")
    workspace.write("other/tokenizer.json", "{}")
    assert problems("evaluate.checkpoint=other") == []


def test_code_of_a_model_is_refused(workspace: Any) -> None:
    workspace.write_hf_config(auto_map={"AutoModel": "x.py"})
    assert any("auto_map" in problem for problem in problems())


def test_pickled_weights_are_refused(workspace: Any) -> None:
    (workspace.root / "model" / "model.safetensors").rename(workspace.root / "model" / "pytorch_model.bin")
    assert any("pickle" in problem for problem in problems())


def test_a_checkpoint_may_be_named_in_three_ways(workspace: Any) -> None:
    workspace.write_hf_config("run/checkpoint-3/actor")
    (workspace.root / "run" / "latest").symlink_to("checkpoint-3")
    for given in ("run/checkpoint-3/actor", "run/checkpoint-3", "run"):
        assert (
            Path(find_model(given, "x", "base").weights).resolve() == workspace.root / "run" / "checkpoint-3" / "actor"
        )


def test_the_checkpoints_own_tokenizer_wins_and_the_configured_one_stands_in(workspace: Any) -> None:
    workspace.write_hf_config("run/checkpoint-3/actor")
    cfg = load_config("run.yaml", ["model.tokenizer_path=elsewhere"])
    assert checkpoint_config(cfg, find_model("run/checkpoint-3", "x", "model")).model.tokenizer_path == "elsewhere"
    cfg.model.tokenizer_path = None
    assert checkpoint_config(cfg, find_model("run/checkpoint-3", "x", "model")).model.tokenizer_path == "model"
    workspace.write("run/checkpoint-3/actor/tokenizer.json", "{}")
    own = checkpoint_config(cfg, find_model("run/checkpoint-3", "x", "model")).model
    assert own.tokenizer_path == own.path == "run/checkpoint-3/actor"
    assert cfg.model.path == "model"


def test_every_token_needs_a_row_of_the_embedding(workspace: Any) -> None:
    for num_tokens, fits in [(90, True), (100, True), (101, False)]:
        write_tokenizer(workspace, "model", num_tokens)
        assert tokenizer_size("model") == num_tokens
        found = problems()
        assert (found == []) is fits
        if not fits:
            assert "has 101 tokens, but the model has vocab_size=100; use the model's own tokenizer" in found[0]


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_the_end_of_a_response_must_be_a_token(workspace: Any, file: str) -> None:
    write_tokenizer(workspace, "model", 50)
    if file == "config.json":
        workspace.write_hf_config(eos_token_id=60)
    else:
        workspace.write("model/generation_config.json", json.dumps({"eos_token_id": [49, 60]}))
    (found,) = problems()
    assert "ends a response with token 60, which the tokenizer in model with its 50 tokens does not have" in found


def test_a_tokenizer_that_does_not_say_its_size(workspace: Any) -> None:
    for content in ["", "[]", "{}", '{"model": {"vocab": {}}}', '{"model": {"vocab": 3}}']:
        workspace.write("model/tokenizer.json", content)
        assert tokenizer_size("model") is None
        assert list(token_problems("model", None, "x", "model")) == []


def test_unigram_tokenizers_number_their_tokens_by_place(workspace: Any) -> None:
    content = {"model": {"vocab": [["a", -1.0], ["b", -2.0], ["c", -3.0]]}, "added_tokens": None}
    workspace.write("model/tokenizer.json", json.dumps(content))
    assert tokenizer_size("model") == 3
