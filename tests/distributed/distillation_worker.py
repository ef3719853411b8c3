"""Distil a teacher to a student under separate layouts, and compare with transformers and dense divergences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rlhf_mcore.algorithms.kl import Divergence
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.roles.teacher import OTHERS, Average, Teacher
from rlhf_mcore.types import TEACHER_TOP, Prompt
from tests.difference import any_rank, first_difference
from tests.distributed import models
from tests.distributed.setting import (
    TEMPERATURE,
    VOCAB,
    Row,
    Settings,
    batch_for,
    build,
    finish,
    gatherer,
    groups_of,
    hf_logprobs,
    load_hf,
    rows,
    start,
)
from tests.distributed.update_worker import fill, oracle
from tests.rows import rows_of_padded

MODEL = "qwen3_tied"
COEF = 0.3
# name -> (kind, beta, tokens per distribution)
DIVERGENCES = {
    "forward": ("forward_kl", 0.5, VOCAB),
    "reverse": ("reverse_kl", 0.5, VOCAB),
    "jsd": ("jsd", 0.3, VOCAB),
    "forward_top": ("forward_kl", 0.5, 6),
    "reverse_top": ("reverse_kl", 0.5, 6),
}
# (layout of the student, layout of the teacher, tokens per microbatch, packing, tokens per chunk)
LAYOUTS = {
    "dp4": ("dp4", "tp4", 24, True, 5),
    "tp2": ("tp2_dp2", "pp2_dp2", 64, True, None),
    "pp2": ("pp2_dp2", "dp4", 24, False, 5),
    "cp2": ("cp2_dp2", "tp2_dp2_sp", 64, True, 5),
    "all": ("tp2_pp2_vpp2_sp", "cp4", 64, False, None),
    "cp4": ("cp4", "tp2_pp2", 64, True, None),
}


def ways() -> list[tuple[str, str]]:
    """Return every divergence on one layout, and every layout with a divergence of all tokens and one of few tokens."""
    return [("tp2", name) for name in DIVERGENCES] + [
        (layout, name) for layout in LAYOUTS if layout != "tp2" for name in ("jsd", "forward_top")
    ]


def main(directory: Path) -> None:
    platform, groups, findings = start(), dict[str, ModelGroups](), dict[str, Any]()
    path, taught_by, reference = directory / MODEL, directory / "teacher", directory / "reference"
    if dist.get_rank() == 0:
        for seed, each in ((0, path), (5, taught_by), (7, reference)):
            models.make(MODEL, each, seed=seed)
    dist.barrier()
    teacher, compared = load_hf(taught_by, torch.float64), load_hf(reference)
    if dist.get_rank() == 0:
        for name, how in DIVERGENCES.items():
            extra = partial(dense_divergence, teacher, how)
            findings[f"oracle/{name}"] = oracle(path, compared, directory / f"after_{name}", extra)
    dist.barrier()
    for layout, name in ways():
        student, other, max_tokens, packing, chunk = LAYOUTS[layout]
        settings = Settings(max_tokens=max_tokens, packing=packing, logit_chunk_tokens=chunk)
        kind, beta, count = DIVERGENCES[name]
        model, actor = build(path, groups_of(student, groups), platform, settings)
        _, teaches = build(taught_by, groups_of(other, groups), platform, settings)
        batch = batch_for(rows())
        fill(batch, compared)
        batch.fields[TEACHER_TOP] = Teacher({OTHERS: teaches.model}, TEMPERATURE, VOCAB, count).compute(batch)
        actor.divergence = Divergence(kind, beta, COEF)
        metrics = actor.deliver_update(batch)().metrics
        after = load_file(directory / f"after_{name}" / "model.safetensors")
        differences = all_gather_json(first_difference(gatherer(model), after, tolerance=1e-5))
        findings[f"{layout}/{name}"] = {**metrics, "weights": any_rank(differences)}
        if name == "jsd":
            fresh = build(path, groups_of(student, groups), platform, settings)
            findings[f"{layout}/others"] = other_prompts((teaches, fresh[1]), (load_hf(taught_by), load_hf(path)))
            findings[f"{layout}/average"] = average(actor, fresh)
    finish(findings, directory)


def dense_divergence(teacher: torch.nn.Module, how: tuple[str, float, int], hf: torch.nn.Module) -> Tensor:
    """Return the loss term from the full distribution at every token, in double precision."""
    (kind, beta, count), total, num_tokens = how, torch.zeros((), dtype=torch.float64), 0
    for row in rows():
        at = slice(len(row.prompt_ids) - 1, -1)
        ids = torch.tensor([row.prompt_ids + row.response_ids])
        with torch.no_grad():
            t = (teacher(ids).logits[0, at, :VOCAB] / TEMPERATURE).softmax(-1)
        p = (hf(ids).logits[0, at, :VOCAB].double() / TEMPERATURE).softmax(-1)
        if count < VOCAB:
            chosen = t.topk(count).indices
            t, p = (torch.cat([x.gather(1, chosen), 1 - x.gather(1, chosen).sum(1, keepdim=True)], 1) for x in (t, p))
        m = beta * t + (1 - beta) * p
        terms = {
            "forward_kl": t * (t / p).log(),
            "reverse_kl": p * (p / t).log(),
            "jsd": beta * t * (t / m).log() + (1 - beta) * p * (p / m).log(),
        }
        total, num_tokens = total + terms[kind].sum(), num_tokens + len(row.response_ids)
    return (COEF * total / num_tokens).float()


def other_prompts(teachers: tuple[Any, Any], oracles: tuple[Any, Any]) -> float:
    """Return the errors of logprobs if every second row has another teacher and both teachers read longer prompts."""
    batch, made = batch_for(rows()), rows()
    batch.group_ids = torch.arange(len(made))  # every row has its own prompt here
    batch.prompts = [
        Prompt(str(number), number, row.prompt_ids, "", ("text", "math")[number % 2]) for number, row in enumerate(made)
    ]

    def longer(prompts: Sequence[Prompt]) -> list[list[int]]:
        return [[1, 2, 3, *prompt.prompt_ids] for prompt in prompts]

    first, second = teachers
    teacher = Teacher({OTHERS: first.model, "math": second.model}, TEMPERATURE, VOCAB, context=longer)
    found, worst = rows_of_padded(batch, teacher.compute(batch)), 0.0
    for number, (values, row) in enumerate(zip(found, made, strict=True)):
        changed = Row([1, 2, 3, *row.prompt_ids], row.response_ids, [], 0.0)
        with torch.no_grad():
            expected, _ = hf_logprobs(oracles[number % 2], changed)
        worst = max(worst, float((torch.tensor(values) - expected).abs().max()))
    return worst


def average(actor: Any, fresh: Any) -> str:
    """Average a copy of the old model with the actor twice, so that 1/4 of the old model remains."""
    model, copied = fresh
    before = {name: tensor.clone() for name, tensor in gatherer(model)}
    now = dict(gatherer(actor.model.model))
    follows = Average(copied.model, actor.model, 0.5)
    follows.follow()
    follows.follow()
    expected = {name: 0.25 * before[name] + 0.75 * now[name] for name in before}
    return any_rank(all_gather_json(first_difference(gatherer(model), expected, tolerance=1e-6)))
