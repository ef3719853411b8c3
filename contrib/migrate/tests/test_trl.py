"""Convert GRPOConfig scripts and ``trl grpo``. If TRL is installed, defaults are compared with its GRPOConfig."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.cli import main as main_module
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.validate import validate
from rlhf_mcore.rewards.graders import PatternGrader
from rlhf_mcore_contrib.migrate import sources, trl
from rlhf_mcore_contrib.migrate.python_script import read_python
from rlhf_mcore_contrib.migrate.table import Migration, apply

SCRIPT = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

MODEL = "model"
SAMPLES = 4
dataset = load_dataset("json", data_files="data/train.jsonl", split="train").map(lambda row: row)


def main(options):
    args = GRPOConfig(
        "out",
        learning_rate=5e-6,
        per_device_train_batch_size=SAMPLES * 8,
        gradient_accumulation_steps=2,
        num_generations=SAMPLES,
        max_completion_length=2**7 - 1 + 1,
        max_steps=10,
        beta=0.04,
        logging_steps=1,
        weight_decay=options.weight_decay,
    )
    adapters = LoraConfig(r=SAMPLES * 2, lora_alpha=64, target_modules="all-linear", task_type=TaskType.CAUSAL_LM)
    GRPOTrainer(MODEL, [accuracy_reward], args, train_dataset=dataset["train"], peft_config=adapters).train()
"""


def migrate_arguments(**given: Any) -> Migration:
    return apply(trl.TABLE, given)


def test_a_script_becomes_a_configuration_that_validates(workspace: Any, capsys: pytest.CaptureFixture[str]) -> None:
    workspace.write("train.py", SCRIPT)
    workspace.write("data/train.jsonl", '{"prompt": "1+1=", "answer": "2"}\n')
    assert main_module.main(["migrate", "train.py", "-o", "out.yaml"]) == 0
    printed = capsys.readouterr().out
    cfg = load_config("out.yaml")
    validate(cfg)
    assert (cfg.model.path, cfg.data.train, cfg.reward.rules[0].name) == ("model", ["data/train.jsonl"], "math")
    assert (cfg.actor.lora.rank, cfg.actor.lora.alpha, cfg.actor.lora.targets) == (8, 64.0, ["all-linear"])
    # Two batches of 32 responses: 64 responses are 16 groups of 4, and one update.
    assert (cfg.trainer.prompts_per_step, cfg.trainer.minibatch_size, cfg.trainer.num_steps) == (16, 16, 10)
    assert (cfg.rollout.sampling.n, cfg.actor.optimizer.lr, cfg.algorithm.kl.coef, cfg.seed) == (4, 5e-6, 0.04, 42)
    assert cfg.actor.optimizer.schedule.name == "linear"  # TRL's default, not ours
    assert "not carried over: weight_decay=options.weight_decay: the script computes it; write the value" in printed
    assert "not carried over: max_completion_length=2 ** 7 - 1 + 1: the script computes it" in printed
    assert "multiply trainer.prompts_per_step and trainer.minibatch_size by the processes" in printed


