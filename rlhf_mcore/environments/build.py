"""Build the environment of a run from its configuration."""

from __future__ import annotations

import asyncio
import json
import os
import weakref
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.choices import ASKING, ROLLOUT
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.questions import longest_response
from rlhf_mcore.config.rules.environment import read_tools
from rlhf_mcore.data.source import load_transform, transformed_rows
from rlhf_mcore.data.tokenizer import load_tokenizer
from rlhf_mcore.environments.containers.kinds import containers_of, options_of
from rlhf_mcore.environments.containers.task import Task, task_of
from rlhf_mcore.environments.environment import EnvironmentRollout
from rlhf_mcore.environments.function import FunctionRollout, InProcessSessions
from rlhf_mcore.environments.function_worker import KEY as FUNCTION_KEY
from rlhf_mcore.environments.sessions import Sessions, sessions_of, worker_settings
from rlhf_mcore.environments.turn_text import TurnText, most_characters
from rlhf_mcore.readers.data_rows import mapping
from rlhf_mcore.readers.model_files import sees_images
from rlhf_mcore.readers.user_functions import OwnFunction
from rlhf_mcore.sampling.rollouts import RolloutLimits, RolloutSetup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from rlhf_mcore.config.schema import Config, DataConfig, EnvironmentConfig
    from rlhf_mcore.data.image_rows import ImageReader

    # (environment.tool_parser, tokenizer, tool schemas) -> function from the text of a turn to a message.
    MakeParser = Callable[[str, PreTrainedTokenizerBase, Sequence[Mapping[str, Any]]], Callable[[str], Any]]


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """Settings of an engine's episodes, which the engine's first rank builds.

    ``make_parser`` builds the parser ``environment.tool_parser``, which finds the tool calls in a turn.
    ``folder`` is the directory in which the run was started; relative paths start there.
    ``num_engines`` engines may share the cores of a machine.
    """

    own: EnvironmentConfig
    tools: list[dict[str, Any]]
    make_parser: MakeParser
    chat_template: str  # data.apply_chat_template
    tokenizer_dir: str
    fails: bool
    overlap: bool
    folder: str
    num_engines: int
    max_total: int  # tokens per sequence, including the prompt
    make_reader: Callable[[], ImageReader] | None  # None if the model reads no images
    variables: Mapping[str, str] = field(repr=False)  # environment.env; repr=False because they may be secret

    @classmethod
    def of(cls, cfg: Config, num_engines: int, make_parser: MakeParser) -> EpisodeSpec:
        """Return the spec of a run's episodes."""
        own = worker_settings(cfg)
        overlap = own.function in ASKING or cfg.trainer.max_staleness > 0
        if own.overlap is not None or cfg.rollout.deterministic_order:
            overlap = bool(own.overlap)
        return cls(
            own,
            read_tools(own.tools),
            make_parser,
            cfg.data.apply_chat_template,
            cfg.model.tokenizer_path or cfg.model.path,
            fails=cfg.reward.on_error == "fail",
            overlap=overlap,
            folder=os.getcwd(),
            num_engines=num_engines,
            max_total=cfg.data.max_prompt_tokens + longest_response(cfg),
            make_reader=_reader_of(cfg.run_directory, cfg.model.path, cfg.data),
            variables={name: os.environ[name] for name in own.env if name in os.environ},
        )

    def build(self) -> RolloutSetup:
        """Build the rollouts of an environment or of an agent."""
        own, tokenizer = self.own, load_tokenizer(self.tokenizer_dir)
        if own.function in ASKING:
            return self._agents(tokenizer)
        text = TurnText(tokenizer, self.chat_template, keep=own.rewritten_history == "keep")
        limits = RolloutLimits(own.max_turns, own.max_tokens, own.max_seconds, self.max_total)
        if own.function == ROLLOUT:
            return RolloutSetup(self._function(text), limits, in_order=not self.overlap)
        rules: dict[str, Any] = {"fails": self.fails, "pays": own.score != "reward"}
        if own.tool_parser is not None:
            parse = self.make_parser(own.tool_parser, tokenizer, self.tools)
            rules["action_of"] = lambda _, turn: parse(text.written_text_of(turn))
        if self.make_reader is not None:
            rules["images"] = self.make_reader()
        os.environ.update(self.variables)
        sessions = sessions_of(own, self.num_engines, self.folder)
        return RolloutSetup(EnvironmentRollout(sessions, text, **rules), limits, in_order=not self.overlap)

    def _function(self, text: TurnText) -> FunctionRollout:
        options = self.own.options or {}
        images = None if self.make_reader is None else self.make_reader()
        sessions: Sessions | InProcessSessions
        if isinstance(options["function"], OwnFunction):
            sessions = InProcessSessions(f"{FUNCTION_KEY}={options['function']}", options)
        else:
            os.environ.update(self.variables)
            sessions = sessions_of(self.own, self.num_engines, self.folder)
        return FunctionRollout(sessions, text, self.fails, self.own.branches, images)

    def _agents(self, tokenizer: PreTrainedTokenizerBase) -> RolloutSetup:
        from rlhf_mcore.environments.agents.conversation import Conversation
        from rlhf_mcore.environments.agents.endpoint import MAX_BYTES, Endpoint
        from rlhf_mcore.environments.agents.episode import AgentRollout, AgentRules

        own, parse = self.own, None
        if (name := own.tool_parser) is not None:
            # Building a parser for a list of tool schemas takes 0.1 s. An agent uses few different lists.
            parser_of = lru_cache(maxsize=64)(lambda tools: self.make_parser(name, tokenizer, json.loads(tools)))
            parser_of("[]")  # reject a parser that does not support this tokenizer before the run starts

            def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
                return dict(parser_of(json.dumps(tools))(text))

        images = None
        if self.make_reader is not None:
            from rlhf_mcore.environments.agents.images import RequestImages

            images = RequestImages(self.make_reader())
        limits = RolloutLimits(own.max_turns, own.max_tokens, own.max_seconds, self.max_total)
        in_order = not self.overlap
        rules = AgentRules(self.fails, own.score != "reward", own.branches, in_order)
        os.environ.update(self.variables)
        sessions = sessions_of(own, self.num_engines, self.folder, isolates=self.overlap)
        # JSON uses up to 6 bytes per character. Images are data URLs, so their size does not depend on the context length.
        max_bytes = MAX_BYTES if images is not None else min(6 * most_characters(self.max_total), MAX_BYTES)
        endpoint = Endpoint(own.agent.host, max_bytes)
        rollout = AgentRollout(sessions, endpoint, Conversation(tokenizer, parse, images), rules)
        weakref.finalize(rollout, endpoint.close_all)
        # In order, the engine waits for all agents that have begun, so each of them needs a slot of a worker process.
        places = sessions.places if in_order else None
        return RolloutSetup(rollout, limits, in_order, moves_turns=self.overlap, places=places)


