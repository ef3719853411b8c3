"""Check whole plans: configurations that fit or do not, and suggested layouts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.commands.plan.suggest import (
    _engine_layouts,
    _engines,
    changes,
    smallest_world,
    suggest,
    with_less_memory,
)
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore.config.schema import Config, RolloutLayoutConfig
from rlhf_mcore.config.validate import validate
from rlhf_mcore.geometry import ExpertSizes
from rlhf_mcore.planning.inputs import GIB, GPUS, Assumptions, PlanInputs, roles_of, workload
from rlhf_mcore.planning.phases import GENERATE
from rlhf_mcore.planning.plan import RunPlan, as_json, make_plan
from rlhf_mcore.planning.report import as_text, refusal
from rlhf_mcore.planning.timing import FORWARD, TRAIN, TRAIN_RECOMPUTED, SyncEstimate, _pass, most_running

ROOT = Path(__file__).resolve().parents[3]
H100 = GPUS["H100"]
# quantization_config of DeepSeek-V3 and of Kimi-K2-Thinking
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_INT4_GROUP = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}}
INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": _INT4_GROUP}}


def config(model: str, *overrides: str) -> Config:
    base = [
        "data.train=[train.parquet]",
        "trainer.prompts_per_step=64",
        "actor.offload=never",
        "critic.offload=never",
        "reference.offload=never",
        "reward.model.offload=never",
        f"model.path={ROOT / 'configs' / 'models' / model}",
    ]
    return resolve(load_config(ROOT / "configs" / "base.yaml", [*base, *overrides]))


def plan_run(model: str, world_size: int, *overrides: str, gpu: str = "H100") -> RunPlan:
    return make_plan(config(model, *overrides), world_size, GPUS[gpu])


def test_routes_take_two_bytes_an_expert_of_every_layer_with_experts() -> None:
    plan = plan_run("Qwen3-30B-A3B", 8, "actor.layout.ep=8", "actor.router_replay=rollout")
    assert plan.route_bytes == 48 * 8 * 2 and "768 bytes per token" in as_text(plan)
    plan = plan_run("DeepSeek-V3", 256, "actor.layout.ep=64", "actor.router_replay=rollout")
    assert plan.route_bytes == 58 * 8 * 2, "three of 61 layers are dense"
    assert plan_run("Qwen3-30B-A3B", 8, "actor.layout.ep=8").route_bytes == 0


def test_gradients_of_16_bits_take_half_and_are_copied_while_they_are_stepped() -> None:
    """The optimizer steps in fp32.

    On one rank, the copy of all gradients is larger than the activations, which are already free.
    """
    for ranks in (1, 8):
        usual, halved = (
            plan_run("Qwen2.5-0.5B-Instruct", ranks, "trainer.max_tokens_per_microbatch=1024", *more)
            for more in ([], ["actor.megatron={grad_reduce_in_fp32: false}"])
        )
        gradients, masters = halved.roles[0].state.gradients, halved.roles[0].state.masters
        assert gradients * 2 == usual.roles[0].state.gradients
        copied = halved.phases[-1].parts.get("actor gradients in fp32")
        assert copied == (masters if ranks == 1 else None), "on eight ranks activations take more"
        assert halved.phases[-1].total < usual.phases[-1].total


def test_a_hosted_state_takes_the_time_of_the_hosts_memory_or_of_copies() -> None:
    count = 494_032_768 // 2
    usual, hosted, narrow = (
        plan_run("Qwen2.5-0.5B-Instruct", 2, f"actor.optimizer.{key}")
        for key in ("lr=1e-6", "offload=1", "state_dtype=bf16")
    )
    assert hosted.roles[0].state.hosted == 12 * count
    usual_s, hosted_s, narrow_s = (plan.seconds["actor update"] for plan in (usual, hosted, narrow))
    on_host = count * (16 + 12 + 6) / 40e9  # gradient, master and moments are read, and these and a bf16 weight written
    assert hosted_s - usual_s == pytest.approx(on_host - count * 28 / 3.35e12, rel=1e-3)
    assert usual_s - narrow_s == pytest.approx(count * (28 - 16) / 3.35e12, rel=1e-3)
    assert "optimizer state 2.8 GiB" in " ".join(as_text(hosted).split()) and hosted.hosted_bytes == 12 * count
    assert hosted.pinned_bytes - usual.pinned_bytes == 384 * 2**20


def test_fields_of_megatron_whose_memory_is_not_counted_are_named() -> None:
    fields = "actor.megatron={moe_z_loss_coeff: 0.1, nccl_ub: true, moe_shared_expert_overlap: false}"
    (warning,) = plan_run("Qwen3-30B-A3B", 8, "actor.layout.ep=8", fields).warnings
    assert warning == "actor: the memory that megatron.moe_z_loss_coeff, megatron.nccl_ub saves or takes is not counted"
    assert not plan_run("Qwen3-30B-A3B", 8, "actor.layout.ep=8").warnings


def test_each_node_reads_its_stages_and_experts_once(tmp_path: Path) -> None:
    whole = 2 * 235_093_634_560
    keys = ["actor.layout.pp=8", "actor.layout.layers_per_stage=[11,12,12,12,11,12,12,12]"]
    assert plan_run("Qwen3-235B-A22B", 8).load.node_bytes == whole
    assert plan_run("Qwen3-235B-A22B", 64, *keys).load.node_bytes == whole // 8
    # Sixteen ranks share the experts. A node has half of them, and everything else.
    experts = 2 * 94 * 128 * 3 * 4096 * 1536
    load = plan_run("Qwen3-235B-A22B", 16, "actor.layout.ep=16").load
    assert load.node_bytes == pytest.approx(whole - experts / 2, rel=1e-6)
    assert load.seconds == pytest.approx(load.node_bytes / 2e9)
    (tmp_path / "config.json").write_bytes((ROOT / "configs/models/Qwen2.5-7B/config.json").read_bytes())
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).write_bytes(bytes(1000))
    on_disk = make_plan(config("Qwen2.5-7B", f"model.path={tmp_path}", "algorithm.kl.coef=0.1"), 8, H100)
    assert on_disk.load.node_bytes == 2000 and "2 GB/s" in as_text(on_disk), "the reference has the same files"


@pytest.mark.parametrize(
    ("model", "quantised", "size"),
    [
        # One byte for each element of a layer, with an fp32 scale per 128 x 128; two for embedding and output layer.
        ("DeepSeek-V3", FP8, 669.17e9 * (1 + 4 / 128**2) + 2 * 2 * 129_280 * 7_168),
        ("gpt-oss-120b", {"quant_method": "mxfp4"}, 60.8 * GIB),  # arXiv 2508.10925, table 1
        # Half a byte for each element of 384 experts in 60 layers, with a bf16 scale per 32; two bytes for 11.7 B others.
        ("Kimi-K2", INT4, 60 * 384 * 3 * 7_168 * 2_048 * (1 / 2 + 2 / 32) + 2 * 11.73e9),
    ],
)
def test_quantised_files_are_smaller(model: str, quantised: dict[str, Any], size: float, tmp_path: Path) -> None:
    content = json.loads((ROOT / "configs/models" / model / "config.json").read_text())
    content |= {"quantization_config": quantised}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert plan_run(model, 8, f"model.path={tmp_path}").load.node_bytes == pytest.approx(size, rel=0.002)


def test_every_model_of_a_ppo_run_is_planned() -> None:
    plan = plan_run(
        "Qwen2.5-0.5B-Instruct",
        4,
        "algorithm=ppo",
        "algorithm.kl.coef=0.01",
        "critic.layout.tp=2",
        "critic.ranks=[2,4]",
    )
    assert [role.name for role in plan.roles] == ["actor", "reference", "critic"]
    assert [role.layout["dp"] for role in plan.roles] == [4, 4, 1]
    names = [phase.phase for phase in plan.phases]
    assert names == [
        "generate",
        "sync",
        "actor forward",
        "reference forward",
        "critic forward",
        "actor update",
        "critic update",
    ]
    assert list(plan.seconds) == names
    worst = next(phase for phase in plan.phases if phase.phase == "critic update")
    assert worst.rank == 2 and worst.parts["critic moments"] > 0


@pytest.mark.parametrize(
    ("model", "parameters", "not_dealt"),
    # 58 layers of DeepSeek-V3 have 256 experts of 3 x 7168 x 2048. 36 layers of gpt-oss have 128 experts of 3 x
    # 2880^2 and 3 x 2880 biases.
    [
        ("DeepSeek-V3", 671_026_419_200, 671_026_419_200 - 58 * 256 * 3 * 7168 * 2048),
        ("gpt-oss-120b", 116_829_156_672, 116_829_156_672 - 36 * 128 * 3 * (2880 * 2880 + 2880)),
    ],
)
def test_models_whose_experts_are_dealt_to_all_ranks(model: str, parameters: int, not_dealt: int) -> None:
    plan = plan_run(model, 8, "actor.layout.ep=8", "actor.layout.etp=1", "algorithm.kl.coef=0")
    (actor,) = plan.roles
    assert actor.parameters == parameters
    held = not_dealt + (parameters - not_dealt) // 8
    assert actor.state.weights == pytest.approx(2 * held, rel=1e-4)  # and padding


def test_offloaded_models_are_there_only_while_they_are_used() -> None:
    key = "reference weights"
    kept = {p.phase: p for p in plan_run("Qwen2.5-7B", 8, "algorithm.kl.coef=0.01").phases}
    away = {p.phase: p for p in plan_run("Qwen2.5-7B", 8, "algorithm.kl.coef=0.01", "reference.offload=always").phases}
    assert kept["actor update"].parts[key] == 2 * 7_615_616_512
    assert [phase for phase in away if key in away[phase].parts] == ["reference forward"]
    keys = ("algorithm.kl.coef=0.01", "reference.offload=by_layer")
    by_layer = plan_run("Qwen2.5-7B", 8, *keys)
    there = {phase.phase: phase.parts[key] for phase in by_layer.phases if key in phase.parts}
    # Embedding, output layer, last norm; two layers of 233,057,792.
    assert there == {"reference forward": 2 * (1_089_998_336 + 2 * 233_057_792)}
    assert "reference: weights layer by layer" in as_text(by_layer)
    # All weights are copied for each of three microbatches at 0.7 of 64 GB/s, if the computation takes less time.
    tokens = by_layer.work.tokens * by_layer.roles[0].computed_share / 8
    slow = plan_run("Qwen2.5-7B", 8, *keys, f"trainer.forward_tokens={int(tokens / 2.5)}")
    assert slow.seconds["reference forward"] == pytest.approx(3 * 2 * 7_615_616_512 / (0.7 * 64e9))
    assert slow.seconds["actor forward"] == by_layer.seconds["actor forward"] < slow.seconds["reference forward"]


AUTO = ("actor.offload=auto", "actor.recompute.granularity=full")


def test_a_trained_model_leaves_the_device_as_far_as_is_necessary() -> None:
    """Qwen2.5-7B on eight devices, with half of each device for the engine.

    2 bytes per parameter of weights, 4 of gradients and 12 / 8 of state are too much. It fits without gradients and
    state. If engines are separate or do not sleep, offloading helps no other model.
    """
    parameters = 7_615_616_512
    phases = {p.phase: p for p in plan_run("Qwen2.5-7B", 8, *AUTO).phases}
    plan = plan_run("Qwen2.5-7B", 8, *AUTO)
    assert plan.fits and plan.roles[0].offload == ("gradients", "optimizer")
    assert plan.pinned_bytes == pytest.approx(12 * parameters / 8, rel=1e-3)
    assert "actor gradients" not in phases[GENERATE].parts and phases[GENERATE].parts["actor weights"] == 2 * parameters
    assert phases["actor update"].parts["actor gradients"] == pytest.approx(4 * parameters, rel=1e-3)
    tight = plan_run("Qwen2.5-7B", 8, *AUTO[1:], "actor.offload=always", "rollout.gpu_memory_utilization=0.6")
    assert tight.fits and "actor weights" not in tight.phases[0].parts
    assert tight.phases[-1].phase == "actor update"  # a save needs less, and the engine sleeps during it
    assert max(map(len, as_text(tight).splitlines())) <= 80
    assert "actor.offload" not in as_text(tight) and "actor: gradients, optimizer, weights" in as_text(tight)
    for key in ("rollout.sleep_level=0", "rollout.engine=hf", "rollout.placement=disaggregated"):
        assert plan_run("Qwen2.5-7B", 8, *AUTO, key).roles[0].offload == (), key


def test_a_frozen_model_leaves_the_device_where_a_phase_would_not_fit_otherwise() -> None:
    """Qwen2.5-7B with its reference, replicated on eight devices: 2 + 2 bytes per parameter, and 0.75 of a device for the engine."""
    auto = (*AUTO, "algorithm.kl.coef=0.01", "reference.offload=auto")
    roomy = plan_run("Qwen2.5-7B", 16, *auto, "trainer.max_tokens_per_microbatch=2048")
    assert roomy.fits and {role.name: role.offload for role in roomy.roles} == {
        "actor": ("gradients", "optimizer"),
        "reference": (),
    }
    tight = plan_run("Qwen2.5-7B", 8, *auto, "rollout.gpu_memory_utilization=0.69")
    assert tight.fits and {role.name: role.offload for role in tight.roles} == {
        "actor": ("gradients", "optimizer"),
        "reference": ("weights",),
    }
    refused = plan_run("Qwen2.5-7B", 8, *auto[:-1], "reference.offload=never", "rollout.gpu_memory_utilization=0.8")
    assert not refused.fits
    by_layer = plan_run("Qwen2.5-7B", 8, *auto, "reference.offload=by_layer")
    assert by_layer.roles[1].offload == ("weights layer by layer",)


def test_a_reward_model_scores_beside_an_engine_that_is_awake() -> None:
    """The engine may have to sample more for the same step, so its cache stays."""
    reward = f"reward.model.path={ROOT / 'configs' / 'models' / 'Qwen2.5-0.5B-Instruct'}"
    phases = {p.phase: p.parts for p in plan_run("Qwen2.5-7B", 8, reward).phases}
    awake = {"engine weights", "engine cache"}
    assert awake <= phases["reward forward"].keys() and not awake & phases["actor forward"].keys()
    apart = plan_run("Qwen2.5-7B", 8, reward, "rollout.placement=disaggregated").phases
    assert not any(awake & p.parts.keys() for p in apart if p.phase == "reward forward")


def test_a_teacher_has_a_layout_and_a_pass_of_its_own() -> None:
    teacher = f"teacher.path={ROOT / 'configs' / 'models' / 'Qwen2.5-7B'}"
    made = plan_run("Qwen2.5-0.5B-Instruct", 8, "algorithm=distillation", teacher, "teacher.layout.tp=8")
    assert [(role.name, role.layout["tp"]) for role in made.roles] == [("actor", 1), ("teacher", 8)]
    (phase,) = (phase for phase in made.phases if phase.phase == "teacher forward")
    assert phase.parts["teacher weights"] == pytest.approx(2 * 7_615_616_512 / 8, rel=1e-3)


def test_teachers_of_data_sources_and_an_average_are_counted_and_the_policy_itself_is_not_twice() -> None:
    """An average is in fp32 and uses the actor's layout: 4 bytes for each of the 494,032,768 parameters, halved by tp=2."""
    small, large = (ROOT / "configs" / "models" / name for name in ("Qwen2.5-0.5B-Instruct", "Qwen2.5-7B"))
    both = f"teacher.sources={{math: {large}}}"
    made = plan_run("Qwen2.5-0.5B-Instruct", 8, "algorithm=distillation", f"teacher.path={small}", both)
    assert [role.name for role in made.roles] == ["actor", "teacher", "teacher[math]"]
    average = plan_run(
        "Qwen2.5-0.5B-Instruct", 8, "algorithm=distillation", "teacher.weights=average", "actor.layout.tp=2"
    )
    (phase,) = (phase for phase in average.phases if phase.phase == "teacher forward")
    assert phase.parts["teacher weights"] == pytest.approx(4 * 494_032_768 / 2, rel=1e-2)
    itself = plan_run(
        "Qwen2.5-0.5B-Instruct", 8, "algorithm=distillation", "teacher.weights=actor", "teacher.context=a.py:b"
    )
    assert [role.name for role in itself.roles] == ["actor"]


