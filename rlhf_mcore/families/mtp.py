"""Describe MTP layers. They follow a decoder's last layer and predict later tokens (arXiv 2412.19437, section 2.2).

DeepSeek-V3 and GLM-4.5 number them after the decoder's layers. Qwen3-Next names them ``mtp.``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rlhf_mcore.families.base import HF_LAYER, HIDDEN, MEGATRON_LAYER, TWICE_HIDDEN, Rule
from rlhf_mcore.foreign import Fields

MTP_KEY = "num_nextn_predict_layers"  # in config.json
_MAX_LAYERS = 64
# Tensors of an MTP layer in files, and the equal tensors of the model.
REPEATED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
# Additional tensors of an MTP layer, compared with a decoder layer. It shares the model's embedding and output
# layer.
MTP = (
    Rule(MEGATRON_LAYER + "enorm.weight", "replicated", {HF_LAYER + "enorm.weight": (HIDDEN,)}, "mtp"),
    Rule(MEGATRON_LAYER + "hnorm.weight", "replicated", {HF_LAYER + "hnorm.weight": (HIDDEN,)}, "mtp"),
    Rule(
        MEGATRON_LAYER + "eh_proj.weight",
        "column_parallel",
        {HF_LAYER + "eh_proj.weight": (HIDDEN, TWICE_HIDDEN)},
        "mtp",
    ),
    Rule(
        MEGATRON_LAYER + "final_layernorm.weight",
        "replicated",
        {HF_LAYER + "shared_head.norm.weight": (HIDDEN,)},
        "mtp",
    ),
)
EMBEDDING = "embedding.word_embeddings.weight"
EMBEDDING_COPY = "mtp.embedding.weight"  # on the last pipeline stage, unless it is also the first


def num_mtp_layers(hf_config: Fields) -> int:
    """Return the number of MTP layers in config.json, or 0 without the key.

    Their weights may be missing, because transformers saves models without them.

    Raises:
        ConfigError: the value is not a valid number.
    """
    return int(hf_config.integer(MTP_KEY, 0, _MAX_LAYERS, default=0))


def mtp_tensors(names: Iterable[str], hf_config: Fields) -> list[str]:
    """List the tensors of MTP layers in a model directory."""
    first = hf_config.integer("num_hidden_layers", default=0)  # missing if a model is more than a language model
    numbers = range(first, first + num_mtp_layers(hf_config)) if first else range(0)

    def is_mtp(name: str) -> bool:
        layer = re.match(r"model\.layers\.(\d{1,6})\.", name)
        return name.startswith("mtp.") or (layer is not None and int(layer.group(1)) in numbers)

    return sorted(filter(is_mtp, names))
