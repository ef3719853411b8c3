"""Renders prompts as text, also a teacher's prompts. Chat templates run in a separate process with limits.

A template is a program that comes with a model. Jinja's sandbox isolates it, but it may still loop forever or compute
``10 ** 10 ** 8`` in C code, which no signal handler interrupts. Templates therefore run in a forked child, whose CPU time and
memory the kernel limits. The limits apply to each prompt and count CPU time, so the load of the machine does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.tokenizer import token_ids
from rlhf_mcore.foreign import is_plain
from rlhf_mcore.own_processes import ProcessLost, map_in_fork
from rlhf_mcore.readers.data_rows import checked_prompt
from rlhf_mcore.readers.user_functions import load_function, place_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_mcore.types import Prompt

CPU_S = 10  # CPU seconds per prompt; published templates take a millisecond
MEMORY_BYTES = 384 * 2**20  # in addition to the memory of the process; the longest prompt uses a sixth of it
MAX_CHARACTERS = 16 * 2**20  # per rendered prompt
_CONTEXT_KEY = "teacher.context"

Content = (
    str | list[dict[str, Any]]
)  # a text, or messages {role, content}; a content is a text, or a list of texts and images


class Renderer:
    """Renders the contents of prompts as texts for the model.

    A list of messages goes through the tokenizer's chat template. With ``mode`` "true", a text becomes one user message. With
    "auto", it does so if the tokenizer has a template and the text contains no special tokens, which would mean that it is
    already rendered. Otherwise the text is used unchanged.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mode: str, tools: Sequence[dict[str, Any]] = ()) -> None:
        """Check the template. ``tools`` are schemas that the template writes into every prompt.

        Raises:
            ConfigError: the tokenizer lacks a required template, or the template does not write ``tools``.
        """
        self._tokenizer = tokenizer
        self._mode = mode
        self._tools: list[dict[str, Any]] | None = None
        if tools:
            self._require_tools(list(tools))
        if mode == "true" and tokenizer.chat_template is None:
            raise ConfigError(
                "data.apply_chat_template=true, but the tokenizer has no chat template; give model.tokenizer_path one with a "
                "template, or set data.apply_chat_template=false"
            )
        added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        tokens = sorted(filter(None, {*added, *map(str, tokenizer.all_special_tokens)}))
        self._rendered = re.compile("|".join(map(re.escape, tokens))) if tokens else None

    def _require_tools(self, tools: list[dict[str, Any]]) -> None:
        remedy = "give model.tokenizer_path a template that writes them, or set environment.tools=null and name tools in prompts"
        if self._mode == "false" or self._tokenizer.chat_template is None:
            raise ConfigError(f"environment.tools is set, but no chat template is applied to prompts; {remedy}")
        question = [{"role": "user", "content": "question"}]
        [without] = in_child(self._apply, [question])
        self._tools = tools
        [rendered] = in_child(self._apply, [question])
        if "error" in rendered:
            raise ConfigError(f"the chat template rejects environment.tools: {rendered['error']}; {remedy}")
        if rendered == without:
            raise ConfigError(f"the chat template does not write environment.tools into a prompt; {remedy}")

    def all(self, contents: Sequence[tuple[Any, str]], *, parts: bool = False) -> Iterator[str]:
        """Yield the texts of (content, place), in order. ``place`` is for messages. ``parts``: see ``checked_prompt``.

        Raises:
            ConfigError: a content is not a prompt, there is no template, or the template rejects the messages or takes too
            long.
        """
        checked = [(self._prepare(checked_prompt(content, place, parts=parts)), place) for content, place in contents]
        rendered = self._render([(content, place) for content, place in checked if not isinstance(content, str)])
        for content, _ in checked:
            yield content if isinstance(content, str) else next(rendered)

    def _prepare(self, content: Content) -> Content:
        """Return messages if a template will be applied, else the text."""
        if not isinstance(content, str) or self._mode == "false":
            return content
        is_rendered = self._rendered is not None and self._rendered.search(content) is not None
        if self._mode == "auto" and (self._tokenizer.chat_template is None or is_rendered):
            return content
        return [{"role": "user", "content": content}]

    def _render(self, conversations: Sequence[tuple[Any, str]]) -> Iterator[str]:
        if not conversations:
            return
        if self._tokenizer.chat_template is None:
            raise ConfigError(
                f"{conversations[0][1]}: the prompt is a list of messages, but the tokenizer has no chat template; "
                "give model.tokenizer_path one with a template, or make the prompts plain strings"
            )
        answers = in_child(self._apply, [messages for messages, _ in conversations])
        for messages, place in conversations:
            answer = next(answers)
            if "error" in answer:
                roles = ", ".join(message["role"] for message in messages)
                raise ConfigError(
                    f"{place}: the chat template rejects these messages (roles {roles:.200}): {answer['error']}"
                )
            yield answer["text"]

    def _apply(self, messages: Any) -> str:
        template = self._tokenizer.apply_chat_template
        return str(template(messages, tools=self._tools, tokenize=False, add_generation_prompt=True))


