"""Convert a file of another trainer to the text of our configuration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import KEYS, leaves
from rlhf_mcore.config.settings import MAX_BYTES, load_yaml
from rlhf_mcore.foreign import read_text
from rlhf_mcore.readers.hub_ids import model_id
from rlhf_mcore.redaction import redact
from rlhf_mcore_contrib.migrate import openrlhf, openrlhf_examples, sources, trl, verl
from rlhf_mcore_contrib.migrate.python_script import read_python
from rlhf_mcore_contrib.migrate.shell import read_script
from rlhf_mcore_contrib.migrate.table import Migration, Table, apply

RULES = "final_number for GSM8K, math for MATH, answer_line for DAPO-Math-17k"  # verl also chooses its graders by data source
_KNOWN_DATA: dict[str, dict[str, Any]] = {  # part of a file name, in order of precedence -> rule
    "gsm8k": {"name": "final_number"},
    "dapo": {"name": "answer_line", "incorrect": -1.0},
    "math": {"name": "math"},
    "aime": {"name": "math"},
}


def migrate(path: Path, source: str = "auto") -> Migration:
    """Read a YAML file (verl), a Python script (TRL) or a launch script (verl, OpenRLHF, TRL) and convert its keys.

    Raises:
        ConfigError: the file cannot be read, or it is not a configuration of one of these trainers.
    """
    text = read_text(path, limit=MAX_BYTES)
    if path.suffix in (".yaml", ".yml"):
        tree = load_yaml(text, str(path))
        if isinstance(tree, dict) and is_ours(tree):
            raise ConfigError(f"{path}: already a configuration of rlhf_mcore; start it with rlhf-mcore train {path}")
        if not isinstance(tree, dict) or not tree.keys() & set(sources.ROOTS) - {"data", "trainer", "algorithm"}:
            raise ConfigError(
                f"{path}: not a configuration of verl, because it contains none of the groups {', '.join(sources.ROOTS)}"
            )
        migration = apply(verl.TABLE, sources.read_tree(tree))
    elif path.suffix == ".py":
        migration = _of_python(text, path)
    else:
        migration = _of_script(text, path, source)
    _note(migration)
    return migration


def is_ours(tree: dict[str, Any]) -> bool:
    """Return whether a file contains groups that only our configuration has, or only our keys."""
    groups = {key.partition(".")[0] for key in KEYS} | {"base"}
    if tree.keys() & (groups - set(sources.ROOTS)):
        return not tree.keys() & {"actor_rollout_ref", "custom_reward_function"}
    return bool(tree) and all(key in KEYS for key, _ in leaves(tree))


def _of_script(text: str, path: Path, source: str) -> Migration:
    """Convert the training command that sets the most keys, or the first of several. Report other training commands."""
    script = read_script(text)
    trainings = [(command, _table_and_values(command, source)) for command in script.commands]
    launches = [(command, *training) for command, training in trainings if training is not None]
    if not launches:
        raise ConfigError(
            f"{path}: found neither overrides of verl (actor_rollout_ref.model.path=...) nor flags of OpenRLHF "
            "(openrlhf.cli.train_ppo_ray --...) or TRL (trl grpo --...), when bash ran the script with no variable "
            f"set{''.join(f'; {note}' for note in script.notes)}"
        )
    command, table, values = max(launches, key=lambda launch: len(launch[2]))
    migration = apply(table, values)
    migration.decisions += script.notes
    if len(launches) > 1:
        migration.decisions.append(f"the script starts {len(launches)} trainings; this is the first with the most keys")
    if foreign := [word for word in command if word.startswith("--config-name") and "ppo_" not in word]:
        migration.decisions.append(
            f"{foreign[0]}: that file was not read; `rlhf-mcore migrate` can convert it separately"
        )
    return migration


def _of_python(text: str, path: Path) -> Migration:
    """Convert the GRPOConfig and the GRPOTrainer of a TRL script."""
    script = read_python(text, str(path))
    migration = apply(trl.TABLE, script.values)
    for key, expression in script.computed.items():
        migration.lost[key] = expression, "the script computes it; write the value"
    migration.decisions.append(
        "batch sizes are for one process; multiply trainer.prompts_per_step and trainer.minibatch_size by the processes of "
        "`accelerate launch`"
    )
    return migration


def _table_and_values(command: Sequence[str], source: str) -> tuple[Table, dict[str, Any]] | None:
    """Return the table for a command of a script and the command's settings, or None if it starts no training."""
    program = sources.command_of(command)
    if program is not None and source in ("auto", "openrlhf"):
        flags = sources.read_flags(command)
        if program.startswith("train_ppo"):
            return openrlhf.TABLE, flags
        if program in openrlhf_examples.SUPERVISED_TABLES:
            return openrlhf_examples.SUPERVISED_TABLES[program], openrlhf_examples.one_model(flags)
        if program.startswith("train_"):
            raise ConfigError(
                f"openrlhf.cli.{program} has no counterpart here; supported: train_ppo_ray, train_sft, train_rm and train_dpo"
            )
    if sources.starts_trl(command) and source in ("auto", "trl"):
        return trl.TABLE, sources.read_trl_flags(command)
    if source not in ("auto", "verl"):
        return None
    if any("sft_trainer" in word for word in command):
        raise ConfigError(
            "verl's sft_trainer is not supported; write the dozen keys by hand, see docs/guide/supervised.md"
        )
    overrides = sources.read_overrides(command)
    return (verl.TABLE, overrides) if any(key.startswith("actor_rollout_ref.") for key in overrides) else None