def test_a_reference_that_is_run_once_is_gone_when_pairs_are_learned() -> None:
    for once, roles in ((False, ["actor", "reference"]), (True, ["actor"])):
        made = plan_run("Qwen2.5-0.5B-Instruct", 8, "algorithm=dpo", f"reference.precompute={str(once).lower()}")
        assert [role.name for role in made.roles] == roles
        assert any("reference" in phase.phase for phase in made.phases) == (not once)


def test_the_engine_hf_has_no_share_of_the_device_and_is_whole_on_every_rank() -> None:
    """The cache holds only decoded tokens: 8 ranks, 8 prompts with 8 samples each, 512 + 256 tokens of 28 layers, 4 heads of 128."""
    overrides = "rollout.engine=hf", "rollout.layout.tp=4", "rollout.gpu_memory_utilization=0.9"
    phases = {p.phase: p for p in plan_run("Qwen2.5-0.5B-Instruct", 8, *overrides).phases}
    assert phases["actor update"].parts["engine weights"] == 2 * 494_032_768  # the engine hf does not sleep
    assert phases[GENERATE].parts["engine cache"] == 64 * 768 * (24 * 2 * 2 * 64 * 2)
    assert "engine cache" not in phases["actor update"].parts


def test_greedy_responses_take_room_and_time_of_the_engine_alone() -> None:
    few = "rollout.engine=hf", "rollout.sampling.n=1", "rollout.max_num_seqs=64"
    plain, remax = (
        plan_run("Qwen2.5-0.5B-Instruct", 8, *few, f"algorithm={name}") for name in ("reinforce_plus_plus", "remax")
    )
    cache = [next(p.parts["engine cache"] for p in plan.phases if p.phase == GENERATE) for plan in (plain, remax)]
    assert cache[1] == 2 * cache[0]  # 8 samples, and 16 concurrent responses with the greedy ones
    assert remax.seconds[GENERATE] > plain.seconds[GENERATE]
    assert remax.seconds["actor update"] == plain.seconds["actor update"]


