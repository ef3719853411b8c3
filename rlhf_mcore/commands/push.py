"""``rlhf-mcore push RUN_DIR ORG/NAME``: upload a run's model to the Hugging Face Hub, with a card from the run's records."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_mcore.checkpoint.delta import checked_model
from rlhf_mcore.checkpoint.layout import BEST, LATEST, linked_step, step_of
from rlhf_mcore.checkpoint.manifest import read_manifest
from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import say
from rlhf_mcore.config.choices import RL, RUN_KINDS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import DESCRIPTIONS, leaves
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import to_dict
from rlhf_mcore.config.settings import load_yaml, read_yaml_text
from rlhf_mcore.foreign import SMALL, read_json, shorten
from rlhf_mcore.observability.files import read_lines
from rlhf_mcore.observability.run_directory import METRICS
from rlhf_mcore.readers.adapter_files import ADAPTER_CONFIG, holds_adapter, read_settings
from rlhf_mcore.readers.hub_ids import id_of_snapshot
from rlhf_mcore.readers.model_files import COMPANIONS, INDEX_FILE
from rlhf_mcore.redaction import redact, without_secrets

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Settings that describe how a model was trained. Other settings describe paths and machines.
_SHOWN = (
    "seed",
    "model.dtype",
    "actor.optimizer.",
    "actor.freeze",
    "actor.lora.",
    "critic.optimizer.",
    "rollout.sampling.",
    "rollout.engine",
    "algorithm.",
    "reward.rules",
    "reward.sources",
    "reward.function",
    "data.max_",
    "data.apply_chat_template",
    "trainer.num_steps",
    "trainer.prompts_per_step",
    "trainer.minibatch_size",
    "trainer.ppo_epochs",
    "trainer.max_staleness",
    "environment.max_",
)
_MEASURED = {
    "evaluate/accuracy": "held-out accuracy",
    "evaluate/reward": "held-out reward",
    "evaluate/margin": "held-out margin",
    "evaluate/perplexity": "held-out perplexity",
    "reward/mean": "training reward",
}
_OF_THIS_MACHINE = (
    "_name_or_path",
    "name_or_path",
)  # keys in a model's JSON files with the path that it was loaded from


@terminal.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Build the card and upload the model. Returns the exit code."""
    args = _parser().parse_args(argv)
    if not _ID.fullmatch(args.repo):
        raise ConfigError(f"{shorten(args.repo)!r} is not the name of a repository on the Hub; write it as ORG/NAME")
    checkpoint = _checkpoint(args.run, BEST if args.best else LATEST)
    with tempfile.TemporaryDirectory(prefix="rlhf_mcore-push-") as scratch:
        folder = Path(scratch, "upload")
        card = collect(checkpoint, args.repo, folder)
        if args.dry_run:
            say(card)
            say("\n".join(f"{path.stat().st_size:>15,}  {path.name}" for path in sorted(folder.iterdir())))
            return terminal.DONE
        say(f"{args.repo}: {_send(folder, args)}")
    return terminal.DONE


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore push",
        "Upload the trained model of a run to the Hugging Face Hub, with a model card (README.md) that shows data, settings, metrics "
        "and versions. The token comes from `hf auth login` or HF_TOKEN. Paths of this machine and secrets are removed.",
        examples=[
            "rlhf-mcore push outputs/my/run my-org/my-model --dry-run     # print the card and the files, upload nothing",
            "rlhf-mcore push outputs/my/run my-org/my-model",
            "rlhf-mcore push outputs/my/run/checkpoint-100 my-org/my-model --public",
        ],
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a run directory, or one of its checkpoints")
    parser.add_argument(
        "repo", metavar="ORG/NAME", help="repository on the Hub; a missing repository is created as private"
    )
    parser.add_argument("--best", action="store_true", help="upload the best checkpoint instead of the latest")
    parser.add_argument("--public", action="store_true", help="create a public repository")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to upload to (default: main)")
    parser.add_argument("--dry-run", action="store_true", help="print the card and the files, and stop")
    return parser


