"""Train from Python in one process, as in a script or a notebook."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.commands import ROOT, environment, run_command
from tests.tiny_training import SMALL, make_quickstart

ENGINE = ["reward.function=null", "rollout.engine=vllm", "rollout.kv_cache_gib=0.02"]
SCRIPT = """
import gc, json, os, runpy, shutil, sys
from dataclasses import replace
import rlhf_mcore as rm

sys.argv[1:] = [*SMALL, "trainer.num_steps=1", "logging.console=off"]
example = runpy.run_path(EXAMPLE)["trained"]

seen = []
def tell(step, metrics):
    seen.append((step, metrics["reward/is_seven_mean"]))

class Watcher(rm.Callback):
    def __init__(self):
        self.told = []
    def on_begin(self, directory, step):
        self.told.append(["begin", directory.name, step])
    def on_save(self, step, checkpoint):
        self.told.append(["save", step, (checkpoint / "actor" / "config.json").is_file()])
    def on_evaluation(self, step, metrics):
        self.told.append(["evaluation", step, "evaluate/accuracy" in metrics])
    def on_rollouts(self, step, rollouts):
        self.told.append(["rollouts", step, len(rollouts), rollouts[0]["parts"]["is_seven"], "response" in rollouts[0]])
    def on_end(self, trained):
        self.told.append(["end", trained.finished])

def long(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str) / 16, "is_seven": float(ground_truth == "7")}

cfg = rm.load_config(CONFIG, [*SMALL, "actor.layout.tp=1", "trainer.world_size=1", "trainer.num_steps=2", "logging.console=off"])
rows = [{"prompt": f"<|user|>{a}+1=<|end|><|assistant|>", "answer": "7"} for a in range(10, 40)]
watcher = Watcher()
DOCUMENTED
def fail(step, metrics):
    raise KeyError("of a callback")
try:
    rm.train(cfg.model_copy(update={"experiment": "failed"}), reward=long, prompts=rows, callbacks=[fail])
except KeyError:  # the next run is in the same process, as in a notebook
    trained = rm.train(cfg, reward=long, prompts=rows, callbacks=[tell, watcher, Longest()])
again = rm.train(cfg, reward=long, prompts=rows)  # nothing is left to do

AFTERWARDS
shutil.rmtree("quickstart/evaluations")  # of the page, with its reward
cfg.rollout.engine, cfg.logging.rollout_tokens = "hf", 3  # starts faster
evaluated = rm.evaluate(cfg, compare="quickstart/model", reward=long, prompts=rows[:6])
converted = rm.convert(trained.directory, "flat", dtype="bf16", verify=True)
refused = []
for call in (lambda: rm.convert(trained.directory, "flat"), lambda: rm.convert(trained.directory, "other", target_format="onnx"),
             lambda: rm.evaluate(cfg, "nowhere")):
    try:
        call()
    except rm.ConfigError as error:
        refused.append(str(error))

def left():
    gc.collect()
    models = sum(type(found).__name__ in ("GPTModel", "DistributedDataParallel") for found in gc.get_objects())
    return models, len(os.listdir("/proc/self/fd"))

before = left()
cfg.experiment, cfg.trainer.num_steps = "second", 3
texts = (row["prompt"] for row in rows)
with rm.Trainer(cfg, reward=long, prompts=texts) as trainer:
    first = trainer.step()
    saved = trainer.save_checkpoint("kept")
    steps = [trainer.step(), trainer.step(), trainer.step()]
del trainer
lefts = [before, left()]
problems = []
for given, changes in (({"reward": lambda x: 1.0}, ["trainer.world_size=1"]), ({}, ["trainer.world_size=2"])):
    try:
        rm.train(rm.load_config(CONFIG, [*SMALL, "actor.layout.tp=1", "experiment=third", *changes]), **given)
    except rm.ConfigError as error:
        problems.append(str(error))