def in_child(apply: Any, inputs: Sequence[Any]) -> Iterator[dict[str, str]]:
    """Yield the result of ``apply`` for each input, {"text": ...} or {"error": ...}, from a child with resource limits."""
    try:
        yield from map_in_fork(partial(_render_one, apply), inputs, cpu_s=CPU_S, memory_bytes=MEMORY_BYTES)
    except ProcessLost as lost:
        exceeded = f"it takes more than {CPU_S} s of processor time for one prompt"
        yield {"error": f"{exceeded if lost.timed_out else lost.cause}; correct the template"}


def _render_one(apply: Any, item: Any) -> dict[str, str]:
    try:
        text = apply(item)
    except MemoryError:
        return {"error": f"it takes more than {MEMORY_BYTES >> 20} MiB of memory; correct the template"}
    # A template may raise any exception that an expression can raise.
    except Exception as error:
        name = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        line = f"its line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        return {"error": f"{line}{name}{error}"[:500]}
    if len(text) > MAX_CHARACTERS:
        return {"error": f"the text has {len(text)} characters, more than {MAX_CHARACTERS}; correct the template"}
    if not is_plain(text):
        return {"error": "the text contains a NUL or a lone surrogate; correct the template"}
    return {"text": text}


def preview_prompt(text: str, num_tokens: int) -> str:
    """Return the start of a prompt for the terminal, on a few lines. Repeated image tokens are shown once with their number."""
    text = re.sub(r"(<[^<>\s]{1,60}>)\1{3,}", lambda run: f"{run[1]} x {len(run[0]) // len(run[1])} ", text)
    lines = [line[:160] + ("..." if len(line) > 160 else "") for line in text[:1200].splitlines()]
    printable = ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines[:10]]
    if len(lines) > 10 or len(text) > 1200:
        printable.append("...")
    title = f"first prompt, as the model reads it ({num_tokens} tokens):"
    return "\n".join([title, *(f"  | {line}" for line in printable)])


@dataclass(slots=True)
class PromptContext:
    """Calls the user's function ``spec`` for each prompt, and renders and tokenises its result.

    ``max_tokens`` is the limit for a prompt that leaves space for the longest response.
    """

    spec: str
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    _function: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self._function = load_function(self.spec, _CONTEXT_KEY)

    def __call__(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of the teacher's prompts, one for each of ``prompts``. Local.

        Raises:
            ConfigError: the function fails or returns no prompt, the template rejects the prompt, or the prompt is too long.
        """
        named = {prompt.prompt_id: prompt for prompt in prompts}  # responses to the same prompt share one entry
        # "false": a text is used unchanged; messages go through the chat template.
        contents = [(self._call(prompt), f"{_CONTEXT_KEY}, prompt {name!r}") for name, prompt in named.items()]
        tokens = token_ids(self.tokenizer, list(Renderer(self.tokenizer, "false").all(contents)))
        for name, ids in zip(named, tokens, strict=True):
            if not 0 < len(ids) <= self.max_tokens:
                raise ConfigError(
                    f"{_CONTEXT_KEY}={self.spec}: its prompt for {name!r} has {len(ids)} tokens; it must have between 1 and "
                    f"{self.max_tokens} to leave space for a response; shorten it, or raise trainer.forward_tokens"
                )
        found = dict(zip(named, tokens, strict=True))
        return [found[prompt.prompt_id] for prompt in prompts]

    def _call(self, prompt: Prompt) -> Any:
        if prompt.images:
            raise ConfigError(
                f"{_CONTEXT_KEY}={self.spec}: prompt {prompt.prompt_id!r} has images, which {_CONTEXT_KEY} does not support "
                f"yet; set {_CONTEXT_KEY}=null, or data.image_key=null"
            )
        content = prompt.text if prompt.messages is None else prompt.messages
        try:
            return self._function(content, prompt.ground_truth, prompt.extra_info, prompt.data_source)
        except Exception as error:
            raise ConfigError(
                f"{_CONTEXT_KEY}={self.spec} fails for prompt {prompt.prompt_id!r} ({type(error).__name__}: {error})"
                f"{place_of(error, self.spec)}; correct the function"
            ) from error