def collect(checkpoint: Path, repo: str, folder: Path) -> str:
    """Create the folder to upload, with links to the files of a checkpoint's model, and its card. Returns the card.

    Raises:
        ConfigError: the checkpoint is damaged.
    """
    tree = load_yaml(read_yaml_text(checkpoint / "config.yaml", "config file"), "config.yaml")
    settings = dict(leaves(tree)) if isinstance(tree, dict) else {}
    kind = RUN_KINDS.get(str(settings.get("algorithm.kind")), RL)
    model = checked_model(checkpoint, kind.saved_as, folder.parent)
    folder.mkdir()
    names = [*COMPANIONS, INDEX_FILE, ADAPTER_CONFIG, *(path.name for path in model.glob("*.safetensors"))]
    for name in dict.fromkeys(names):
        if (model / name).is_file():
            _add(model / name, folder / name)
    card = without_secrets(_card(checkpoint, repo, settings, kind.saved_as))
    (folder / "README.md").write_text(card, encoding="utf-8")
    return card


def _checkpoint(directory: Path, link: str) -> Path:
    """Return ``directory`` if it is a checkpoint, else the checkpoint that ``link`` in a run directory points to.

    Raises:
        ConfigError: there is none.
    """
    if step_of(directory.name) is not None:
        return directory
    if linked_step(directory, link) is None:
        raise ConfigError(
            f"{directory} contains no {link} checkpoint; give a run directory (outputs/PROJECT/EXPERIMENT) with a saved checkpoint, "
            "or a checkpoint in it"
        )
    return (directory / link).resolve()


def _add(file: Path, to: Path) -> None:
    """Link a file, or write a JSON file without the path that the model or tokenizer was loaded from."""
    if file.suffix == ".json" and file.name not in (INDEX_FILE, "tokenizer.json"):
        content = dict(read_json(file, limits=SMALL).content)
        kept = {key: value for key, value in content.items() if key not in _OF_THIS_MACHINE}
        if file.name == ADAPTER_CONFIG:
            kept["base_model_name_or_path"] = _name_of(str(content.get("base_model_name_or_path")))
        if kept != content:
            to.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            return
    to.symlink_to(file.resolve())


def _name_of(path: str) -> str:
    """Return a model's id on the Hub, else the last part of its path."""
    snapshot = id_of_snapshot(path)
    return snapshot.repo if snapshot is not None else path.rstrip("/").rpartition("/")[2]


