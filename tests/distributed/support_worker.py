"""Compare logprobs within sampled supports, and their update, with transformers, on every kind of layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.roles.policy import Actor
from rlhf_mcore.types import Ragged, TrainBatch
from tests.covering import covering_rows
from tests.distributed import models
from tests.distributed.setting import (
    TEMPERATURE,
    Settings,
    batch_for,
    build,
    finish,
    groups_of,
    load_hf,
    rows,
    splits_of,
    start,
)
from tests.distributed.update_worker import OWNERS, fill, oracle, update
from tests.rows import rows_of_padded

MODEL = "qwen3_tied"
LAYOUTS = ("dp4", "tp2_dp2_sp", "tp4", "pp2_dp2", "tp2_pp2_vpp2_sp", "cp2_dp2", "cp4", "tp2_sp_cp2", "pp2_vpp2_cp2")
CUTS = {
    "one/packed": (64, True, None),
    "many/packed": (24, True, 5),
    "many/padded": (24, False, 5),
    "one/padded": (64, False, None),
}
WHOLE = 5  # a row that was sampled from the whole vocabulary
WARPERS = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE), TopKLogitsWarper(30), TopPLogitsWarper(0.8)])


def cells() -> list[dict[str, Any]]:
    """Return layout, cut and ownership of rows. Every layout occurs, and each kind of split with each cut and each ownership."""
    factors = {"layout": LAYOUTS, "cut": tuple(CUTS), "owner": OWNERS}
    return covering_rows(factors, features=lambda row: {**row, **splits_of(row["layout"]), "layout": None})


Supports = list[list[list[int]]]  # [row][response token] -> token ids


def main(directory: Path) -> None:
    platform, groups = start(), dict[str, ModelGroups]()
    path, other, findings = directory / MODEL, directory / "reference", dict[str, Any]()
    if dist.get_rank() == 0:
        models.make(MODEL, path)
        models.make(MODEL, other, seed=7)
    dist.barrier()
    supports, expected = of_transformers(path)
    if dist.get_rank() == 0:
        findings["oracle"] = oracle(path, load_hf(other), directory / "after", None, partial(drawn_logprobs, supports))
    dist.barrier()
    after, reference = load_file(directory / "after" / "model.safetensors"), load_hf(other)
    findings["sizes"] = sorted({len(ids) for row in supports for ids in row})
    findings["cells"] = {}
    for layout, cut, owner in (cell.values() for cell in cells()):
        max_tokens, packing, chunk = CUTS[cut]
        settings = Settings(max_tokens=max_tokens, packing=packing, logit_chunk_tokens=chunk)
        mine = groups_of(layout, groups)
        _, actor = build(path, mine, platform, settings)
        complete = partial(add_support, supports)
        found = update(path, mine, platform, settings, reference, after, owner, complete)
        findings["cells"][f"{layout}/{cut}"] = {**found, **distances(actor, supports, expected, reference)}
    finish(findings, directory)


@torch.no_grad()
def of_transformers(path: Path) -> tuple[Supports, list[torch.Tensor]]:
    """Return supports and, in double precision, the logprobs of each row and the log masses of its supports, [2, tokens].

    Responses are random, so each sampled token is added to its support, even if the warpers would remove it.
    """
    hf, supports, expected = load_hf(path, torch.float64), Supports(), []
    for number, row in enumerate(rows()):
        logits = hf(torch.tensor([row.prompt_ids + row.response_ids])).logits[0, len(row.prompt_ids) - 1 : -1]
        scores = WARPERS(torch.zeros(1, 1, dtype=torch.long), logits)
        own = [
            sorted({*line.isfinite().nonzero().flatten().tolist(), token})
            for line, token in zip(scores, row.response_ids, strict=True)
        ]
        supports.append([[]] * len(own) if number == WHOLE else own)
        log_p = (logits / TEMPERATURE).log_softmax(-1)
        masses = [
            line[ids].logsumexp(0) if ids else line.new_zeros(()) for line, ids in zip(log_p, supports[-1], strict=True)
        ]
        drawn = torch.stack(
            [line[token] - mass for line, token, mass in zip(log_p, row.response_ids, masses, strict=True)]
        )
        expected.append(torch.stack([drawn, torch.stack(masses)]))
    return supports, expected


def drawn_logprobs(supports: Supports, hf: torch.nn.Module, number: int) -> torch.Tensor:
    """Return the logprobs of a row within its supports, from plain transformers."""
    row = rows()[number]
    logits = hf(torch.tensor([row.prompt_ids + row.response_ids])).logits[0, len(row.prompt_ids) - 1 : -1]
    found = []
    for line, token, support in zip(logits.double() / TEMPERATURE, row.response_ids, supports[number], strict=True):
        ids = support or list(range(len(line)))
        found.append(line[ids].log_softmax(-1)[ids.index(token)])
    return torch.stack(found).float()


def add_support(supports: Supports, batch: TrainBatch) -> None:
    """Add the supports of the rows that this rank owns."""
    held = [(len(rows()[k].prompt_ids), supports[k]) for k in batch.rows.tolist()]
    counts = [count for prompt, row in held for count in ([0] * prompt + [len(ids) for ids in row])]
    values = [token for _, row in held for ids in row for token in ids]
    batch.support = Ragged(torch.tensor(counts, dtype=torch.int32), torch.tensor(values, dtype=torch.int32))


def distances(
    actor: Actor, supports: Supports, expected: list[torch.Tensor], reference: torch.nn.Module
) -> dict[str, float]:
    """Return the largest errors of logprobs and log masses, in a separate pass and in the update itself."""
    batch = batch_for(rows())
    add_support(supports, batch)
    found = {"own": worst(batch, actor.compute_logprobs(batch), expected)}
    fill(batch, reference)
    batch.old_logprobs = batch.log_mass = None
    actor.deliver_update(batch)()
    return found | {"of_update": worst(batch, actor.logprobs_of_update(batch), expected)}


def worst(batch: TrainBatch, logprobs: torch.Tensor, expected: list[torch.Tensor]) -> float:
    assert batch.log_mass is not None
    found = [rows_of_padded(batch, values) for values in (logprobs, batch.log_mass)]
    return max(float((torch.tensor(pair) - row).abs().max()) for row, *pair in zip(expected, *found, strict=True))
