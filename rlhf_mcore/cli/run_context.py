"""The context and the data of a training run. All ranks load the data together.

In a dry run one process loads the data and checks the checkpoint, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.triggers import SignalRequests
from rlhf_mcore.cli.preflight import continues_text
from rlhf_mcore.cli.saved_checkpoint import check_saved
from rlhf_mcore.config.choices import RL, RunKind, run_kind
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.questions import grades, longest_example, scores_alone
from rlhf_mcore.config.resolve import with_sequences
from rlhf_mcore.config.rules.environment import read_tools
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.settings import to_yaml
from rlhf_mcore.data.examples import TokenizedExample, load_examples
from rlhf_mcore.data.image_rows import ImageReader
from rlhf_mcore.data.rendering import preview_prompt
from rlhf_mcore.data.source import image_reader, load_prompts
from rlhf_mcore.data.tokenizer import load_tokenizer
from rlhf_mcore.parallel.collectives import on_every_rank
from rlhf_mcore.platform import Platform, current_platform
from rlhf_mcore.readers.data_rows import file_keys, wanted_columns
from rlhf_mcore.rewards.reward import check_sources
from rlhf_mcore.trainer.inputs import fingerprints
from rlhf_mcore.trainer.record import RunRecord
from rlhf_mcore.trainer.resume import Checker, find_start
from rlhf_mcore.trainer.run_state import Start
from rlhf_mcore.types import Prompt

T = TypeVar("T", Prompt, TokenizedExample)
V = TypeVar("V")
Note = Callable[[str], None]
Group = dist.ProcessGroup | None  # ranks that share the work, collectively; None: only this process


@dataclass(frozen=True, slots=True)
class RunContext:
    """A resolved configuration with its process, its record and its starting point.

    At the end of the run ``stack`` closes everything that the run has started.
    """

    cfg: Config
    platform: Platform
    record: RunRecord
    start: Start
    requests: SignalRequests
    stack: ExitStack

    @property
    def kind(self) -> RunKind:
        return run_kind(self.cfg)

    @property
    def dtype(self) -> str:
        """Return the dtype of models whose configuration sets none: fp32, bf16 or fp16."""
        return self.platform.dtype(self.cfg.model.dtype)

    @property
    def directory(self) -> Path:
        return self.cfg.run_directory.resolve()


@dataclass(frozen=True, slots=True)
class Data(Generic[T]):
    """Prompts or examples for training, and others for evaluation."""

    tokenizer: PreTrainedTokenizerBase
    train: list[T]
    held_out: list[T]

    def decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of responses, without special tokens."""
        return self.tokenizer.batch_decode(responses, skip_special_tokens=True)


def load_prompt_data(cfg: Config, note: Note, group: Group) -> Data[Prompt]:
    """Load the prompts of a run.

    Raises:
        ConfigError: the tokenizer or the data are invalid; raised on every rank.
    """
    return _load_data(cfg, note, group, _load_prompts)


def load_example_data(cfg: Config, note: Note, group: Group) -> Data[TokenizedExample]:
    """Load the examples of a run on given responses. See ``load_prompt_data``."""
    return _load_data(cfg, note, group, _load_examples)


def _load_data(
    cfg: Config,
    note: Note,
    group: Group,
    load: Callable[[Config, PreTrainedTokenizerBase, Note, Group], tuple[list[T], list[T]]],
) -> Data[T]:
    tokenizer = _together(lambda: load_tokenizer(cfg.model.tokenizer_path or cfg.model.path), group)
    train, held_out = load(cfg, tokenizer, note, group)
    if len(train) < cfg.trainer.prompts_per_step:
        one, many = ("a prompt", "prompts") if run_kind(cfg).generates else ("an example", "examples")
        raise ConfigError(
            f"data.train has {len(train)} {many}, fewer than trainer.prompts_per_step={cfg.trainer.prompts_per_step}: "
            f"a step would hold {one} twice. Lower it, or add data."
        )
    first = train[0].prompt_ids
    note(preview_prompt(tokenizer.decode(first), len(first)))
    return Data(tokenizer, train, held_out[: cfg.evaluate.max_prompts])


def _together(action: Callable[[], V], group: Group) -> V:
    return action() if group is None else on_every_rank(action, group)


