"""The first prompts are looked at before any process has started: their template and their lengths."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.data.first_rows import check_first_rows
from rlhf_mcore.data.source import load_prompts

TEXT = "twelve chars"  # a token each


@pytest.fixture
def model(workspace: Any, tokenizer: PreTrainedTokenizerBase) -> Path:
    folder: Path = workspace.root / "model"
    tokenizer.save_pretrained(str(folder))
    return folder


def write(workspace: Any, *prompts: Any) -> None:
    rows = [{"prompt": prompt, "answer": "2"} for prompt in prompts]
    workspace.write("train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def without_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))


def problem(*overrides: str) -> str | None:
    try:
        cfg = load_config("run.yaml", ["data.train=train.jsonl", *overrides])
        check_first_rows(cfg.data, cfg.model.tokenizer_path or cfg.model.path)
    except ConfigError as error:
        return str(error)
    return None


MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.mark.parametrize("prompt", [TEXT, MESSAGES])
def test_a_prompt_that_is_too_long_is_named_with_its_row(
    workspace: Any, model: Path, tokenizer: PreTrainedTokenizerBase, prompt: Any
) -> None:
    write(workspace, "ok", prompt)
    tokens = len(tokenizer.encode(TEXT, add_special_tokens=False))
    assert tokens == 12
    assert str(problem("data.max_prompt_tokens=11")).startswith(
        "data.train: train.jsonl, line 2: the prompt has at least 12 tokens, more than data.max_prompt_tokens=11; raise it"
    )
    assert problem("data.max_prompt_tokens=12") is None  # a template's tokens are counted by the ranks
    assert problem("data.max_prompt_tokens=11", "data.overlong_prompts=drop") is None


def test_nothing_is_refused_that_the_ranks_take(
    workspace: Any, model: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    write(workspace, f"  {TEXT}\n", MESSAGES, [{"role": "system", "content": "s" * 9}, *MESSAGES])
    cfg = load_config("run.yaml", ["data.train=train.jsonl"])
    longest = max(len(prompt.prompt_ids) for prompt in load_prompts(["train.jsonl"], tokenizer, cfg.data))
    assert problem(f"data.max_prompt_tokens={longest}") is None


def test_the_marks_of_images_are_not_counted_as_text(workspace: Any, model: Path) -> None:
    write(workspace, f"<image>{TEXT}<image>")
    assert problem("data.max_prompt_tokens=12") is None
    assert "has at least 12 tokens" in str(problem("data.max_prompt_tokens=11"))


def test_padding_and_truncation_of_the_file_do_not_count(workspace: Any, model: Path) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    padding = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    (model / "tokenizer.json").write_text(json.dumps(content | {"padding": padding}))
    write(workspace, TEXT)
    assert problem("data.max_prompt_tokens=12") is None
    truncation = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    (model / "tokenizer.json").write_text(json.dumps(content | {"truncation": truncation}))
    assert "has at least 12 tokens" in str(problem("data.max_prompt_tokens=11"))


def test_messages_need_a_template(workspace: Any, model: Path) -> None:
    without_template(model)
    write(workspace, TEXT)
    assert problem() is None
    assert "data.apply_chat_template=true, but the tokenizer in model has no chat template" in str(
        problem("data.apply_chat_template='true'")
    )
    write(workspace, TEXT, MESSAGES)
    assert (
        "train.jsonl, line 2: the prompt is a list of messages, but the tokenizer in model has no chat template"
        in str(problem())
    )


@pytest.mark.parametrize("template", ["{{ 'x' }}", [{"name": "default", "template": "{{ 'x' }}"}]])
def test_a_template_may_be_in_the_settings(workspace: Any, model: Path, template: Any) -> None:
    without_template(model)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    write(workspace, MESSAGES)
    assert problem() is None


def test_transformers_is_not_imported_for_it(workspace: Any, model: Path) -> None:
    write(workspace, TEXT)
    code = (
        "import sys; from rlhf_mcore.config.load import load_config; from rlhf_mcore.data.first_rows import check_first_rows; "
        "cfg = load_config('run.yaml', ['data.train=train.jsonl']); check_first_rows(cfg.data, cfg.model.path); "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=workspace.root)
    assert done.stdout.strip() == "set()", done.stderr
