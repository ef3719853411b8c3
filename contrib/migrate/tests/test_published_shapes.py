"""Convert launch scripts in the published styles of verl and OpenRLHF. Each result loads, and is valid except for missing files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.cli import main as main_module
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.validate import validate
from rlhf_mcore_contrib.migrate.convert import migrate

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = Path(__file__).with_name("launch_scripts")
MODELS = ROOT / "configs" / "models"
HOME = "/home/somebody"
# script -> (a model with the same geometry, expected values of the configuration)
EXPECTED: dict[str, tuple[str, dict[str, Any]]] = {
    "verl_grpo.sh": (
        "Qwen2.5-7B",
        {
            "data.train": [f"{HOME}/data/gsm8k/train.parquet"],
            "algorithm.kl.coef": 0.002,
            "rollout.sampling.n": 6,
            "project": "grpo_gsm8k",
            "trainer.minibatch_size": 128,
            "logging.trackers": ["wandb"],
        },
    ),
    "verl_grpo_defaults.sh": (
        "Qwen2.5-7B",
        {
            "trainer.world_size": 16,
            "model.path": f"{HOME}/verl/models/Qwen2.5-7B",
            "data.eval": [f"{HOME}/verl/data/aime.parquet", f"{HOME}/verl/data/math.parquet"],
            "trainer.max_tokens_per_microbatch": 20480,
            "experiment": "defaults-Qwen2.5-7B",
            "output_dir": f"{HOME}/verl/ckpts",
            "data.overlong_prompts": "drop",
            "trainer.num_steps": 200,
        },
    ),
    "verl_ppo.sh": (
        "deepseek-llm-7b-chat",
        {
            "algorithm.advantage": "gae",
            "critic.optimizer.schedule.warmup": 0.05,
            "critic.warmup_steps": 10,
            "data.train": [f"{HOME}/data/gsm8k/train.parquet", f"{HOME}/data/math/train.parquet"],
            "algorithm.kl.placement": "reward",
            "logging.trackers": [],
        },
    ),
    "verl_ppo_megatron.sh": (
        "Qwen2.5-7B",
        {
            "actor.layout.pp": 2,
            "critic.layout.tp": 2,
            "rollout.layout.tp": 4,
            "actor.recompute.granularity": "full",
            "trainer.num_steps": 50,
        },
    ),
    "verl_moe_megatron.sh": (
        "Qwen3-30B-A3B",
        {
            "model.path": "models/Qwen3-30B-A3B",
            "actor.layout.tp": 4,
            "actor.layout.ep": 8,
            "actor.layout.etp": 1,
            "algorithm.policy_loss": "gspo",
            "algorithm.clip_high": 4e-4,
            "trainer.world_size": 32,
        },
    ),
    "verl_dapo_ray.sh": (
        "Qwen2.5-32B",
        {
            "algorithm.overlong.enabled": True,
            "algorithm.overlong.cache_tokens": 4096,
            "algorithm.overlong.max_tokens": 20480,
            "algorithm.dynamic_sampling.max_batches": 10,
            "actor.optimizer.schedule.warmup": 160,  # 10 steps of 512 / 32 updates
            "algorithm.dual_clip": 10.0,
            "trainer.world_size": 128,
            "data.eval": [f"{HOME}/verl/data/aime-2024.parquet"],
        },
    ),
    "verl_functions.sh": (
        "Qwen2.5-7B",
        {
            "model.path": "models/Qwen2.5-7B",
            "trainer.prompts_per_step": 128,
            "trainer.minibatch_size": 32,
            "trainer.world_size": 4,
            "logging.trackers": ["tensorboard"],
            "algorithm.advantage": "rloo",
        },
    ),
    "verl_sweep.sh": (
        "Qwen2.5-7B",
        {"actor.optimizer.lr": 1e-6, "actor.optimizer.schedule.warmup": 0.1, "experiment": "lr_1e-6"},
    ),
    "verl_slurm.sh": (
        "Qwen2.5-7B",
        {"trainer.world_size": 16, "experiment": "slurm", "data.train": [f"{HOME}/data/train.parquet"]},
    ),
    "openrlhf_ppo_ray.sh": (
        "Llama-3-8B",
        {
            "rollout.layout.tp": 2,
            "trainer.prompts_per_step": 1024,
            "data.max_prompt_tokens": 1024,
            "actor.optimizer.schedule.warmup": 0.05,
            "reward.model.path": "OpenRLHF/Llama-3-8b-rm-mixture",
            "data.train": ["data/prompt-collection-v0.1/train.parquet"],
            "data.apply_chat_template": "true",
        },
    ),
    "openrlhf_grpo.sh": (
        "Llama-3-8B",
        {
            "model.path": "models/Llama-3-8B",
            "algorithm.kl.placement": "loss",
            "actor.optimizer.schedule.warmup": 0.03,
            "data.max_prompt_tokens": 1024,
            "rollout.sampling.max_new_tokens": 1024,
            "data.answer_key": "answer",
        },
    ),
    "openrlhf_arrays.sh": (
        "Llama-3-8B",
        {
            "output_dir": "./exp/dapo",
            "checkpoint.resume": "never",
            "algorithm.overlong.cache_tokens": 1024,
            "algorithm.overlong.penalty": 0.5,
            "algorithm.clip_high": 0.28,
            "data.max_prompt_tokens": 1024,
            "data.train": ["data/a.jsonl", "data/b.jsonl"],
        },
    ),
    "openrlhf_sft.sh": (
        "Llama-3-8B",
        {
            "algorithm.kind": "sft",
            "data.max_tokens": 2048,
            "data.response_key": "response",
            "trainer.prompts_per_step": 256,
            "actor.optimizer.schedule.warmup": 0.1,
            "actor.optimizer.lr": 5e-6,
        },
    ),
    "openrlhf_rm.sh": (
        "Llama-3-8B",
        {
            "algorithm.kind": "reward_model",
            "model.path": f"{HOME}/models/Llama-3-8B",
            "data.chosen_key": "better",
            "data.max_tokens": 4096,
            "trainer.max_tokens_per_microbatch": 8192,
            "seed": 7,
        },
    ),
    "openrlhf_dpo.sh": (
        "Llama-3-8B",
        {
            "algorithm.kind": "dpo",
            "algorithm.dpo.loss": "dpo",
            "algorithm.dpo.beta": 0.15,
            "algorithm.dpo.label_smoothing": 0.1,
            "algorithm.dpo.nll_coef": 0.2,
            "actor.optimizer.lr": 5e-7,
            "data.chosen_key": "better",
            "data.max_tokens": 2048,
            "trainer.max_tokens_per_microbatch": 4096,
            "trainer.prompts_per_step": 256,
        },
    ),
    "openrlhf_slurm.sh": (
        "Llama-3-8B",
        {"trainer.world_size": 32, "trainer.minibatch_size": 64, "output_dir": "/openrlhf/out"},
    ),
    "openrlhf_eval_string.sh": ("Llama-3-8B", {"seed": 3, "trainer.prompts_per_step": 64, "trainer.world_size": 4}),
}


def value_of(cfg: Config, key: str) -> Any:
    found: Any = cfg
    for name in key.split("."):
        found = getattr(found, name)
    return found


def test_every_script_is_here() -> None:
    assert {path.name for path in SCRIPTS.glob("*.sh")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_script(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", HOME)
    for variable in ("WANDB_TOKEN", "NNODES", "DEBUG"):
        monkeypatch.delenv(variable, raising=False)
    assert main_module.main(["migrate", str(SCRIPTS / name), "-o", "out.yaml"]) == 0
    printed = capsys.readouterr().out
    cfg = load_config("out.yaml")
    model, expected = EXPECTED[name]
    assert {key: value_of(cfg, key) for key in expected} == expected
    is_known = "is not on this machine; planned with configs/models/" in printed
    assert is_known or ("plan: not made" in printed and "model.path=DIRECTORY" in printed)
    here = [f"model.path={MODELS / model}", *([f"critic.path={MODELS / model}"] if cfg.critic.path else [])]
    validate(
        load_config("out.yaml", [*here, "reward.model.path=null", "reward.rules=[{name: boxed}]"]), check_files=False
    )


def test_what_has_to_be_filled_in_is_listed_and_secrets_are_not(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text((SCRIPTS / "openrlhf_ppo_ray.sh").read_text().replace("${WANDB_TOKEN}", "0123456789abcdef"))
    migration = migrate(script)
    listed = "\n".join(migration.notes)
    for wanted in ("trainer.num_steps", "reward.model", "rlhf-mcore prepare-data OpenRLHF/prompt-collection-v0.1"):
        assert wanted in listed
    assert main_module.main(["migrate", str(script), "-o", str(tmp_path / "out.yaml")]) == 0
    assert "0123456789abcdef" not in (tmp_path / "out.yaml").read_text()
    assert "logger.wandb.key=<redacted>" in (tmp_path / "out.yaml").read_text()


def test_a_plan_is_made_where_the_model_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    text = (SCRIPTS / "verl_ppo_megatron.sh").read_text().replace("models/Qwen2.5-7B", str(MODELS / "Qwen2.5-7B"))
    Path("run.sh").write_text(text)
    assert main_module.main(["migrate", "run.sh", "-o", "out.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "plan, for H100" in printed
    assert "to do: reward.sources: the data_source of each row decides" in printed


def test_what_comes_from_the_environment_is_named(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=$MODEL_DIR/x data.train_files=[$DATA/a.parquet] "
        "trainer.nnodes=$NODES trainer.experiment_name=run_$(date +%s)\n"
    )
    migration = migrate(script)
    assert migration.settings["model.path"] == "${oc.env:MODEL_DIR,MODEL_DIR_is_not_set}/x"
    assert migration.settings["data.train"] == ["${oc.env:DATA,DATA_is_not_set}/a.parquet"]
    assert migration.settings["experiment"] == "run_date_s_is_not_known"
    assert any("reads DATA, MODEL_DIR from it" in note for note in migration.notes)
    assert "its value is not in the script" in migration.lost["trainer.nnodes"][1]
