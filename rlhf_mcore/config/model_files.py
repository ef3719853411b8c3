"""What can be said about a Hugging Face model directory from its small files, without torch or transformers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from os.path import exists, isdir, isfile
from pathlib import Path, PurePosixPath
from typing import Any

from rlhf_mcore.config.errors import ConfigError, FileProblem
from rlhf_mcore.config.weight_files import SINGLE_FILE, tensor_problems
from rlhf_mcore.foreign import INDEX, SMALL, Fields, Limits, MissingFile, read_json, shorten

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
CHAT_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
# What travels with the weights: everything a user of the directory needs to run it.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    *TOKENIZER_FILES,
    *CHAT_TEMPLATE_FILES,
)
# What transformers takes for a key that the file leaves out, where it matters here.
_HEAD_DIM = {"qwen3": 128}  # elsewhere hidden_size / num_attention_heads
_MISTRAL_WINDOW = 4096
_QWEN_MAX_WINDOW_LAYERS = 28
TOP_K = {"qwen3_moe": 8, "mixtral": 2}
# Two to eight times the largest that is published. Tables of layers, heads, experts and tokens are made before any weight is
# read, so beyond these a config.json that is damaged, or wants to be, would take the memory of the machine.
MAX_SIZES = {
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 4096,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "moe_intermediate_size": 2**20,
    "num_experts": 4096,
    "num_local_experts": 4096,
    "num_experts_per_tok": 4096,
    "vocab_size": 2**20,
    "max_position_embeddings": 2**31,
}
MAX_EXPERTS = 2**15  # of all layers together
MAX_KV_HEADS = (
    2**14
)  # of all layers together, nearly twice the most that are published; a plan places each of them on its own
_EXPORT = "export the model again"


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
    if not isdir(path):
        where = "is not a directory" if exists(path) else f"does not exist (looked from {Path.cwd()})"
        return None, [f"{prefix} {where}; give the path of a Hugging Face model directory"]
    problems: list[str] = [FileProblem(problem) for problem in _weight_problems(Path(path), prefix)]
    try:
        hf_config = read_config(path, prefix)
        problems += _config_problems(hf_config, prefix, heads)
        shape = _shape(hf_config)
    except ConfigError as error:
        return None, [*error.problems, *problems]
    try:
        different = [] if problems else list(_tensor_problems(Path(path), prefix, hf_config))
    except ConfigError as error:
        different = error.problems
    return shape, [*problems, *map(FileProblem, different)]


def tokenizer_problems(path: str, field: str) -> Iterator[str]:
    """What is wrong with a directory that should hold a tokenizer. A missing directory is reported elsewhere."""
    folder = Path(path)
    if isdir(folder) and not any(isfile(folder / name) for name in TOKENIZER_FILES):
        yield (
            f"{field}={path} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); "
            "copy the model's tokenizer files there or set model.tokenizer_path"
        )


def inspect_generator(path: str, field: str, *, needs_weights: bool = True) -> tuple[ModelShape | None, list[str]]:
    """As ``inspect_model``, of a directory that only has to generate: any architecture will do that the engine knows.

    ``needs_weights``: whether it holds the weights too.
    The shape is None also where config.json does not have it under the usual keys.
    """
    prefix = f"{field}={path}"
    is_delta = any(Path(path).glob("*.safetensors.delta"))  # of our own checkpoints: made whole before it is read
    problems = [] if is_delta or not needs_weights else list(_weight_problems(Path(path), prefix))
    try:
        hf_config = read_config(path, prefix)
    except ConfigError as error:
        return None, [*error.problems, *problems]
    if "auto_map" in hf_config:
        problems.append(f"{prefix}: config.json has auto_map (code from the directory would be run): refused")
    if "quantization_config" in hf_config:
        problems.append(
            f"{prefix}: quantised weights (quantization_config) are not supported; use the unquantised model"
        )
    try:
        return _shape(hf_config), problems
    except ConfigError:
        return None, problems


def read_config(directory: str | Path, prefix: str) -> Fields:
    """``config.json`` of a model directory. ``prefix`` names that directory in messages.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    return _read(Path(directory) / "config.json", prefix, SMALL)


