"""Compare ``plan --trace``, which lets Megatron allocate one rank of an imagined world, with the formulas."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}
GLM = ROOT / "configs" / "models" / "GLM-4.5-Air" / "config.json"
SHARED_EXPERTS = {"num_hidden_layers": 4, "n_routed_experts": 16, "num_nextn_predict_layers": 0}
# Both sizes of an expert-parallel group occur with and without recomputed experts.
MOE = ROOT / "configs" / "models" / "Qwen3-30B-A3B" / "config.json"
SMALL = {"hidden_size": 256, "head_dim": 32, "num_attention_heads": 8, "moe_intermediate_size": 64, "num_experts": 8}
DEEP = SMALL | {"num_hidden_layers": 48, "num_experts_per_tok": 2, "vocab_size": 512}
RECOMPUTED = {
    "nothing": "",
    "everything": "actor.recompute.granularity=full actor.optimizer.name=sgd",
    "parts": "actor.recompute.granularity=selective actor.recompute.modules=[core_attn,mlp,shared_experts]",
    "experts": "actor.recompute.granularity=selective actor.recompute.modules=[moe]",
}


def differences(model: Path, world_size: int, overrides: str, limit_s: float = 500) -> dict[str, str]:
    """Return the relative differences by kind of memory, as in the table."""
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", "plan", str(ROOT / "configs" / "base.yaml"), "--trace"]
    keys = [f"model.path={model}", "model.dtype=bf16", "data.train=[absent.parquet]", *overrides.split()]
    keys += ["actor.layout.sequence_parallel=true", "trainer.max_tokens_per_microbatch=2048"]
    done = subprocess.run(
        [*command, "--world-size", str(world_size), *keys], capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert "Warning" not in done.stdout + done.stderr and "Traceback" not in done.stderr, done.stderr[-2000:]
    rows = re.findall(r"^([a-z ]+?)  +([0-9.]+)  +([0-9.]+)  +(\S+)$", done.stdout, re.MULTILINE)
    return {name: difference for name, _, _, difference in rows}


def check(found: dict[str, str]) -> None:
    assert found.keys() >= {"weights", "gradients", "masters and moments", "activations and logits"}
    for name, difference in found.items():
        assert difference == "none" or abs(float(difference.rstrip("%"))) <= 5, (name, difference)


def test_formulas_are_within_5_percent(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    check(differences(tmp_path, 8, "actor.layout.tp=2 actor.layout.pp=2 actor.layout.cp=2 actor.optimizer.name=muon"))


NORMS_AROUND = {
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
}
GELU = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 32,
    "sliding_window": 512,
    "query_pre_attn_scalar": 32,
}


def test_norms_around_blocks_and_an_activation_without_a_fused_kernel(tmp_path: Path) -> None:
    for name, changes in {"norms": NORMS_AROUND, "gelu": GELU}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(TINY | changes))
        found = differences(tmp_path / name, 8, "actor.layout.tp=2 actor.layout.pp=2")
        if name == "gelu":  # Megatron's unfused products keep more than the formula counts
            assert 0 < float(found.pop("activations and logits").rstrip("%")) < 20
            found["activations and logits"] = "none"
        check(found)


@pytest.mark.full
def test_recomputed_experts_keep_no_gradients_and_a_hosted_state_is_not_on_the_device(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads(MOE.read_text()) | DEEP))
    layout = "actor.layout.tp=2 actor.layout.ep=4 actor.layout.etp=1 actor.recompute.granularity=full"
    check(differences(tmp_path, 4, f"{layout} actor.optimizer.offload=0.5"))


@pytest.mark.full
@pytest.mark.parametrize(("recomputed", "etp"), [("nothing", 1), ("everything", 2), ("parts", 2), ("experts", 1)])
def test_layers_with_a_shared_expert(recomputed: str, etp: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads(GLM.read_text()) | SHARED_EXPERTS))
    layout = f"actor.layout.tp=2 actor.layout.pp=2 actor.layout.ep=2 actor.layout.etp={etp}"
    check(differences(tmp_path, 8, f"{layout} {RECOMPUTED[recomputed]}"))