def _reader_of(run: Path, model_dir: str, data: DataConfig) -> Callable[[], ImageReader] | None:
    """Return a function that builds the image reader of an engine's episodes; None if the model reads no images."""
    if not sees_images(model_dir):
        return None
    from rlhf_mcore.data.image_rows import ImageReader
    from rlhf_mcore.data.images import ImageStore

    return partial(ImageReader, ImageStore.of(run, model_dir, data.image_pixels), model_dir, data, (0, 1))


def warm_containers(cfg: EnvironmentConfig, data: DataConfig) -> None:
    """Read the tasks of all rows, and prepare everything their containers need on this machine, for example images.

    Raises:
        ConfigError: a task cannot be read, or something cannot be prepared. The message names the row or the missing part.
    """
    containers = containers_of(options_of(cfg))
    different = {(task.image, tuple(sorted(task.context.items()))): task for task in _tasks(data)}
    asyncio.run(containers.warm(different.values()))


def _tasks(data: DataConfig) -> Iterator[Task]:
    transform = load_transform(data.transform)
    for file in (*data.train, *data.eval):
        for place, row in transformed_rows(Path(file), data, transform):
            if row is None:
                continue
            try:
                yield task_of(mapping(row, "extra_info", place))
            except ConfigError as error:
                raise ConfigError(f"{place}: {error}") from error
