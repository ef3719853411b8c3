"""Give train, plan and convert a config.json or generation_config.json with wrong statements about a model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.readers.model_files import inspect_generator, inspect_model, read_geometry
from rlhf_mcore.readers.tokenizer_match import token_problems, tokenizer_size
from tests.unit.hostile.refusals import refusal

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}
QWEN_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    **SIZES,
}
HUGE = (3_000_000, 10**18, 10**300)
OTHER_TYPES: tuple[Any, ...] = ({}, [1], "12", "", 1.5, -1, True, [[]])


def write(folder: Path, config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def problems(folder: Path) -> str:
    """Return the messages of the model's validation."""
    return "\n".join(inspect_model(str(folder), "model.path")[1])


# -------------------------------------------------------------------------------------------------------------- sizes
def test_sizes_that_no_model_has(tmp_path: Path) -> None:
    """The readers allocate tables of layers, heads, experts and tokens before they read weights.

    These sizes would take all memory.
    """
    for value in HUGE:
        for number, key in enumerate(
            [key for key in QWEN_MOE if isinstance(QWEN_MOE[key], int) and key != "norm_topk_prob"]
        ):
            here = tmp_path / f"{value}-{number}"
            here.mkdir()
            folder = write(here, {**QWEN_MOE, key: value})
            if value < 2**31 and key == "max_position_embeddings":
                return  # a length allocates nothing
            assert f"config.json has {key}={value}, not an integer from 1 to" in problems(
                folder
            ) or "bits, beyond 128" in problems(folder)
            if key != "max_position_embeddings":
                assert key in refusal(read_geometry, folder, "lm")


def test_sizes_that_do_not_go_together(tmp_path: Path) -> None:
    for number, (change, message) in enumerate(
        [
            ({"num_hidden_layers": 1024, "num_experts": 1024}, "at most 32: 1024 layers have up to 32768 experts"),
            ({"num_hidden_layers": 17, "num_experts": 4096}, "at most 1927: 17 layers"),
            ({"num_attention_heads": 6}, "num_key_value_heads=4, not a divisor of num_attention_heads=6"),
            (
                {"num_hidden_layers": 1024, "num_experts": 8, "num_attention_heads": 64, "num_key_value_heads": 64},
                "num_key_value_heads=64, not at most 16 in each of 1024 layers",
            ),
            ({"head_dim": 7}, "head_dim=7, not an even number"),
            ({"num_attention_heads": 1024, "head_dim": None}, "hidden_size=64, not at least num_attention_heads=1024"),
            ({"mlp_only_layers": [10**9]}, None),
            ({"mlp_only_layers": list(range(100_000))}, None),
            ({"layer_types": ["full_attention"] * 100_000}, None),
            ({"decoder_sparse_step": 10**15}, None),
        ]
    ):
        here = tmp_path / str(number)
        here.mkdir()
        folder = write(here, {**QWEN_MOE, "num_key_value_heads": 4, **change})
        if message is None:
            assert read_geometry(folder).num_layers == 2
        else:
            assert message in refusal(read_geometry, folder)


# -------------------------------------------------------------------------------------------------------------- types
TYPED = (
    *SIZES,
    "architectures",
    "attention_bias",
    "decoder_sparse_step",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "id2label",
    "layer_types",
    "max_window_layers",
    "mlp_only_layers",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_experts",
    "num_experts_per_tok",
    "num_labels",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
)


def test_values_of_other_types(tmp_path: Path) -> None:
    """Every key gets a value of every other JSON type. Each value gives a message or has no effect."""
    others = [{**LLAMA, "architectures": [name]} for name in ("Qwen2ForCausalLM", "MistralForCausalLM")]
    configs = (LLAMA, QWEN_MOE, *others)
    for place, key in enumerate(TYPED):
        for number, value in enumerate(OTHER_TYPES):
            config = configs[(place + number) % len(configs)]
            _check_every_reader(write(tmp_path / f"{key}-{number}", {**config, key: value}))


