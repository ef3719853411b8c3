"""A last check of a conversion that fits into memory: the model's logits, from the source's tensors and from what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_mcore.bridge.files.formats.convert import Reading, main_dtype
from rlhf_mcore.config.errors import ConfigError

_PROMPT_TOKENS = 8


def compare_logits(source: Reading, written: Reading, total_bytes: int) -> str:
    """Compare the outputs on a short prompt. Returns why it was not done, "" when it was.

    Raises:
        ConfigError: they differ.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    needed, available = 3 * total_bytes, _available_bytes()
    if needed > available // 2:
        return f"the model needs {needed / 1e9:.1f} GB twice over, {available / 1e9:.1f} GB are free"
    before = _outputs(_from_tensors(source))
    directory = written.source.directory
    is_hf = written.source.companions == directory
    after = _outputs(_from_directory(directory, main_dtype(written.types)) if is_hf else _from_tensors(written))
    if not torch.equal(before, after):
        largest = float((before.float() - after.float()).abs().max())
        raise ConfigError(
            f"{directory}: the outputs on a short prompt differ by up to {largest:.3g} from those of the source"
        )
    return ""


def _from_tensors(reading: Reading) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(reading.source.companions, local_files_only=True)
    tensors = {name: torch.cat([part for _, part in reading.blocks(name)]) for name in reading.types}
    model_class = getattr(transformers, config.architectures[0])
    dtype = main_dtype(reading.types)
    return model_class.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype).eval()


def _from_directory(directory: Path, dtype: torch.dtype) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    model_class = getattr(transformers, config.architectures[0])
    return model_class.from_pretrained(directory, local_files_only=True, use_safetensors=True, dtype=dtype).eval()


def _outputs(model: Any) -> Tensor:
    """Outputs [1, tokens, vocabulary or labels] of a transformers model."""
    token_ids = torch.arange(_PROMPT_TOKENS).unsqueeze(0) % model.config.vocab_size
    with torch.no_grad():
        return model(input_ids=token_ids).logits


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