def test_pinned_memory_is_that_of_offloading_and_of_saves_in_the_background() -> None:
    assert plan_run("Qwen2.5-7B", 8).pinned_bytes == 0
    offloaded = plan_run("Qwen2.5-7B", 8, "algorithm.kl.coef=0.01", "reference.offload=always")
    assert offloaded.pinned_bytes == 2 * 7_615_616_512
    saved = plan_run("Qwen2.5-7B", 8, "checkpoint.async_save=true")
    assert saved.pinned_bytes == pytest.approx(14 * 7_615_616_512 / 8, rel=1e-3)
    apart = ["rollout.placement=disaggregated", "trainer.max_staleness=1", "actor.layout.tp=4"]
    in_order = plan_run("Qwen2.5-7B", 8, *apart, "rollout.deterministic_order=true")
    assert plan_run("Qwen2.5-7B", 8, *apart).pinned_bytes == 0
    assert in_order.pinned_bytes == pytest.approx(2 * 7_615_616_512 / 4, rel=1e-3)  # copies of the last sent weights


def test_a_sleeping_engine_leaves_its_memory_to_training() -> None:
    asleep = {p.phase: p.total for p in plan_run("Qwen2.5-7B", 8).phases}
    awake = {p.phase: p.total for p in plan_run("Qwen2.5-7B", 8, "rollout.sleep_level=0").phases}
    assert awake["actor update"] - asleep["actor update"] == int(0.5 * H100.memory_bytes)
    assert awake[GENERATE] == asleep[GENERATE]