def _read(file: Path, prefix: str, limits: Limits) -> Fields:
    try:
        return read_json(file, limits=limits, where=f"{prefix}: {file.name}", remedy=f"download or {_EXPORT}")
    except MissingFile as error:
        raise ConfigError(f"{prefix} has no {file.name}; it is not a Hugging Face model directory") from error


def _weight_problems(folder: Path, prefix: str) -> Iterator[str]:
    if isfile(folder / INDEX_FILE):
        yield from _index_problems(folder, prefix)
    elif not any(folder.glob("*.safetensors")):
        pickled = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
        found = f" (only {', '.join(pickled[:3])}, which is pickle and is not read)" if pickled else ""
        yield f"{prefix} has no *.safetensors{found}; save the model with safe_serialization=True"


def _tensor_problems(folder: Path, prefix: str, hf_config: Fields) -> Iterator[str]:
    """Whether the weights are those of config.json: their first and last layer, and the tables around them."""
    weight_map = _read(folder / INDEX_FILE, prefix, INDEX).object("weight_map") if isfile(folder / INDEX_FILE) else None
    if weight_map is None and not isfile(folder / SINGLE_FILE):
        return
    shard_of = None if weight_map is None else {name: weight_map.text(name) for name in weight_map}
    num_layers = size(hf_config, "num_hidden_layers")
    yield from tensor_problems(folder, prefix, shard_of, num_layers, _some_shapes(hf_config))


def _some_shapes(hf_config: Fields) -> dict[str, tuple[int, ...]]:
    """Tensors that tell one model from another, as Hugging Face names them."""
    family, _ = ARCHITECTURES[architecture(hf_config)]
    hidden, num_layers = size(hf_config, "hidden_size"), size(hf_config, "num_hidden_layers")
    queries = size(hf_config, "num_attention_heads") * head_dim(hf_config, family)
    keys = num_kv_heads(hf_config) * head_dim(hf_config, family)
    first = "model.layers.0."
    found = {
        "model.embed_tokens.weight": (size(hf_config, "vocab_size"), hidden),
        f"{first}self_attn.q_proj.weight": (queries, hidden),
        f"{first}self_attn.k_proj.weight": (keys, hidden),
        f"{first}self_attn.o_proj.weight": (hidden, queries),
    }
    if family == "mixtral":
        experts, expert, rows = f"{first}block_sparse_moe.", "w1", size(hf_config, "intermediate_size")
    elif family == "qwen3_moe" and 0 not in dense_layers(hf_config):
        experts, expert, rows = f"{first}mlp.", "gate_proj", size(hf_config, "moe_intermediate_size")
    else:
        found[f"{first}mlp.gate_proj.weight"] = (size(hf_config, "intermediate_size"), hidden)
        experts = ""
    if experts:
        found[f"{experts}gate.weight"] = (num_experts(hf_config), hidden)
        found[f"{experts}experts.0.{expert}.weight"] = (rows, hidden)
    return {**found, f"model.layers.{num_layers - 1}.input_layernorm.weight": (hidden,), "model.norm.weight": (hidden,)}


def _index_problems(folder: Path, prefix: str) -> Iterator[str]:
    try:
        weight_map = _read(folder / INDEX_FILE, prefix, INDEX).object("weight_map", default=None)
        shards = sorted({weight_map.text(name) for name in weight_map}) if weight_map else []
    except ConfigError as error:
        yield str(error)
        return
    if not shards:
        yield f"{prefix}: {INDEX_FILE} has no weight_map; download or export the model again"
    for shard in shards:
        if PurePosixPath(shard).name != shard:
            yield f"{prefix}: {INDEX_FILE} names {shorten(shard)!r}, a path outside the directory; it must name files beside it"
        elif not isfile(folder / shard):
            yield f"{prefix}: {INDEX_FILE} names {shorten(shard)}, which is not there; download the model again"


