"""Check a command's results at the shell: one message and exit code 2, a printed tree, help."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_mcore.cli import main as main_module
from rlhf_mcore.cli import saved_checkpoint, train
from rlhf_mcore.cli.arguments import receive
from tests.messages import assert_names
from tests.unit.checkpoint.saving import save

ROOT = Path(__file__).resolve().parents[3]


def write_parquet(path: str, column: str) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({column: ["1+1"], "answer": ["2"]}), path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "trainer.num_stps=3",
            "error: override 'trainer.num_stps=3': unknown key trainer.num_stps; did you mean trainer.num_steps?\n",
        ),
        (
            "actor.layout.tp=3",
            "error: actor.layout.tp=3 does not divide num_attention_heads=8 of model.path; choose a divisor of 8\n",
        ),
        (
            "model.path=nowhere",
            "error: model.path=nowhere does not exist (looked from {root}); "
            "give the path of a Hugging Face model directory\n",
        ),
        (
            "data.train=[q.parquet]",
            "error: data.train: q.parquet, row 0: no column 'prompt'; there are: answer, question. "
            "Set data.prompt_key to one of them\n",
        ),
    ],
)
def test_a_mistake_ends_with_code_2_and_one_message(
    workspace: Any, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.write_hf_config(num_key_value_heads=1, intermediate_size=96)
    write_parquet("q.parquet", "question")
    assert main_module.main(["train", "run.yaml", override]) == 2
    assert capsys.readouterr() == ("", message.format(root=workspace.root))


def test_under_torchrun_the_world_is_that_of_the_environment_and_rank_0_speaks(
    workspace: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert train.main(["run.yaml", "actor.layout.tp=2"]) == 2
        error = capsys.readouterr().err
        assert ("the number of processes=3 is not divisible" in error) is (rank == "0")


RANK_1_OF_2 = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_under_torchrun_a_message_is_left_for_the_launcher(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANK_1_OF_2.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(workspace.root / "attempt" / "error.json"))
    assert train.main(["run.yaml", "sed=1"]) == 2
    left = yaml.safe_load((workspace.root / "attempt" / "error.json").read_text())
    assert left["message"] == "override 'sed=1': unknown key sed; did you mean seed?"


def test_print_config_shows_the_resolved_tree(workspace: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_module.main(["train", "run.yaml", "--print-config", "trainer.num_steps=7", "algorithm=dr_grpo"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"] == {
        "num_steps": 7,
        "num_epochs": None,
        "prompts_per_step": 32,
        "max_staleness": 0,
        "minibatch_size": 32,
        "ppo_epochs": 1,
        "max_tokens_per_microbatch": 8192,
        "forward_tokens": None,
        "logit_chunk_tokens": None,
        "packing": True,
        "share_prefixes": True,
        "world_size": None,
        "threads_per_rank": 1,
        "bind_numa": "auto",
        "collective_timeout_s": 1800,
        "watchdog_s": 3600,
        "max_restarts": 0,
        "profile": {"steps": []},
    }
    assert printed["actor"]["optimizer"]["schedule"]["total_updates"] == 7
    assert printed["algorithm"]["loss_aggregation"] == "constant"


def test_print_config_shows_a_wrong_tree_too(workspace: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["run.yaml", "rollout.sampling.n=1", "--print-config"]) == 2
    shown = capsys.readouterr()
    assert yaml.safe_load(shown.out)["rollout"]["sampling"]["n"] == 1
    assert_names(shown.err, field="rollout.sampling.n", value=1, remedy="2 or more")


def test_a_good_config_is_launched_with_its_own_arguments(
    workspace: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[list[str], int, int, int]] = []

    def launch(
        arguments: list[str],
        world_size: int,
        threads_per_rank: int,
        *,
        max_restarts: int,
        logs: Path,
        console: str,
        engines: str | None,
    ) -> int:
        assert (logs / "launch.json").is_file() and console == "auto" and engines is None
        handed = receive(arguments.pop().removeprefix("--resolved="))
        assert (handed.actor.layout.tp, handed.trainer.minibatch_size) == (2, 1)  # derived from the former
        calls.append((arguments, world_size, threads_per_rank, max_restarts))
        return 9

    monkeypatch.setattr("rlhf_mcore.cli.agent.launch", launch)
    overrides = ["actor.layout.tp=2", "rollout.layout.tp=4", "trainer.threads_per_rank=3", "trainer.max_restarts=2"]
    assert train.main(["run.yaml", *overrides]) == 2
    assert "data.train has 1 rows, fewer than trainer.prompts_per_step=32" in capsys.readouterr().err
    assert not Path("outputs").exists()  # a rejected start leaves no files
    overrides.append("trainer.prompts_per_step=1")
    assert train.main(["run.yaml", *overrides]) == 9
    assert calls == [(["run.yaml", *overrides], 4, 3, 2)]
    assert capsys.readouterr().out.startswith("starting 4 processes; logs are in outputs/rlhf_mcore/default/logs/")


@pytest.mark.parametrize("address", ["null", "10.0.0.1:6379"])
def test_more_engines_than_this_machine_can_start(
    workspace: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    monkeypatch.setattr("rlhf_mcore.cli.agent.launch", lambda *_, **__: 9)
    monkeypatch.setattr("rlhf_mcore.cli.preflight.memory_bytes", lambda: {"MemAvailable": 2 * 2**30})
    engines = ["rollout.placement=disaggregated", "rollout.num_engines=8", "rollout.layout.tp=2"]
    elsewhere = address != "null"  # for a cluster elsewhere, Ray reports its capacity
    arguments = ["run.yaml", *engines, f"rollout.ray.address={address}", "trainer.prompts_per_step=1"]
    assert train.main(arguments) == (9 if elsewhere else 2)
    said = "rollout.num_engines x rollout.layout.tp=16: this machine has 2 GiB of free memory, enough for 10 processes of 200 MiB"
    assert (said in capsys.readouterr().err) is not elsewhere


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"], ["evaluate", "--help"]])
def test_help_documents_exit_codes(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main_module.main(args)
    assert ended.value.code == 0
    assert "exit codes:\n  0 " in capsys.readouterr().out


def test_no_command_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_module.main([]) == 2
    shown = capsys.readouterr()
    assert "\n  verify-checkpoint " in shown.err and shown.out == ""


def test_a_broken_plugin_is_listed_and_does_not_stop_other_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "acme_cmd").mkdir()
    (tmp_path / "acme_cmd" / "__init__.py").write_text("import acme_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(main_module.PLUGINS, "acme", "acme_cmd")
    monkeypatch.setattr(main_module, "COMMANDS", [*main_module.COMMANDS, "acme"])
    assert main_module.main(["config", "explain", "seed"]) == 0
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit) as ended:
        main_module.main(["--help"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  acme ")]
    assert ended.value.code == 0 and "acme_cmd: ModuleNotFoundError: No module named 'acme_dependency'" in line
    assert main_module.main(["acme"]) == 2
    error = capsys.readouterr().err
    assert (
        error == "error: rlhf-mcore acme needs acme_cmd and the package acme_dependency: pip install acme_dependency\n"
    )


@pytest.mark.parametrize(("command", "folder"), main_module.CONTRIB.items())
def test_a_command_of_contrib_without_contrib_names_its_plugin(
    command: str, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_module.PLUGINS[command].split(".")[:2] == ["rlhf_mcore_contrib", folder]
    monkeypatch.setattr("rlhf_mcore.plugins.find_plugins", lambda kind: {})
    monkeypatch.setattr(main_module, "COMMANDS", list(main_module.SUMMARIES))
    assert main_module.main([command, "run.yaml"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: rlhf-mcore {command} needs rlhf_mcore_contrib.{folder}: pip install ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["train", "evaluate", "plan"])
def test_overrides_are_not_required(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main_module.main([command])
    assert capsys.readouterr().err.endswith("error: the following arguments are required: CONFIG\n")


@pytest.mark.parametrize("args", [["--verson"], ["train"], ["train", "run.yaml", "--print"]])
def test_a_wrong_command_line_ends_with_code_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main_module.main(args)
    assert ended.value.code == 2
    assert "rlhf-mcore" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--trainer.num_steps=3"], ["--trainer.num_steps", "without dashes", "trainer.num_steps=3"]),
        (["--trainer.num_steps", "3"], ["--trainer.num_steps", "without dashes", "trainer.num_steps=3"]),
        (["--world-size", "2"], ["--world-size", "without dashes", "trainer.world_size"]),
        (["--learning-rate", "1e-6"], ["--learning-rate", "without dashes", "actor.optimizer.lr"]),
    ],
)
def test_an_option_that_is_a_setting_is_named(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL users write dashes."""
    with pytest.raises(SystemExit) as ended:
        main_module.main(["train", "run.yaml", *args])
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and printed.count("\n") == 1 and all(word in printed for word in words), printed


