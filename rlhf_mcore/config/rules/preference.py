"""Check the keys of runs in which a policy learns from pairs of responses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from rlhf_mcore.config.choices import PREFERENCE_LOSSES
from rlhf_mcore.config.implied import needs_reference
from rlhf_mcore.config.rules.layouts import model_problems
from rlhf_mcore.config.schema import Config
from rlhf_mcore.geometry import ModelGeometry


def preference_problems(cfg: Config, geometry: ModelGeometry | None) -> Iterator[str]:
    """List problems with the reference that pairs are compared by. ``geometry``: of the actor, if it is known."""
    reference, loss = cfg.reference, PREFERENCE_LOSSES.get(cfg.algorithm.dpo.loss)
    if loss is not None and loss.needs_mismatched and cfg.trainer.prompts_per_step < 2:
        yield (
            f"trainer.prompts_per_step={cfg.trainer.prompts_per_step}: algorithm.dpo.loss={cfg.algorithm.dpo.loss} estimates a "
            "divergence from responses to other prompts of a step; raise it to 2 or more"
        )
    if cfg.algorithm.kl.coef:
        yield (
            f"algorithm.kl.coef={cfg.algorithm.kl.coef} has no effect with algorithm.kind={cfg.algorithm.kind}: algorithm.dpo.beta "
            "sets how far the policy goes from the reference; remove it"
        )
    if not needs_reference(cfg):
        for item in fields(reference):
            if value := getattr(reference, item.name):  # offload=False is what null has been resolved to
                yield (
                    f"reference.{item.name}={value} has no effect with algorithm.dpo.loss={cfg.algorithm.dpo.loss}, which reads no "
                    "reference; remove it"
                )
        return
    if reference.precompute and loss is not None and loss.needs_mismatched:
        yield (
            f"reference.precompute=True is not supported with algorithm.dpo.loss={cfg.algorithm.dpo.loss}, which compares other pairs "
            "of prompt and response in every step; set it to false"
        )
    if reference.precompute and reference.offload:
        yield (
            "reference.offload=True has no effect with reference.precompute=True, which lets the reference go before training; "
            "remove it"
        )
    if reference.refresh_steps and cfg.actor.lora.rank is None:  # which is another problem
        yield (
            f"reference.refresh_steps={reference.refresh_steps} is not supported with algorithm.kind={cfg.algorithm.kind}: pairs are "
            "compared by one reference; set it to 0"
        )
    if reference.path is not None:
        yield from model_problems("reference.path", reference.path, ("lm",), "actor", cfg.actor.layout, geometry)
