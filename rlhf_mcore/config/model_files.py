"""What can be said about a Hugging Face model directory from its small files, without torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rlhf_mcore.config.errors import ConfigError, FileProblem

_MODELS = {  # as the names of Hugging Face architectures begin -> model family
    "Llama": "llama",
    "Mistral": "mistral",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3Moe": "qwen3_moe",
    "Mixtral": "mixtral",
}
HEADS = {  # kind of head -> how the names of architectures with it end
    "lm": "ForCausalLM",
    "token": "ForTokenClassification",
    "sequence": "ForSequenceClassification",
}
ARCHITECTURES = {  # architecture of a Hugging Face config -> model family and kind of head
    model + suffix: (family, head) for head, suffix in HEADS.items() for model, family in _MODELS.items()
}
MOE_FAMILIES = ("qwen3_moe", "mixtral")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# What transformers takes for a key that the file leaves out, where it matters here.
_MISTRAL_WINDOW = 4096
_QWEN_MAX_WINDOW_LAYERS = 28
TOP_K = {"qwen3_moe": 8, "mixtral": 2}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that layouts and lengths are checked against."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    num_experts: int = 0  # 0: a dense model
    expert_size: int = 0  # intermediate size of an expert
    has_dense_mlp: bool = True


def architecture_name(architecture: str, head: str) -> str:
    """The architecture of the same model with another head."""
    _, own = ARCHITECTURES[architecture]
    return architecture.removesuffix(HEADS[own]) + HEADS[head]


def inspect_model(path: str, field: str, heads: Collection[str] = ("lm",)) -> tuple[ModelShape | None, list[str]]:
    """The shape of the model in directory ``path`` (None if it cannot be known), and what is wrong with the directory.

    ``field`` is the config key that names the directory, ``heads`` the kinds of head that it may have.
    """
    prefix = f"{field}={path}"
    if not Path(path).is_dir():
        where = "is not a directory" if Path(path).exists() else f"does not exist (looked from {Path.cwd()})"
        return None, [f"{prefix} {where}; give the path of a Hugging Face model directory"]
    problems: list[str] = [FileProblem(problem) for problem in _weight_problems(Path(path), prefix)]
    try:
        hf_config = read_json(Path(path) / "config.json", prefix)
        problems += _config_problems(hf_config, prefix, heads)
        return _shape(hf_config, prefix), problems
    except ConfigError as error:
        return None, [*error.problems, *problems]
    except (TypeError, AttributeError, ValueError) as error:  # a value of a kind that no exporter writes
        return None, [f"{prefix}: config.json is malformed ({error}); export the model again", *problems]


def tokenizer_problems(path: str, field: str) -> Iterator[str]:
    """What is wrong with a directory that should hold a tokenizer. A missing directory is reported elsewhere."""
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield (
            f"{field}={path} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); "
            "copy the model's tokenizer files there or set model.tokenizer_path"
        )


def inspect_generator(path: str, field: str) -> tuple[ModelShape | None, list[str]]:
    """As ``inspect_model``, of a directory that only has to generate: any architecture will do that the engine knows.

    The shape is None also where config.json does not say it in the usual keys.
    """
    prefix = f"{field}={path}"
    is_delta = any(Path(path).glob("*.safetensors.delta"))  # of our own checkpoints: made whole before it is read
    problems = [] if is_delta else list(_weight_problems(Path(path), prefix))
    try:
        hf_config = read_json(Path(path) / "config.json", prefix)
    except ConfigError as error:
        return None, [*error.problems, *problems]
    if "auto_map" in hf_config:
        problems.append(f"{prefix}: config.json has auto_map (code from the directory would be run): refused")
    if "quantization_config" in hf_config:
        problems.append(
            f"{prefix}: quantised weights (quantization_config) are not supported; use the unquantised model"
        )
    try:
        return _shape(hf_config, prefix), problems
    except (ConfigError, TypeError, AttributeError, ValueError):
        return None, problems


def read_json(file: Path, prefix: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{prefix} has no {file.name}; it is not a Hugging Face model directory") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{prefix}: {file.name} cannot be read ({error}); download or export the model again"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{prefix}: {file.name} is not a JSON object; download or export the model again")
    return content


def _weight_problems(folder: Path, prefix: str) -> Iterator[str]:
    if (folder / INDEX_FILE).is_file():
        yield from _index_problems(folder, prefix)
    elif not any(folder.glob("*.safetensors")):
        pickled = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
        found = f" (only {', '.join(pickled[:3])}, which is pickle and is not read)" if pickled else ""
        yield f"{prefix} has no *.safetensors{found}; save the model with safe_serialization=True"


def _index_problems(folder: Path, prefix: str) -> Iterator[str]:
    try:
        weight_map = read_json(folder / INDEX_FILE, prefix).get("weight_map")
    except ConfigError as error:
        yield str(error)
        return
    if not isinstance(weight_map, dict) or not weight_map:
        yield f"{prefix}: {INDEX_FILE} has no weight_map; download or export the model again"
        return
    for shard in sorted(set(map(str, weight_map.values()))):
        if PurePosixPath(shard).name != shard:
            yield f"{prefix}: {INDEX_FILE} names {shard!r}, a path outside the directory; it must name files beside it"
        elif not (folder / shard).is_file():
            yield f"{prefix}: {INDEX_FILE} names {shard}, which is not there; download the model again"


def _config_problems(hf_config: Mapping[str, Any], prefix: str, heads: Collection[str]) -> Iterator[str]:
    if "auto_map" in hf_config:
        yield f"{prefix}: config.json has auto_map (code from the directory would be run): refused; remove the entry"
    if "quantization_config" in hf_config:
        yield f"{prefix}: quantised weights (quantization_config) cannot be trained; use the unquantised model"
    architecture = (hf_config.get("architectures") or ["none"])[0]
    family, head = ARCHITECTURES.get(architecture, ("", ""))
    if head not in heads:
        supported = (name for name, (_, kind) in ARCHITECTURES.items() if kind in heads)
        yield f"{prefix}: architecture {architecture} is not supported; supported are: {', '.join(supported)}"
        return
    num_labels = hf_config.get("num_labels", len(hf_config.get("id2label") or (0, 1)))  # transformers' default is two
    if head != "lm" and num_labels != 1:
        yield f"{prefix}: {architecture} with {num_labels} labels; a value or a score is one number: use a model with one label"
    if hf_config.get("hidden_act", "silu") != "silu":
        yield f"{prefix}: hidden_act {hf_config['hidden_act']!r} is not supported, only 'silu'; use another model"
    rope_type = _rope(hf_config).get("rope_type") or _rope(hf_config).get("type") or "default"
    if rope_type not in ROPE_TYPES:
        yield f"{prefix}: rope type {rope_type!r} is not supported; supported are: {', '.join(ROPE_TYPES)}"
    for key in ("attention_bias", "mlp_bias"):
        if hf_config.get(key) and family in ("llama", "qwen3", "qwen3_moe"):
            yield f"{prefix}: {key} is not supported for {architecture}; use another model"
    window = _active_window(hf_config, family)
    if window is not None:
        yield f"{prefix}: {architecture} with an active sliding_window {window} is not supported; use another model"
    if family in MOE_FAMILIES:
        yield from _routing_problems(hf_config, prefix, family)


def _routing_problems(hf_config: Mapping[str, Any], prefix: str, family: str) -> Iterator[str]:
    top_k = hf_config.get("num_experts_per_tok", TOP_K[family])
    num_experts = _num_experts(hf_config)
    if isinstance(num_experts, int) and not 1 <= top_k <= num_experts:
        yield f"{prefix}: num_experts_per_tok={top_k} is not between 1 and num_experts={num_experts}; export the model again"
    if top_k == 1 and (family == "mixtral" or hf_config.get("norm_topk_prob")):
        yield f"{prefix}: num_experts_per_tok=1 with weights that add up to one cannot be learned; use another model"
    if hf_config.get("shared_expert_intermediate_size"):
        yield f"{prefix}: shared experts (shared_expert_intermediate_size) are not supported; use another model"


def _num_experts(hf_config: Mapping[str, Any]) -> Any:
    """Under the name that transformers writes since version 5, or the one of Qwen3-MoE's authors."""
    return hf_config.get("num_local_experts", hf_config.get("num_experts"))


