"""Start a run: the configuration is checked, then torchrun is started, which a rank of it does not load."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial

from rlhf_mcore.cli import exit_codes
from rlhf_mcore.cli.arguments import configuration
from rlhf_mcore.cli.rendezvous import torchrun_world_size
from rlhf_mcore.cli.terminal import say
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config
from rlhf_mcore.own_files import shown_path


def start(args: argparse.Namespace, run_rank: Callable[[Config], int]) -> int:
    """Check the configuration of ``args``, then start its ranks, or under torchrun ``run_rank``. Returns the exit code.

    Raises:
        ConfigError: what is wrong with it.
    """
    from rlhf_mcore.config.derive import epochs_text, resolve
    from rlhf_mcore.config.document import offer
    from rlhf_mcore.config.hub import localize, notes_of
    from rlhf_mcore.config.validate import validate

    cfg, world_size = configuration(args), torchrun_world_size()
    local = localize(cfg, download=not args.print_config)
    try:
        validate(cfg, world_size)
    except ConfigError:
        if args.print_config:
            show(cfg)  # what is wrong with it is easier to see beside it
        raise
    epochs, cfg = epochs_text(cfg), resolve(cfg)
    if args.print_config:
        show(cfg)
        return exit_codes.DONE
    from rlhf_mcore.cli import preflight

    preflight.check_packages(cfg)
    preflight.check_engine(cfg)
    if world_size is None:
        for note in (*notes_of(local), *([epochs] if epochs else [])):
            preflight.say(cfg, note)
        with offer(cfg) as document:
            return _launch(cfg, [args.config, *args.overrides, f"--resolved={document}"])
    return run_rank(cfg)


def _launch(cfg: Config, arguments: Sequence[str]) -> int:
    """Find mistakes that need no process to be found, then start the ranks."""
    from rlhf_mcore.cli import preflight
    from rlhf_mcore.cli.launch import launch
    from rlhf_mcore.config.derive import default_world_size, short_episodes
    from rlhf_mcore.config.rules.data import check_fills_a_step
    from rlhf_mcore.config.rules.rollout import engine_keys
    from rlhf_mcore.config.run_kinds import run_kind
    from rlhf_mcore.data.first_rows import check_first_rows
    from rlhf_mcore.rewards.trial import check_reward

    world_size = default_world_size(cfg)
    with preflight.no_empty_directory(cfg):
        continues_after = preflight.announce(cfg)
        if continues_after is None:
            return exit_codes.DONE
        preflight.check_devices(cfg, world_size)
        preflight.check_world(world_size)
        if run_kind(cfg).generates:
            if cfg.rollout.placement == "disaggregated" and cfg.rollout.ray.address is None:
                engine_ranks = cfg.rollout.num_engines * cfg.rollout.layout.num_ranks
                preflight.check_world(engine_ranks, f"rollout.num_engines x {engine_keys(cfg.rollout.layout)}")
            check_fills_a_step(cfg.data, cfg.trainer.prompts_per_step)
            check_first_rows(cfg)
            verdict = check_reward(cfg, "data.train", partial(preflight.say, cfg))
            for warning in filter(None, (verdict, short_episodes(cfg))):
                preflight.say(cfg, f"warning: {warning}")
            preflight.check_environment(cfg)
    logs = preflight.logs_directory(cfg)
    count = "one process" if world_size == 1 else f"{world_size} processes"
    preflight.say(cfg, f"starting {count}; logs are in {shown_path(logs)}")
    return launch(
        [*arguments, *([f"--announced={continues_after}"] if continues_after else [])],
        world_size,
        cfg.trainer.threads_per_rank,
        max_restarts=cfg.trainer.max_restarts,
        logs=logs,
        console=cfg.logging.console,
        engines=cfg.rollout.ray.address,
    )


def show(cfg: Config) -> None:
    """Print a configuration, on rank 0 only."""
    from rlhf_mcore.config.show import to_yaml

    if os.environ.get("RANK", "0") == "0":
        say(to_yaml(cfg), end="")