fits = rm.plan(cfg, world_size=1).fits
print(json.dumps([example.finished, str(example.model),
    seen, trained.finished, str(trained.model), len(trained.metrics), len(again.metrics), first["step"], str(saved),
    [step and step["step"] for step in steps], problems, fits, "RANK" in os.environ,
    watcher.told, [evaluated.results["reward"]["value"], len(evaluated.samples), evaluated.comparison["num_prompts"],
        evaluated.comparison["reward"]["difference"]["value"], str(evaluated.directory)],
    [str(converted.directory), converted.num_parameters, converted.num_bytes], refused, lefts]))
"""


def test_runs_from_python_are_those_of_the_command(tmp_path: Path) -> None:
    make_quickstart(tmp_path)
    config = str(ROOT / "configs" / "quickstart" / "grpo.yaml")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    script = SCRIPT.replace("CONFIG", repr(config)).replace("EXAMPLE", repr(str(ROOT / "examples" / "from_python.py")))
    script = script.replace("*SMALL", "*" + repr([*SMALL, *ENGINE]))
    page = (ROOT / "docs" / "guide" / "python.md").read_text(encoding="utf-8")
    [longest] = re.findall(r"```python\n(import rlhf_mcore as rm\n+class Longest.*?)\n\ncfg = ", page, re.DOTALL)
    [after] = re.findall(r"## After training\n+```python\n(.*?)```", page, re.DOTALL)
    small = ", ".join(map(repr, [*SMALL, *ENGINE, "rollout.engine=hf"]))
    after = after.replace('"trainer.world_size=1"]', f'"trainer.world_size=1", {small}]')
    script = script.replace("DOCUMENTED", longest).replace("AFTERWARDS", f"exec({after!r}, {{}})")
    run = run_command([sys.executable, "-c", script], tmp_path, environment(tmp_path))
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    shown, example, seen, ended, model, made, made_again, first, saved, steps, problems, fits, leaves_rank, *rest = told
    assert f"2 {tmp_path}/outputs/quickstart/grpo/checkpoint-2/actor" in run.stdout.splitlines()  # from the page
    assert (tmp_path / "my-model" / "config.json").is_file() and re.search(r"my-model \d+$", run.stdout, re.MULTILINE)
    assert shown and (tmp_path / example / "model.safetensors").is_file() and example in run.stdout.splitlines()
    assert seen == [[1, 1.0], [2, 1.0]] and ended and (made, made_again) == (2, 2)
    assert (tmp_path / model / "model.safetensors").is_file() and (tmp_path / model / "config.json").is_file()
    assert first == 1 and steps == [2, 3, None]
    assert (
        Path(saved) == tmp_path / "outputs/quickstart/second/kept/checkpoint-1"
        and (Path(saved) / "manifest.json").is_file()
    )
    assert "let it take (data_source, solution_str, ground_truth, extra_info)" in problems[0]
    assert "need 2 processes, but there is only one" in problems[1]
    assert fits and not leaves_rank
    rows = (tmp_path / "outputs/quickstart/second/data/train.jsonl").read_text().splitlines()
    assert len(rows) == 30 and json.loads(rows[0]) == {"prompt": "<|user|>10+1=<|end|><|assistant|>"}
    heard, (reward, num_samples, num_compared, difference, place), (flat, num_parameters, num_bytes), refused, lefts = (
        rest
    )
    assert [models for models, _ in lefts] == [0, 0] and lefts[0] == lefts[1], "a run leaves models or open files"
    steps_heard = [["rollouts", step, 8, 1.0, True] for step in (1, 2)]
    assert heard == [
        ["begin", "grpo", 1],
        ["evaluation", 0, True],
        steps_heard[0],
        ["save", 1, True],
        steps_heard[1],
        ["evaluation", 2, True],
        ["save", 2, True],
        ["end", True],
    ]
    scored = [json.loads(line) for line in (Path(tmp_path, place) / "samples.jsonl").read_text().splitlines()]
    assert num_samples == len(scored) == num_compared == 6
    assert reward == pytest.approx(sum(sample["score"] for sample in scored) / 6)
    (untrained,) = (tmp_path / "quickstart" / "evaluations").glob("*/results.json")
    assert difference == pytest.approx(reward - json.loads(untrained.read_text())["results"]["all"]["reward"]["value"])
    saved_numbers = sum(tensor.numel() for tensor in load_file(tmp_path / flat / "model.safetensors").values())
    assert flat == "flat" and num_parameters == saved_numbers and num_bytes == 2 * num_parameters
    assert "flat already exists" in refused[0] and "choose one of hf, megatron" in refused[1]
    assert "evaluate.checkpoint=nowhere is not a directory" in refused[2]
    written = tmp_path / "outputs/quickstart/second/rollouts"
    tokens = [json.loads(line) for line in (written / "tokens-000002.jsonl").read_text().splitlines()]
    whole = [json.loads(line) for line in (written / "step-000002.jsonl").read_text().splitlines()]
    by_name = {(row["prompt_id"], row["sample"]): row for row in whole}
    assert [(row["row"], row["sample"]) for row in tokens] == [(0, 0), (1, 1), (2, 0)]
    for row in tokens:
        rollout = by_name[row["prompt_id"], row["sample"]]
        assert "".join(row["tokens"]) == rollout["response"] and len(row["tokens"]) == rollout["num_tokens"]
        assert len(row["advantages"]) == len(row["logprob_differences"]) == len(row["tokens"])
        assert max(map(abs, row["logprob_differences"])) < 1e-3
    pair = [by_name[row["prompt_id"], row["sample"]]["score"] for row in tokens[:2]]
    assert (tokens[0]["advantages"][0] > tokens[1]["advantages"][0]) == (pair[0] > pair[1])


PRELUDE = """
import linecache

