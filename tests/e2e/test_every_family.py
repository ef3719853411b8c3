"""Two steps of GRPO with a random model of a family, cut over two ranks: what the engine says of its tokens, the trainer says too.

And one run with latent attention and experts that learns.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.cli.launch import TRAIN, local_logs, local_rendezvous, torchrun_command
from rlhf_mcore.families.mtp import REPEATED
from tests.commands import ROOT, environment, finished
from tests.difference import first_difference
from tests.distributed.models import DEEPSEEK, FURTHER_MODELS, MODELS, MOE_MODELS, add_mtp_layer, make, pack
from tests.tiny_training import make_quickstart

# vLLM's kernels for latent attention and gated delta nets know some sizes of heads and bf16 only, on a CPU.
# How far their logprobs may be apart, in nats; where a choice of experts may flip in bf16, where the rule of the metric warns.
IN_BF16 = {"deepseek_v3_heads": ("max", 0.3), "qwen3_next": ("mean", 0.1)}
BY_TRANSFORMERS = [name for name in FURTHER_MODELS if name.startswith(("deepseek", "qwen3_5")) and name not in IN_BF16]
WITH_MTP = ("deepseek_v3", "deepseek_v3_heads", "glm4_moe")
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return (sum(map(ord, solution_str)) % 17) / 16  # differs between responses, so that there is a gradient
"""
SMALL = [
    "trainer.num_steps=2",
    "trainer.prompts_per_step=4",
    "trainer.minibatch_size=2",
    "rollout.sampling.n=4",
    "reward.function=reward.py:score",
    "bridge.verify=digest",
    "evaluate.every=0",
    "logging.console=plain",
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("families")
    make_quickstart(directory, num_eval=2)
    (directory / "reward.py").write_text(REWARD)
    return directory


# What of vLLM's kernels for latent attention a processor decides is tried in both ways.
ALWAYS = ("deepseek_v3", "deepseek_v3_heads")


@pytest.mark.parametrize(
    ("name", "module"),
    [
        *(pytest.param(name, TRAIN, id=name) for name in ALWAYS),
        pytest.param("deepseek_v3_heads", "tests.e2e.without_amx", id="deepseek_v3_heads without AMX"),
        *(
            pytest.param(name, TRAIN, marks=pytest.mark.matrix, id=name)
            for name in (*MODELS, *MOE_MODELS, *FURTHER_MODELS)
            if name not in ALWAYS
        ),
    ],
)
def test_engine_and_trainer_agree_while_the_weights_change(workspace: Path, name: str, module: str) -> None:
    known = json.loads((workspace / "quickstart" / "model" / "config.json").read_text())
    tokens = {key: known[key] for key in ("vocab_size", "eos_token_id", "bos_token_id", "pad_token_id")}
    make(name, workspace / name, **tokens)
    mtp = add_mtp_layer(workspace / name) if name in WITH_MTP else {}
    learns = {tensor: mtp.pop(tensor) for tensor in sorted(mtp)}
    if learns:  # and one that nothing knows is kept
        mtp = {"model.layers.4.unknown.weight": torch.arange(3.0)}
        held = workspace / name / "model.safetensors"
        save_file({**load_file(held), **mtp}, held, {"format": "pt"})
    if name == "gpt_oss":
        pack(workspace / name)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(workspace / "quickstart" / "model" / file, workspace / name)
    engine = "hf" if name in BY_TRANSFORMERS else "vllm"
    options = [
        f"model.path={name}",
        f"rollout.engine={engine}",
        "actor.layout.sequence_parallel=true",
    ]
    if name == "gpt_oss":
        options += ["actor.layout.ep=2", "actor.layout.etp=1"]
    if name in IN_BF16:
        options += ["model.dtype=bf16"]
    if learns:
        options += ["actor.mtp.mode=train"]
        options += ["rollout.speculative.method=mtp"] if engine == "vllm" else []
    if name == "deepseek_v3_heads":  # what attention has made of its weights too
        options += ["bridge.verify=full"]
    experiment = f"{name}-{module.rpartition('.')[2]}"
    steps = [step for step in train(workspace, experiment, [*SMALL, *options], module=module) if step["step"]]
    assert len(steps) == 2
    statistic, limit = IN_BF16.get(name, ("max", 1e-4))
    for step in steps:
        assert 0 < step[f"rollout/logprob_diff_{statistic}"] < limit
        assert step["actor/grad_norm"] > 0 and step["actor/skipped_updates"] == 0
        assert not learns or (step["actor/mtp_loss"] > 0 and step["actor/mtp_grad_norm"] > 0)
        assert (0 <= step.get("rollout/draft_acceptance/1", -1) <= 1) == (bool(learns) and engine == "vllm")
    saved = dict(HFReader(workspace / "outputs" / "quickstart" / experiment / "latest" / "actor").tensors())
    assert first_difference({tensor: saved[tensor] for tensor in mtp}, mtp) == ""
    for tensor, before in learns.items():
        of = tensor.removeprefix("model.layers.4.")
        if of in REPEATED:
            assert torch.equal(saved[tensor], saved[REPEATED[of]])
        elif (
            "experts" not in tensor and name not in IN_BF16
        ):  # an expert may have had no token, bf16 rounds small steps away
            is_same = torch.equal(saved[tensor].float(), before.float())
            assert saved[tensor].isfinite().all() and is_same == of.endswith("e_score_correction_bias"), tensor


def train(
    directory: Path, name: str, options: list[str], timeout_s: int = 240, module: str = TRAIN
) -> list[dict[str, Any]]:
    """The metrics of a run, from step 0 on. Another ``module`` than ours runs as two ranks."""
    arguments = [str(ROOT / "configs" / "quickstart" / "grpo.yaml"), f"experiment={name}", *options]
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", "train", *arguments]
    if module != TRAIN:
        command = torchrun_command([*local_rendezvous(), *local_logs(None, 2)], 2, arguments, module)
    done = finished(command, directory, environment(directory), timeout_s)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (directory / "outputs" / "quickstart" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.matrix
@pytest.mark.timeout(2000)
def test_latent_attention_and_experts_learn_to_carry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickstart with a tiny DeepSeek-V3, whose experts are shared out and balanced by their bias."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import make_quickstart as tool

    problems, held_out = tool.make_problems(0, 200)
    tokenizer = tool.make_tokenizer()
    torch.manual_seed(0)
    sizes = {key: value for key, value in DEEPSEEK.items() if value is not None}
    config = DeepseekV3Config(
        **{**sizes, "q_lora_rank": 64, "qk_nope_head_dim": 24, "v_head_dim": 32, "routed_scaling_factor": 1.0},
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = DeepseekV3ForCausalLM(config)
    examples = tool.encode(tokenizer, problems)
    tool.train_model(model, examples, tool.Fit(400, 64, 2e-3), 0, lambda step, loss: None)
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "quickstart" / "model")
    for split, rows in (("train", problems), ("eval", held_out)):
        tool.write_parquet(tmp_path / "quickstart" / f"{split}.parquet", rows, split)
    layout = ["actor.layout.sequence_parallel=true", "actor.layout.ep=2", "actor.layout.etp=1"]
    options = [*layout, "rollout.engine=hf", "actor.moe.expert_bias_rate=0.001", "logging.console=plain"]
    steps = train(tmp_path, "learns", options, 1500)
    first, last = steps[0]["evaluate/accuracy"], steps[-1]["evaluate/accuracy"]
    print(f"held-out accuracy {first} -> {last}; reward {steps[1]['reward/mean']} -> {steps[-1]['reward/mean']}")
    assert len(steps) == 31 and first < 0.6 and last > first + 0.25
    assert steps[-1]["reward/mean"] > steps[1]["reward/mean"] + 0.2
    assert max(step["rollout/logprob_diff_max"] for step in steps[1:]) < 1e-3
