"""The command: no files but config.json, no torch, exit code 2 where something does not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.commands.plan import command as plan
from rlhf_mcore.planning.inputs import device_and_assumptions

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "configs" / "models" / "Qwen2.5-7B"
RUN = f"base: {ROOT / 'configs' / 'base.yaml'}\nmodel: {{path: {MODEL}}}\ndata: {{train: [absent.parquet]}}\n"


@pytest.fixture
def run_yaml(workspace: Any) -> str:
    return str(workspace.write("plan.yaml", RUN))


def test_text_has_every_part(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([run_yaml, "--world-size", "8", "actor.layout.tp=2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("8 x H100 (79.1 GiB each, 8 a node), bf16: fits\n")
    for part in ("tp2 pp1 dp4", "generate", "actor update", "sync ", "checkpoint ", "cache ", "step "):
        assert part in out


def test_small_models_are_counted_in_millions(workspace: Any, capsys: pytest.CaptureFixture[str]) -> None:
    workspace.write_hf_config(num_key_value_heads=1, intermediate_size=96)
    assert plan.main(["run.yaml"]) == 0
    assert re.search(r"^actor +[1-9][0-9]*\.[0-9]{2} M ", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("kind", ["sft", "reward_model"])
def test_runs_that_do_not_generate_are_planned(run_yaml: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([run_yaml, "--world-size", "8", "--json", "actor.layout.tp=2", f"algorithm={kind}"]) == 0
    assert [role["name"] for role in json.loads(capsys.readouterr().out)["roles"]] == ["actor"]


def test_what_does_not_fit_ends_with_code_2(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([run_yaml, "--world-size", "1", "--gpu", "A100-40"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: actor update needs") and "biggest parts" in err and "--suggest" in err


def test_suggestions_are_printed_as_overrides(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([run_yaml, "--world-size", "1", "--suggest", "--json"]) == 2
    suggestions = json.loads(capsys.readouterr().out)["suggestions"]
    assert suggestions and suggestions[0]["world_size"] > 1


def test_numbers_of_devices_are_shown_side_by_side(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    """7B takes 18 bytes a parameter: one device has too little memory, two have enough."""
    assert plan.main([run_yaml, "--suggest", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)["suggestions"]
    assert [entry["world_size"] for entry in found] == [2, 4, 8, 16, 32, 64]
    seconds = [entry["step_s"] for entry in found]
    assert seconds == sorted(seconds, reverse=True)
    fits = [run_yaml, "--world-size", "4", *found[1]["overrides"], "--json"]
    assert plan.main(fits) == 0 and json.loads(capsys.readouterr().out)["step_s"] == pytest.approx(seconds[1], rel=0.1)
    assert plan.main([run_yaml, "--suggest", "trainer.world_size=8", "actor.layout.tp=2"]) == 0
    assert set(re.findall(r"s  (\d+) processes", capsys.readouterr().out)) == {"8"}, "the user has chosen it"


def test_adapters_are_offered_where_nothing_else_fits(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    """7B with all weights trained takes 18 bytes a parameter, more than one device has; the weights alone are 15 GB."""
    assert plan.main([run_yaml, "--world-size", "1", "--suggest", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert [offer["overrides"][0] for offer in found["with_costs"]] == ["actor.optimizer.offload=1.0"]
    offered = found["adapters"]
    assert offered["overrides"][0] == "actor.lora.rank=8"
    assert 15.2e9 < offered["needed"] <= offered["available"]
    assert plan.main([run_yaml, "--world-size", "1", *offered["overrides"], "--json"]) == 0
    fitting = json.loads(capsys.readouterr().out)
    assert max(phase["total"] for phase in fitting["phases"]) == offered["needed"]
    assert fitting["later_sync_bytes"] < fitting["roles"][0]["parameters"]


def test_adapters_are_not_tried_if_the_plan_may_choose_a_larger_world(
    run_yaml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([run_yaml, "--suggest", "--json", "rollout.gpu_memory_utilization=0.9"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["suggestions"][0]["world_size"] > found["world_size"] == 1 and "adapters" not in found


def test_adapters_are_not_offered_where_they_are_not_needed(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([run_yaml, "--world-size", "8", "--suggest", "--json", "actor.layout.tp=2"]) == 0
    assert "adapters" not in json.loads(capsys.readouterr().out)


def test_numbers_of_the_device_can_be_set(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([run_yaml, "--world-size", "8", "--set", "memory_bytes=3e10"]) == 2
    assert plan.main([run_yaml, "--set", "bandwith=1"]) == 2
    assert "there are: memory_bytes" in capsys.readouterr().err
    assert plan.main([run_yaml, "--set", "per_node"]) == 2
    for change in ("per_node=0", "network_bytes_per_s=-1", "train_efficiency=40", "reserve_bytes=-5"):
        assert plan.main([run_yaml, "--set", change]) == 2
        assert f"--set {change} is out of range; give a number " in capsys.readouterr().err.splitlines()[-1]
    assert device_and_assumptions("H100", ["reserve_bytes=0", "expert_imbalance=2"])[1].expert_imbalance == 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size", "0"], "--world-size 0 is out of range"),
        (["actor.layout.tp=3", "--world-size", "3"], "actor.layout.tp=3 does not divide num_attention_heads=28"),
        (["model.path=nowhere"], "model.path=nowhere does not exist"),
        (["trainer.num_stps=3"], "did you mean trainer.num_steps?"),
        (
            ["actor.fp8=blockwise", "--gpu", "A100"],
            "actor.fp8=blockwise needs GPUs of compute capability 9.0 (H100, H200)",
        ),
    ],
)
def test_mistakes_are_told(
    run_yaml: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([run_yaml, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_training_still_asks_for_the_files(run_yaml: str) -> None:
    from rlhf_mcore.config.errors import ConfigError
    from rlhf_mcore.config.load import load_config
    from rlhf_mcore.config.validate import validate

    with pytest.raises(ConfigError) as caught:
        validate(load_config(run_yaml), 8)
    text = str(caught.value)
    assert "no *.safetensors" in text and "has no tokenizer" in text and "absent.parquet" in text


def test_engines_of_their_own_are_planned_beside_the_trainer(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    apart = ["rollout.placement=disaggregated", "rollout.num_engines=2", "trainer.max_staleness=1"]
    assert plan.main([run_yaml, "--world-size", "8", "actor.layout.tp=2", *apart]) == 0
    out = capsys.readouterr().out
    assert out.startswith("8 and 2 for engines x H100") and "generation meanwhile" in out


def test_memory_outside_torch_is_that_of_an_earlier_run(
    run_yaml: str, workspace: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its largest value in any phase; --set has priority."""
    steps = [{"generate": 6e9, "update": 3e9}, {"generate": 7e9, "update": 3e9}]
    lines = [
        {"step": step, **{f"memory/{phase}_outside_bytes": size for phase, size in sizes.items()}}
        for step, sizes in enumerate(steps)
    ]
    workspace.write("earlier/metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def reserve(*options: str) -> set[int]:
        plan.main([run_yaml, "--world-size", "8", "--json", "actor.layout.tp=2", *options])
        return {phase["parts"]["reserve"] for phase in json.loads(capsys.readouterr().out)["phases"]}

    assert reserve("--run", "earlier") == {7_000_000_000}
    assert reserve("--run", "earlier", "--set", "reserve_bytes=1e9") == {1_000_000_000}
    workspace.write("cpu/metrics.jsonl", '{"step": 1}\n')
    for name in ("cpu", "absent"):
        assert plan.main([run_yaml, "--run", name]) == 2
        told = capsys.readouterr().err
        assert name in told and "name the directory of a run on GPUs" in told


def test_recorded_peaks_are_compared_with_their_prediction(
    run_yaml: str, workspace: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU records what torch allocates. A run on CPUs records the parts that it offloads."""
    peaks = [{"generate": 6.0e9, "old_logprobs": 8.0e9, "update": 3.0e10}, {"update": 3.2e10, "exchange": 1e9}]
    kinds = {"gpus": "_allocated", "cpus": ""}
    for name, kind in kinds.items():
        lines = [{f"memory/{phase}{kind}_bytes": size for phase, size in step.items()} for step in peaks]
        outside = {"memory/update_outside_bytes": 3e9} if name == "gpus" else {}
        workspace.write(f"{name}/metrics.jsonl", "".join(json.dumps(line | outside) + "\n" for line in lines))
    arguments = [run_yaml, "--world-size", "8", "actor.layout.tp=2", "actor.offload=always"]
    shown = ""
    for name in kinds:
        assert plan.main([*arguments, "--json", "--run", name]) == 0
        found = json.loads(capsys.readouterr().out)
        parts = {phase["phase"]: phase["parts"] for phase in found["phases"]}
        state = sum(parts["actor update"][f"actor {part}"] for part in ("weights", "gradients", "masters", "moments"))
        update = sum(parts["actor update"].values()) - parts["actor update"]["reserve"] if name == "gpus" else state
        rows = {row["phase"]: (row["predicted"], row["recorded"]) for row in found["recorded"]}
        assert list(rows) == ["generate", "old_logprobs", "update"]  # the plan has no phase "exchange"
        assert rows["update"] == (update, 32_000_000_000)
        shown = f"{32e9 / update - 1:+.1%}" if name == "gpus" else shown
        assert parts["actor update"]["reserve"] == (3_000_000_000 if name == "gpus" else 5 * 2**30)
    assert plan.main([*arguments, "--run", "gpus"]) == 0
    (line,) = re.findall("^update +allocated.*", capsys.readouterr().out, re.MULTILINE)
    assert line.split()[4:] == ["29.8", "GiB", shown, "2.8", "GiB"]
