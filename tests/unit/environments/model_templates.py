"""Chat templates with the rules of published templates: which earlier thoughts stay, and how tools are described.

They were written for these tests from the models' documentation and are not copies. They omit system prompts for tools.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.types import Completion
from tests.unit.environments.conftest import character_tokenizer


def wide(text: str) -> str:
    """Write DeepSeek's control tokens, which contain look-alike letters. <!User!> means the token of the user."""
    return re.sub("<!(.*?)!>", lambda name: f"<\uff5c{name[1].replace('_', chr(0x2581))}\uff5c>", text)


_LAST_USER = """
{%- set at = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set at.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
"""
# Sets ``words`` and ``thought`` from an assistant message m.
_SPLIT = """
{%- set words = m.content or '' -%}{%- set thought = '' -%}
{%- if '</think>' in words -%}
  {%- set thought = words.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
  {%- set words = words.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
"""
_CHATML = """
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    SPLIT
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > at.user -%}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}{%- endif -%}
    {{- words + '<|im_end|>\\n' -}}
  {%- elif m.role == 'tool' -%}
    {%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- else -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
"""
# Drops the thoughts of turns before the last question of the user. A turn starts with its thoughts.
QWEN3 = _LAST_USER + _CHATML.replace("SPLIT", _SPLIT)
QWEN3 += "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
# The same rule, and the prompt already starts the thoughts.
QWEN35 = QWEN3.replace("assistant\\n' -}}{%- endif -%}", "assistant\\n<think>\\n' -}}{%- endif -%}")
# The same rule. A turn has no end token and ends with the token that starts the next message.
GLM45 = (
    "[gMASK]<sop>"
    + _LAST_USER
    + """
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    SPLIT
    {{- '<|assistant|>' -}}
    {%- if loop.index0 > at.user and thought -%}{{- '\\n<think>' + thought.strip() + '</think>' -}}
    {%- else -%}{{- '\\n<think></think>' -}}{%- endif -%}
    {%- if words.strip() -%}{{- '\\n' + words.strip() -}}{%- endif -%}
  {%- elif m.role == 'tool' -%}
    {%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|observation|>' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
  {%- else -%}{{- '<|' + m.role + '|>\\n' + m.content -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
""".replace("SPLIT", _SPLIT)
)
# Thoughts stay until there is an answer. Raw channels are rejected. A call is rendered in another order than it was sampled.
GPT_OSS = """
{%- set at = namespace(answer=-1, called='') -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' and not m.tool_calls -%}{%- set at.answer = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {%- if '<|channel|>' in (m.content or '') -%}{{- raise_exception('channels in content: give thinking and content') -}}{%- endif -%}
    {%- if m.tool_calls -%}
      {%- if m.thinking and loop.index0 > at.answer -%}
        {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}
      {%- endif -%}
      {%- set at.called = m.tool_calls[0].function.name -%}
      {{- '<|start|>assistant to=functions.' + at.called + '<|channel|>commentary json<|message|>' -}}
      {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' -}}
    {%- else -%}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' -}}
    {%- endif -%}
  {%- elif m.role == 'tool' -%}
    {%- if not at.called -%}{{- raise_exception('a result, and no call before it') -}}{%- endif -%}
    {{- '<|start|>functions.' + at.called + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' -}}
  {%- else -%}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""
# Drops every earlier thought, even between tool calls. No marker of the next turn follows a result.
DEEPSEEK_V3 = """
{{- '<!begin_of_sentence!>' -}}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' -%}{{- '<!Assistant!></think>' -}}{%- endif -%}
    {{- (m.content or '').split('</think>')[-1] + '<!end_of_sentence!>' -}}
  {%- elif m.role == 'tool' -%}{{- '<!tool_output_begin!>' + m.content + '<!tool_output_end!>' -}}
  {%- elif m.role == 'user' -%}{{- '<!User!>' + m.content -}}
  {%- else -%}{{- m.content -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}{{- '<!Assistant!>OPENING' -}}{%- endif -%}
"""


@dataclass(frozen=True)
class Family:
    """A template and the texts that its model samples. ``thinks(thought, words)`` ends with the end token of the turn."""

    template: str
    special: tuple[str, ...]
    answers: Callable[[str, str], str]  # with a thought
    calls: Callable[[str, int], str]  # with a thought: add(a)
    keeps_with_tools: bool = True  # thoughts since the last question stay during tool calls

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Build a tokenizer of letters with the family's control tokens."""
        special = [wide(token) for token in self.special]
        return character_tokenizer(["<unk>", *special], special[0], wide(self.template))


_HERMES = '<tool_call>\n{{"name": "add", "arguments": {{"a":  {0}}}}}\n</tool_call>'
_GLM = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{0}</arg_value>\n</tool_call>"
_XML = "<tool_call>\n<function=add>\n<parameter=a>\n{0}\n</parameter>\n</function>\n</tool_call>"
_CHATML_TOKENS = ("<|im_end|>", "<|im_start|>")
_GLM_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>", "<|system|>", "[gMASK]", "<sop>")
_OSS_TOKENS = ("<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>")
_V3_CALLS = ("<!tool_calls_begin!>", "<!tool_call_begin!>", "<!tool_sep!>", "<!tool_call_end!>", "<!tool_calls_end!>")
_V3_RESULTS = ("<!tool_output_begin!>", "<!tool_output_end!>")
_V3_TOKENS = ("<!end_of_sentence!>", "<!begin_of_sentence!>", "<!User!>", "<!Assistant!>", *_V3_CALLS, *_V3_RESULTS)
_V3 = f'{_V3_CALLS[0]}{_V3_CALLS[1]}add{_V3_CALLS[2]}{{{{"a":  {{0}}}}}}{_V3_CALLS[3]}{_V3_CALLS[4]}'
FAMILIES = {
    "qwen3": Family(
        QWEN3,
        _CHATML_TOKENS,
        lambda thought, words: f"<think>\n{thought}\n</think>\n\n{words}<|im_end|>",
        lambda thought, a: f"<think>\n{thought}\n</think>\n\n{_HERMES.format(a)}<|im_end|>",
    ),
    "qwen3.5": Family(
        QWEN35,
        _CHATML_TOKENS,
        lambda thought, words: f"{thought}\n</think>\n\n{words}<|im_end|>",
        lambda thought, a: f"{thought}\n</think>\n\n{_XML.format(a)}<|im_end|>",
    ),
    "glm-4.5": Family(
        GLM45,
        _GLM_TOKENS,
        lambda thought, words: f"\n<think>{thought}</think>\n{words}<|user|>",
        lambda thought, a: f"\n<think>{thought}</think>\n{_GLM.format(a)}<|observation|>",
    ),
    "gpt-oss": Family(
        GPT_OSS,
        _OSS_TOKENS,
        lambda thought, words: (
            f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{words}<|return|>"
        ),
        lambda thought, a: (
            f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            f'<|constrain|>json<|message|>{{"a":  {a}}}<|call|>'
        ),
    ),
    "deepseek-v3.1": Family(
        DEEPSEEK_V3.replace("OPENING", "<think>"),
        _V3_TOKENS,
        lambda thought, words: f"{thought}</think>{words}<!end_of_sentence!>",
        lambda thought, a: f"{thought}</think>{_V3.format(a)}<!end_of_sentence!>",
        keeps_with_tools=False,
    ),
    "deepseek-v3": Family(  # it has no thoughts
        DEEPSEEK_V3.replace("OPENING", "</think>"),
        _V3_TOKENS,
        lambda thought, words: f"{words}<!end_of_sentence!>",
        lambda thought, a: f"{_V3.format(a)}<!end_of_sentence!>",
    ),
}


def completion(tokenizer: PreTrainedTokenizerBase, text: str, first: int) -> Completion:
    """Return a completion of a text that ends with the end token. Logprobs identify tokens: the first is -(first + 1) / 1024."""
    ids = np.array(tokenizer(wide(text), add_special_tokens=False)["input_ids"], np.int32)
    logprobs = -(np.arange(first, first + len(ids), dtype=np.float32) + 1) / 1024
    return Completion(0, ids, logprobs, ((0, 0),), "stop")


def parse(text: str, tools: Any) -> dict[str, Any]:
    """Parse a call of add in any of the formats, like a parser of vLLM."""
    marker = next((mark for mark in ("<tool_call>", wide("<!tool_calls_begin!>")) if mark in text), None)
    if marker is None:
        return {"role": "assistant", "content": text, "tool_calls": []}
    words, _, call = text.partition(marker)
    digits = "".join(letter for letter in call if letter.isdigit())
    function = {"name": "add", "arguments": f'{{"a": {digits}}}'}
    return {
        "role": "assistant",
        "content": words,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
