"""Compare an update on given responses to prompts with images with transformers, for every kind of run that supports them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import softplus
from transformers import AutoModelForImageTextToText

from rlhf_mcore.bridge.files.hf_files import HFReader, load
from rlhf_mcore.config.schema import DpoConfig, OptimizerConfig, RecomputeConfig, TrainerConfig
from rlhf_mcore.data.examples import TokenizedExample, example_batch
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.image_features import StepFeatures
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.platform import Platform
from rlhf_mcore.roles.model import RoleModel
from rlhf_mcore.roles.policy import Reference, SupervisedActor
from rlhf_mcore.roles.preference import PreferenceActor
from rlhf_mcore.roles.scalar_models import RewardModelTrainer
from rlhf_mcore.roles.trained_model import MinibatchPlan, TrainedModel
from rlhf_mcore.roles.trained_weights import freeze
from tests.difference import any_rank, first_difference
from tests.distributed import models
from tests.distributed.setting import finish, gatherer, groups_of, start
from tests.distributed.vision_worker import ROWS, Pictures, hf_inputs, tokens
from tests.episodes import make_example

LAYOUTS = {"qwen2_5_vl": "tp2_sp_cp2", "qwen3_vl": "tp2_pp2"}
KINDS = ("sft", "dpo", "reward_model")
BETA, LR = 0.3, 0.1


def examples(kind: str) -> list[TokenizedExample]:
    """Return the prompts and responses of vision_worker.py. In a pair, the rejected response belongs to the next prompt."""
    rows = [(ids[:prompt], ids[prompt:]) for ids, prompt in tokens()]
    made = []
    for number, (prompt, response) in enumerate(rows):
        others = [] if kind == "sft" else [rows[(number + 1) % len(rows)][1]]
        made.append(make_example(prompt, response, *others))
        made[-1].images = ROWS[number][0]
    return made


def make_scorer(policy: Path, scorer: Path) -> Tensor:
    """Write a reward model with the policy's weights. Returns its head."""
    copytree(policy, scorer)
    config = json.loads((scorer / "config.json").read_text())
    (architecture,) = config["architectures"]
    stem = architecture.removesuffix("ForConditionalGeneration")
    config |= {"architectures": [f"{stem}WithImagesForSequenceClassification"], "tie_word_embeddings": False}
    config |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    (scorer / "config.json").write_text(json.dumps(config))
    held = load_file(scorer / "model.safetensors")
    held.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(8)
    held["score.weight"] = torch.randn(1, models.SIZES["hidden_size"], generator=generator)
    save_file(held, scorer / "model.safetensors", {"format": "pt"})
    return held["score.weight"]


def update(kind: str, path: Path, reference: Path, groups: ModelGroups, platform: Platform) -> dict[str, Any]:
    """Return loss and gradient norm of an update, and the weights after it."""
    spec = load_spec(path, "sequence" if kind == "reward_model" else "lm")
    trainer = TrainerConfig(max_tokens_per_microbatch=96)

    def built(folder: Path, *, trainable: bool) -> MegatronModel:
        options = BuildOptions("fp32", "local", RecomputeConfig(), trainable, False, 0, images=Pictures())
        model = build_model(spec, groups, platform, options)
        load(model.local_parameters(), spec.geometry, HFReader(folder))
        return model

    model = built(path, trainable=True)
    optimizer = OptimizerConfig(name="sgd", lr=LR, clip_grad=0.0, weight_decay=0.0)
    model.add_optimizer(optimizer)
    plan, name = MinibatchPlan(1000), "reward_model" if kind == "reward_model" else "actor"
    trained = TrainedModel(groups.layout, model, spec, trainer, optimizer=optimizer, plan=plan, name=name)
    batch = example_batch(examples(kind))
    role: Any
    if kind == "sft":
        role = SupervisedActor(trained)
    elif kind == "dpo":
        other = RoleModel(groups.layout, built(reference, trainable=False), spec, trainer)
        role = PreferenceActor(trained, DpoConfig(loss="dpo", beta=BETA), Reference(other, temperature=1.0))
        role.compute_reference(batch)
    else:
        role = RewardModelTrainer(trained, 0.0)
    metrics = role.deliver_update(batch)().metrics
    return {"loss": metrics[f"loss/{kind}"], "grad_norm": metrics[f"{name}/grad_norm"], "after": dict(gatherer(model))}