def test_keywords() -> None:
    for given, expected in [
        # By default, 8 responses per device, in groups of 8.
        ({}, {"trainer.prompts_per_step": 1, "trainer.minibatch_size": 1, "algorithm.loss_aggregation": "token"}),
        (
            {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "steps_per_generation": 8},
            {"trainer.prompts_per_step": 16, "trainer.minibatch_size": 8},
        ),
        # 10 updates, 2 x 3 per generation
        (
            {"steps_per_generation": 2, "num_iterations": 3, "max_steps": 18, "save_steps": 12},
            {"trainer.num_steps": 3, "trainer.ppo_epochs": 3, "checkpoint.save_steps": 2},
        ),
        ({"num_train_epochs": 2}, {"trainer.num_epochs": 2.0}),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"algorithm.policy_loss": "gspo"}),
        ({"loss_type": "dr_grpo"}, {"algorithm.policy_loss": "ppo_clip", "algorithm.loss_aggregation": "constant"}),
        # cispo bounds the ratio at 5 = 1 + 4
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {"algorithm.policy_loss": "cispo", "algorithm.clip_low": 1.0, "algorithm.clip_high": 4.0},
        ),
        ({"epsilon_high": 0.28}, {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28}),
        ({"scale_rewards": False}, {"algorithm.normalize_std": False}),
        ({"scale_rewards": "none"}, {"algorithm.normalize_std": False}),
        ({"warmup_steps": 0.1}, {"actor.optimizer.schedule.warmup": 0.1}),
        ({"warmup_steps": 20}, {"actor.optimizer.schedule.warmup": 20}),
        (
            {"use_vllm": True},
            {
                "algorithm.rollout_correction.mode": "sequence",
                "algorithm.rollout_correction.cap": 3.0,
                "algorithm.rollout_correction.mask_high": 3.0,
            },
        ),
        ({}, {"algorithm.rollout_correction.mode": "off"}),
        (
            {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
            {"algorithm.rollout_correction.mode": "token", "algorithm.rollout_correction.cap": 3.0},
        ),
        ({"top_k": 0}, {"rollout.sampling.top_k": -1}),
        ({"logging_steps": 10, "num_iterations": 2}, {"logging.every": 5}),  # TRL counts updates
        ({"mask_truncated_completions": True}, {"algorithm.mask_truncated": True}),
        (  # TRL 1.16's defaults of these flags, and PEFT's of targets
            {"use_peft": True},
            {
                "actor.lora.rank": 16,
                "actor.lora.alpha": 32.0,
                "actor.lora.dropout": 0.05,
                "actor.lora.targets": ["q_proj", "v_proj"],
                "actor.lora.use_dora": None,
            },
        ),
        (
            {"use_peft": True, "lora_r": 4, "lora_dropout": 0, "lora_target_modules": "all-linear", "use_dora": True},
            {"actor.lora.rank": 4, "actor.lora.targets": ["all-linear"], "actor.lora.use_dora": True},
        ),
        ({"use_peft": False, "lora_r": 4}, {"actor.lora.rank": None}),
        ({"peft_config": None}, {"actor.lora.rank": None}),
        (
            {"peft_config": {"lora_dropout": 0.1, "bias": "none"}},  # PEFT's defaults
            {"actor.lora.rank": 8, "actor.lora.alpha": 8.0, "actor.lora.dropout": 0.1},
        ),
        (
            {"peft_config": {"r": 32, "use_rslora": True, "init_lora_weights": "pissa", "target_modules": ["o_proj"]}},
            {"actor.lora.use_rslora": True, "actor.lora.init": "pissa", "actor.lora.targets": ["o_proj"]},
        ),
        ({"report_to": ["tensorboard", "wandb"]}, {"logging.trackers": ["tensorboard", "wandb"]}),
        ({"report_to": "none"}, {"logging.trackers": ["tensorboard"]}),
        ({"save_strategy": "epoch"}, {"checkpoint.save_epochs": 1.0}),
        ({"reward_funcs": "accuracy_reward"}, {"reward.rules": [{"name": "math", "weight": 1.0}]}),
    ]:
        migration = migrate_arguments(**given)
        assert {key: migration.settings.get(key) for key in expected} == expected
        assert not migration.lost


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"peft_config": "LoraConfig"}, "set actor.lora.rank"),
        (
            {"peft_config": {"r": 8, "modules_to_save": ["lm_head"]}},
            "modules_to_save=['lm_head'] of LoraConfig has no counterpart",
        ),
        ({"peft_config": {"r": 8, "init_lora_weights": "eva"}}, "init_lora_weights=eva of LoraConfig"),
        ({"peft_config": {"target_modules": ".*_proj$"}}, "a regular expression is not supported"),
        ({"use_peft": True, "lora_r": "eight"}, "a value of this type is not supported"),
        ({"use_peft": True, "lora_target_parameters": ["experts"]}, "target_parameters=['experts'] of LoraConfig"),
        ({"loss_type": "sapo"}, "'sapo' has no counterpart"),
        ({"scale_rewards": "batch"}, "deviation of their group"),
        ({"reward_funcs": ["my_reward"]}, "put my_reward into a file"),
        ({"per_device_train_batch_size": 4}, "not divisible by 8"),
        ({"sync_ref_model": True}, "mixing is not supported"),
        ({"beta": 0.1, "use_bias_correction_kl": True}, "not weighted by the importance ratio"),
        ({"logging_steps": 0.1}, "logging.every"),
        ({"an_option_of_2027": 5}, "there is no such key here"),
    ],
)
def test_what_has_no_counterpart_is_named(given: dict[str, Any], reason: str) -> None:
    lost = migrate_arguments(**given).lost
    assert [text for key, (_, text) in lost.items() if key in given and reason in text]


