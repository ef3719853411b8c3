"""Train with images: resume, convert, evaluate, with later turns, adapters, a critic and a reward model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_mcore.commands.report.run_data import read_run
from tests.beside import link, needs
from tests.commands import ROOT, environment, run_command

CONFIG = str(ROOT / "configs" / "quickstart" / "images.yaml")
# Scores differ between responses, whether or not they are correct, so the first step already has a gradient.
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return (sum(map(ord, solution_str)) % 17) / 16
"""
# Shows the picture of the prompt mirrored, then unchanged, and then ends.
GALLERY = """
import io

from PIL import Image, ImageOps


class Gallery:
    def reset(self, row, seed):
        self.file, self.turn = row["images"][0], 0

    def step(self, action):
        self.turn += 1
        picture, shown = Image.open(self.file), io.BytesIO()
        (ImageOps.mirror(picture) if self.turn == 1 else picture).save(shown, "PNG")
        parts = [{"type": "text", "text": "and here?"}, {"type": "image", "image": shown.getvalue()}]
        return [{"role": "user", "content": parts}], 0.0, self.turn == 3
"""
# Asks about the picture of its task, asks the same about its mirror image, and continues there with the first picture.
AGENT = """
import base64
import io
import json
from urllib.request import Request, urlopen

from PIL import Image, ImageOps


def play(task, base_url, api_key):
    def ask(*messages):
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        body = json.dumps({"messages": messages}).encode()
        with urlopen(Request(base_url + "/chat/completions", body, headers)) as answer:
            return json.load(answer)["choices"][0]["message"]

    [asked], mirrored = task["messages"], io.BytesIO()
    ImageOps.mirror(Image.open(task["images"][0])).save(mirrored, "PNG")
    url = "data:image/png;base64," + base64.b64encode(mirrored.getvalue()).decode()
    picture, question = asked["content"]
    other = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, question]}
    ask(asked)
    said = ask(other)
    ask(other, said, {"role": "user", "content": [{"type": "text", "text": "and here?"}, picture]})
"""
SMALL = [
    "trainer.prompts_per_step=2",
    "trainer.minibatch_size=2",
    "rollout.sampling.n=2",
    "rollout.sampling.max_new_tokens=6",
    "reward.function=reward.py:score",
    "checkpoint.save_steps=1",
    "checkpoint.save_total_limit=null",
    "evaluate.every=0",
    "logging.console=plain",
    "logging.trackers=[]",
    "deterministic=true",
]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rlhf_mcore.cli.main", *arguments]


def rlhf_mcore(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command that finds the packages in the folder ``packages``."""
    own = environment(directory)
    own["PYTHONPATH"] += f"{os.pathsep}{directory / 'packages'}"
    done = run_command(command(*arguments), directory, own, 240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def train(directory: Path, name: str, steps: int, *overrides: str) -> Path:
    """Train, and return the run directory."""
    rlhf_mcore(directory, "train", CONFIG, *SMALL, f"experiment={name}", f"trainer.num_steps={steps}", *overrides)
    return directory / "outputs" / "quickstart" / name


def rollouts(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(run.glob("rollouts/step-*.jsonl")) for line in file.open()]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def is_of_tower(name: str) -> bool:
    return name.startswith("model.visual.")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Qwen3-VL model with random weights, and a few pictures with questions."""
    directory = tmp_path_factory.mktemp("images")
    tool = [sys.executable, str(ROOT / "tools" / "make_images.py"), "--out", "images", "--family", "qwen3_vl"]
    sizes = ["--fit-steps", "1", "--num-layers", "2", "--num-train", "8", "--num-eval", "4"]
    made = run_command([*tool, *sizes], directory, environment(directory))
    assert made.returncode == 0, made.stderr[-3000:]
    (directory / "reward.py").write_text(REWARD)
    (directory / "packages").mkdir()
    link(directory / "packages", "torchvision")
    return directory


@pytest.fixture(scope="module")
def calm(workspace: Path) -> Path:
    """Return an uninterrupted run of two steps on two processes."""
    return train(workspace, "calm", 2)


def test_the_language_model_learns_and_the_tower_is_saved_as_it_came(workspace: Path, calm: Path) -> None:
    before, after = weights(workspace / "images" / "model"), weights(calm / "checkpoint-2" / "actor")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if is_of_tower(name))
    assert not any(
        torch.equal(before[name], after[name])
        for name in before
        if name.endswith("proj.weight") and not is_of_tower(name)
    )


def test_engines_get_a_frozen_tower_once(workspace: Path, calm: Path) -> None:
    """The sync of a step sends the language model and no other bytes."""
    held = weights(workspace / "images" / "model")
    text = sum(tensor.nbytes for name, tensor in held.items() if not is_of_tower(name))
    assert text < sum(tensor.nbytes for tensor in held.values()) / 2
    moved = [row["bridge/received_bytes"] + row["bridge/local_bytes"] for row in metrics(calm) if row["step"]]
    assert moved == [text, text]


def test_a_run_that_resumes_from_a_checkpoint_ends_with_the_same_files(workspace: Path, calm: Path) -> None:
    resumed = train(workspace, "resumed", 2, f"checkpoint.resume={calm / 'checkpoint-1'}")
    saved = calm / "checkpoint-2" / "actor"
    files = [path.relative_to(calm) for path in saved.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"model.safetensors", "preprocessor_config.json", "state-00000.safetensors"}
    for file in [*files, Path("rollouts/step-000002.jsonl")]:
        assert (resumed / file).read_bytes() == (calm / file).read_bytes(), file


