"""What a GRPO rank loads of this package: no more than is known, and nothing that its run does not configure."""

from __future__ import annotations

from pathlib import Path

from benchmarks.run_weight import loaded_modules, weigh

# What is known and a little more. The goals are 200 and 30,000 (docs/performance.md); keys of agents, images and teachers are 400
# lines.
FILES, LINES = 200, 30_600
ELSEWHERE = """
algorithms.distillation algorithms.kl_schedules algorithms.preference bridge.map.live_weights
bridge.map.quantised bridge.run.changes bridge.run.quantised bridge.run.stand_ins families.quantised cli.teacher
data.image_rows data.images data.recorded data.token_fields episode_driver mcore.lora mcore.route_replay mcore.vision
parallel.fused_softmax parallel.subsets parallel.top_tokens roles.routes roles.teacher rollout.vllm.routes trainer.greedy
algorithms.muon algorithms.returns algorithms.turns algorithms.value_loss api bridge.files.formats bridge.files.gather
bridge.files.saved_model bridge.files.state_reader bridge.plan.accounting checkpoint.archive checkpoint.contents checkpoint.delta
checkpoint.delta_files checkpoint.saved_rng cli.continuing cli.restoring cli.saved_checkpoint cli.starting commands config.load
config.example_columns mcore.image_features config.other_names config.rules config.tokenizer_match config.user_functions
data.examples data.trajectory_files environments
mcore.attention mcore.delta_net mcore.latent mcore.momentum mcore.mtp mcore.stages observability.background_tracker
observability.live_display parallel.context planning.plan platform.cuda residency.parts rewards.comparison rewards.http_pool
rewards.items rewards.judge rewards.mathematics rewards.ray_pool rewards.shape roles.critic roles.freezing roles.reward_model
roles.supervised rollout.hf rollout.remote rollout.vllm.masks rollout.vllm.reload sandbox trainer.ahead trainer.dynamic_sampling
trainer.earlier_checkpoint trainer.evaluation trainer.pipeline trainer.saved_state trainer.statistics
"""


def test_a_rank_loads_what_its_run_configures(tmp_path: Path) -> None:
    modules = loaded_modules(tmp_path)
    names = {name.removeprefix("rlhf_mcore.") for name in modules}
    assert {"trainer.loop", "rollout.vllm.engine", "bridge.run.sync", "families.qwen2"} & names
    unused = {name for name in names for other in ELSEWHERE.split() if name == other or name.startswith(f"{other}.")}
    assert unused - {"rollout.hf", "rollout.remote"} == set()  # folders that are asked for an engine's declaration
    weight = weigh(modules)
    assert weight["files"] <= FILES and weight["lines"] <= LINES, weight["lines_by_room"]