def test_during_a_sync_an_engine_that_sleeps_otherwise_holds_its_weights_and_no_cache() -> None:
    """The cache is allocated after the sync. Without sleep it is always allocated. Qwen2.5-7B has 7,615,616,512 parameters."""
    phases = {p.phase: p for p in plan_run("Qwen2.5-7B", 8).phases}
    assert "engine cache" not in phases["sync"].parts and phases[GENERATE].parts["engine cache"] > 0
    assert phases["sync"].parts["engine weights"] == 2 * 7_615_616_512
    awake = {p.phase: p for p in plan_run("Qwen2.5-7B", 8, "rollout.sleep_level=0").phases}
    assert awake["sync"].parts["engine cache"] == int(0.5 * H100.memory_bytes) - 2 * 7_615_616_512


def test_what_does_not_fit_is_named_with_its_biggest_parts() -> None:
    plan = plan_run("Qwen2.5-7B", 1)  # 18 bytes per parameter are 128 GiB
    assert not plan.fits
    lines = refusal(plan).splitlines()
    assert lines[0].startswith("generate needs 1")
    assert "its biggest parts: actor moments 56.7, actor gradients 28.4, actor masters 28.4" in refusal(plan)
    assert as_text(plan).splitlines()[0].endswith("does not fit")
    assert max(map(len, as_text(plan).splitlines())) <= 80
    assert as_json(plan)["fits"] is False


