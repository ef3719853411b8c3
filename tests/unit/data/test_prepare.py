from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from rlhf_mcore.commands.prepare_data.command import main
from rlhf_mcore.commands.prepare_data.prepare import Options, PreparationReport, prepare, read_source, write_splits
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig
from rlhf_mcore.data.examples import load_examples
from rlhf_mcore.data.source import load_prompts

Splits = dict[str, list[dict[str, Any]]]


def prepare_rows(rows: list[dict[str, Any]], **options: Any) -> tuple[Splits, PreparationReport]:
    return prepare(((f"row {i}", row) for i, row in enumerate(rows)), Options(**{"eval_share": 0.0, **options}))


def gsm8k(question: str, answer: str = "1") -> dict[str, Any]:
    return {"question": question, "answer": f"so\n#### {answer}"}


def test_a_row_of_reinforcement_learning() -> None:
    splits, _ = prepare_rows([gsm8k("How many?", "7")], system="Be brief.")
    (row,) = splits["train"]
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "7"}
    assert (row["data_source"], row["ability"]) == ("gsm8k", "math")
    assert row["extra_info"]["id"].startswith("gsm8k-") and row["extra_info"]["split"] == "train"


def test_rows_for_fine_tuning_and_preferences() -> None:
    splits, _ = prepare_rows([gsm8k("How many?", "7")], task="sft")
    (row,) = splits["train"]
    assert set(row) == {"data_source", "prompt", "response"} and row["response"] == "so\n#### 7"
    splits, _ = prepare_rows([{"prompt": "a", "chosen": "b", "rejected": "c"}], task="preference")
    (row,) = splits["train"]
    assert row == {
        "data_source": "preference",
        "prompt": [{"role": "user", "content": "a"}],
        "chosen": "b",
        "rejected": "c",
    }


def test_duplicates_are_the_same_words() -> None:
    splits, report = prepare_rows([gsm8k("How  many?"), gsm8k("how many?"), gsm8k("How much?")])
    assert [row["prompt"][0]["content"].split("\n")[0] for row in splits["train"]] == ["How  many?", "How much?"]
    assert report.counts["duplicates"] == 1


def test_a_prompt_with_two_answers_is_left_out() -> None:
    splits, report = prepare_rows([gsm8k("a", "1"), gsm8k("a", "2"), gsm8k("b", "3")])
    assert [row["reward_model"]["ground_truth"] for row in splits["train"]] == ["3"]
    assert (report.counts["with contradicting answers"], report.counts["duplicates"]) == (2, 0)


def test_two_pairs_of_one_prompt_are_no_duplicates() -> None:
    pairs = [{"prompt": "a", "chosen": "b", "rejected": worse} for worse in "ccd"]
    splits, report = prepare_rows(pairs, task="preference")
    assert [row["rejected"] for row in splits["train"]] == ["c", "d"] and report.counts["duplicates"] == 1


def test_rows_without_what_the_task_needs_are_counted() -> None:
    rows = [{"messages": [{"role": "user", "content": text}]} for text in "ab"]
    rows[1]["messages"].append({"role": "assistant", "content": "c"})
    splits, report = prepare_rows(rows, task="sft")
    assert len(splits["train"]) == 1 and report.counts["without what the task needs"] == 1


def test_the_split_goes_by_the_prompt_alone() -> None:
    rows = [gsm8k(f"question {i}") for i in range(400)]
    splits, _ = prepare_rows(rows, eval_share=0.25)
    held_out = {row["extra_info"]["id"] for row in splits["eval"]}
    assert 70 <= len(held_out) <= 130  # 100 expected, standard deviation 9
    fewer, _ = prepare_rows(rows[::-1][:200], eval_share=0.25)
    ids = {row["extra_info"]["id"] for row in fewer["eval"]}
    assert ids == held_out & {row["extra_info"]["id"] for split in fewer.values() for row in split}
    assert all(row["extra_info"]["split"] == "eval" for row in splits["eval"])


def test_all_pairs_of_a_prompt_are_on_one_side() -> None:
    pairs = [{"prompt": f"q{i % 50}", "chosen": "b", "rejected": f"r{i}"} for i in range(200)]
    splits, _ = prepare_rows(pairs, task="preference", eval_share=0.3)
    prompts = [{row["prompt"][0]["content"] for row in splits[split]} for split in ("train", "eval")]
    assert all(prompts) and not prompts[0] & prompts[1]


