"""``rlhf-mcore chat RUN_DIR``: talk to a trained model, with transformers, in a terminal or from a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from rlhf_mcore.cli import exit_codes
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import say
from rlhf_mcore.config.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Message = dict[str, str]
PROMPT = "> "
HELP = "Enter sends, /new forgets the conversation, Ctrl-C stops an answer, Ctrl-D ends"


@exit_codes.reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Load the model and answer. Returns the exit code."""
    args = _parser().parse_args(argv)
    chat = _load(args)
    if sys.stdin.isatty():
        return _converse(chat)
    text = sys.stdin.read().strip()
    if not text:
        raise ConfigError(
            "standard input has no text; write a question to it, as in `echo 'What is 2+2?' | rlhf-mcore chat RUN_DIR`"
        )
    for part in chat.answer(text):
        say(part, end="")
    say()
    return exit_codes.DONE


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore chat",
        "Talk to a model: of a run (its latest checkpoint), of a checkpoint, a Hugging Face directory or an id of the hub. In a "
        "terminal the conversation goes on, through the model's chat template; from a pipe one question is answered. It computes with "
        "transformers on a GPU if there is one; for many users see `vllm serve` in docs/own-model.md.",
        examples=[
            "rlhf-mcore chat outputs/my/run",
            "rlhf-mcore chat outputs/my/run --system 'Answer with a number.' --temperature 0",
            "echo 'What is 12 * 7?' | rlhf-mcore chat outputs/my/run/checkpoint-100",
        ],
    )
    parser.add_argument("model", metavar="RUN_DIR", help="a run, a checkpoint, a Hugging Face directory, or ORG/NAME")
    parser.add_argument("--system", metavar="TEXT", help="a message of the system before the conversation")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="0: the likeliest token always (default: 1, as in training)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="longest answer (default: 1024)")
    parser.add_argument("--seed", type=int, default=0, help="of the answers (default: 0)")
    return parser


