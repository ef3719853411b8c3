"""Chain SFT, a reward model and PPO on a toy preference: responses with more a's are better."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.rollout.tiny import save_model
from tests.e2e.test_train_command import lines, run
from tests.metric_names import assert_registered

LETTERS = "abcd"
POLICY, SCORER = "outputs/toy/sft/latest/actor", "outputs/toy/reward/latest/reward"
CHAIN = """\
project: toy
model: {{path: {model}}}
data: {{train: [{kind}-train.jsonl], eval: [{kind}-eval.jsonl], max_prompt_tokens: 8}}
trainer: {{num_steps: {steps}, prompts_per_step: 32, max_tokens_per_microbatch: 2048}}
actor: {{optimizer: {{lr: {lr}}}}}
logging: {{console: plain, trackers: []}}
"""


def write_data(directory: Path) -> None:
    """Write short words as prompts, and responses of four letters. Chosen responses contain more a's."""
    rng = random.Random(0)

    def word(letters: str, count: int) -> str:
        return "".join(rng.choices(letters, k=count))

    def pair() -> dict[str, str]:
        chosen, rejected = sorted((word(LETTERS, 4), word(LETTERS, 4)), key=lambda text: -text.count("a"))
        if chosen.count("a") == rejected.count("a"):
            return pair()
        return {"prompt": word("xyz", 3) + "=", "chosen": chosen, "rejected": rejected}

    pairs = [pair() for _ in range(900)]
    splits = {"train": pairs[:800], "eval": pairs[800:]}
    for split, held in splits.items():
        answered = [{"prompt": row["prompt"], "response": rng.choice([row["chosen"], row["rejected"]])} for row in held]
        for kind, rows in {"sft": answered, "reward": held, "ppo": answered[:64]}.items():
            (directory / f"{kind}-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


EMITTED = {  # metrics of the reference table that each link reports
    "sft": ("loss/sft", "actor/perplexity", "evaluate/perplexity", "throughput/<phase>_tokens_per_s"),
    "reward": ("loss/reward_model", "reward_model/accuracy", "reward_model/score_mean", "<role>/grad_norm"),
    "ppo": ("critic/explained_variance", "critic/clip_fraction", "loss/value", "<role>/lr", "reward/<part>_mean"),
}


def train(directory: Path, name: str, model: str, steps: int, lr: str, *overrides: str) -> list[dict[str, Any]]:
    """Run one link of the chain. Returns its metrics."""
    (directory / f"{name}.yaml").write_text(CHAIN.format(model=model, kind=name, steps=steps, lr=lr))
    done = run(directory, "-m", "rlhf_mcore.cli.main", "train", f"{name}.yaml", f"experiment={name}", *overrides)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stdout
    assert_registered(directory / "outputs" / "toy" / name, *EMITTED[name])
    return lines(directory / "outputs" / "toy" / name / "metrics.jsonl")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chain")
    write_data(directory)
    save_model(directory / "model", "qwen3", seed=1)
    return directory


@pytest.fixture(scope="module")
def fine_tuned(workspace: Path) -> list[dict[str, Any]]:
    """Return the metrics of 60 steps of fine-tuning, which stopped after step 30 and continued."""
    for steps in (30, 60):
        metrics = train(workspace, "sft", "model", steps, "3e-3", "algorithm=sft", "evaluate.every=30")
    return metrics


@pytest.fixture(scope="module")
def scorer(workspace: Path, fine_tuned: Any) -> list[dict[str, Any]]:
    """Return the metrics of a reward model that starts from the fine-tuned model."""
    return train(workspace, "reward", POLICY, 60, "1e-3", "algorithm=reward_model")


@pytest.fixture(scope="module")
def ppo(workspace: Path, scorer: Any) -> list[dict[str, Any]]:
    """Return the metrics of PPO from the fine-tuned model, with the reward model."""
    settings = ["algorithm=ppo", "critic.optimizer.lr=1e-3", "reward.rules=[]", f"reward.model.path={SCORER}"]
    settings += ["rollout.engine=hf", "rollout.sampling={n: 2, max_new_tokens: 8}"]
    return train(workspace, "ppo", POLICY, 12, "1e-3", *settings)


@pytest.mark.ci
def test_fine_tuning_finds_the_form_of_the_responses(workspace: Path, fine_tuned: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    held_out = [row["evaluate/perplexity"] for row in fine_tuned if "evaluate/perplexity" in row]
    assert [row["step"] for row in fine_tuned] == list(range(61)), "both runs have one record"
    assert len(held_out) == 3, "before, after 30 steps and after the last one"
    # The optimum: four letters of four equally likely ones, then a certain end, which is 4 ** (4 / 5) per token.
    assert held_out[0] > 20 and 2.9 < held_out[-1] < 4
    model, tokenizer = (kind.from_pretrained(workspace / POLICY) for kind in (AutoModelForCausalLM, AutoTokenizer))
    prompt = tokenizer("xyz=", return_tensors="pt", add_special_tokens=False)
    text = tokenizer.decode(
        model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, 4:], skip_special_tokens=True
    )
    assert len(text) == 4 and set(text) <= set(LETTERS)


def test_the_reward_model_orders_held_out_pairs(workspace: Path, scorer: Any) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    first, last = scorer[0], scorer[-1]
    assert first["evaluate/accuracy"] == 0.5, "a fresh head says the same of both"
    assert last["evaluate/accuracy"] > 0.9 and last["evaluate/margin"] > 0
    path = workspace / SCORER
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert model.config.num_labels == 1

    def score(row: dict[str, str], which: str) -> float:
        ids = tokenizer(row["prompt"] + row[which], add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            return float(model(torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], 1)).logits[0, 0])

    rows = lines(workspace / "reward-eval.jsonl")
    margins = [score(row, "chosen") - score(row, "rejected") for row in rows]
    assert sum(margins) / len(margins) == pytest.approx(last["evaluate/margin"], rel=1e-4)
    assert sum(margin > 0 for margin in margins) / len(margins) == pytest.approx(last["evaluate/accuracy"])


def test_ppo_raises_the_score_of_the_reward_model(ppo: Any) -> None:
    rewards = [row["reward/mean"] for row in ppo if "reward/mean" in row]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 1.0