def oracle(kind: str, path: Path, reference: Path, head: Tensor, target: Path) -> dict[str, Any]:
    """Compute the same update with transformers, row by row."""
    hf = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    score = torch.nn.Parameter(head.clone())
    if kind == "dpo":
        other = AutoModelForImageTextToText.from_pretrained(reference, dtype=torch.float32).eval()
    losses, count = [], 0
    for example in examples(kind):
        rows = [([*example.prompt_ids, *response], len(response)) for response in example.response_ids]
        if kind == "reward_model":
            better, worse = (
                hf.model(**hf_inputs(ids, example.images)).last_hidden_state[0, -1] @ score[0] for ids, _ in rows
            )
            losses.append(softplus(worse - better))
            continue
        values = [response_logprob(hf, *row, example.images) for row in rows]
        if kind == "sft":
            losses.append(-values[0])
            count += rows[0][1]
        else:
            with torch.no_grad():
                before = [response_logprob(other, *row, example.images) for row in rows]
            losses.append(softplus(-BETA * ((values[0] - before[0]) - (values[1] - before[1]))))
    loss = torch.stack(losses).sum() / (count or len(losses))
    loss.backward()
    trained = [p for p in (*hf.parameters(), score) if p.grad is not None]
    norm = torch.stack([parameter.grad.norm() for parameter in trained]).norm().item()
    with torch.no_grad():
        for parameter in trained:
            parameter -= LR * parameter.grad
    hf.save_pretrained(target)
    after = dict(HFReader(target).tensors())
    if kind == "reward_model":
        after.pop("lm_head.weight", None)
        after["score.weight"] = score.detach()
    return {"loss": loss.item(), "grad_norm": norm, "after": after}


def response_logprob(hf: Any, ids: list[int], count: int, images: tuple[str, ...]) -> Tensor:
    """Return the sum of the logprobs of the last ``count`` tokens."""
    given = hf_inputs(ids, images)
    logprobs = hf(**given).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, given["input_ids"][0, 1:, None])[-count:].sum()


def patches_read(path: Path, groups: ModelGroups, platform: Platform) -> dict[str, list[int]]:
    """Return the patches that each rank's tower reads in a DPO step, if policy and reference have equal frozen towers."""
    spec, kept, counts = load_spec(path), StepFeatures(), dict.fromkeys(("policy", "reference"), 0)
    vision = FAMILIES[spec.geometry.family].vision
    assert vision is not None
    frozen = partial(
        freeze, geometry=spec.geometry, layout=groups.layout, patterns=vision.frozen(spec.geometry, "none")
    )

    def built(name: str) -> MegatronModel:
        own = frozen if name == "policy" else None
        options = BuildOptions(
            "fp32", "local", RecomputeConfig(), name == "policy", False, 0, freeze=own, images=Pictures(), kept=kept
        )
        model = build_model(spec, groups, platform, options)
        load(model.local_parameters(), spec.geometry, HFReader(path))
        if model.vision is not None and model.vision.tower is not None:
            model.vision.tower.register_forward_pre_hook(
                lambda _, given: counts.update({name: counts[name] + len(given[0])})
            )
        return model

    trainer, optimizer = TrainerConfig(max_tokens_per_microbatch=96), OptimizerConfig(name="sgd", lr=LR)
    policy, reference = built("policy"), built("reference")
    policy.add_optimizer(optimizer)
    plan = MinibatchPlan(1000)
    trained = TrainedModel(groups.layout, policy, spec, trainer, optimizer=optimizer, plan=plan, name="actor")
    actor = PreferenceActor(
        trained, DpoConfig(loss="dpo"), Reference(RoleModel(groups.layout, reference, spec, trainer), temperature=1.0)
    )
    found: dict[str, list[int]] = {name: [] for name in counts}
    for _ in range(2):
        batch = example_batch(examples("dpo"))
        actor.compute_reference(batch)
        actor.compute_logprobs(batch)
        actor.deliver_update(batch)()
        for name in counts:
            found[name].append(sum(all_gather_json(counts[name])))
    return found


def main(directory: Path) -> None:
    platform = start()
    groups: dict[str, ModelGroups] = {}
    findings: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        policy, reference, scorer = (directory / f"{name}_{what}" for what in ("policy", "reference", "scorer"))
        head = torch.zeros(0)
        if dist.get_rank() == 0:
            models.make_with_tower(name, policy)
            models.make_with_tower(name, reference, seed=1)
            head = make_scorer(policy, scorer)
        dist.barrier()
        for kind in KINDS:
            path = scorer if kind == "reward_model" else policy
            found = update(kind, path, reference, groups_of(layout, groups), platform)
            expected: dict[str, Any] = {}
            if dist.get_rank() == 0:
                expected = oracle(kind, policy, reference, head, directory / f"{name}_{kind}")
            here = "" if dist.get_rank() else first_difference(found.pop("after"), expected.pop("after"), 1e-5)
            found.pop("after", None)
            found["weights"] = any_rank(all_gather_json(here))
            findings[f"{name}/{kind}"] = {"found": found, "oracle": expected}
        findings[f"{name}/patches"] = patches_read(policy, groups_of(layout, groups), platform)
    finish(findings, directory)