def test_a_cache_that_cannot_hold_one_sequence_is_refused() -> None:
    plan = plan_run("Qwen2.5-7B", 8, "rollout.gpu_memory_utilization=0.185")
    generate = plan.phases[0]
    assert generate.total <= generate.available and not generate.fits
    assert "rollout.gpu_memory_utilization=0.185 leaves space for" in refusal(plan)


def test_microbatches_and_bubble() -> None:
    # 64 * 8 sequences of (512 + 256) / 2 tokens on two data-parallel ranks are 98304 tokens: 12 microbatches of 8192.
    plan = plan_run("Qwen2.5-7B", 8, "actor.layout.pp=4", "trainer.share_prefixes=false")
    cut = plan.roles[0].cut
    assert cut.num_microbatches == 12
    assert cut.bubble == pytest.approx(3 / 15)
    halves = plan_run("Qwen2.5-7B", 8, "actor.layout.pp=4", "trainer.share_prefixes=false", "trainer.minibatch_size=32")
    assert halves.roles[0].cut.num_microbatches == 6
    # With shared prompts they are (64 * 256 + 512 * 128) / 2 = 40960 tokens.
    shared = plan_run("Qwen2.5-7B", 8, "actor.layout.pp=4")
    assert shared.roles[0].cut.num_microbatches == 5
    assert shared.roles[0].computed_share == pytest.approx(81920 / 196608)
    assert "computed once: 42% of the tokens" in as_text(shared) and "computed once" not in as_text(plan)
    assert shared.seconds["actor update"] < 0.6 * plan.seconds["actor update"]


@pytest.mark.parametrize(("kind", "rows"), [("sft", 1), ("reward_model", 2)])
def test_supervised_runs_have_one_model_and_generate_nothing(kind: str, rows: int) -> None:
    cfg = config("Qwen2.5-0.5B-Instruct", f"algorithm={kind}", "data.max_tokens=1024", "rollout.sleep_level=0")
    validate(cfg, 2, check_files=False)
    plan = make_plan(cfg, 2, H100)
    assert [phase.phase for phase in plan.phases] == list(plan.seconds) == ["actor update"]
    assert "engine weights" not in plan.phases[0].parts and plan.sync is None
    assert plan.work.tokens == 64 * rows * 512  # half of the maximum
    head = 896 if kind == "reward_model" else 0  # the embedding is also the output layer of the language model
    assert plan.roles[0].parameters == 494_032_768 + head
    assert "cache" not in as_text(plan)


def test_pairs_are_compared_by_a_reference_that_is_planned() -> None:
    def plan_pairs(*overrides: str) -> RunPlan:
        cfg = config("Qwen2.5-0.5B-Instruct", "data.max_tokens=1024", "rollout.sleep_level=0", *overrides)
        validate(cfg, 2, check_files=False)
        return make_plan(cfg, 2, H100)

    plan = plan_pairs("algorithm=dpo")
    assert [role.name for role in plan.roles] == ["actor", "reference"]
    assert [phase.phase for phase in plan.phases] == list(plan.seconds) == ["reference forward", "actor update"]
    assert plan.phases[1].parts["reference weights"] == 2 * 494_032_768, "in bf16, beside the update"
    assert plan.work.tokens == 64 * 2 * 512
    away = plan_pairs("algorithm=dpo", "reference.offload=always")
    assert "reference weights" not in away.phases[1].parts and away.pinned_bytes - plan.pinned_bytes == 2 * 494_032_768
    assert [role.name for role in plan_pairs("algorithm=simpo").roles] == ["actor"]
    adapted = plan_pairs("algorithm=dpo", "actor.lora.rank=8")
    assert [role.name for role in adapted.roles] == ["actor"], "the reference is the actor without adapters"
    assert list(adapted.seconds) == ["actor forward", "actor update"]


def test_suggestions_fit_and_the_fastest_comes_first() -> None:
    cfg = config("Qwen2.5-7B", "rollout.gpu_memory_utilization=0.9")
    assert not make_plan(cfg, 8, H100).fits
    found = suggest(cfg, 8, H100)
    assert len(found) == 5
    assert [made.plan.step_s for made in found] == sorted(made.plan.step_s for made in found)
    for made in found:
        again = config("Qwen2.5-7B", "rollout.gpu_memory_utilization=0.9", *made.overrides)
        validate(again, 8, check_files=False)
        assert make_plan(again, 8, H100).fits