def test_think_format_reward_is_a_rule_that_gives_what_trl_gives() -> None:
    theirs = re.compile(
        r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE
    )  # trl/rewards/format_rewards.py
    (settings,) = migrate_arguments(reward_funcs="think_format_reward").settings["reward.rules"]
    ours = PatternGrader(settings["pattern"])
    pieces = ["<", "t", "<think>", "</think>", "think>", "<thin", "k>", "\n", "é"]
    texts = ["".join(parts) for size in range(5) for parts in itertools.product(pieces, repeat=size)]
    graded = {text: bool(theirs.match(text)) for text in [*texts, *(f"<think>{text}" for text in texts)]}
    assert sum(graded.values()) > 1000
    assert [text for text, is_right in graded.items() if ours(text) != is_right] == []


def test_functions_keep_their_weights_and_stand_beside_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(
        "GRPOTrainer(model='m', reward_funcs=[right, accuracy_reward, short], args=GRPOConfig(reward_weights=[1.0, 0.5, 0.2]))"
    )
    assert main_module.main(["migrate", str(tmp_path / "train.py"), "-o", str(tmp_path / "run.yaml")]) == 0
    reward = load_config(tmp_path / "run.yaml").reward
    assert [(rule.name, rule.weight) for rule in reward.rules] == [("math", 0.5)]
    assert [(one.path, one.weight) for one in reward.functions] == [("FILE.py:right", 1.0), ("FILE.py:short", 0.2)]
    printed = capsys.readouterr().out
    assert "put right and short into a file" in printed and "to do: reward" not in printed


def test_a_model_directory_that_is_here_is_no_id_of_the_hub(workspace: Any, capsys: pytest.CaptureFixture[str]) -> None:
    workspace.write_hf_config("my/base")
    workspace.write("train.py", "GRPOTrainer(model='my/base', reward_funcs=accuracy_reward)")
    assert main_module.main(["migrate", "train.py", "-o", "run2.yaml"]) == 0
    assert "looks like the id of a model" not in capsys.readouterr().out


def test_flags_of_the_command() -> None:
    line = (
        "accelerate launch --num_processes 4 trl grpo --model_name_or_path m --use_peft False --beta 0.1 "
        "--reward_funcs accuracy_reward think_format_reward"
    )
    words = line.split(" ")
    assert sources.starts_trl(words)
    assert sources.read_trl_flags(words) == {
        "model_name_or_path": "m",
        "use_peft": False,
        "beta": 0.1,
        "reward_funcs": ["accuracy_reward", "think_format_reward"],
    }
    assert not sources.starts_trl(["python", "train.py", "--grpo"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print(1)\n", "calls neither GRPOConfig nor GRPOTrainer"),
        ("def f(:\n", "not a Python script"),
        ("GRPOConfig(beta=" + "(" * 5000 + ")" * 5000 + ")", "not a Python script"),
        ("GRPOConfig(beta=" + "-" * 50000 + "1)", "not a Python script"),
    ],
)
def test_a_script_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_python(text, "train.py")


def test_nothing_of_a_script_is_run_or_grows() -> None:
    text = (
        "A = B\nB = A\nGRPOConfig(beta=A, seed=9**9**9, output_dir='x' * 10**9, max_steps=1 // 0, "
        "epsilon=__import__('os').getpid())"
    )
    script = read_python(text, "train.py")
    assert script.values == {}
    assert set(script.computed) == {"beta", "seed", "output_dir", "max_steps", "epsilon"}


def test_defaults_are_those_of_trl() -> None:
    """Only fields that GRPOConfig declares itself are compared. The others belong to transformers' TrainingArguments."""
    import sys

    file = Path(sys.prefix, "oracles", "trl", "trainer", "grpo_config.py")
    if not file.is_file():
        pytest.skip("TRL is not installed beside this environment")
    body = next(
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "GRPOConfig"
    ).body
    defaults = {
        node.target.id: ast.literal_eval(keyword.value)
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call)
        for keyword in node.value.keywords
        if keyword.arg == "default"
    }
    ours = {name: value for name, value in trl.DEFAULTS.items() if name in defaults}
    assert len(ours) > 15
    assert ours == {name: defaults[name] for name in ours}
