"""The quickstart's model and data, at a size that takes a second."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.validate import validate
from tests.messages import expect_error

TOOL = Path(__file__).parents[3] / "tools" / "make_quickstart.py"
TINY = ["--fit-steps", "3", "--batch-size", "4", "--num-layers", "1", "--num-eval", "20", "--threads", "1"]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_quickstart", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def quickstart(tool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "quickstart"
    assert tool.main(["--out", str(out), *TINY]) == 0
    return out


@pytest.fixture(scope="module")
def tokenizer(quickstart: Path):
    return AutoTokenizer.from_pretrained(quickstart / "model")


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_model_is_a_standard_directory(quickstart: Path) -> None:
    config = json.loads((quickstart / "model" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 32)
    assert config["vocab_size"] % 2 == 1  # so that tensor parallelism has to pad it
    names = {path.name for path in (quickstart / "model").iterdir()}
    assert {"model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    model = AutoModelForCausalLM.from_pretrained(quickstart / "model")
    assert {str(parameter.dtype) for parameter in model.parameters()} == {"torch.float32"}
    assert model.generation_config.eos_token_id == config["eos_token_id"] == 1


def test_full_size_is_between_one_and_three_million_parameters(tool: ModuleType) -> None:
    model = tool.make_model(tool.make_tokenizer(), tool.parse([]).num_layers, seed=0)
    assert 1_000_000 <= model.num_parameters() <= 3_000_000


@pytest.mark.parametrize("text", ["37+45=", "#### 82", "a  b\n#1 ## ###", "".join(map(chr, range(32, 127)))])
def test_tokenizer_round_trips(tokenizer, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids


def test_tokenizer_splits_into_characters(tokenizer) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer("#### 82<|end|>").input_ids) == ["####", " ", "8", "2", "<|end|>"]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (None, "<|end|>", "<|pad|>")
    assert tokenizer.convert_ids_to_tokens(tokenizer("5é").input_ids) == ["5", "<|unk|>"]
    assert tokenizer.decode(tokenizer("4<|end|>").input_ids, skip_special_tokens=True) == "4"


def test_chat_template_renders_roles(tokenizer) -> None:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2="}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|system|>Add.<|end|><|user|>1+2=<|end|><|assistant|>"
    chat.append({"role": "assistant", "content": "#### 3"})
    assert tokenizer.apply_chat_template(chat, tokenize=False) == prompt + "#### 3<|end|>"
    with pytest.raises(Exception, match="unknown role: judge"):
        tokenizer.apply_chat_template([{"role": "judge", "content": ""}], tokenize=False)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_rows_are_right_and_follow_the_schema(quickstart: Path, split: str) -> None:
    rows = pq.read_table(quickstart / f"{split}.parquet").to_pylist()
    for index, row in enumerate(rows):
        (message,) = row["prompt"]
        a, b = message["content"].removesuffix("=").split("+")
        assert row == {
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "data_source": "quickstart/addition",
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(int(a) + int(b))},
            "extra_info": {"index": index, "split": split},
            "response": f"#### {int(a) + int(b)}",
            "chosen": f"#### {int(a) + int(b)}",
            "rejected": f"#### {int(a) + int(b) + (-10 if int(a) % 10 + int(b) % 10 > 9 else 10)}",
        }
        assert 10 <= int(a) <= 99 and 10 <= int(b) <= 99


@pytest.mark.parametrize("name", ["grpo", "ppo", "sft", "reward_model", "dpo"])
def test_every_quickstart_runs_on_what_is_made(name: str, quickstart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(quickstart.parent)
    # One layer instead of four: it cannot be cut by the pipeline of the critic.
    cfg = load_config(TOOL.parents[1] / "configs" / "quickstart" / f"{name}.yaml", ["critic.layout.pp=1"])
    assert [Path(file).resolve().is_file() for file in (*cfg.data.train, *cfg.data.eval)] == [True, True]
    validate(cfg)  # it raises what is wrong
    monkeypatch.chdir("/")
    with expect_error(ConfigError, field="model.path", value="quickstart/model"):
        validate(cfg)


def test_held_out_problems_are_not_trained_on_in_either_order(quickstart: Path) -> None:
    def pairs(split: str) -> list[frozenset[str]]:
        rows = pq.read_table(quickstart / f"{split}.parquet").to_pylist()
        return [frozenset(row["prompt"][0]["content"].strip("=").split("+")) for row in rows]

    train, held_out = pairs("train"), pairs("eval")
    assert len(held_out) == len(set(held_out)) == 20
    assert len(train) > 5000
    assert not set(train) & set(held_out)


def test_two_thirds_of_the_problems_carry(tool: ModuleType) -> None:
    train, held_out = tool.make_problems(0, 200)
    for problems in (train, held_out):
        assert sum(problem.carries for problem in problems) / len(problems) == pytest.approx(2 / 3, abs=0.06)


def test_careless_answers(tool: ModuleType) -> None:
    assert tool.Problem(37, 45).answer() == 82
    assert tool.Problem(37, 45).answer(forget_carry=True) == 72
    assert tool.Problem(95, 95).answer(forget_carry=True) == 180
    assert tool.Problem(31, 45).answer(forget_carry=True) == 76


def test_encoding_pads_to_the_longest_answer(tool: ModuleType, tokenizer) -> None:
    examples = tool.encode(tokenizer, [tool.Problem(37, 45), tool.Problem(99, 99)])
    assert tokenizer.batch_decode(examples.prompts) == [
        f"<|user|>{sum_}=<|end|><|assistant|>" for sum_ in ("37+45", "99+99")
    ]
    assert tokenizer.batch_decode(examples.correct) == ["#### 82<|end|><|pad|>", "#### 198<|end|>"]
    assert tokenizer.batch_decode(examples.careless) == ["#### 72<|end|><|pad|>", "#### 188<|end|>"]


def test_fit_lowers_the_loss(tool: ModuleType, tokenizer) -> None:
    losses = []
    model = tool.make_model(tokenizer, 1, seed=0)
    examples = tool.encode(tokenizer, tool.make_problems(0, 20)[0][:100])
    tool.train_model(model, examples, tool.Fit(30, 16, 3e-3, warmup=3), 0, lambda step, loss: losses.append(loss))
    assert len(losses) == 30
    assert losses[0] > 4.0  # ln(103) = 4.63, a uniform guess
    assert losses[-1] < 0.3 * losses[0]


def test_learning_rate_warms_up_and_ends_at_zero(tool: ModuleType) -> None:
    fit = tool.Fit(steps=100, batch_size=1, lr=1.0, warmup=10)
    assert [tool.learning_rate(fit, step) for step in (0, 9, 50, 75, 100)] == [0.1, 1.0, 1.0, 0.5, 0.0]


def test_same_seed_gives_the_same_bytes(tool: ModuleType, quickstart: Path, tmp_path: Path) -> None:
    tool.main(["--out", str(tmp_path / "again"), *TINY])
    tool.main(["--out", str(tmp_path / "other"), *TINY, "--seed", "1"])
    first = digests(quickstart)
    assert digests(tmp_path / "again") == first
    assert first.keys() == digests(tmp_path / "other").keys()
    assert digests(tmp_path / "other")["model/model.safetensors"] != first["model/model.safetensors"]
    assert digests(tmp_path / "other")["train.parquet"] != first["train.parquet"]