def test_a_text_where_none_is_meant_is_named(tmp_path: Path) -> None:
    for number, key in enumerate(
        [key for key in TYPED if key not in ("layer_types", "id2label", "num_labels", "max_window_layers")]
    ):
        here = tmp_path / str(number)
        here.mkdir()
        change = {"architectures": ["Qwen2ForCausalLM"]} if key in ("sliding_window", "use_sliding_window") else {}
        if key == "use_sliding_window":
            change["sliding_window"] = 16
        folder = write(here, {**QWEN_MOE, **change, key: "\u00e9t\u00e9"})
        (folder / "generation_config.json").write_text("{}")
        ends = "\n".join(token_problems(str(folder), 5, "model.path", "t"))
        found = (
            problems(folder)
            + ends
            + (refusal(read_geometry, folder) if key in ("head_dim", "hidden_size", "tie_word_embeddings") else "")
        )
        if key == "eos_token_id":
            (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
            (folder / "config.json").write_text(json.dumps(LLAMA))
            found = "\n".join(token_problems(str(folder), 5, "model.path", "t"))
        assert key in found


def _check_every_reader(folder: Path) -> None:
    """Run all readers of config.json. They may raise only ConfigError."""
    for head in ("lm", "token", "sequence"):
        shape, found = inspect_model(str(folder), "model.path", (head,))
        assert shape is not None or found
        assert all(len(problem) < 2000 for problem in found)
    inspect_generator(str(folder), "evaluate.checkpoint")
    list(token_problems(str(folder), tokenizer_size(str(folder)), "model.path", str(folder)))
    list(token_problems(str(folder), 50, "model.path", str(folder)))
    for read in (read_geometry, lambda path: read_geometry(path, "token")):
        try:
            read(folder)
        except ConfigError as error:
            assert len(str(error)) < 2000


# ----------------------------------------------------------------------------------------------------------- documents
DOCUMENTS = {
    "nothing": ("", "not valid JSON"),
    "a list": ("[]", "is not a JSON object"),
    "a number": ("1", "is not a JSON object"),
    "NaN": ('{"rope_theta": NaN}', "rope_theta is nan, not a finite number"),
    "Infinity": ('{"rope_scaling": {"factor": -Infinity}}', "rope_scaling.factor is -inf"),
    "a number without end": ('{"rms_norm_eps": 1e999}', "rms_norm_eps is inf"),
    "a NUL": ('{"architectures": ["Llama\\u0000"]}', "architectures[0] holds a NUL"),
    "half a character": ('{"model_type": "\\udc00"}', "model_type holds a NUL or a lone surrogate"),
    "half a character in a key": ('{"\\ud800": 1}', "holds a NUL or a lone surrogate"),
    "a key twice": ('{"vocab_size": 1, "vocab_size": 100}', "key 'vocab_size' appears twice"),
    "depth": ('{"a":' * 50 + "1" + "}" * 50, "nested deeper than 32"),
    "depth beyond the parser": ("[" * 200_000, "nested deeper than 32"),
    "a million layers by name": ('{"layer_types": [' + '"a",' * 1_000_000 + '"a"]}', "more than 500,000 values"),
    "forty thousand keys": (json.dumps({f"k{n}": n for n in range(40_000)}), "architecture none"),
    "digits": ('{"vocab_size": ' + "9" * 5000 + "}", "Exceeds the limit"),
    "a long architecture": (json.dumps({"architectures": ["x" * 100_000]}), "architecture xxx"),
    "a long activation": (json.dumps({**LLAMA, "hidden_act": "y" * 100_000}), "hidden_act 'yyy"),
    "a long rope type": (json.dumps({**LLAMA, "rope_scaling": {"rope_type": "z" * 100_000}}), "rope type 'zzz"),
    "escapes": (json.dumps({"architectures": ["\x1b[2J"]}), "architecture \\x1b[2J"),
}


def test_documents(tmp_path: Path) -> None:
    for number, name in enumerate(DOCUMENTS):
        here = tmp_path / str(number)
        here.mkdir()
        text, message = DOCUMENTS[name]
        folder = write(here, text)
        assert message in problems(folder)
        if "hidden_act" not in text and "rope_type" not in text:  # not a part of the geometry
            assert message in refusal(read_geometry, folder)
        assert problems(folder).replace("\n", "").isprintable()


def test_files(tmp_path: Path) -> None:
    for make, message in [
        (os.mkfifo, "a FIFO, not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "a device, not a regular file"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
        (lambda path: path.mkdir(), "a directory, not a regular file"),
        (lambda path: (path.touch(), os.truncate(path, 2**40)), "bytes, but at most"),
        (lambda path: path.write_bytes(b"\xff\xfe{\0}\0"), "a NUL at byte 3"),
        (lambda path: path.write_bytes(b'{"a": "\xe9"}'), "not UTF-8"),
    ]:
        for number, file in enumerate(["config.json", "generation_config.json", "model.safetensors.index.json"]):
            here = tmp_path / f"{make}-{message}-{number}"
            here.mkdir()
            folder = write(here / "model", LLAMA)
            (folder / file).unlink(missing_ok=True)
            make(folder / file)
            found = problems(folder) + "\n".join(token_problems(str(folder), 50, "model.path", "t"))
            if file == "model.safetensors.index.json" and not (folder / file).is_file():
                assert found == ""  # no index, because one file contains the weights
            else:
                assert message in found
                assert found.count(file) == 1


def test_indexes(tmp_path: Path) -> None:
    for number, index in enumerate(
        [
            '{"weight_map": {"a": 1}}',
            '{"weight_map": {"a": null}}',
            '{"weight_map": []}',
            '{"weight_map": {}}',
            '{"weight_map": {"a": "../x.safetensors"}}',
            '{"weight_map": {"a": "b\\u0000"}}',
            '{"weight_map": {"a": "b", "a": "c"}}',
            '{"weight_map": {"a": "' + "n" * 5000 + '"}}',
            '{"weight_map": {"\\ud800": "model.safetensors"}}',
            "[" * 100_000,
        ]
    ):
        here = tmp_path / str(number)
        here.mkdir()
        folder = write(here, LLAMA)
        (folder / "model.safetensors.index.json").write_text(index)
        shape, found = inspect_model(str(folder), "model.path")
        assert shape is not None
        assert len(found) == 1 and "model.safetensors.index.json" in found[0] and len(found[0]) < 1000


def test_end_tokens(tmp_path: Path) -> None:
    for number, end in enumerate([{}, "2", 2.5, True, [[1]], ["2"], -1, 10**30, 99]):
        here = tmp_path / str(number)
        here.mkdir()
        folder = write(here, LLAMA)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
        (found,) = token_problems(str(folder), 50, "model.path", "t")
        assert "eos_token_id" in found or "token 99" in found


# -------------------------------------------------------------------------------------------------------------- fuzzing
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([10**9, 2**64, "1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(
    [*TYPED, "auto_map", "quantization_config", "shared_expert_intermediate_size", "num_local_experts"]
)
ROPE = st.dictionaries(
    st.sampled_from(
        ["rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    ),
    VALUES | st.sampled_from(["yarn", "linear", "llama3", "default"]),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([LLAMA, QWEN_MOE]), st.dictionaries(KEYS, VALUES, min_size=1, max_size=4), st.none() | ROPE)
@example(base=LLAMA, change={"quantization_config": []}, rope=None)
def test_changed_configs(
    tmp_path: Path, base: Mapping[str, Any], change: dict[str, Any], rope: dict[str, Any] | None
) -> None:
    config = {**deepcopy(dict(base)), **change, **({"rope_scaling": rope} if rope else {})}
    _check_every_reader(write(tmp_path, json.dumps(config)))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_bytes(tmp_path: Path, data: st.DataObject) -> None:
    text = bytearray(json.dumps(QWEN_MOE).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    folder = write(tmp_path, QWEN_MOE)
    (folder / "config.json").write_bytes(bytes(text))
    _check_every_reader(folder)