class Chat:
    """A conversation with a model. A tokenizer without a chat template gets the plain text of all turns."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        temperature: float = 1.0,
        max_new_tokens: int = 1024,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._first: list[Message] = [{"role": "system", "content": system}] if system else []
        self._temperature, self._max_new_tokens = temperature, max_new_tokens
        self.messages: list[Message] = list(self._first)

    def forget(self) -> None:
        """Begin a new conversation."""
        self.messages = list(self._first)

    def answer(self, text: str) -> Iterator[str]:
        """Yield an answer as it is made. It belongs to the conversation, as far as it was taken."""
        import torch
        from transformers import TextIteratorStreamer

        self.messages.append({"role": "user", "content": text})
        prompt_ids = self._prompt_ids()
        room = getattr(self._model.config, "max_position_embeddings", 2**31) - len(prompt_ids)
        if room < 1:
            raise ConfigError(
                f"the conversation has {len(prompt_ids)} tokens, more than the model has positions for; begin again with /new"
            )
        ids = torch.tensor([prompt_ids], device=self._model.device)
        streamer, stop = TextIteratorStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True), Event()
        sampling: dict[str, Any] = {"do_sample": False}
        if self._temperature > 0:
            sampling = {"do_sample": True, "temperature": self._temperature, "top_k": 0, "top_p": 1.0}
        failed: list[BaseException] = []

        def generate() -> None:
            try:
                self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    streamer=streamer,
                    max_new_tokens=min(self._max_new_tokens, room),
                    stopping_criteria=[lambda *_, **__: torch.tensor([stop.is_set()])],
                    pad_token_id=self._tokenizer.pad_token_id,
                    **sampling,
                )
            except BaseException as error:  # it is raised where the answer is read
                failed.append(error)
                streamer.end()

        thread, parts = Thread(target=generate, daemon=True), list[str]()
        thread.start()
        try:
            for part in streamer:
                parts.append(part)
                yield part
        finally:
            stop.set()
            thread.join()
            self.messages.append({"role": "assistant", "content": "".join(parts)})
        if failed:
            raise failed[0]

    def _prompt_ids(self) -> list[int]:
        if self._tokenizer.chat_template:
            try:
                text = self._tokenizer.apply_chat_template(self.messages, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # of the template, which came with the model
                raise ConfigError(
                    f"the model's chat template refuses the conversation ({type(error).__name__}: {error})"
                ) from error
        else:
            text = "".join(message["content"] for message in self.messages)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _load(args: argparse.Namespace) -> Chat:
    from rich.console import Console

    from rlhf_mcore.checkpoint.delta import readable
    from rlhf_mcore.checkpoint.layout import step_of
    from rlhf_mcore.cli.progress import working
    from rlhf_mcore.config.adapter_files import base_model
    from rlhf_mcore.config.evaluation import find_adapters, find_model
    from rlhf_mcore.config.generator_files import inspect_generator
    from rlhf_mcore.config.hub import is_offline, local_model
    from rlhf_mcore.config.model_files import TOKENIZER_FILES, architecture, read_config

    if args.temperature < 0 or args.max_new_tokens < 1:
        raise ConfigError("--temperature must be at least 0, and --max-new-tokens at least 1")
    path = local_model(args.model, "RUN_DIR", may_download=not is_offline()) or args.model
    adapters = find_adapters(path)
    folder = Path(adapters or find_model(path, "RUN_DIR"))
    if step_of(folder.parent.resolve().name) is not None:
        folder = readable(folder.parent.resolve(), folder.name)
    tokenizer_folder = folder
    if adapters is not None:
        adapters, folder = str(folder), Path(base_model(folder))
        if not any((tokenizer_folder / name).is_file() for name in TOKENIZER_FILES):
            tokenizer_folder = folder
    _, problems = inspect_generator(str(folder), "RUN_DIR")
    if problems:
        raise ConfigError.many(problems)
    if (kind := architecture(read_config(folder, "RUN_DIR"))).endswith("Classification"):
        raise ConfigError(f"RUN_DIR={folder}: a {kind} gives scores and writes nothing; name a language model")
    with working("loading the model", console=Console(stderr=True)):
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        from rlhf_mcore.data.tokenizer import load_tokenizer

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.manual_seed(args.seed)
        tokenizer = load_tokenizer(str(tokenizer_folder))
        model = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True, dtype="auto"
        )
        if adapters is not None:
            _add_adapters(model, Path(adapters), folder)
        model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return Chat(model, tokenizer, system=args.system, temperature=args.temperature, max_new_tokens=args.max_new_tokens)


def _add_adapters(model: PreTrainedModel, adapters: Path, base: Path) -> None:
    """Put the weights with the adapters of a PEFT directory added into a model.

    Raises:
        ConfigError: transformers holds an adapted weight in another form.
    """
    from rlhf_mcore.bridge.files.formats.adapted import AdaptedSource
    from rlhf_mcore.config.model_files import read_geometry

    source = AdaptedSource(adapters, base, read_geometry(base))
    weights = model.state_dict()
    for name in source.adapted:
        if name not in weights:
            raise ConfigError(
                f"{adapters}: transformers has no weight {name}; write a whole model with rlhf-mcore convert --merge"
            )
        weights[name].copy_(source.read(name, 0, source.types[name][1][0]))


def _converse(chat: Chat) -> int:
    """Alternate question and answer, until Ctrl-D, or Ctrl-C where nothing is being answered."""
    with suppress(ImportError):
        import readline  # noqa: F401  # lines can be edited then

    say(HELP)
    while True:
        try:
            text = input(PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            say()
            return exit_codes.DONE
        if text == "/new":
            chat.forget()
        elif text:
            answer = chat.answer(text)
            try:
                for part in answer:
                    say(part, end="")
            except KeyboardInterrupt:
                answer.close()  # type: ignore[attr-defined]
            except ConfigError as error:
                say(f"error: {error}", end="")
            say()