def test_a_checkpoint_is_converted_to_what_transformers_loads(workspace: Path, calm: Path) -> None:
    from transformers import AutoModelForImageTextToText

    rlhf_mcore(workspace, "convert", "--from", "checkpoint", "--to", "hf", str(calm), "converted", "--verify")
    saved, converted = weights(calm / "checkpoint-2" / "actor"), weights(workspace / "converted")
    assert saved.keys() == converted.keys()
    assert all(torch.equal(tensor, converted[name]) for name, tensor in saved.items())
    assert (workspace / "converted" / "preprocessor_config.json").is_file()
    loaded = AutoModelForImageTextToText.from_pretrained(workspace / "converted", dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.items())


def test_the_checkpoint_is_evaluated_on_the_images_of_its_data(workspace: Path, calm: Path) -> None:
    """A single process evaluates like two processes at the end of training."""
    one = ["trainer.world_size=1", "actor.layout.tp=1", f"evaluate.checkpoint={calm}", "evaluate.output_dir=evaluated"]
    rlhf_mcore(workspace, "evaluate", CONFIG, *SMALL, *one)
    found = json.loads((workspace / "evaluated" / "results.json").read_text())["results"]["all"]
    assert found["reward"]["value"] == metrics(calm)[-1]["evaluate/reward"] > 0


def test_the_report_has_the_images_of_the_rollouts(calm: Path) -> None:
    run = read_run(calm, 100)
    named = [digest for group in run.groups for digest in group["images"]]
    assert len(run.groups) == len(named) == 4 and set(named) == set(run.images)


VLLM = ["rollout.engine=vllm", "rollout.kv_cache_gib=0.0625", "trainer.world_size=1", "actor.layout.tp=1"]


@needs("torchvision")
def test_vllm_and_the_trainer_see_the_images_of_later_turns(workspace: Path) -> None:
    """Both compute the same logprobs of responses to the images. Image tokens are in no loss."""
    (workspace / "gallery.py").write_text(GALLERY)
    turns = ["environment.function=gallery.py:Gallery", "environment.max_turns=3", "environment.max_tokens=80"]
    run = train(workspace, "shown", 1, *turns, "environment.score=reward", *VLLM)
    episodes = [row for row in rollouts(run) if len(row["images"]) == 3]
    assert episodes
    for row in episodes:
        first, mirrored, again = row["images"]
        assert first == again != mirrored
    assert metrics(run)[-1]["rollout/logprob_diff_max"] < 1e-5 and metrics(run)[-1]["actor/grad_norm"] > 0


@needs("torchvision")
def test_an_agent_shows_images_in_its_requests(workspace: Path) -> None:
    """Two conversations have the same tokens and different pictures. Engine cache and trainer distinguish them."""
    (workspace / "agent.py").write_text(AGENT)
    turns = ["environment.function=agent", "environment.agent.function=agent.py:play", "environment.max_turns=3"]
    run = train(workspace, "asking", 1, *turns, "environment.max_tokens=80", "environment.score=reward", *VLLM)
    episodes = [row for row in rollouts(run) if [turn["writer"] for turn in row["turns"]].count("policy") == 3]
    assert episodes and all(row["branches"] == 2 and len(row["images"]) == 2 for row in episodes)
    assert metrics(run)[-1]["rollout/logprob_diff_max"] < 1e-5 and metrics(run)[-1]["actor/grad_norm"] > 0


@pytest.fixture(scope="module")
def scorer(workspace: Path) -> Path:
    """Return the directory of a reward model that was trained on pairs for a step."""
    return train(workspace, "scorer", 1, "algorithm=reward_model") / "latest" / "reward"


@pytest.fixture(scope="module")
def ppo(workspace: Path, scorer: Path) -> Path:
    """Train adapters and a critic with PPO. The score of the reward model is the whole reward."""
    own = ["reward.function=null", "reward.rules=[]", f"reward.model.path={scorer}"]
    return train(workspace, "ppo", 1, "algorithm=ppo", "actor.lora.rank=4", *own)


def test_a_reward_model_learns_from_pairs(workspace: Path, scorer: Path) -> None:
    assert weights(scorer)["score.weight"].abs().sum() > 0
    assert same_tower(workspace, scorer)


def test_a_reward_model_scores_sampled_responses(calm: Path, ppo: Path) -> None:
    first = [json.loads(line) for line in (ppo / "rollouts/step-000001.jsonl").open()]
    scores = {row["score"] for row in first}
    assert len(scores) == 4 and metrics(ppo)[-1]["reward/reward_model_mean"] == pytest.approx(sum(scores) / 4)
    same = [json.loads(line) for line in (calm / "rollouts/step-000001.jsonl").open()]
    assert [row["response"] for row in first] == [row["response"] for row in same]


def test_adapters_learn_with_images(ppo: Path) -> None:
    held = weights(ppo / "checkpoint-1" / "actor")
    assert held and not any("visual" in name for name in held)
    assert metrics(ppo)[-1]["actor/grad_norm"] > 0


def test_a_critic_learns_with_images(workspace: Path, ppo: Path) -> None:
    assert same_tower(workspace, ppo / "checkpoint-1" / "critic")
    assert metrics(ppo)[-1]["critic/grad_norm"] > 0


def same_tower(workspace: Path, folder: Path) -> bool:
    """Return whether the vision tower in a folder equals the first model's."""
    before, after = weights(workspace / "images" / "model"), weights(folder)
    return all(torch.equal(before[name], after[name]) for name in before if is_of_tower(name))