def test_layouts_of_engines_that_are_tried() -> None:
    def list_engine_layouts(*overrides: str) -> list[tuple[int, ...]]:
        cfg = config("Qwen3-30B-A3B", *overrides)  # an expert has 768 columns, and a node has eight devices
        return list(dict.fromkeys(tuple(vars(each.rollout.layout).values()) for each in _engines(cfg, 16, H100)))

    by_tensor = [(1, 1, 1, 1), (2, 1, 1, 1), (4, 1, 1, 1), (8, 1, 1, 1), (16, 1, 1, 1)]
    assert list_engine_layouts() == [*by_tensor, (8, 2, 1, 1), (1, 1, 8, 8), (1, 1, 16, 16)]
    assert list_engine_layouts("rollout.sampling.top_k=20") == by_tensor
    assert list_engine_layouts("rollout.quantization=int8") == list_engine_layouts()
    # An expert of 768 rows has blocks of 128 for two ranks. With whole experts, 16 ranks have two heads each.
    whole = [(tp, 1, 1, tp) for tp in (4, 8, 16)]
    assert list_engine_layouts("rollout.quantization=fp8") == [
        *by_tensor[:2],
        *whole,
        (8, 2, 1, 8),
        (1, 1, 8, 8),
        (1, 1, 16, 16),
    ]
    assert list_engine_layouts("rollout.quantization=fp8", "rollout.engine=hf") == list_engine_layouts(
        "rollout.engine=hf"
    )
    assert list(_engine_layouts(1, ExpertSizes(8, 6, per_token=2), 1))[2] == RolloutLayoutConfig(tp=4, ep=4)


def test_suggestions_change_the_critic_too() -> None:
    cfg = config("Qwen2.5-7B", "algorithm=ppo", "trainer.max_tokens_per_microbatch=16384")
    assert not make_plan(cfg, 8, H100).fits  # an unsharded critic with the actor
    best = suggest(cfg, 8, H100)[0]
    assert any(override.startswith("critic.layout.") for override in best.overrides)
    assert make_plan(
        config("Qwen2.5-7B", "algorithm=ppo", "trainer.max_tokens_per_microbatch=16384", *best.overrides), 8, H100
    ).fits


def test_where_nothing_fits_a_larger_world_is_proposed() -> None:
    cfg = config("Llama-3-70B")
    assert suggest(cfg, 4, H100) == []  # 18 bytes per parameter are 1183 GiB
    (found,) = smallest_world(cfg, 4, H100)
    assert found.plan.world_size >= 32 and found.plan.fits


def test_ways_to_need_less_memory_are_offered_with_their_costs() -> None:
    """7B needs 10 bytes per parameter with 16-bit gradients and state, 71 GiB. With 6 bytes and a hosted state it fits."""
    (alone,) = with_less_memory(config("Qwen2.5-7B"), 1, H100, Assumptions())
    assert alone.overrides[0] == "actor.optimizer.offload=1.0" and alone.plan.fits and "same arithmetic" in alone.cost
    on_two = with_less_memory(config("Qwen2.5-7B"), 2, H100, Assumptions())
    assert [offer.overrides[0] for offer in on_two] == [
        "actor.optimizer.state_dtype=bf16",
        "actor.optimizer.offload=0.5",
    ]
    assert on_two[0].plan.step_s < on_two[1].plan.step_s


