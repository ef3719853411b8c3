"""Test the checks of a run directory before any process starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import rlhf_mcore.trainer.resume  # noqa: F401  # else it is first imported here, and keeps a replaced verify_chain
from rlhf_mcore.checkpoint.delta import verify_chain
from rlhf_mcore.cli import main as main_module
from rlhf_mcore.cli.preflight import logs_directory
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore.config.schema import EnvironmentConfig
from rlhf_mcore.config.settings import to_yaml
from rlhf_mcore.config.validate import warnings_of
from rlhf_mcore.observability.run_directory import RunDirectory
from rlhf_mcore.trainer.inputs import fingerprints

RUN = Path("outputs") / "rlhf_mcore" / "default"


@pytest.fixture
def launches(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the log directories of the launches, without creating them."""
    calls: list[Path] = []
    monkeypatch.setattr("rlhf_mcore.cli.agent.launch", lambda *given, logs, **more: calls.append(logs) or 0)
    monkeypatch.setattr("rlhf_mcore.checkpoint.delta.verify_chain", lambda path, hashes: [])
    return calls


def make_checkpoint(step: int, **changes: object) -> None:
    cfg = resolve(load_config("run.yaml", [f"{key}={value}" for key, value in changes.items()]))
    folder = RUN / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (folder / "config.yaml").write_text(to_yaml(cfg))
    state = {"format": 2, "step": step, "world_size": 1, "state": {}, "recent": [], "inputs": fingerprints(cfg)}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def train(*overrides: str) -> int:
    return main_module.main(["train", "run.yaml", "trainer.prompts_per_step=1", *overrides])


def test_a_finished_run_says_so_and_nothing_is_started(
    launches: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(100)
    assert train() == 0 and launches == []
    assert capsys.readouterr().out == (
        "this run is finished: 100 steps were made, and trainer.num_steps=100\n"
        "trained model   outputs/rlhf_mcore/default/checkpoint-100/actor\n"
        "raise trainer.num_steps (or num_epochs) to train on, or choose another experiment\n"
    )
    assert not (RUN / "logs").exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            "reward.rules=[math]",
            "reward has another content than when the checkpoint was written (reward.rules=[final_number] then",
        ),
        ("data.train=[train.jsonl,train.jsonl]", "data.train[1] was not there and is train.jsonl"),
    ],
)
@pytest.mark.parametrize("step", [12, 100])
def test_a_run_from_something_else_is_refused_whether_it_is_finished_or_not(
    launches: list[Path], capsys: pytest.CaptureFixture[str], step: int, change: str, problem: str
) -> None:
    make_checkpoint(step)
    assert train(change) == 2 and launches == []
    told = capsys.readouterr()
    assert problem in told.err and "start a new experiment" in told.err and told.out == ""
    assert train(change, "checkpoint.changed_inputs=warn") == 0


