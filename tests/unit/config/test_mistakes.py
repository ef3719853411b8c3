"""Make typical mistakes of users. Each gives exactly one problem with field, value and remedy."""

from __future__ import annotations

from typing import Any

import pytest

from tests.messages import assert_names
from tests.unit.config.checking import check, only

GOOD = "model: {path: model}\ndata: {train: [train.jsonl]}\n"

# User input (a whole file, or overrides), then the field, the value and the remedy that the message must name.
MISTAKES: list[tuple[str | list[str], str, str, str]] = [
    # Keys: misspelt, in the wrong group, or from other trainers.
    (["trainer.num_stps=5"], "trainer.num_stps", "unknown key", "trainer.num_steps"),
    (["actor.optimiser.lr=1e-6"], "actor.optimiser.lr", "unknown key", "actor.optimizer.lr"),
    (["actor.layot.tp=2"], "actor.layot.tp", "unknown key", "actor.layout.tp"),
    (["trainer.num-steps=5"], "trainer.num-steps", "unknown key", "trainer.num_steps"),
    (["Seed=1"], "Seed", "unknown key", "seed"),
    (["lr=1e-6"], "lr", "unknown key", "actor.optimizer.lr"),
    (["learning_rate=1e-6"], "learning_rate", "unknown key", "actor.optimizer.lr"),
    (["num_generations=8"], "num_generations", "unknown key", "rollout.sampling.n"),
    (["actor_rollout_ref.rollout.n=8"], "actor_rollout_ref.rollout.n", "unknown key", "rollout.sampling.n"),
    (["data.train_batch_size=32"], "data.train_batch_size", "unknown key", "trainer.prompts_per_step"),
    (["max_completion_length=512"], "max_completion_length", "unknown key", "rollout.sampling.max_new_tokens"),
    (["trainer.total_epochs=2"], "trainer.total_epochs", "unknown key", "trainer.num_epochs"),
    (["data.train_files=[train.jsonl]"], "data.train_files", "unknown key", "data.train"),
    (["zzz.zzz=1"], "zzz.zzz", "unknown key", "trainer"),
    (["reward.rules=[{nam: boxed}]"], "reward.rules[0].nam", "unknown key", "name"),
    ("model: {path: model}\ndata: {trian: [train.jsonl]}\n", "data.trian", "run.yaml:2", "data.train"),
    ("model: {pth: model}\ndata: {train: [train.jsonl]}\n", "model.pth", "run.yaml:1", "model.path"),
    (GOOD + "trainer:\nnum_steps: 5\n", "num_steps", "run.yaml:4", "trainer.num_steps"),
    # Syntax of overrides and files.
    (["--trainer.num_steps=5"], "--trainer.num_steps=5", "unknown key", "trainer.num_steps"),
    (["trainer.num_steps:5"], "trainer.num_steps:5", "is not of the form", "key=value"),
    (["trainer.num_steps"], "trainer.num_steps", "is not of the form", "key=value"),
    (["rollout.layout.tp=[2"], "rollout.layout.tp=[2", "not valid YAML", "']'"),
    ("model: {path: model\n", "run.yaml:2", "not valid YAML", "'}'"),
    ("model:\n\tpath: model\n", "run.yaml:2", "not valid YAML", "character"),
    ("- model\n", "run.yaml", "keys and values", "seed: 1"),
    (GOOD + "model: {path: other}\n", "'model'", "run.yaml:3", "keep one"),
    ("data: {train: [train.jsonl]}\n", "model.path", "is not set", "model.path="),
    # Files of other programs' configurations.
    ("base: gone.yaml\n" + GOOD, "config file", "gone.yaml", "correct the path"),
    ("base: run.yaml\n" + GOOD, "base", "run.yaml -> run.yaml", "remove one"),
    ("base: model\n" + GOOD, "config file", "model", "correct the path"),
    # Types.
    (["trainer.num_steps=many"], "trainer.num_steps", "'many'", "int"),
    (["trainer.num_steps=1.5"], "trainer.num_steps", "1.5", "int"),
    (["data.max_prompt_tokens=1k"], "data.max_prompt_tokens", "'1k'", "int"),
    (["actor.optimizer.lr=1e-6x"], "actor.optimizer.lr", "'1e-6x'", "float"),
    (["actor.optimizer.lr=[1e-6, 1e-5]"], "actor.optimizer.lr", "['1e-6', '1e-5']", "float"),
    (["rollout.gpu_memory_utilization=80%"], "rollout.gpu_memory_utilization", "'80%'", "float"),
    (["rollout.kv_cache_gib=4GB"], "rollout.kv_cache_gib", "'4GB'", "float"),
    (["deterministic=maybe"], "deterministic", "'maybe'", "bool"),
    (["trainer.minibatch_size=half"], "trainer.minibatch_size", "'half'", "null"),
    (["data.train={a: b}"], "data.train[0]", "{'a': 'b'}", "list of str"),
    (["seed=null"], "seed", "None", "int"),
    (["rollout.layout=2"], "rollout.layout", "2", "rollout.layout.tp"),
    ("model: model\nreward: math\ndata: {train: [train.jsonl]}\n", "reward", "run.yaml:2", "reward.rules"),
    ("model: {path: model}\ndata: train.jsonl\n", "data", "run.yaml:2", "data.train"),
    (GOOD + "trainer:\n- num_steps: 3\n", "trainer", "run.yaml:4", "trainer.num_steps"),
    # Ranges and units.
    (["actor.optimizer.lr=-1e-6"], "actor.optimizer.lr", "-1e-6", "at least 0"),
    (["rollout.gpu_memory_utilization=90"], "rollout.gpu_memory_utilization", "90", "at most 1"),
    (["rollout.sampling.top_p=1.5"], "rollout.sampling.top_p", "1.5", "at most 1"),
    (["rollout.sampling.n=0"], "rollout.sampling.n", "0", "at least 1"),
    # Choices.
    (["algorithm=grppo"], "algorithm.preset", "'grppo'", "'grpo'"),
    (["model.dtype=bfloat16"], "model.dtype", "'bfloat16'", "'bf16'"),
    (["actor.optimizer.name=adam"], "actor.optimizer.name", "'adam'", "'adamw'"),
    (["rollout.engine=sglang"], "rollout.engine", "'sglang'", "vllm"),
    (["reward.rules=[mth]"], "reward.rules[0].name", "'mth'", "'math'"),
    (["checkpoint.mode=777"], "checkpoint.mode", "'777'", "0644"),
    (["logging.trackers=[wandbb]"], "logging.trackers", "'wandbb'", "wandb"),
    # Divisibility and layouts.
    (["trainer.minibatch_size=5"], "trainer.minibatch_size", "5", "divisor"),
    (["actor.layout.tp=3"], "actor.layout.tp", "3", "divisor of 8"),
    (["rollout.layout.tp=3"], "rollout.layout.tp", "3", "divisor of 8"),
    (["actor.layout.pp=3"], "actor.layout.pp", "3", "divisor of 4"),
    (["actor.layout.sequence_parallel=true"], "actor.layout.sequence_parallel", "True", "actor.layout.tp"),
    (["actor.layout.ep=2"], "actor.layout.ep", "2", "set it to 1"),
    # Files and columns.
    (["model.path=modle"], "model.path", "modle", "Hugging Face model directory"),
    (["model.tokenizer_path=gone"], "model.tokenizer_path", "gone", "directory with tokenizer files"),
    (["data.train=[trian.jsonl]"], "data.train", "trian.jsonl", ".parquet or .jsonl"),
    (["data.train=[run.yaml]"], "data.train", "'.yaml'", "convert it"),
    (["data.prompt_key=question"], "data.prompt_key", "'question'", "answer, prompt"),
    (["data.answer_key=solution"], "data.answer_key", "'solution'", "answer, prompt"),
    (["reward.function=gone.py:score"], "reward.function", "gone.py", "correct the path"),
    (["reward.function=grade:score"], "reward.function", "grade:score", "path/to/file.py:name"),
    (["checkpoint.resume=gone"], "checkpoint.resume", "'gone'", "auto"),
    (["environment.tools=gone.json"], "environment.tools", "gone.json", "correct the path"),
    (["actor.megatron={bucket_size: big}"], "actor.megatron.bucket_size", "'big'", "int or null"),
    (["output_dir=train.jsonl"], "output_dir", "train.jsonl", "another output_dir"),
    (["reward.env=[MY_UNSET_TOKEN]"], "reward.env", "MY_UNSET_TOKEN", "export it"),
    # Combinations that would fail late, or silently have another effect.
    (["rollout.sampling.n=1"], "rollout.sampling.n", "1", "2 or more"),
    (["algorithm=ppo", "algorithm.use_critic=false"], "algorithm.use_critic", "false", "auto"),
    (["evaluate.every=5"], "evaluate.every", "5", "data.eval"),
    (["rollout.max_model_len=100"], "rollout.max_model_len", "100", "raise it"),
    (["data.max_prompt_tokens=2000"], "data.max_prompt_tokens", "2256", "lower"),
    (["trainer.max_tokens_per_microbatch=100"], "trainer.max_tokens_per_microbatch", "100", "768"),
    (["trainer.max_staleness=1"], "trainer.max_staleness", "1", "rollout.placement=disaggregated"),
    (["trainer.num_steps=3", "trainer.num_epochs=1"], "trainer.num_steps", "trainer.num_epochs=1", "remove one"),
    (["actor.lora.alpha=16"], "actor.lora.alpha", "16.0", "actor.lora.rank"),
    (["actor.optimizer.schedule.min_lr=1"], "actor.optimizer.schedule.min_lr", "1", "lower it"),
    (["algorithm.kl={coef: 0.1, controller: {target: 1, final: 0}}"], "algorithm.kl.controller.target", "1", "null"),
    (
        ["checkpoint.metric_for_best_model=accuracy"],
        "checkpoint.metric_for_best_model",
        "'accuracy'",
        "evaluate/accuracy",
    ),
    (
        ["checkpoint.load_best_model_at_end=true"],
        "checkpoint.load_best_model_at_end",
        "True",
        "checkpoint.metric_for_best_model",
    ),
    (["actor.megatron={hidden_dropout: 0.1}"], "actor.megatron.hidden_dropout", "0.1", "remove it"),
    (["actor.megatron={overlap_grad_reduc: true}"], "actor.megatron.overlap_grad_reduc", "True", "overlap_grad_reduce"),
    (["rollout.vllm={max_num_seq: 4}"], "rollout.vllm.max_num_seq", "4", "max_num_seqs"),
    # References.
    (["project=${experimnt}"], "project", "'${experimnt}'", "${experiment}"),
    (["seed=${oc.env:MY_UNSET_SEED}"], "seed", "MY_UNSET_SEED", "export it"),
    (["project=${project}"], "project", "'${project}'", "write a value"),
    (["project=${env:HOME}"], "project", "'${env:HOME}'", "${oc.env:NAME"),
    (["project=${seed"], "project", "'${seed'", "${seed}"),
]


@pytest.mark.parametrize(("given", "field", "value", "remedy"), MISTAKES)
def test_a_mistake_is_one_message(workspace: Any, given: str | list[str], field: str, value: str, remedy: str) -> None:
    if isinstance(given, str):
        workspace.write("run.yaml", given)
        given = []
    assert_names(only(check(*given)), field=field, value=value, remedy=remedy)


def test_three_mistakes_in_one_file_are_three_messages(workspace: Any) -> None:
    """A misspelt key, a value of a wrong type and a combination give one problem each, from different checks."""
    workspace.write("run.yaml", GOOD + "trainer: {num_stps: 5, max_staleness: 1}\nseed: eleven\n")
    found = check()
    assert len(found) == 3, found
    for field, value, remedy in [
        ("trainer.num_stps", "run.yaml:3", "trainer.num_steps"),
        ("seed", "'eleven'", "int"),
        ("trainer.max_staleness", "1", "rollout.placement=disaggregated"),
    ]:
        assert_names(
            next(problem for problem in found if f"{field}" in problem), field=field, value=value, remedy=remedy
        )