def _config_problems(hf_config: Fields, prefix: str, heads: Collection[str]) -> Iterator[str]:
    if "auto_map" in hf_config:
        yield f"{prefix}: config.json has auto_map (code from the directory would be run): refused; remove the entry"
    if "quantization_config" in hf_config:
        yield f"{prefix}: quantised weights (quantization_config) cannot be trained; use the unquantised model"
    name = architecture(hf_config)
    family, head = ARCHITECTURES.get(name, ("", ""))
    if head not in heads:
        supported = (known for known, (_, kind) in ARCHITECTURES.items() if kind in heads)
        yield f"{prefix}: architecture {shorten(name)} is not supported; supported are: {', '.join(supported)}"
        return
    labels = hf_config.object("id2label", default=(0, 1))  # transformers' default is two
    num_labels = hf_config.integer("num_labels", default=len(labels))
    if head != "lm" and num_labels != 1:
        yield f"{prefix}: {name} with {num_labels} labels; a value or a score is one number: use a model with one label"
    activation = hf_config.text("hidden_act", default="silu")
    if activation != "silu":
        yield f"{prefix}: hidden_act {shorten(activation)!r} is not supported, only 'silu'; use another model"
    yield from _rope_problems(hf_config, prefix)
    for key in ("attention_bias", "mlp_bias"):
        if hf_config.flag(key, default=False) and family in ("llama", "qwen3", "qwen3_moe"):
            yield f"{prefix}: {key} is not supported for {name}; use another model"
    hf_config.number("rms_norm_eps", 0.0, 1.0, default=None)
    head_dim(hf_config, family)
    window = _active_window(hf_config, family)
    if window is not None:
        yield f"{prefix}: {name} with an active sliding_window {window} is not supported; use another model"
    if family in MOE_FAMILIES:
        yield from _routing_problems(hf_config, prefix, family)


def _rope_problems(hf_config: Fields, prefix: str) -> Iterator[str]:
    hf_config.number("rope_theta", 1.0, 1e15, default=None)
    rope, kind = rotary(hf_config), rope_type(hf_config)
    if kind not in ROPE_TYPES:
        yield f"{prefix}: rope type {shorten(kind)!r} is not supported; supported are: {', '.join(ROPE_TYPES)}"
        return
    rope.number("rope_theta", 1.0, 1e15, default=None)
    needed = {"linear": ["factor"], "yarn": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}
    for key in needed.get(kind, []):
        rope.number(key, 1e-6, 1e6)
    if kind == "llama3":
        rope.integer("original_max_position_embeddings", 1, MAX_SIZES["max_position_embeddings"])


def _routing_problems(hf_config: Fields, prefix: str, family: str) -> Iterator[str]:
    top_k = size(hf_config, "num_experts_per_tok", TOP_K[family])
    found = num_experts(hf_config)
    if top_k > found:
        yield f"{prefix}: num_experts_per_tok={top_k} is not between 1 and num_experts={found}; {_EXPORT}"
    renormalised = hf_config.flag("norm_topk_prob", default=family == "mixtral") or family == "mixtral"
    if top_k == 1 and renormalised:
        yield f"{prefix}: num_experts_per_tok=1 with weights that add up to one cannot be learned; use another model"
    if hf_config.integer("shared_expert_intermediate_size", default=0):
        yield f"{prefix}: shared experts (shared_expert_intermediate_size) are not supported; use another model"


def architecture(hf_config: Fields) -> str:
    """The name of the architecture, "none" where config.json does not have it."""
    names = hf_config.texts("architectures", default=None)
    return names[0] if names else "none"


def size(hf_config: Fields, key: str, default: int | None = None) -> int:
    """A size of the model, from 1 to its entry in ``MAX_SIZES``.

    Raises:
        ConfigError: it is absent without a default, no integer or out of range.
    """
    found = hf_config.integer(key, 1, MAX_SIZES[key], default=default)
    if found is None:
        raise hf_config.wrong(key, f"an integer from 1 to {MAX_SIZES[key]}")
    return found


def num_experts(hf_config: Fields) -> int:
    """Experts of a layer, under the name that transformers writes since version 5, or the one of Qwen3-MoE's authors.

    Raises:
        ConfigError: as ``size``, or all layers have too many together.
    """
    key = "num_local_experts" if "num_local_experts" in hf_config else "num_experts"
    found, num_layers = size(hf_config, key), size(hf_config, "num_hidden_layers")
    if found * num_layers > MAX_EXPERTS:
        raise hf_config.wrong(
            key, f"at most {MAX_EXPERTS // num_layers}: {num_layers} layers have up to {MAX_EXPERTS} experts"
        )
    return found