def test_unusable_rows_stop_it_with_their_places_or_are_counted() -> None:
    rows = [gsm8k("a"), {"question": "b", "answer": "none"}, gsm8k("c\x00")]
    with pytest.raises(ConfigError) as stopped:
        prepare_rows(rows)
    assert "2 rows cannot be used" in str(stopped.value) and "--skip-bad" in str(stopped.value)
    assert "row 1: 'answer' has no number" in str(stopped.value) and "row 2: character U+0000" in str(stopped.value)
    splits, report = prepare_rows(rows, skip_bad=True)
    assert len(splits["train"]) == 1 and report.counts["unusable"] == 2


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "the data has no rows"),
        ([{"x": 1, "y": 2}], {}, "row 0: rows with the columns x, y have no known format; choose one with --format"),
        ([{"x": 1}], {}, "data.prompt_key and data.answer_key"),
        ([{"x": 1}], {"task": "preference"}, "data.prompt_key, data.chosen_key and data.rejected_key"),
        ([{"messages": [{"role": "user", "content": "a"}]}], {"task": "sft"}, "no usable row is left"),
        ([{"messages": [{"role": "user", "content": " "}]}], {}, "row 0: the prompt is empty"),
        ([{"prompt": [{"role": "system", "content": "a"}]}], {}, "does not end with a user message"),
    ],
)
def test_mistakes(rows: list[dict[str, Any]], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_rows(rows, **options)


def test_one_language_of_open_assistant() -> None:
    rows = [
        {"message_id": str(i), "parent_id": None, "text": f"q{i}", "role": "prompter", "lang": lang}
        for i, lang in enumerate(["en", "de", "en"])
    ]
    splits, _ = prepare_rows(rows, lang="de")
    assert [row["prompt"][0]["content"] for row in splits["train"]] == ["q1"]
    assert splits["train"][0]["reward_model"] == {"style": "model", "ground_truth": None}


def test_the_command_writes_what_training_reads(
    tmp_path: Path, tokenizer_directory: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    lines = [json.dumps(gsm8k(f"question {i}", str(i))) for i in range(60)]
    (source / "a.jsonl").write_text("\n".join(lines[:40]))
    parquet.write_table(pyarrow.Table.from_pylist([json.loads(line) for line in lines[30:]]), source / "b.parquet")
    (source / "c.json").write_text(json.dumps([gsm8k("in an array " + "x" * 3000)]))
    limits = ["--tokenizer", str(tokenizer_directory), "--max-prompt-tokens", "1000"]
    assert main([str(source), "--out", str(tmp_path / "out"), "--eval-share", "0.2", *limits]) == 0
    printed = capsys.readouterr().out
    assert "71  rows read" in printed and "10  duplicates" in printed and "1  too long" in printed
    prompts = [
        load_prompts([str(tmp_path / "out" / f"{split}.parquet")], tokenizer, DataConfig(max_prompt_tokens=1000))
        for split in ("train", "eval")
    ]
    assert sorted(int(prompt.ground_truth) for part in prompts for prompt in part) == list(range(60))
    assert all(prompt.data_source == "gsm8k" and prompt.prompt_id.startswith("gsm8k-") for prompt in prompts[0])


def test_a_broken_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(gsm8k("a")) + "\n{broken\n")
    assert main([str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert "a.jsonl, line 2: not valid JSON" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_data_set_needs_its_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main(["openai/gsm8k", "--out", "out"]) == 2
    assert (
        "no such file or directory. If it is the Hub id of a data set, `pip install datasets`"
        in capsys.readouterr().err
    )


def test_a_data_set_comes_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def load_dataset(name: str, subset: str | None, split: str) -> list[dict[str, Any]]:
            assert (name, subset, split) == ("openai/gsm8k", "main", "test")
            return [gsm8k("a")]

    monkeypatch.setitem(sys.modules, "datasets", Library)
    assert list(read_source("openai/gsm8k", subset="main", split="test")) == [
        ("openai/gsm8k (test), row 0", gsm8k("a")),
    ]


def test_token_limits_need_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--out", str(tmp_path / "out"), "--max-prompt-tokens", "5"]) == 2
    assert "add --tokenizer DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "answers", "columns"),
    [
        ("sft", {"response": "b"}, {"data.prompt_key": "prompt", "data.response_key": "response"}),
        (
            "preference",
            {"chosen": "b", "rejected": "c"},
            {"data.prompt_key": "prompt", "data.chosen_key": "chosen", "data.rejected_key": "rejected"},
        ),
    ],
)
def test_what_is_written_is_what_supervised_training_reads(
    tmp_path: Path, tokenizer: Any, task: str, answers: dict[str, str], columns: dict[str, str]
) -> None:
    splits, _ = prepare_rows([{"prompt": f"question {i}", **answers} for i in range(3)], task=task)
    (file,) = write_splits(splits, tmp_path)
    examples = load_examples([str(file)], tokenizer, columns, max_tokens=100, drop_longer=False)
    expected = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in answers.values()]
    assert [[ids.tolist() for ids in example.response_ids] for example in examples] == [expected] * 3


def test_a_prompt_that_a_model_has_read_stays_as_it_is() -> None:
    rows = [
        ("here", {"prompt_id": "p", "sample": n, "prompt": "<|user|> Hi", "response": text, "score": float(n)})
        for n, text in enumerate(("no", "yes"))
    ]
    splits, _ = prepare(rows, Options(task="preference", eval_share=0.0))
    assert splits["train"] == [{"data_source": "rollouts", "prompt": "<|user|> Hi", "chosen": "yes", "rejected": "no"}]
    with pytest.raises(ConfigError, match="--system"):
        prepare(rows, Options(task="preference", system="Be kind."))
