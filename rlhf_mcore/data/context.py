"""Teacher prompts for sampled rows, with information that the student does not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.rendering import Renderer
from rlhf_mcore.data.tokenizer import token_ids
from rlhf_mcore.readers.user_functions import load_function, place_of
from rlhf_mcore.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "teacher.context"


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
        self._function = load_function(self.spec, KEY)

    def __call__(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of the teacher's prompts, one for each of ``prompts``. Local.

        Raises:
            ConfigError: the function fails or returns no prompt, the template rejects the prompt, or the prompt is too long.
        """
        named = {prompt.prompt_id: prompt for prompt in prompts}  # responses to the same prompt share one entry
        # "false": a text is used unchanged; messages go through the chat template.
        contents = [(self._call(prompt), f"{KEY}, prompt {name!r}") for name, prompt in named.items()]
        tokens = token_ids(self.tokenizer, list(Renderer(self.tokenizer, "false").all(contents)))
        for name, ids in zip(named, tokens, strict=True):
            if not 0 < len(ids) <= self.max_tokens:
                raise ConfigError(
                    f"{KEY}={self.spec}: its prompt for {name!r} has {len(ids)} tokens; it must have between 1 and "
                    f"{self.max_tokens} to leave space for a response; shorten it, or raise trainer.forward_tokens"
                )
        found = dict(zip(named, tokens, strict=True))
        return [found[prompt.prompt_id] for prompt in prompts]

    def _call(self, prompt: Prompt) -> Any:
        if prompt.images:
            raise ConfigError(
                f"{KEY}={self.spec}: prompt {prompt.prompt_id!r} has images, which {KEY} does not support yet; set {KEY}=null, "
                "or data.image_key=null"
            )
        content = prompt.text if prompt.messages is None else prompt.messages
        try:
            return self._function(content, prompt.ground_truth, prompt.extra_info, prompt.data_source)
        except Exception as error:
            raise ConfigError(
                f"{KEY}={self.spec} fails for prompt {prompt.prompt_id!r} ({type(error).__name__}: {error})"
                f"{place_of(error, self.spec)}; correct the function"
            ) from error
