"""What a GRPO rank loads of this package: no more than is known, and nothing that its run does not configure."""

from __future__ import annotations

from pathlib import Path

from benchmarks.run_weight import loaded_modules, weigh

FILES, LINES = 200, 30_150  # what is known and a little more; the goals are 200 and 30,000 (docs/performance.md)
ELSEWHERE = (
    *(
        "api",
        "commands",
        "environments",
        "sandbox",
        "rewards.http_pool",
        "rewards.judge",
        "rewards.remote",
        "rewards.ray_pool",
    ),
    *(
        "rollout.hf",
        "rollout.remote",
        "roles.critic",
        "roles.reward_model",
        "roles.supervised",
        "trainer.ahead",
        "trainer.pipeline",
    ),
    *("trainer.dynamic_sampling", "checkpoint.archive", "checkpoint.delta_files", "bridge.files.formats"),
    *(
        "algorithms.value_loss",
        "algorithms.muon",
        "bridge.files.saved_model",
        "bridge.files.state_reader",
        "bridge.plan.accounting",
    ),
    *(
        "checkpoint.contents",
        "checkpoint.delta",
        "checkpoint.saved_rng",
        "cli.restoring",
        "cli.saved_checkpoint",
        "config.rules",
    ),
    *(
        "data.examples",
        "mcore.momentum",
        "rewards.comparison",
        "rewards.mathematics",
        "rewards.shape",
        "roles.freezing",
    ),
    *(
        "rollout.vllm.reload",
        "trainer.earlier_checkpoint",
        "trainer.evaluation",
        "trainer.saved_state",
        "trainer.statistics",
    ),
    *(
        "config.load",
        "config.other_names",
        "mcore.delta_net",
        "mcore.latent",
        "mcore.mtp",
        "planning.plan",
        "platform.cuda",
    ),
    *(
        "cli.starting",
        "cli.continuing",
        "observability.live_display",
        "observability.background_tracker",
        "rewards.items",
    ),
    *(
        "bridge.files.gather",
        "config.tokenizer_match",
        "config.user_functions",
        "algorithms.returns",
        "algorithms.turns",
    ),
    *(
        "data.trajectory_files",
        "mcore.attention",
        "mcore.stages",
        "parallel.context",
        "residency.parts",
        "rollout.vllm.masks",
    ),
)


def test_a_rank_loads_what_its_run_configures(tmp_path: Path) -> None:
    modules = loaded_modules(tmp_path)
    names = {name.removeprefix("rlhf_mcore.") for name in modules}
    assert {"trainer.loop", "rollout.vllm.engine", "bridge.run.sync", "families.qwen2"} & names
    unused = {name for name in names for other in ELSEWHERE if name == other or name.startswith(f"{other}.")}
    assert unused - {"rollout.hf", "rollout.remote"} == set()  # folders that are asked for an engine's declaration
    weight = weigh(modules)
    assert weight["files"] <= FILES and weight["lines"] <= LINES, weight["lines_by_room"]