def _note(migration: Migration) -> None:
    settings = migration.settings
    supervised = settings.get("algorithm.preset") in ("sft", "reward_model", "dpo", "ipo")
    if "reward.model.path" in settings:
        migration.notes.append("reward.model: must be a *ForSequenceClassification directory with one label")
    elif "reward.function" in settings:
        migration.notes.append("reward.function: called as f(data_source, solution_str, ground_truth, extra_info)")
    elif not supervised and not {"reward.rules", "reward.functions"}.intersection(settings):
        _note_rule(migration)
    if not {"trainer.num_steps", "trainer.num_epochs"}.intersection(settings):
        migration.notes.append("trainer.num_steps: the other trainer computes it from epochs and rows; set it")
    model = str(settings.get("model.path", ""))
    if model_id(model):
        migration.notes.append(
            f"model.path: {model} looks like the id of a model on the Hub; give a directory, or unset HF_HUB_OFFLINE"
        )
    if "model.path" not in settings:
        migration.notes.append("model.path: not in the source; set it to a Hugging Face directory")
    if not settings.get("data.train"):
        migration.notes.append("data.train: not in the source; set it to .parquet or .jsonl files")
    for key in ("data.train", "data.eval"):
        if key in migration.stand_ins:
            migration.notes.append(f"{key}: {migration.stand_ins[key]}")
    unset = sorted(set(re.findall(r"\$\{oc\.env:(\w+),", str(list(settings.values())))))
    if unset:
        migration.notes.append(
            f"environment: the script reads {', '.join(unset)} from it; set these variables, or write values"
        )
    if "_is_not_known" in str(list(settings.values())):
        migration.notes.append(
            "..._is_not_known: replaces the output of a command or an argument of the script; write values"
        )


def _note_rule(migration: Migration) -> None:
    """Choose the rule by the names of the data files, if all are known. In verl, the data source of each row decides."""
    files = migration.settings.get("data.train") or []
    rules = [next((rule for word, rule in _KNOWN_DATA.items() if word in file.lower()), None) for file in files]
    if migration.source == verl.TABLE.name and rules[1:] != rules[:-1]:
        rules = [None]  # in verl, the data source of each row decides
    if migration.source == verl.TABLE.name and (not rules or None in rules):
        migration.settings["reward.sources"] = {}
        migration.notes.append(
            "reward.sources: the data_source of each row decides, as in verl; add rules for sources that "
            "docs/guide/rewards/index.md does not list"
        )
        return
    if not rules or None in rules:
        migration.notes.append(f"reward: not in the source; set reward.rules ({RULES}) or reward.function")
        return
    # The rule math accepts the notations of all these data sets.
    rule = rules[0] if all(rule == rules[0] for rule in rules) else _KNOWN_DATA["math"]
    assert rule is not None
    migration.settings["reward.rules"] = [rule]
    migration.notes.append(
        f"reward.rules: {rule['name']}, chosen by the names in data.train; check that it fits ({RULES})"
    )


def to_text(migration: Migration) -> str:
    """Write the configuration as YAML. Comments above it list decisions, tasks and lost keys."""
    lines = [f"# Carried over from {migration.source} by rlhf-mcore migrate: {len(migration.carried)} keys."]
    if migration.decisions:
        lines += [
            "#",
            "# Decisions while reading the script:",
            *(f"#   {' '.join(note.split())}" for note in migration.decisions),
        ]
    if migration.notes:
        lines += ["#", "# To do:", *(f"#   {note}" for note in migration.notes)]
    if migration.lost:
        lines += ["#", f"# Not carried over ({len(migration.lost)}):"]
        lines += [f"#   {format_key(key, value)}: {reason}" for key, (value, reason) in migration.lost.items()]
    body = yaml.safe_dump(_nest(migration.settings), sort_keys=False, allow_unicode=True, default_flow_style=False)
    return "\n".join([*lines, "", body])


def format_key(key: str, value: Any) -> str:
    """Write ``key=value`` on one line, without secrets, because configurations are committed and shared."""
    name = key.rpartition(".")[2]
    hidden = redact({f"api_{name}" if name == "key" else name: value})
    return " ".join(f"{key}={next(iter(hidden.values()))}".split())


def _nest(settings: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key in KEYS:  # keeps the order of the schema
        if key in settings:
            *groups, name = key.split(".")
            node = tree
            for group in groups:
                node = node.setdefault(group, {})
            node[name] = settings[key]
    return tree