def dense_layers(hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers of a mixture-of-experts model that have a dense MLP (Qwen3-MoE's ``decoder_sparse_step``, ``mlp_only_layers``)."""
    step, listed = hf_config.get("decoder_sparse_step", 1), hf_config.get("mlp_only_layers") or ()
    if step < 1:
        raise ValueError(f"decoder_sparse_step={step}")
    return tuple(i for i in range(hf_config["num_hidden_layers"]) if i in listed or (i + 1) % step)


def _active_window(hf_config: Mapping[str, Any], family: str) -> int | None:
    """The sliding window if some layer of the model really uses it."""
    window = hf_config.get("sliding_window", _MISTRAL_WINDOW if family == "mistral" else None)
    if not window or window >= hf_config.get("max_position_embeddings", window + 1):
        return None
    if family in ("mistral", "mixtral"):
        return int(window)
    if not hf_config.get("use_sliding_window"):
        return None
    if family == "qwen3_moe":
        return int(window)
    first = hf_config.get("max_window_layers", _QWEN_MAX_WINDOW_LAYERS)
    listed = "sliding_attention" in (hf_config.get("layer_types") or [])
    return int(window) if listed or first < hf_config.get("num_hidden_layers", 0) else None


def _rope(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    return hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {}


def _shape(hf_config: Mapping[str, Any], prefix: str) -> ModelShape:
    def size(key: str) -> int:
        value = hf_config.get(key)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{prefix}: config.json has {key}={value!r}, not a positive integer; export the model again"
            )
        return value

    num_heads = size("num_attention_heads")
    return ModelShape(
        num_layers=size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=size("num_key_value_heads") if hf_config.get("num_key_value_heads") is not None else num_heads,
        intermediate_size=size("intermediate_size"),
        vocab_size=size("vocab_size"),
        max_positions=_max_positions(hf_config, size("max_position_embeddings")),
        **_expert_shape(hf_config, size),
    )


def _expert_shape(hf_config: Mapping[str, Any], size: Callable[[str], int]) -> dict[str, Any]:
    family, _ = ARCHITECTURES.get((hf_config.get("architectures") or ["none"])[0], ("", ""))
    if family not in MOE_FAMILIES:
        return {}
    return dict(
        num_experts=size("num_local_experts" if "num_local_experts" in hf_config else "num_experts"),
        expert_size=size("moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"),
        has_dense_mlp=bool(dense_layers(hf_config)),
    )


def _max_positions(hf_config: Mapping[str, Any], stated: int) -> int:
    """yarn and linear scaling stretch a model beyond the length in config.json; with llama3 it is stated stretched."""
    rope = _rope(hf_config)
    kind = rope.get("rope_type") or rope.get("type")
    original = rope.get("original_max_position_embeddings") or stated
    factor = rope.get("factor") or 1.0
    return max(stated, int(original * factor)) if kind in ("yarn", "linear") else stated
