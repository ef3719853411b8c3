"""Convert whole files. The results load and, if their files exist, pass validation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.cli import main as main_module
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.validate import validate
from rlhf_mcore_contrib.migrate.convert import migrate

VERL = """\
set -x
DATA=data
train_files="['$DATA/train.jsonl', 'data/more.jsonl']"
python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer.yaml' \\
    algorithm.adv_estimator=grpo \\
    data.train_files="$train_files" \\
    data.val_files=data/train.jsonl \\
    data.train_batch_size=64 data.max_prompt_length=256 data.max_response_length=128 \\
    actor_rollout_ref.model.path=model \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \\
    custom_reward_function.path=reward.py \\
    trainer.n_gpus_per_node=4 trainer.total_training_steps=7 trainer.balance_batch=True $@
"""
OPENRLHF = """\
CKPT_ARGS=(
   --actor.model_name_or_path model
   --ckpt.output_dir exp
   # --ckpt.load_enable
)
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray \\
   ${CKPT_ARGS[@]} \\
   --data.prompt_dataset data/train.jsonl --data.input_key prompt --data.max_len 512 --rollout.max_new_tokens 128 \\
   --rollout.batch_size 32 --rollout.n_samples_per_prompt 4 --train.batch_size 128 --actor.num_gpus_per_node 4 \\
   --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 --ds.zero_stage 3
"""


@pytest.fixture
def folder(workspace: Any) -> Path:
    workspace.write("verl.sh", VERL)
    workspace.write("openrlhf.sh", OPENRLHF)
    for name in ("train", "more"):
        workspace.write(f"data/{name}.jsonl", '{"prompt": "1+1=", "answer": "2"}\n')
    workspace.write(
        "reward.py", "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    root: Path = workspace.root
    return root


def run(source: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main_module.main(["migrate", source, "-o", "out.yaml"]) == 0
    return capsys.readouterr().out


def test_a_script_of_verl(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run("verl.sh", capsys)
    cfg = load_config("out.yaml")
    validate(cfg)
    assert cfg.data.train == ["data/train.jsonl", "data/more.jsonl"]
    assert (cfg.actor.layout.tp, cfg.actor.layout.sequence_parallel, cfg.trainer.world_size) == (2, True, 4)
    assert (cfg.trainer.prompts_per_step, cfg.trainer.minibatch_size, cfg.trainer.num_steps) == (64, 32, 7)
    assert (cfg.algorithm.kl.coef, cfg.algorithm.loss_aggregation, cfg.rollout.sampling.n) == (0.001, "token", 5)
    assert cfg.reward.function == "reward.py:compute_score"
    assert "not carried over: trainer.balance_batch=True: always on here" in printed
    assert "to correct" not in printed
    text = (folder / "out.yaml").read_text()
    assert "#   trainer.balance_batch=True: always on here" in text


def test_a_script_of_openrlhf(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run("openrlhf.sh", capsys)
    cfg = load_config("out.yaml")
    validate(cfg)
    assert (cfg.output_dir, cfg.seed, cfg.rollout.sampling.n, cfg.trainer.minibatch_size) == ("exp", 42, 4, 32)
    assert (cfg.algorithm.advantage, cfg.algorithm.kl.placement, cfg.checkpoint.resume) == ("grpo", "loss", "never")
    assert "not carried over: ds.zero_stage=3" in printed
    assert "to do: trainer.num_steps" in printed and "to do: reward" in printed


def test_a_yaml_file_of_verl(folder: Path, workspace: Any, capsys: pytest.CaptureFixture[str]) -> None:
    workspace.write(
        "verl.yaml",
        "actor_rollout_ref: {model: {path: model}, rollout: {n: 4, tensor_model_parallel_size: 1}}\n"
        "algorithm: {adv_estimator: grpo}\ndata: {train_files: [data/train.jsonl], train_batch_size: 256}\n",
    )
    run("verl.yaml", capsys)
    cfg = load_config("out.yaml")
    validate(cfg)
    assert (cfg.rollout.sampling.n, cfg.trainer.prompts_per_step, cfg.algorithm.preset) == (4, 256, "grpo")


def test_what_is_wrong_with_the_result_is_said(
    folder: Path, workspace: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.write("s.sh", VERL.replace("path=model", "path=Qwen/Qwen2-7B"))
    printed = run("s.sh", capsys)
    assert "to do: model.path: Qwen/Qwen2-7B looks like the id of a model" in printed
    assert re.search(r"to correct: model.path=Qwen/Qwen2-7B does not exist", printed)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("s.sh", "echo hello\n", "found neither overrides of verl"),
        ("s.yaml", "nodes: 3\n", "not a configuration of verl"),
        (
            "s.yaml",
            "model: {path: x}\n",
            "already a configuration of rlhf_mcore; start it with rlhf-mcore train s.yaml",
        ),
        ("s.yaml", "base: ../base.yaml\ncritic: {path: x}\n", "already a configuration of rlhf_mcore"),
        (
            "s.yaml",
            "algorithm: grpo\nreward: {rules: [math]}\nrollout: {num_engines: 2}\n",
            "already a configuration of rlhf_mcore",
        ),
        ("s.yaml", "data: {train: [a.jsonl]}\ntrainer: {num_steps: 3}\n", "already a configuration of rlhf_mcore"),
        ("s.yaml", "a: [\n", "not valid YAML"),
        ("gone.sh", None, "no such file"),
        ("s.sh", "python -m openrlhf.cli.train_kd --a 1\n", "train_kd has no counterpart"),
    ],
)
def test_mistakes(
    folder: Path, workspace: Any, capsys: pytest.CaptureFixture[str], name: str, text: str | None, message: str
) -> None:
    if text is not None:
        workspace.write(name, text)
    assert main_module.main(["migrate", name, "-o", "out.yaml"]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "out.yaml").exists()


def test_an_existing_file_is_kept(folder: Path, workspace: Any, capsys: pytest.CaptureFixture[str]) -> None:
    workspace.write("out.yaml", "mine")
    assert main_module.main(["migrate", "verl.sh", "-o", "out.yaml"]) == 2
    assert "exists" in capsys.readouterr().err
    assert (folder / "out.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("files", "rule"),
    [
        ("['$DATA/gsm8k/train.parquet']", {"name": "final_number"}),
        ("['$DATA/MATH-lighteval/train.parquet']", {"name": "math"}),
        ("['$DATA/gsm8k/train.parquet','$DATA/math/train.parquet']", None),
        ("$DATA/dapo-math-17k.parquet", {"name": "answer_line", "incorrect": -1.0}),
        ("['$DATA/gsm8k/train.parquet','$DATA/more.parquet']", None),
    ],
)
def test_the_rule_follows_from_the_names_of_the_data(tmp_path: Path, files: str, rule: dict[str, Any] | None) -> None:
    script = tmp_path / "run.sh"
    text = VERL.replace("custom_reward_function.path=reward.py", "").replace(
        "['$DATA/train.jsonl', 'data/more.jsonl']", files
    )
    script.write_text(text)
    migration = migrate(script)
    assert migration.settings.get("reward.rules") == (rule and [rule])
    (note,) = [note for note in migration.notes if note.startswith("reward")]
    decides = "reward.sources: the data_source of each row decides, as in verl"
    assert note.startswith(f"reward.rules: {rule['name']}, chosen by the names" if rule else decides)
    assert migration.settings.get("reward.sources", rule) == (rule or {})