import rlhf_mcore as rm
from rlhf_mcore.api import commands, inputs, training

def small(*given, **more):
    return inputs.run_config(*given, **more).updated(SMALL)

training.run_config = commands.run_config = small

def cell(text, names):
    # As a notebook does, which keeps the source of its cells.
    name = f"<cell {len(linecache.cache)}>"
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    exec(compile(text, name, "exec"), names)
"""
SETTINGS = {
    "trainer": {"num_steps": 1, "prompts_per_step": 2, "minibatch_size": 2},
    "rollout": {"engine": "hf", "sampling": {"n": 2, "max_new_tokens": 4}},
    "logging": {"console": "off", "trackers": []},
}


def test_the_page_trains_what_it_shows_after_the_quickstart(tmp_path: Path) -> None:
    make_quickstart(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    page = (ROOT / "docs" / "guide" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    one_process = '["actor.layout.tp=1", "trainer.world_size=1"]'
    parts = [
        PRELUDE.replace("SMALL", repr(SETTINGS)),
        f'rm.train(rm.load_config("configs/quickstart/grpo.yaml", {one_process}))',  # the quickstart
        *(f"cell({block!r}, {{}})" for block in blocks),
        "names = {}",
        f"cell({blocks[0]!r}, names)",  # the cell runs again,
        "first = names['trained']",
        f"cell({blocks[0].replace('else 0.0', 'else 0.5')!r}, names)",  # and with another reward
        "second = names['trained']",
        "print(first.directory, len(first.metrics), second.directory, second.metrics[0]['reward/mean'])",
        "try:",
        f"    cell({blocks[1].replace('else 0.0', 'else 0.5')!r}, {{}})",
        "except rm.ConfigError as error:",
        "    print(error)",
    ]
    run = run_command([sys.executable, "-c", "\n".join(parts)], tmp_path, environment(tmp_path))
    assert run.returncode == 0, run.stderr
    *_, again, refused = run.stdout.splitlines()
    first, num_steps, second, reward = again.split()
    assert first != second and num_steps == "1" and float(reward) >= 0.5
    assert refused.startswith(
        "reward.function has another content than when the checkpoint was written (python:right_sum)"
    )
    steps = {
        path.parent.name: path.read_text().count('"reward/mean"') for path in tmp_path.glob("outputs/*/*/metrics.jsonl")
    }
    assert steps == {"grpo": 1, "python": 1, "callbacks": 1, Path(first).name: 1, Path(second).name: 1}
