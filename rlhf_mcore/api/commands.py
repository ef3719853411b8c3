"""The commands evaluate, convert and plan as Python functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_mcore.api import display
from rlhf_mcore.api.inputs import (
    check,
    checked_choice,
    checked_config,
    checked_flag,
    checked_list,
    checked_path,
    run_config,
)
from rlhf_mcore.api.training import Reward, Rows, UserRollout, checked_world_size, one_process
from rlhf_mcore.cli import rank
from rlhf_mcore.cli.preflight import check_engine
from rlhf_mcore.commands.convert.command import DTYPES, FORMATS, ROLES, TARGETS, check_destination, num_bytes
from rlhf_mcore.commands.evaluate.checkpoints import default_checkpoint, validate_evaluation
from rlhf_mcore.config.resolve import default_world_size, resolve
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.validate import validate
from rlhf_mcore.planning.inputs import GPUS, device_and_assumptions
from rlhf_mcore.planning.plan import make_plan
from rlhf_mcore.readers.hub import MODEL_KEYS, localize

if TYPE_CHECKING:
    from rlhf_mcore.commands.convert.conversion import Converted
    from rlhf_mcore.planning.plan import RunPlan


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation on the first rank; empty on other ranks.

    ``results`` contains figures over all prompts: numbers, or dicts of ``value``, ``low`` and ``high`` (95 % interval). ``samples``
    contains the scored responses. ``comparison`` is the comparison with ``evaluate.compare``, as in comparison.json. ``directory``
    contains the files with these results.
    """

    results: dict[str, Any]
    samples: list[dict[str, Any]]
    comparison: dict[str, Any]
    directory: Path | None

    def _repr_html_(self) -> str:
        return display.of_evaluation(self.results, self.comparison, self.directory)


def evaluate(
    cfg: Config,
    checkpoint: str | Path | None = None,
    compare: str | Path | None = None,
    *,
    reward: Reward | Sequence[Any] | Mapping[str, Any] | None = None,
    rollout: UserRollout | str | Mapping[str, Any] | None = None,
    prompts: Rows | None = None,
) -> Evaluation:
    """Score a model on held-out prompts, like ``rlhf-mcore evaluate``. Collective over the world.

    Args:
        cfg: configuration of the training run, or a smaller one; it is not changed.
        checkpoint: replaces ``evaluate.checkpoint``. Without both, the latest checkpoint of the configuration's own run is used.
        compare: replaces ``evaluate.compare``; positive differences mean that ``checkpoint`` is better.
        reward: as in ``train``. If its name or code has changed, all responses are scored again.
        rollout: as in ``train``.
        prompts: texts or rows, which replace ``data.eval``.

    Raises:
        ConfigError: the configuration, the data, the reward or the checkpoint is invalid.
    """
    check("cfg", cfg, cfg is not None, "give a configuration from rm.load_config or rm.Config")
    cfg = run_config(cfg, {}, reward=reward, rollout=rollout, eval_prompts=prompts)
    if checkpoint is not None:
        cfg.evaluate.checkpoint = str(checked_path("checkpoint", checkpoint))
    if compare is not None:
        cfg.evaluate.compare = str(checked_path("compare", compare))
    cfg.evaluate.checkpoint = cfg.evaluate.checkpoint or default_checkpoint(cfg)
    localize(cfg, (*MODEL_KEYS, "data.eval"))
    validate_evaluation(cfg, checked_world_size(default_world_size(cfg)))
    check_engine(cfg)
    with one_process():
        from rlhf_mcore.commands.evaluate.evaluation import run

        with rank.forbid_early_exit():
            evaluations, comparison = run(cfg)
    if not evaluations:
        return Evaluation({}, [], {}, None)
    first = evaluations[0]
    return Evaluation(first.content["results"]["all"], first.samples, comparison, first.directory)


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    source_format: str = "checkpoint",
    target_format: str = "hf",
    role: str = "actor",
    dtype: str | None = None,
    hf_config: str | Path | None = None,
    average: Sequence[str | Path] = (),
    shard_size: str = "4GiB",
    verify: bool = False,
    overwrite: bool = False,
) -> Converted:
    """Convert a model between formats in this process, like ``rlhf-mcore convert`` with options of the same names.

    Raises:
        ConfigError: the source is incomplete, unsafe or of an unknown family, or the destination cannot be created.
    """
    from rlhf_mcore.commands.convert.conversion import Conversion, run

    allowed = {"source_format": FORMATS, "target_format": TARGETS, "role": ROLES, "dtype": (None, *DTYPES)}
    given = {"source_format": source_format, "target_format": target_format, "role": role, "dtype": dtype}
    for name, choices in allowed.items():
        checked_choice(name, given[name], choices)
    origin, target = checked_path("source", source), checked_path("destination", destination)
    averaged = [checked_path("average", path) for path in checked_list("average", average, "paths of checkpoints")]
    check("shard_size", shard_size, isinstance(shard_size, str), "give a text such as 500MB or 4GiB")
    checked_flag("verify", verify)
    check_destination(target, origin, may_exist=checked_flag("overwrite", overwrite))
    converted = run(
        Conversion(
            source_format=source_format,
            target_format=target_format,
            source=origin,
            destination=target,
            role=role,
            dtype=dtype,
            shard_bytes=num_bytes(shard_size),
            average=averaged,
            hf_config=None if hf_config is None else checked_path("hf_config", hf_config),
            verify=verify,
            overwrite=overwrite,
        )
    )
    assert converted is not None, "only a dry run returns None"
    return converted


def plan(cfg: Config, world_size: int | None = None, gpu: str = "H100") -> RunPlan:
    """Estimate memory, traffic and time of a run, like ``rlhf-mcore plan``. The attribute ``fits`` is True if the run fits.

    Raises:
        ConfigError: the configuration is invalid, or the GPU model is unknown.
    """
    checked_choice("gpu", gpu, tuple(GPUS))
    cfg = checked_config(cfg)
    is_count = isinstance(world_size, int) and not isinstance(world_size, bool) and world_size > 0
    check("world_size", world_size, world_size is None or is_count, "give a number of at least 1")
    size = world_size or default_world_size(cfg)
    validate(cfg, size, check_files=False)
    return make_plan(resolve(cfg), size, *device_and_assumptions(gpu, []))