def dense_layers(hf_config: Fields) -> tuple[int, ...]:
    """Layers of a mixture-of-experts model that have a dense MLP (Qwen3-MoE's ``decoder_sparse_step``, ``mlp_only_layers``)."""
    step = hf_config.integer("decoder_sparse_step", 1, default=1)
    listed = set(hf_config.integers("mlp_only_layers", default=()))
    return tuple(i for i in range(size(hf_config, "num_hidden_layers")) if i in listed or (i + 1) % step)


def _active_window(hf_config: Fields, family: str) -> int | None:
    """The sliding window if some layer of the model really uses it."""
    window = hf_config.integer("sliding_window", default=_MISTRAL_WINDOW if family == "mistral" else 0)
    if not window or window >= hf_config.integer("max_position_embeddings", default=window + 1):
        return None
    if family in ("mistral", "mixtral"):
        return window
    if not hf_config.flag("use_sliding_window", default=False):
        return None
    if family == "qwen3_moe":
        return window
    first = hf_config.integer("max_window_layers", default=_QWEN_MAX_WINDOW_LAYERS)
    listed = "sliding_attention" in hf_config.texts("layer_types", default=())
    return window if listed or first < size(hf_config, "num_hidden_layers") else None


def rotary(hf_config: Fields) -> Fields:
    """How rotary embeddings are scaled; empty where config.json does not have it."""
    found = hf_config.object("rope_scaling", default=None) or hf_config.object("rope_parameters", default=None)
    return found or Fields({}, hf_config.where, hf_config.remedy)


def rope_type(hf_config: Fields) -> str:
    """The kind of rotary scaling."""
    rope = rotary(hf_config)
    return rope.text("rope_type", default=rope.text("type", default="default"))


def _shape(hf_config: Fields) -> ModelShape:
    num_heads = size(hf_config, "num_attention_heads")
    expert_shape: dict[str, Any] = {}
    family, _ = ARCHITECTURES.get(architecture(hf_config), ("", ""))
    if family in MOE_FAMILIES:
        expert_shape = dict(
            num_experts=num_experts(hf_config),
            expert_size=size(hf_config, "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"),
            has_dense_mlp=bool(dense_layers(hf_config)),
        )
    return ModelShape(
        num_layers=size(hf_config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads(hf_config),
        intermediate_size=size(hf_config, "intermediate_size"),
        vocab_size=size(hf_config, "vocab_size"),
        max_positions=_max_positions(hf_config, size(hf_config, "max_position_embeddings")),
        **expert_shape,
    )


def num_kv_heads(hf_config: Fields) -> int:
    """Heads of keys and values: a divisor of the query heads.

    Raises:
        ConfigError: as ``size``, or it is no divisor.
    """
    num_heads = size(hf_config, "num_attention_heads")
    found = size(hf_config, "num_key_value_heads", num_heads)
    if num_heads % found:
        raise hf_config.wrong("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    num_layers = size(hf_config, "num_hidden_layers")
    if found * num_layers > MAX_KV_HEADS:
        raise hf_config.wrong(
            "num_key_value_heads", f"at most {MAX_KV_HEADS // num_layers} in each of {num_layers} layers"
        )
    return found


def head_dim(hf_config: Fields, family: str) -> int:
    """Elements of a head, even as rotary embeddings need them.

    Raises:
        ConfigError: as ``size``, or it is odd.
    """
    num_heads, hidden = size(hf_config, "num_attention_heads"), size(hf_config, "hidden_size")
    if hidden < num_heads:
        raise hf_config.wrong("hidden_size", f"at least num_attention_heads={num_heads}")
    found = size(hf_config, "head_dim", _HEAD_DIM.get(family, hidden // num_heads))
    if found % 2:
        raise hf_config.wrong("head_dim", "an even number, as rotary embeddings need it")
    return found


def _max_positions(hf_config: Fields, stated: int) -> int:
    """yarn and linear scaling stretch a model beyond the length in config.json; with llama3 it is stated stretched."""
    rope = rotary(hf_config)
    original = rope.integer("original_max_position_embeddings", 1, default=stated)
    factor = rope.number("factor", 0.0, 1e6, default=1.0)
    return max(stated, int(original * factor)) if rope_type(hf_config) in ("yarn", "linear") else stated
