"""Ranks tokenise data together, and one rank fails to read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig
from rlhf_mcore.data import shared_tokens
from rlhf_mcore.data.source import load_prompts
from rlhf_mcore.data.tokenizer import load_tokenizer
from rlhf_mcore.parallel.collectives import all_gather_json, world_group
from tests.distributed.setting import finish, start


def main(directory: Path) -> None:
    start()
    tokenizer, before = load_tokenizer(str(directory)), shared_tokens.TEXTS_PER_CALL
    shared_tokens.TEXTS_PER_CALL = 3

    def load(file: str, group: Any) -> Any:
        try:
            prompts = load_prompts([str(directory / file)], tokenizer, DataConfig(), group=group)
        except ConfigError as error:
            return str(error)
        return [(prompt.prompt_id, prompt.prompt_ids) for prompt in prompts]

    try:
        found = {
            "alone": load("a.jsonl", None),
            "together": all_gather_json(load("a.jsonl", world_group())),
            "missing": all_gather_json(load("none.jsonl" if dist.get_rank() == 2 else "a.jsonl", world_group())),
        }
    finally:
        shared_tokens.TEXTS_PER_CALL = before
    finish(found, directory)