def test_assumptions_change_what_is_left() -> None:
    cfg = config("Qwen2.5-7B")
    plain = make_plan(cfg, 8, H100)
    tight = make_plan(cfg, 8, H100, Assumptions(reserve_bytes=10 * GIB))
    assert tight.phases[0].total - plain.phases[0].total == 10 * GIB - Assumptions().reserve_bytes
    half = make_plan(cfg, 8, replace(H100, memory_bytes=H100.memory_bytes // 2))
    assert half.phases[0].available == pytest.approx(plain.phases[0].available / 2, abs=1)


APART = ("rollout.placement=disaggregated", "rollout.num_engines=3", "rollout.layout.tp=2", "actor.layout.tp=2")


def test_engines_of_their_own_share_no_memory_with_the_trainer() -> None:
    apart = plan_run("Qwen2.5-7B", 4, *APART, "rollout.gpu_memory_utilization=0.9")
    assert apart.engine_devices == 6
    assert as_text(apart).startswith("4 and 6 for engines x H100")
    phases = {phase.phase: phase for phase in apart.phases}
    engine = phases[GENERATE]
    assert engine.rank == 4 and set(engine.parts) == {"reserve", "engine weights", "engine cache"}
    assert engine.parts["engine weights"] + engine.parts["engine cache"] == int(0.9 * H100.memory_bytes)
    assert phases["sync"].rank == 4 and set(phases["sync"].parts) == {*engine.parts, "bridge buckets"}
    assert phases["sync"].parts["engine cache"] == engine.parts["engine cache"]  # the engine never sleeps
    beside = plan_run("Qwen2.5-7B", 4, "actor.layout.tp=2", "rollout.layout.tp=2", "rollout.sleep_level=0")
    update = next(phase for phase in beside.phases if phase.phase == "actor update")
    assert {name: size for name, size in update.parts.items() if not name.startswith("engine ")} == phases[
        "actor update"
    ].parts


def test_a_sync_of_engines_apart_is_planned_for_its_worse_side() -> None:
    """A trainer of 32B on one of two ranks holds more than an engine that may use a tenth of a device."""
    apart = plan_run("Qwen2.5-32B", 2, *APART, "rollout.gpu_memory_utilization=0.1")
    sync = next(phase for phase in apart.phases if phase.phase == "sync")
    assert sync.rank == 0 and "engine weights" not in sync.parts and "actor moments" in sync.parts


def test_a_sync_takes_as_long_as_all_weights_of_an_engine_rank_over_its_slowest_link() -> None:
    """Llama-3-8B: 8,030,261,248 parameters in bf16."""
    whole, at_once = 2 * 8_030_261_248, Assumptions(link_efficiency=1.0)

    def sync(world_size: int, *overrides: str) -> SyncEstimate:
        found = make_plan(config("Llama-3-8B", *overrides), world_size, H100, at_once).sync
        assert found is not None
        return found

    assert sync(8, "actor.layout.tp=8") == SyncEstimate(whole, False, pytest.approx(whole / 450e9))
    nodes = sync(16, "actor.layout.tp=8", "actor.layout.pp=2", "rollout.layout.tp=2")
    assert nodes.crosses_nodes and nodes.seconds == pytest.approx(whole / 2 / 50e9, rel=0.01)
    # Six engine ranks share a machine with two trainer ranks. Each trainer rank sends three copies of a half.
    assert sync(2, *APART).seconds == pytest.approx(3 * whole / 2 / 450e9, rel=0.01)
    assert "at most 15.0 GiB" in as_text(plan_run("Llama-3-8B", 8, "actor.layout.tp=2"))
    narrow = sync(8, "rollout.quantization=fp8", "actor.layout.tp=2").received
    assert narrow == pytest.approx(6_979_321_856 + 2 * (8_030_261_248 - 6_979_321_856), rel=0.01)


def test_engines_need_at_later_syncs_what_adapters_change() -> None:
    """For Llama-3-8B, only A and B if an engine applies adapters itself, otherwise the whole matrices of the layers."""
    lora = ("actor.lora.rank=8", "actor.layout.tp=2")
    added, merged = (plan_run("Llama-3-8B", 8, *lora, *more) for more in ([], ["actor.lora.sync=merge"]))
    inputs_and_outputs = 4096 + 4096 + 2 * (4096 + 1024) + 4096 + 4096 + 3 * (4096 + 14336)
    assert added.later_sync_bytes == 2 * 32 * 8 * inputs_and_outputs
    assert merged.later_sync_bytes == 2 * 6_979_321_856
    assert plan_run("Llama-3-8B", 8, "actor.layout.tp=2").later_sync_bytes is None


def test_time_of_a_step_that_generates_meanwhile_is_that_of_the_longer_side() -> None:
    waiting, ahead = (plan_run("Qwen2.5-7B", 4, *APART, f"trainer.max_staleness={bound}") for bound in (0, 1))
    assert waiting.seconds == ahead.seconds
    generate, sync = ahead.seconds["generate"], ahead.seconds["sync"]
    learning = sum(ahead.seconds.values()) - generate - sync
    assert waiting.step_s == pytest.approx(generate + sync + learning)
    assert ahead.step_s == pytest.approx(max(generate, learning) + sync)


def test_ranks_that_share_long_sequences_keep_a_part_of_the_activations() -> None:
    long = (
        "trainer.max_tokens_per_microbatch=524288", "trainer.forward_tokens=524288", "trainer.share_prefixes=false",
    )  # fmt: skip
    whole, shared = (
        next(
            phase
            for phase in plan_run("Qwen2.5-7B", 16, *long, f"actor.layout.cp={cp}").phases
            if "update" in phase.phase
        )
        for cp in (1, 4)
    )
    assert shared.parts["actor activations"] == pytest.approx(whole.parts["actor activations"] / 4, rel=1e-3)
    found = suggest(config("Qwen2.5-7B", *long), 16, H100)
    assert found and all(any("layout.cp=" in key for key in made.overrides) for made in found), "half a million tokens"


def test_mtp_layers_that_learn_take_their_time_in_updates_alone() -> None:
    lengths = ["data.max_prompt_tokens=512", "rollout.sampling.max_new_tokens=512"]
    cfg, assumed = config("GLM-4.5-Air", "actor.mtp.mode=train", *lengths), Assumptions(mean_length=1.0)
    roles = roles_of(cfg, 64, "bf16")
    roles[0] = replace(
        roles[0], geometry=replace(roles[0].geometry, mtp_layers=1)
    )  # this config.json does not contain it
    inputs = PlanInputs(cfg, roles, "bf16", H100, assumed, workload(cfg, assumed), 64)
    # One MTP layer of 4096: 96 query heads of 128, 8 of keys and values, with biases; 8 of 128 experts and a shared
    # one; 151,552 tokens.
    attention = (4096 + 1) * 96 * 128 + 2 * (4096 + 1) * 8 * 128 + 96 * 128 * 4096
    experts = (4096 + 1) * 128 + 9 * 3 * 4096 * 1408
    weights = attention + experts + 2 * 4096 * 4096 + 5 * 4096 + 151_552 * 4096  # and projection, norms, output layer
    length = 512 + 512  # prompt and response; a token attends to half of them on average
    flops = 3 * (2 * weights + 4 * 96 * 128 * length / 2) * inputs.work.tokens
    added = _pass(inputs, roles[0], TRAIN) - TRAIN * _pass(inputs, roles[0], FORWARD)
    assert added == pytest.approx(flops / (64 * 989e12 * 0.25))
    role = replace(roles[0], geometry=roles[0].geometry.trunk)
    assert _pass(inputs, role, FORWARD) == _pass(inputs, roles[0], FORWARD)
    assert added == pytest.approx(
        _pass(inputs, roles[0], TRAIN_RECOMPUTED) - TRAIN_RECOMPUTED * _pass(inputs, role, FORWARD)
    )


@pytest.mark.parametrize(("layout", "running"), [((), 16), (("rollout.layout.dp=4", "rollout.layout.ep=4"), 4 * 16)])
def test_each_group_of_an_engine_decodes_as_many_responses(layout: tuple[str, ...], running: int) -> None:
    cfg, assumed = config("Qwen3-30B-A3B", "rollout.max_num_seqs=16", *layout), Assumptions()
    inputs = PlanInputs(cfg, roles_of(cfg, 8, "bf16"), "bf16", GPUS["B200"], assumed, workload(cfg, assumed), 8)
    assert most_running(inputs) == running


@pytest.mark.parametrize(
    ("gpu", "more", "running"),
    [
        ("H100", [], 1024),
        ("H200", [], 1024),
        ("B200", [], 1024),
        ("A100", [], 256),
        ("A100-40", [], 256),
        ("H100", ["rollout.max_num_seqs=64"], 64),
        ("H100", ["rollout.engine=hf"], 256),
    ],
)
def test_the_default_of_decoded_responses_is_vllms_own(gpu: str, more: list[str], running: int) -> None:
    """The values are ``EngineArgs.get_batch_defaults`` of vLLM 0.32 for ``UsageContext.LLM_CLASS``, on devices with
    these names and sizes.
    """
    cfg, assumed = config("Qwen2.5-0.5B-Instruct", "rollout.sampling.n=16", *more), Assumptions()
    work = workload(cfg, assumed)
    inputs = PlanInputs(cfg, roles_of(cfg, 1, "bf16"), "bf16", GPUS[gpu], assumed, work, 1)
    assert most_running(inputs) == running


def test_keys_and_values_in_8_bits_take_half_the_cache() -> None:
    plain, half = (plan_run("Llama-3-8B", 8, *more) for more in ([], ["rollout.vllm.kv_cache_dtype=fp8"]))
    assert half.kv_tokens in (2 * plain.kv_tokens, 2 * plain.kv_tokens + 1)


def test_an_engine_under_ray_may_span_nodes_and_suggestions_keep_its_devices() -> None:
    apart = ["rollout.placement=disaggregated", "rollout.num_engines=4", "trainer.max_staleness=1"]
    wide = config("Qwen3-30B-A3B", *apart, "rollout.layout.dp=16", "rollout.layout.ep=16")
    spanning = make_plan(wide, 32, H100)
    assert as_text(spanning).startswith("32 and 64 for engines (each on 2 nodes) x H100")
    assert make_plan(wide, 32, replace(H100, per_node=6)).engine_nodes == 4
    tried = list(_engines(config("Qwen3-30B-A3B", *apart, "rollout.layout.tp=4"), 32, H100))  # 16 devices
    layouts = {tuple(vars(each.rollout.layout).values()): each.rollout.num_engines for each in tried}
    assert layouts == {(4, 1, 1, 1): 4, (1, 1, 1, 1): 16, (2, 1, 1, 1): 8, (8, 1, 1, 1): 2, (16, 1, 1, 1): 1} | {
        (8, 2, 1, 1): 1, (1, 1, 8, 8): 2, (1, 1, 16, 16): 1,
    }  # fmt: skip
    assert "rollout.num_engines=2" in changes(wide, next(each for each in tried if each.rollout.layout.dp == 8))


def test_products_in_8_bits_are_counted_of_the_policy_and_its_reference() -> None:
    overrides = ["algorithm=ppo", "algorithm.kl.coef=0.01", "actor.layout.tp=2"]
    plain, plan = (plan_run("Llama-3-8B", 8, *overrides, *more) for more in ([], ["actor.fp8=blockwise"]))
    before, after = ({phase.phase: phase.parts for phase in made.phases} for made in (plain, plan))
    copies = [after[f"{name} {phase}"][f"{name} weights in 8 bits"] for name, phase in
              (("actor", "update"), ("actor", "forward"), ("reference", "forward"))]  # fmt: skip
    assert copies[0] == 2 * copies[1] == 2 * copies[2] > 0
    assert after["actor update"]["actor activations"] < before["actor update"]["actor activations"]
    for phase in ("generate", "sync", "critic update"):
        assert after[phase] == before[phase]
    assert after["actor update"]["actor weights"] == before["actor update"]["actor weights"]


def test_a_phase_that_may_outlive_a_limit_of_the_run_is_named_but_not_generation() -> None:
    """The critic is on 4 of 8 ranks, and the others wait for it in a collective.

    Sampled tokens count as progress, however long they take.
    """
    partial = ("algorithm=ppo", "critic.ranks=[4,8]", "actor.ranks=[0,4]", "trainer.prompts_per_step=8192")
    plan = plan_run("Qwen2.5-7B", 8, *partial, "trainer.watchdog_s=0", "trainer.collective_timeout_s=20")
    assert plan.seconds[GENERATE] > 20
    assert {text.partition(" is estimated")[0] for text in plan.warnings} == {
        name for name, seconds in plan.seconds.items() if name.startswith(("actor", "critic")) and seconds > 20
    }
    assert "trainer.collective_timeout_s=20" in plan.warnings[0] and "warning     " in as_text(plan)
    limit = int(plan.seconds["critic update"]) - 1
    slow = plan_run("Qwen2.5-7B", 8, *partial, f"trainer.watchdog_s={limit}", "trainer.collective_timeout_s=100000")
    assert any(text.startswith("critic update") and f"trainer.watchdog_s={limit}" in text for text in slow.warnings)
    assert not plan_run("Qwen2.5-7B", 8, *partial).warnings