def test_ctrl_c_before_anything_was_made_leaves_nothing(
    workspace: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlhf_mcore.rewards.start_trial.check_reward", interrupt)
    assert main_module.main(["train", "run.yaml", "trainer.prompts_per_step=1"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n" and not Path("outputs").exists()


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_reward_that_is_slow_is_told_of_before_anything_starts(
    command: str, workspace: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(cfg: object, data: object, name: str, say: Callable[[str], None]) -> str:
        say(f"trying it on rows of {name}")
        raise KeyboardInterrupt

    monkeypatch.setattr("rlhf_mcore.rewards.start_trial.check_reward", slow)
    arguments = [
        "trainer.prompts_per_step=1",
        "data.eval=${data.train}",
        *["evaluate.checkpoint=${model.path}"] * (command == "evaluate"),
    ]
    assert main_module.main([command, "run.yaml", *arguments]) == 130
    data = "data.train" if command == "train" else "data.eval"
    assert capsys.readouterr().out.endswith(f"trying it on rows of {data}\n")


def test_a_path_that_is_no_text_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run\udcff"  # Python's form of the byte 0xff
    save(run, 20)
    monkeypatch.setattr(saved_checkpoint, "check_saved", lambda checkpoint, weights: None)  # the files contain text
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr("sys.stdout", output)
    assert main_module.main(["verify-checkpoint", str(run)]) == 0
    output.flush()
    assert rb"/run\udcff/checkpoint-20: intact" in output.buffer.getvalue()  # type: ignore[attr-defined]