def test_a_run_whose_last_checkpoint_is_damaged_is_not_finished(
    launches: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(100)
    monkeypatch.setattr("rlhf_mcore.checkpoint.delta.verify_chain", verify_chain)
    assert train() == 0 and len(launches) == 1  # the ranks use the previous checkpoint, or fail
    assert capsys.readouterr().out.startswith("starting one process; ")


def test_a_run_that_continues_says_from_where(launches: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(12)
    make_checkpoint(100)
    assert train("trainer.num_steps=130") == 0 and len(launches) == 1
    expected = "the run continues after step 100 of 130, from outputs/rlhf_mcore/default/checkpoint-100\n"
    assert capsys.readouterr().out.startswith(f"{expected}starting one process; ")
    assert train("trainer.num_steps=130", f"checkpoint.resume={RUN}/checkpoint-12") == 0 and len(launches) == 2
    assert capsys.readouterr().out.startswith("starting one process; ")


def test_what_cannot_be_changed_is_refused(launches: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(12, seed=3)
    assert train() == 2 and launches == []
    assert "seed was 3 and is 0; restore it, or start a new experiment" in capsys.readouterr().err


def test_a_directory_in_use_is_found(launches: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    held = RunDirectory.create("outputs", "rlhf_mcore", "default")
    assert train() == 2 and launches == []
    held.close()
    error = capsys.readouterr().err
    assert error.startswith("error: ") and f"in use by another run (process {os.getpid()}" in error
    assert train() == 0 and len(launches) == 1


def test_a_directory_is_in_use_from_the_first_check_of_a_launcher_on(
    launches: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr("rlhf_mcore.cli.agent.launch", lambda *_, **__: codes.append(train()) or 0)
    assert train() == 0 and codes == [2]
    assert f"in use by another run (process {os.getpid()}" in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_is_found(launches: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    Path("outputs").mkdir()
    Path("outputs/rlhf_mcore").write_text("")
    assert train() == 2 and launches == []
    assert capsys.readouterr().err.startswith("error: output_dir='outputs': cannot write to")


def test_an_output_directory_that_is_not_there_and_cannot_be_made(workspace: Any) -> None:
    Path("file").write_text("")
    cfg = resolve(load_config("run.yaml", ["output_dir=file/inside"]))
    with pytest.raises(
        ConfigError, match=r"output_dir='file/inside': cannot write to .*Not a directory; [\d,]+ bytes are free"
    ):
        logs_directory(cfg)


def test_a_start_leaves_command_host_and_version_without_secrets(
    launches: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2hunter2")
    monkeypatch.setattr("sys.argv", ["rlhf-mcore", "train", "run.yaml", "experiment=hunter2hunter2"])
    assert train() == 0 and train() == 0
    first, second = launches
    assert first != second and first.parent == RUN.resolve() / "logs"
    record = json.loads((first / "launch.json").read_text())
    assert record["command"] == ["rlhf-mcore", "train", "run.yaml", "experiment=<redacted: MY_TOKEN>"]
    assert (record["directory"], record["host"]) == (os.getcwd(), os.uname().nodename)
    assert record["started"] and record["rlhf_mcore"] and "git_commit" in record


def test_a_run_that_was_killed_before_its_best_model_was_evaluated_is_not_finished(
    launches: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(60)
    make_checkpoint(100)
    monkeypatch.setattr("rlhf_mcore.cli.preflight.find_best", lambda checkpoints, rule: checkpoints[0])
    ends_with_best = ["checkpoint.load_best_model_at_end=true", "checkpoint.metric_for_best_model=evaluate/reward"]
    ends_with_best += ["data.eval=[train.jsonl]"]
    lines = ['{"step": 60, "final/step": 40}', '{"step": 100, "evaluate/reward": 1.0}', '{"step": 100, "fin']
    (RUN / "metrics.jsonl").write_text("\n".join(lines))
    assert train(*ends_with_best) == 0 and len(launches) == 1
    assert capsys.readouterr().out.startswith("the run continues after its last step, from outputs/rlhf_mcore/default")
    (RUN / "metrics.jsonl").write_text("\n".join([*lines[:2], '{"step": 100, "final/step": 60}', ""]))
    assert train(*ends_with_best) == 0 and len(launches) == 1
    assert "this run is finished" in capsys.readouterr().out


def test_the_logs_of_the_newest_twenty_starts_are_kept(launches: list[Path], tmp_path: Path) -> None:
    logs, elsewhere = RUN / "logs", tmp_path / "elsewhere"
    names = [
        "20260101-000000",
        "20260101-000000.2",
        "20260101-000000.10",
        *(f"202602{n:02}-000000" for n in range(1, 20)),
    ]
    for name in (*names, "mine", "slurm-17"):
        (logs / name / "node-0").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (logs / "20250101-000000").symlink_to(elsewhere)
    assert train() == 0
    left = {path.name for path in logs.iterdir()} - {"mine", "slurm-17", "20250101-000000"}
    assert left == {*names[3:], launches[0].name} and (elsewhere / "kept").exists()


def test_a_link_in_the_place_of_the_logs_is_refused(
    launches: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RUN.mkdir(parents=True)
    (RUN / "logs").symlink_to(tmp_path)
    assert train() == 2 and launches == []
    assert "logs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "changes", "remedy"),
    [
        ("vllm", [], "needs vllm, which is not installed: pip install 'rlhf_mcore[cpu]', or set rollout.engine=hf"),
        ("ray", ["reward.function=reward.py:grade", "reward.pool=ray"], "pip install 'rlhf_mcore[ray]', or set reward.pool=local"),
    ],
)  # fmt: skip
def test_a_package_that_is_missing_is_named_with_what_installs_it(
    package: str,
    changes: list[str],
    remedy: str,
    launches: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("reward.py").write_text("def grade(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
    monkeypatch.setattr("rlhf_mcore.cli.preflight.find_spec", lambda name: None if name == package else object())
    monkeypatch.setattr("rlhf_mcore.cli.preflight.has_gpu", lambda: False)
    assert train(*changes) == 2 and launches == []
    assert remedy in capsys.readouterr().err and not RUN.exists()


@pytest.mark.parametrize(
    ("has_gpu", "changes", "code"), [(False, [], 2), (False, ["rollout.engine=hf"], 0), (True, [], 0)]
)
def test_latent_attention_that_the_cpu_build_of_vllm_does_not_compute_is_refused(
    has_gpu: bool,
    changes: list[str],
    code: int,
    launches: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = {"q_lora_rank": None, "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    file = Path("model") / "config.json"
    known = json.loads(file.read_text())
    known |= {**sizes, "num_key_value_heads": known["num_attention_heads"], "head_dim": 8}
    known |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    known |= {"first_k_dense_replace": known["num_hidden_layers"], "n_routed_experts": 4, "num_experts_per_tok": 2}
    known |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "routed_scaling_factor": 1.0}
    file.write_text(json.dumps(known | {"moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}))
    monkeypatch.setattr("rlhf_mcore.rollout.vllm.limits.has_gpu", lambda: has_gpu)
    monkeypatch.setattr("rlhf_mcore.cli.preflight.has_gpu", lambda: has_gpu)
    assert train(*changes) == code, capsys.readouterr().err
    assert len(launches) == (code == 0)
    assert ("set rollout.engine=hf" in capsys.readouterr().err) == (code == 2)


@pytest.mark.parametrize(
    ("architecture", "width", "dtype", "processor", "remedy"),
    [
        ("Qwen3Next", 64, "bf16", "avx2 avx512f avx512_bf16", ""),
        ("Qwen3Next", 64, "bf16", "avx2", ""),  # another build of vLLM's kernels
        ("Qwen3Next", 64, "bf16", "avx2 avx512f", "(avx512_bf16), which this one lacks; set rollout.engine=hf"),
        ("Qwen3Next", 64, "fp32", "avx2", "set model.dtype=bf16 or rollout.engine=hf"),
        ("Qwen3Next", 128, "bf16", "avx2", "both 64 or both 128 only; set rollout.engine=hf"),
        ("Qwen3_5", 64, "bf16", "avx2", "imports torchvision, which is not installed; install the torchvision that"),
    ],
)
def test_gated_delta_nets_are_in_bf16_where_vllm_computes_them_on_a_cpu(
    architecture: str,
    width: int,
    dtype: str,
    processor: str,
    remedy: str,
    launches: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = Path("model") / "config.json"
    known = json.loads(file.read_text()) | {
        "architectures": [f"{architecture}ForCausalLM"],
        "full_attention_interval": 2,
    }
    known |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    file.write_text(json.dumps(known | {"linear_key_head_dim": width, "linear_value_head_dim": 64}))
    monkeypatch.setattr("rlhf_mcore.rollout.vllm.limits.has_gpu", lambda: False)
    monkeypatch.setattr("rlhf_mcore.cli.preflight.has_gpu", lambda: False)
    monkeypatch.setattr("rlhf_mcore.rollout.vllm.limits.processor", lambda: f"Maker model {processor}")
    monkeypatch.setattr(
        "rlhf_mcore.rollout.vllm.limits.find_spec", lambda name: None if name == "torchvision" else object()
    )
    assert train(f"model.dtype={dtype}") == (2 if remedy else 0)
    assert len(launches) == (not remedy) and remedy in capsys.readouterr().err


def test_an_environment_is_loaded_and_a_short_episode_warned_of_before_anything_is_started(
    launches: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = ["it has no method step"]

    def load(own: EnvironmentConfig) -> None:
        if problems:
            raise ConfigError(problems.pop())

    monkeypatch.setattr("rlhf_mcore.cli.preflight.check_loads", load)
    changes = ("environment.function=tools", "environment.max_turns=3")
    assert train(*changes) == 2 and launches == []
    assert capsys.readouterr().err == "error: it has no method step\n" and not RUN.exists()
    assert train(*changes) == 0 and len(launches) == 1
    assert (
        "warning: environment.max_tokens is null, so an episode, including the environment's text, has at most 256 tokens"
        in capsys.readouterr().out
    )
    for quiet in ("environment.max_tokens=256", "environment.max_turns=1"):
        assert train(*changes, quiet) == 0
        assert "warning" not in capsys.readouterr().out


def test_rules_that_score_nothing_are_one_line(
    launches: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text("def grade(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
    monkeypatch.setattr("rlhf_mcore.rewards.start_trial.check_reward", lambda *given: None)
    for changes, line in [
        (["reward.function=mine.py:grade", "reward.rules=math"], "reward.rules has no effect, because reward.function"),
        (["reward.remote.url=http://127.0.0.1:9", "reward.rules=math"], "because reward.remote.url replaces it"),
        (["reward.sources={a: [{name: math}]}", "reward.rules=boxed"], "because reward.sources replaces it"),
        (["reward.function=mine.py:grade"], None),
        (["reward.rules=math"], None),
    ]:
        assert train(*changes) == 0
        warnings = [text for text in capsys.readouterr().out.splitlines() if text.startswith("warning: ")]
        assert len(warnings) == (line is not None) and all(str(line) in text for text in warnings), warnings


@pytest.mark.usefixtures("workspace")
def test_second_moments_that_cannot_shrink_in_bf16_are_one_line() -> None:
    """Half the distance between two bf16 numbers is at most 1/256 of them."""
    for beta2, is_frozen in ((0.999, True), (0.9962, True), (0.996, False), (0.99, False)):
        moments = torch.linspace(1, 2, 128, dtype=torch.bfloat16)
        assert bool((moments * torch.tensor(beta2) == moments).any()) is is_frozen
        cfg = load_config("run.yaml", ["actor.optimizer.state_dtype=bf16", f"actor.optimizer.beta2={beta2}"])
        assert any("set beta2 to 0.99 or less" in line for line in warnings_of(cfg)) is is_frozen


@pytest.mark.parametrize(
    ("gpus", "changes", "message"),
    [
        (
            1,
            ["actor.layout.tp=2"],
            "trainer.world_size=2: this machine has 1 GPU, and each process takes one; lower it",
        ),
        (2, ["actor.layout.tp=2"], None),
        (None, ["actor.layout.tp=2"], None),  # nvidia-smi gives no answer
        (
            2,
            ["rollout.placement=disaggregated", "rollout.num_engines=2"],
            "trainer.world_size=1 and rollout.num_engines x rollout.layout.tp=2: this machine has 2 GPUs",
        ),
        (3, ["rollout.placement=disaggregated", "rollout.num_engines=2"], None),
        (1, ["rollout.placement=disaggregated", "rollout.ray.address=10.0.0.1:6379"], None),
    ],
)
def test_more_processes_than_gpus_are_refused_before_they_start(
    gpus: int | None,
    changes: list[str],
    message: str | None,
    launches: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("rlhf_mcore.cli.preflight.has_gpu", lambda: True)
    monkeypatch.setattr("rlhf_mcore.cli.preflight.count_gpus", lambda: gpus)
    code = train(*changes)
    errors = capsys.readouterr().err
    assert (code, len(launches)) == ((0, 1) if message is None else (2, 0)), errors
    assert message is None or message in errors


@pytest.mark.parametrize(
    ("has_driver", "for_cpu", "told"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_a_gpu_that_torch_does_not_use_is_told(
    has_driver: bool,
    for_cpu: bool,
    told: bool,
    launches: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (("has_gpu", False), ("has_driver", has_driver), ("is_torch_for_cpu", for_cpu)):
        monkeypatch.setattr(f"rlhf_mcore.cli.preflight.{name}", lambda value=value: value)
    assert (train(), len(launches)) == (0, 1)
    assert (
        "warning: this machine has a GPU, but the installed torch is built for CPUs" in capsys.readouterr().out
    ) == told
