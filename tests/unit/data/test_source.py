from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig
from rlhf_mcore.data import rendering
from rlhf_mcore.data.source import load_prompts
from tests.messages import expect_error

CHAT = [{"role": "user", "content": "1+1="}]
CHAT_ROW: dict[str, Any] = {
    "prompt": CHAT,
    "data_source": "sums",
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train"},
}


def write_jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path: Path, *rows: dict[str, Any]) -> str:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return str(path)


@pytest.mark.parametrize("write, name", [(write_jsonl, "train.jsonl"), (write_parquet, "train.parquet")])
def test_a_chat_row_is_rendered_with_the_template(
    write: Any, name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    (prompt,) = load_prompts([write(tmp_path / name, CHAT_ROW)], tokenizer, DataConfig())
    assert prompt.text == "[u]1+1=\n[a]"
    assert "".join(tokenizer.convert_ids_to_tokens(prompt.prompt_ids)) == "[u]1+1=\n[a]"
    assert (prompt.prompt_id, prompt.index) == ("train#0", 0)
    assert (prompt.data_source, prompt.style, prompt.ground_truth) == ("sums", "rule", "2")
    assert prompt.extra_info == {"split": "train", "ability": "math"}


def test_a_plain_string_can_be_used_as_it_is(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    cfg = DataConfig(apply_chat_template="false")
    (prompt,) = load_prompts([write_jsonl(tmp_path / "a.jsonl", {"prompt": " 1+1="})], tokenizer, cfg)
    assert prompt.text == " 1+1="
    assert len(prompt.prompt_ids) == 5
    assert (prompt.data_source, prompt.style, prompt.ground_truth) == ("unknown", "rule", None)


def test_parquet_messages_lose_the_null_fields_that_the_file_format_added(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    named = {"prompt": [{"role": "system", "content": "s", "name": "x"}, {"role": "user", "content": "u"}]}
    (prompt,) = load_prompts([write_parquet(tmp_path / "a.parquet", named)], tokenizer, DataConfig())
    assert prompt.text == "[s]s\n[u]u\n[a]"


@pytest.mark.parametrize(
    "row, answer_key, expected",
    [
        ({"reward_model": {"ground_truth": "a"}, "answer": "b", "gold": "c"}, None, "a"),
        ({"reward_model": {"style": "rule"}, "answer": "b", "gold": "c"}, None, "b"),
        ({"reward_model": {"ground_truth": "a"}, "answer": "b", "gold": "c"}, "gold", "c"),
        ({"reward_model": {"ground_truth": "a"}, "answer": "b"}, "reward_model.ground_truth", "a"),
        ({"meta": {"gold": {"short": "a"}}}, "meta.gold.short", "a"),
        ({"meta": {"gold": "a"}, "meta.gold": "b"}, "meta.gold", "b"),
        ({"answer": ["x", "y"]}, None, ["x", "y"]),
    ],
)
def test_where_the_answer_comes_from(
    row: dict[str, Any], answer_key: str | None, expected: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", {"prompt": "x", **row})
    (prompt,) = load_prompts([file], tokenizer, DataConfig(answer_key=answer_key))
    assert prompt.ground_truth == expected


def test_index_and_ids_run_over_several_files(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", {"prompt": "p"}, {"prompt": "q", "extra_info": {"id": 7}})
    second = write_parquet(tmp_path / "b.parquet", {"prompt": "r"}, {"prompt": "s"})
    prompts = load_prompts([first, second], tokenizer, DataConfig(apply_chat_template="false"))
    assert [(p.prompt_id, p.index, p.text) for p in prompts] == [
        ("a#0", 0, "p"),
        ("7", 1, "q"),
        ("b#0", 2, "r"),
        ("b#1", 3, "s"),
    ]


def test_dropped_prompts_leave_the_indices_of_the_others_alone(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", {"prompt": "12345"}, {"prompt": "1234"}, {"prompt": "123456"})
    cfg = DataConfig(max_prompt_tokens=4, overlong_prompts="drop", apply_chat_template="false")
    told: list[str] = []
    assert [(p.prompt_id, p.index) for p in load_prompts([file], tokenizer, cfg, note=told.append)] == [("a#1", 1)]
    [line] = told
    assert "data.train: 2 of 3 rows" in line and "data.max_prompt_tokens=4" in line


def test_overlong_prompts_are_counted_and_the_remedy_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", {"prompt": "1"}, {"prompt": "12345"}, {"prompt": "1234567"})
    with pytest.raises(ConfigError) as error:
        load_prompts([file], tokenizer, DataConfig(max_prompt_tokens=4, apply_chat_template="false"))
    message = str(error.value)
    assert "2 of 3 prompts" in message and "'a#1'" in message and "with 5 tokens" in message
    assert "data.max_prompt_tokens=7" in message and "data.overlong_prompts=drop" in message
    with expect_error(ConfigError, field="data.max_prompt_tokens", value=3):
        load_prompts([file], tokenizer, DataConfig(overlong_prompts="drop").model_copy(update={"max_prompt_tokens": 0}))


@pytest.mark.parametrize(
    "row, message",
    [
        (
            {"question": "x", "gold": "y"},
            r"line 2: no column 'prompt'; there are: gold, question\. Set data.prompt_key",
        ),
        ({"prompt": ""}, r"line 2, column 'prompt': the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [{"role": "user", "content": " "}]}, "the prompt is empty"),
        ({"prompt": None}, "found NoneType"),
        ({"prompt": 5}, "found int 5"),
        ({"prompt": [{"role": "user"}]}, "a text role and a text content"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "1 x <image> in the prompt, but images: 0"),
        ({"prompt": "a\x00b"}, "a NUL character at character 1"),
        ({"prompt": [{"role": "user", "content": "ab\ud800"}]}, r"a lone surrogate \(U\+D800\) at character 2"),
        ({"prompt": "x", "answer": "\udfff"}, r"line 2, ground_truth: a lone surrogate"),
        ({"prompt": "x", "reward_model": "2"}, "'reward_model' must be an object, found str '2'"),
        ({"prompt": CHAT * 2}, r"rejects these messages \(roles user, user\): roles must alternate"),
        ([1], "line 2: expected a JSON object, found list"),
        ({"prompt": "x", "extra_info": {"prompt_id": "a#0"}}, r"line 2: prompt_id 'a#0' was already used by .*line 1"),
    ],
)
def test_a_bad_row_is_refused_by_line(
    row: Any, message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", {"prompt": "good"}, row)
    with pytest.raises(ConfigError, match=message):
        load_prompts([file], tokenizer, DataConfig())


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"prompt": "x"}\n\n{"prompt": \n', "line 3: not valid JSON"),
        (b'{"prompt": "x"}\n{"prompt": "\xff"}\n', "line 2: not valid JSON"),
        (b'{"prompt": "x", "prompt": "y"}\n', "line 1: prompt appears more than once"),
        (b"[" * 100_000 + b"\n", "line 1: not valid JSON"),
        (b"", "it has no rows"),
        (b"\n\n", "it has no rows"),
    ],
)
def test_a_broken_jsonl_file_is_refused(
    content: bytes, message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_prompts([str(tmp_path / "a.jsonl")], tokenizer, DataConfig())


def test_broken_parquet_files_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    garbage = tmp_path / "garbage.parquet"
    garbage.write_bytes(b"PAR1 but not really")
    twins = tmp_path / "twins.parquet"
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"]), twins)
    empty = tmp_path / "empty.parquet"
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), empty)
    for path, message in [(garbage, "not a readable parquet"), (twins, "more than once"), (empty, "no rows")]:
        with pytest.raises(ConfigError, match=message):
            load_prompts([str(path)], tokenizer, DataConfig())


def test_files_that_cannot_be_data_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "a.csv").write_text("prompt\n")
    cases = [([], "data.eval is empty"), (["a.csv"], "unknown kind '.csv'"), (["gone.jsonl"], "no such file")]
    for names, message in cases:
        with pytest.raises(ConfigError, match=message):
            load_prompts([str(tmp_path / name) for name in names], tokenizer, DataConfig(), field="data.eval")


def test_two_files_of_one_name_are_told_apart_by_the_user(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "b").mkdir()
    files = [write_jsonl(tmp_path / "a.jsonl", {"prompt": "x"}), write_jsonl(tmp_path / "b/a.jsonl", {"prompt": "y"})]
    with pytest.raises(ConfigError, match="rename one of the files"):
        load_prompts(files, tokenizer, DataConfig())


def test_a_broken_template_is_reported_with_its_line(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{% for message in messages %}\n{{ message.content }\n{% endfor %}")
    with pytest.raises(
        ConfigError, match=r"line 1, column 'prompt': the chat template rejects these messages .* its line 2: "
    ):
        load_prompts([write_jsonl(tmp_path / "a.jsonl", CHAT_ROW)], tokenizer, DataConfig())


def test_messages_need_a_chat_template(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match="no chat template"):
        load_prompts([write_jsonl(tmp_path / "a.jsonl", CHAT_ROW)], tokenizer, DataConfig())


@pytest.mark.parametrize(
    ("mode", "prompt", "text", "question"),
    [
        ("auto", "1+1=", "[u]1+1=\n[a]", "1+1="),
        ("auto", "<eos>[u]1+1=", "<eos>[u]1+1=", None),  # a special token: it is rendered already
        ("true", "<eos>[u]1+1=", "[u]<eos>[u]1+1=\n[a]", "<eos>[u]1+1="),
        ("false", "1+1=", "1+1=", None),
        ("false", [{"role": "user", "content": "1+1="}], "[u]1+1=\n[a]", None),
    ],
)
def test_texts_and_the_chat_template(
    mode: str, prompt: Any, text: str, question: str | None, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", {"prompt": prompt})
    (loaded,) = load_prompts([file], tokenizer, DataConfig(apply_chat_template=mode))
    assert (loaded.text, loaded.question) == (text, question)


def test_texts_without_a_template(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: Any) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    file = write_jsonl(tmp_path / "a.jsonl", {"prompt": "1+1="})
    assert load_prompts([file], tokenizer, DataConfig())[0].text == "1+1="
    with expect_error(ConfigError, field=("data.apply_chat_template", "chat template"), value="true"):
        load_prompts([file], tokenizer, DataConfig(apply_chat_template="true"))


def test_a_template_writes_schemas_of_tools_into_prompts(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: Any
) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", {"prompt": "1+1="})
    tools = [{"type": "function", "function": {"name": "add"}}]
    with expect_error(ConfigError, field=("environment.tools", "chat template")):
        load_prompts([file], tokenizer, DataConfig(), tools=tools)
    template = "{% for tool in tools %}{{ tool.function.name }};{% endfor %}{{ messages[0].content }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert load_prompts([file], tokenizer, DataConfig(), tools=tools)[0].text == "add;1+1="
    with expect_error(ConfigError, field=("environment.tools", "chat template")):
        load_prompts([file], tokenizer, DataConfig(apply_chat_template="false"), tools=tools)


def test_every_file_has_its_columns(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    files = [
        write_jsonl(tmp_path / "a.jsonl", {"q": "1", "x": "one"}),
        write_jsonl(tmp_path / "b.jsonl", {"p": "2", "answer": "two"}),
    ]
    cfg = DataConfig(
        prompt_key=["q", "p"], answer_key=["x", None], eval_prompt_key=["q", "p"], apply_chat_template="false"
    )
    assert [(p.text, p.ground_truth) for p in load_prompts(files, tokenizer, cfg)] == [("1", "one"), ("2", "two")]
    evaluated = load_prompts(files, tokenizer, cfg, field="data.eval")
    assert [(p.text, p.ground_truth) for p in evaluated] == [("1", "one"), ("2", "two")]


def test_a_transform_changes_rows_and_leaves_some_out(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "t.py").write_text(
        "def shape(row):\n    return None if row['n'] == 1 else {'prompt': f\"{row['n']}+1=\", 'answer': str(row['n'] + 1)}\n"
        "def broken(row):\n    return 1 / 0\n"
        "def text(row):\n    return 'x'\n"
    )
    file = write_jsonl(tmp_path / "a.jsonl", *({"n": n} for n in range(3)))

    def load(name: str) -> list[tuple[int, str, str, Any]]:
        cfg = DataConfig(transform=f"{tmp_path}/t.py:{name}", apply_chat_template="false")
        return [(p.index, p.prompt_id, p.text, p.ground_truth) for p in load_prompts([file], tokenizer, cfg)]

    assert load("shape") == [(0, "a#0", "0+1=", "1"), (2, "a#2", "2+1=", "3")]
    with expect_error(ConfigError, field=("line 1", "data.transform"), value="ZeroDivisionError: division by zero"):
        load("broken")
    with expect_error(ConfigError, field=("line 1", "data.transform"), value="str 'x'"):
        load("text")


def test_the_first_prompt_is_shown_within_bounds() -> None:
    assert rendering.preview_prompt("<s>a\nb\x1b[0m", 4) == (
        "first prompt, as the model reads it (4 tokens):\n  | <s>a\n  | b\\x1b[0m"
    )
    assert rendering.preview_prompt("a" + "<|pad|>" * 512 + "b", 514).endswith("  | a<|pad|> x 512 b")
    long = rendering.preview_prompt("\n".join(["x" * 500] * 50), 9).splitlines()
    assert len(long) <= 12 and max(map(len, long)) <= 170 and long[-1] == "  | ..."
