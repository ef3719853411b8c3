"""Change the keys of config.json one by one. A change is read like transformers does, which logprobs prove, or rejected."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM

from rlhf_mcore.bridge.files.hf_files import HFReader, load
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.data.collate import RowTokens, make_microbatches, restore_tokens
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.groups import ModelGroups, build_groups
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import current_platform
from tests.distributed.models import FURTHER_MODELS, LLAMA3_ROPE, MODELS, MOE_MODELS, YARN_ROPE, make

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a gloo world: the CPU platform only"),
]
BOUND = 1e-4  # fp32; measured: at most 2e-6. A key that is read differently changes logprobs by at least 1e-2.
LENGTHS = [23, 5, 40]  # longer than the windows below
ROWS = torch.randint(0, 97, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
ALL = {**MODELS, **MOE_MODELS, **FURTHER_MODELS}
ABSENT = object()  # removes a key
PLAIN_ROPE = dict(rope_type="default", rope_theta=10000.0)
SOME_SLIDING = ["sliding_attention"] * 2 + ["full_attention"] * 2
# Edits of config.json that keep the weights.
EDITS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "half a rotation": dict(partial_rotary_factor=0.5),
    "half a rotation, among the rotary parameters": dict(rope_parameters={**PLAIN_ROPE, "partial_rotary_factor": 0.5}),
    "half a rotation, scaled": dict(
        rope_parameters=None, rope_scaling=dict(rope_type="linear", factor=2.0, partial_rotary_factor=0.5)
    ),
    "a whole rotation": dict(partial_rotary_factor=1.0),
    "theta beside the parameters": dict(rope_theta=77.0),
    "theta alone": dict(rope_theta=77.0, rope_parameters=None),
    "theta absent": dict(rope_parameters=None),
    "linear, as older files have it": dict(
        rope_theta=77.0, rope_parameters=None, rope_scaling=dict(type="linear", factor=4.0)
    ),
    "two sets of parameters": dict(rope_scaling=dict(rope_type="linear", factor=4.0, rope_theta=55.0)),
    "linear with an mscale": dict(rope_parameters=dict(rope_type="linear", factor=4.0, mscale_all_dim=1.2)),
    "llama3": dict(rope_parameters=LLAMA3_ROPE),
    "llama3 with its length outside": dict(rope_parameters=LLAMA3_ROPE, original_max_position_embeddings=64),
    "yarn": dict(rope_parameters=YARN_ROPE),
    "yarn with mscales": dict(rope_parameters={**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.5}),
    "yarn with one mscale": dict(rope_parameters={**YARN_ROPE, "mscale_all_dim": 0.5}),
    "yarn with a factor of its own": dict(rope_parameters={**YARN_ROPE, "attention_factor": 1.3}),
    "yarn, not truncated": dict(rope_parameters={**YARN_ROPE, "truncate": False, "beta_fast": 16.0}),
    "dynamic": dict(rope_parameters=dict(rope_type="dynamic", rope_theta=100.0, factor=3.0)),
    "a factor without a kind": dict(rope_parameters=dict(rope_theta=100.0, factor=4.0)),
    "parameters by kind of layer": dict(rope_parameters=dict(full_attention=dict(rope_type="linear", factor=2.0))),
    "sees what follows": dict(is_causal=False),
    "a window": dict(sliding_window=4),
    "a window that is used": dict(sliding_window=4, use_sliding_window=True, max_window_layers=2, layer_types=ABSENT),
    "a window of layers": dict(sliding_window=4, use_sliding_window=True, layer_types=SOME_SLIDING),
    "a window of layers that nothing asks for": dict(sliding_window=4, layer_types=SOME_SLIDING),
    "eps": dict(rms_norm_eps=1e-2),
    "eps absent": dict(rms_norm_eps=ABSENT),
    "another activation": dict(hidden_act="gelu", hidden_activation="gelu"),
    "no activation": dict(hidden_act=ABSENT, hidden_activation=ABSENT),
    "tied beside another output layer": dict(tie_word_embeddings=True),
    "tied by default": dict(tie_word_embeddings=ABSENT),
    "capped logits": dict(final_logit_softcapping=2.0),
    "capped attention": dict(attn_logit_softcapping=2.0),
    "another scale": dict(query_pre_attn_scalar=5),
    "multipliers": dict(
        attention_multiplier=0.5, residual_multiplier=0.5, embedding_multiplier=2.0, logits_scaling=4.0
    ),
    "clipped queries": dict(clip_qkv=0.1),
    "weights that add up": dict(norm_topk_prob=True),
    "weights that do not": dict(norm_topk_prob=False),
    "weights that do by default": dict(norm_topk_prob=ABSENT),
    "weights, null": dict(norm_topk_prob=None),
    "routed scaling": dict(routed_scaling_factor=3.0),
    "no groups": dict(n_group=ABSENT, topk_group=ABSENT),
    "a softmax": dict(scoring_func="softmax"),
    "greedy": dict(topk_method="greedy"),
    "every second layer": dict(moe_layer_freq=2),
    "halves": dict(rope_interleave=False),
    "halves, null": dict(rope_interleave=None),
    "both ways": dict(use_bidirectional_attention=True),
    "another clamp": dict(swiglu_limit=3.0),
    "no list of layers": dict(layer_types=ABSENT, sliding_window_pattern=ABSENT, _sliding_window_pattern=ABSENT),
    "layers in reverse": dict(layer_types=["full_attention", "sliding_attention"] * 2),
}
# Settings that determine the weights, so that models are made with them.
MADE: dict[str, dict[str, Any]] = {
    "biases": dict(attention_bias=True),
    "no biases": dict(attention_bias=False),
    "biases of the MLP": dict(mlp_bias=True),
    "no biases of queries, keys and values": dict(qkv_bias=False),
    "tied": dict(tie_word_embeddings=True),
    "untied": dict(tie_word_embeddings=False),
    "two dense layers": dict(first_k_dense_replace=2),
    "a dense layer": dict(mlp_only_layers=[1]),
    "every second layer with experts": dict(decoder_sparse_step=2),
    "three experts": dict(num_experts_per_tok=3),
    "no shared expert": dict(n_shared_experts=0),
    "norms of heads": dict(use_qk_norm=True),
    "no norms of heads": dict(use_qk_norm=False),
    "queries at once": dict(q_lora_rank=None),
}
# Changes that a family supports, as (model, change). Other families reject them by name.
TAKEN = [
    *((name, "a whole rotation") for name in ("llama", "qwen3", "deepseek_v3_direct", "glm4_moe")),
    *(
        ("glm4_moe", change)
        for change in ("half a rotation", "biases", "no biases", "norms of heads", "no norms of heads")
    ),
    *((name, "eps") for name in ("llama", "deepseek_v3_direct", "deepseek_v3", "deepseek_v2")),
    ("deepseek_v3", "queries at once"),
    ("qwen3_next", "half a rotation"),
]


@pytest.fixture(scope="module")
def groups(world: None) -> ModelGroups:
    made = build_groups(ParallelLayout(1))
    assert made is not None
    return made


def edit(directory: Path, changes: dict[str, Any]) -> None:
    path = directory / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ABSENT}))


def of_transformers(directory: Path) -> torch.Tensor | None:
    """Return the logprobs of the rows, or None if transformers rejects the directory, fails, or finds other weights
    than expected.
    """
    try:
        hf, info = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
        if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
            return None
        found = []
        for ids in ROWS.split(LENGTHS):
            with torch.no_grad():
                logprobs = torch.log_softmax(hf.eval()(ids[None].long()).logits[0], dim=-1)
            found.append(torch.cat([logprobs.new_zeros(1), logprobs[:-1].gather(1, ids[1:, None].long())[:, 0]]))
    except Exception:  # any error
        return None
    return torch.cat(found)


def of_ours(directory: Path, groups: ModelGroups) -> torch.Tensor:
    spec = load_spec(directory)
    options = BuildOptions("fp32", "local", RecomputeConfig(), False, False, 0)
    model = build_model(spec, groups, current_platform(), options)
    load(model.local_parameters(), spec.geometry, HFReader(directory), fresh_head=False)
    held = RowTokens([0, 1, 2], LENGTHS, {"token_ids": ROWS})
    cut = make_microbatches(held, max_tokens=64, packing=True)
    logprobs = model.forward(cut, lambda outputs, part: model.logprobs_and_entropy(outputs, part, 1.0)[0])
    return restore_tokens(logprobs, cut, LENGTHS)


def compare(directory: Path, groups: ModelGroups) -> str:
    """Return "refused: ...", the distance, or "" if transformers rejects the model too."""
    try:
        found = of_ours(directory, groups)
    except ConfigError as error:
        return f"refused: {error}"
    expected = of_transformers(directory)
    return "" if expected is None else f"{float((found - expected).abs().max()):.1e}"


def wrong(outcomes: dict[str, str]) -> dict[str, str]:
    """Return the changes after which logprobs differ from transformers."""
    return {
        change: outcome
        for change, outcome in outcomes.items()
        if outcome and not outcome.startswith("refused") and not float(outcome) < BOUND
    }


def of_changes(name: str, directory: Path, groups: ModelGroups, changes: Collection[str]) -> dict[str, str]:
    """Apply each of these changes to a model and compare it."""
    outcomes, config_class = {}, ALL[name][1]()
    make(name, directory)
    config = directory / "config.json"
    original = config.read_text()
    for change, settings in EDITS.items():
        if change not in changes:
            continue
        edit(directory, settings)
        outcomes[change] = compare(directory, groups)
        config.write_text(original)
    for number, (change, settings) in enumerate(MADE.items()):
        if change in changes and hasattr(config_class, next(iter(settings))):
            try:
                make(name, directory / str(number), **settings)
            except StrictDataclassError:  # transformers rejects the setting
                continue
            outcomes[change] = compare(directory / str(number), groups)
    return outcomes


NAMES = [name for name in ALL if "heads" not in name]


def check_changes(name: str, directory: Path, groups: ModelGroups, changes: Collection[str]) -> None:
    warnings.simplefilter("ignore")
    outcomes = of_changes(name, directory, groups, changes)
    assert wrong(outcomes) == {}
    assert float(outcomes["as it is"]) < BOUND
    for change in [change for taken, change in TAKEN if taken == name]:
        assert float(outcomes[change] or "nan") < BOUND, change


@pytest.mark.parametrize("name", ["llama", "deepseek_v3_direct", "glm4_moe", "olmo3"])
def test_supported_changes_of_a_config_agree_with_transformers(name: str, tmp_path: Path, groups: ModelGroups) -> None:
    check_changes(name, tmp_path, groups, ["as it is", *(change for taken, change in TAKEN if taken == name)])


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_changed_key_agrees_with_transformers_or_is_rejected(name: str, tmp_path: Path, groups: ModelGroups) -> None:
    check_changes(name, tmp_path, groups, [*EDITS, *MADE])


def alternatives(value: Any) -> Iterator[tuple[str, Any]]:
    """Return other values of a key. Most are not used by any trained model."""
    yield "absent", ABSENT
    yield "null", None
    if isinstance(value, bool):
        yield str(not value), not value
    elif isinstance(value, int):
        yield from ((str(other), other) for other in (2 * value, value // 2, value + 1))
    elif isinstance(value, float):
        yield from ((str(other), other) for other in (2 * value + 0.125, value / 2))
    elif isinstance(value, list):
        yield from (("reversed", value[::-1]), ("shorter", value[:-1]), ("empty", []))
    elif isinstance(value, dict):
        for key, inner in value.items():
            for label, other in alternatives(inner):
                changed = {**value, key: other}
                yield f"{key} {label}", {name: held for name, held in changed.items() if held is not ABSENT}


IRRELEVANT = ("architectures", "model_type", "transformers_version", "dtype", "use_cache", "initializer_range")


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "deepseek_v3_direct", "gpt_oss", "qwen3_next"])
def test_every_key_in_turn(name: str, tmp_path: Path, groups: ModelGroups) -> None:
    """Each key of transformers' config.json is removed, set to null, and set to other values."""
    warnings.simplefilter("ignore")
    make(name, tmp_path)
    config, outcomes = json.loads((tmp_path / "config.json").read_text()), {}
    for key, value in config.items():
        if key in IRRELEVANT or key.endswith("_token_id"):
            continue
        for label, other in alternatives(value):
            edit(tmp_path, {key: other})
            outcomes[f"{key} {label}"] = compare(tmp_path, groups)
            edit(tmp_path, {key: value})
    assert len(outcomes) > 40 and wrong(outcomes) == {}