def _send(folder: Path, args: argparse.Namespace) -> str:
    """Create the repository, and one commit with all files. Returns the address of the commit.

    Raises:
        ConfigError: the Hub rejects the upload.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="rlhf_mcore")
    try:
        api.create_repo(args.repo, private=not args.public, exist_ok=True)
        if args.revision is not None:
            api.create_branch(args.repo, branch=args.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=args.repo, folder_path=folder, commit_message="Upload by rlhf-mcore push", revision=args.revision
        )
    except Exception as error:  # errors of the library and of its HTTP client are reported in the same way
        reason = without_secrets(shorten(" ".join((str(error) or type(error).__name__).split()), 400))
        raise ConfigError(
            f"{args.repo}: the upload to the Hugging Face Hub failed ({type(error).__name__}: {reason}); log in with `hf auth login` "
            "as a user with write access, unset HF_HUB_OFFLINE, and push again; uploaded files are not sent twice"
        ) from error
    return str(commit.commit_url)


# ------------------------------------------------------------------------------------------------------------------- card
def _card(checkpoint: Path, repo: str, settings: Mapping[str, Any], role: str) -> str:
    step, preset = step_of(checkpoint.name), settings.get("algorithm.preset")
    base, is_adapted = _shown_name(str(settings.get("model.path"))), holds_adapter(checkpoint / role)
    sections = [
        _front_matter(settings, role, "peft" if is_adapted else "transformers"),
        f"# {repo.rpartition('/')[2]}",
        f"{base}, trained for {step} steps with `algorithm: {preset}` by rlhf_mcore.",
        "## Results",
        *_results(checkpoint.parent, step or 0),
        "## Data",
        *_data(settings),
        "## Settings",
        "```yaml\n" + "\n".join(_changed_settings(settings, has_critic=(checkpoint / "critic").is_dir())) + "\n```",
        "## Versions",
        ", ".join(f"{name} {version}" for name, version in sorted(read_manifest(checkpoint).libraries.items())),
    ]
    if role == "actor":
        base_id = _name_of(str(settings.get("model.path")))
        command = (
            f"vllm serve {base_id} --enable-lora --lora-modules adapter={repo}" if is_adapted else f"vllm serve {repo}"
        )
        if is_adapted and read_settings(checkpoint / role).use_dora:  # vLLM does not support DoRA adapters
            command = (
                f"rlhf-mcore convert --from hf --to hf {repo.rpartition('/')[2]} merged --merge\nvllm serve merged"
            )
        sections += ["## Use", f"```bash\n{command}\n```"]
    return "\n\n".join(sections) + "\n"


def _front_matter(settings: Mapping[str, Any], role: str, library: str) -> str:
    from huggingface_hub import ModelCardData

    model = id_of_snapshot(str(settings.get("model.path")))
    ids = [id_of_snapshot(str(file)) for file in settings.get("data.train") or ()]
    data = ModelCardData(
        library_name=library,
        pipeline_tag="text-generation" if role == "actor" else "text-classification",
        base_model=model.repo if model else None,
        datasets=list(dict.fromkeys(one.repo for one in ids if one)) or None,
        tags=["rlhf-mcore", str(settings.get("algorithm.preset"))],
    )
    return f"---\n{data.to_yaml()}\n---"


def _shown_name(path: str) -> str:
    """Return the Hub id and revision of a model or file, else its name without directories of this machine."""
    one = id_of_snapshot(path)
    return f"`{one.repo}` (revision `{one.revision[:12]}`)" if one else f"`{Path(path).name}`"


def _results(run: Path, step: int) -> Iterator[str]:
    lines = read_lines(run / METRICS, "restore it from a copy") if (run / METRICS).is_file() else iter(())
    rows = [line.content for line in lines if line.content.get("step", 0) <= step]
    table = []
    for metric, label in _MEASURED.items():
        values = [row[metric] for row in rows if isinstance(row.get(metric), int | float)]
        if len(values) > 1:
            table.append(f"| {label} | {values[0]:.3f} | {values[-1]:.3f} |")
    if not table:
        yield "No metric was measured before and after training."
        return
    yield "\n".join(["| | at the start | at the end |", "|---|---|---|", *table])


def _data(settings: Mapping[str, Any]) -> Iterator[str]:
    for key, what in (("data.train", "trained on"), ("data.eval", "held out")):
        if files := settings.get(key):
            yield f"{what}: {', '.join(dict.fromkeys(_shown_name(str(file)) for file in files))}"


def _changed_settings(settings: Mapping[str, Any], *, has_critic: bool) -> Iterator[str]:
    """Yield the training settings that differ from the defaults, as ``key: value``."""
    default = dict(leaves(to_dict(Config())))
    # A reward function or server replaces the rules, so the model was not trained with the rules.
    replaced = ("reward.rules", "reward.sources") if _scores_alone(settings) else ()
    for key, value in dict(leaves(redact(dict(settings)))).items():
        is_shown = key in DESCRIPTIONS and key.startswith(_SHOWN) and (has_critic or not key.startswith("critic."))
        if is_shown and not key.startswith(replaced) and value != default.get(key):
            yield f"{key}: {json.dumps(_without_paths(value), ensure_ascii=False)}"


def _scores_alone(settings: Mapping[str, Any]) -> bool:
    return any(settings.get(key) is not None for key in ("reward.function", "reward.remote.url"))


def _without_paths(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_paths(item) for key, item in value.items()}
    is_path = isinstance(value, str) and (".py:" in value or value.startswith(("/", "~")))
    return value.rpartition("/")[2] if is_path else value