def _image_reader(cfg: Config) -> ImageReader | None:
    return image_reader(cfg.run_directory, cfg.model.path, cfg.data, cfg.environment.function)


def _load_prompts(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, note: Note, group: Group
) -> tuple[list[Prompt], list[Prompt]]:
    load, reward = prompt_loader(cfg, tokenizer, note, group), cfg.reward
    train = load(cfg.data.train, "data.train")
    held_out = load(cfg.data.eval, "data.eval") if cfg.data.eval else []
    if not scores_alone(reward) and grades(cfg):
        check_sources(train, reward.sources, "data.train")
        check_sources(held_out, reward.sources, "data.eval")
    return train, held_out


def prompt_loader(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, note: Note, group: Group
) -> Callable[[list[str], str], list[Prompt]]:
    """Return a function that loads the prompts of files. Its second argument is the key that names the files."""
    tools = []
    if (path := cfg.environment.tools) is not None:
        tools = _together(lambda: read_tools(path), group)
    images = _together(lambda: _image_reader(cfg), group)

    def load(files: list[str], field: str) -> list[Prompt]:
        return load_prompts(files, tokenizer, cfg.data, field=field, tools=tools, note=note, group=group, images=images)

    return load


def _load_examples(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, note: Note, group: Group
) -> tuple[list[TokenizedExample], list[TokenizedExample]]:
    from rlhf_mcore.mcore.model_spec import load_spec  # imports Megatron-core, which loading prompts does not need

    data = cfg.data
    spec = _together(lambda: load_spec(cfg.model.path, run_kind(cfg).head), group)
    positions = spec.hf_config.max_position_embeddings
    images = _together(lambda: _image_reader(cfg), group)

    def load(files: list[str], field: str) -> list[TokenizedExample]:
        responses = run_kind(cfg).response_keys
        columns = [wanted_columns(data, prompt_key, responses) for prompt_key, _ in file_keys(data, files, field)]
        return load_examples(
            files,
            tokenizer,
            columns,
            max_tokens=min(longest_example(cfg), positions),
            drop_longer=data.overlong_prompts == "drop",
            data=data,
            field=field,
            note=note,
            group=group,
            images=images,
        )

    return load(data.train, "data.train"), load(data.eval, "data.eval") if data.eval else []


def check_as_ranks(cfg: Config, directory: Path, announced: int) -> list[str]:
    """Check the checkpoint that a run continues from, and every row of its data. Returns the lines that the run would print.

    ``announced``: the step after which the run continues, if it was already printed.

    Raises:
        ConfigError: a check fails, as on the ranks.
    """
    notes: list[str] = []
    platform = current_platform()
    device = platform.memory_bytes() or 0, platform.device_name()
    shown = cfg.model_copy(update={"rollout": with_sequences(cfg.rollout, *device)}) if run_kind(cfg).generates else cfg
    with TemporaryDirectory(prefix=".dry-run-", dir=directory) as scratch:
        checker = _Checker(cfg, Path(scratch))
        start = find_start(directory, cfg.checkpoint, to_yaml(shown), fingerprints(cfg), checker, _UnchangedDisk())
    if start.checkpoint is not None and start.step != announced:
        notes.append(continues_text(cfg, start.checkpoint, start.step))
    notes += start.notes
    load: Callable[..., Any] = load_prompt_data if run_kind(cfg) is RL else load_example_data
    load(cfg, notes.append, None)
    return notes


class _UnchangedDisk(Disk):
    """A disk that ignores every change."""

    def perform(self, name: str, action: Callable[[], Any], path: Path) -> Any:
        return None


class _Checker(Checker):
    """Check checkpoints with the values of models and optimizers. Weights of deltas are restored in ``scratch``."""

    def __init__(self, cfg: Config, scratch: Path):
        self._cfg, self._scratch = cfg, scratch

    def readable(self, checkpoint: Path, model: str, scratch: Path) -> Path:
        """Call ``delta.readable`` with the scratch directory of this dry run."""
        return super().readable(checkpoint, model, self._scratch)

    def check_saved(self, checkpoint: Path, weights: Mapping[str, Path]) -> None:
        """Call ``saved_checkpoint.check_saved`` in this process."""
        check_saved(checkpoint, weights, values=self._cfg.checkpoint.verify, base=self._cfg.model.path)
