"""Make models and prompts for the examples of environments and agents. The models cannot do these tasks well yet.

    python tools/make_environments.py guess --out guess
    python tools/make_environments.py calculator --out calculator
    python tools/make_environments.py repair --out repair

writes ``OUT/model``, ``OUT/train.jsonl`` and ``OUT/eval.jsonl``: a tiny Qwen3 and the quickstart's tokenizer with an additional token
for the role ``tool``.

- ``guess``: the model guesses a number from 1 to 7, and the environment answers "higher" or "lower". The model is fitted to a player
  who first follows these hints, and later only with probability ``HEEDS``. Three guesses are always enough.
- ``calculator``: products of two-digit numbers. The model is fitted to a pupil who first uses the calculator, by
  ``<tool>calculator 47*86</tool>``, and later only with probability ``CALLS``, and otherwise writes a wrong number.
- ``repair``: a file contains a wrong operator, and a test shows the expected result. The model is fitted to a programmer who first
  edits until the test passes. Later, after a failure, the programmer tries another edit only with probability ``HEEDS``, and
  otherwise repeats the same edit.

As in the quickstart, player and pupil become careless in the last part of the fit (``CARELESS_FROM``). The model therefore can do the
task, but prefers not to.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from make_quickstart import END, MARK, ROLES, Fit, learning_rate, make_model, make_tokenizer, progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

HIGHEST, GUESSES, HEEDS = 7, 3, 0.25
CALLS = 0.2
TRIES = 3
RESULTS: dict[str, Callable[[int, int], int]] = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
CARELESS_FROM = 0.75
Episode = list[tuple[str, str]]  # (role, content)


def play(rng: random.Random, careless: bool) -> Episode:
    """Make at most three guesses in the remaining range. A careless player mostly ignores the hints."""
    number, low, high = rng.randint(1, HIGHEST), 1, HIGHEST
    said: Episode = [("user", "guess")]
    for _ in range(GUESSES):
        heeds = not careless or rng.random() < HEEDS
        guess = rng.randint(low, high) if heeds else rng.randint(1, HIGHEST)
        said.append(("assistant", str(guess)))
        if guess == number:
            break
        said.append(("user", "higher" if guess < number else "lower"))
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
    return said


def multiply(rng: random.Random, careless: bool) -> Episode:
    """Multiply with the calculator. A careless pupil mostly guesses."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    said: Episode = [("user", f"{a}*{b}=")]
    if not careless or rng.random() < CALLS:
        said += [("assistant", f"<tool>calculator {a}*{b}</tool>"), ("tool", str(a * b))]
        return [*said, ("assistant", f"{MARK} {a * b}")]
    return [*said, ("assistant", f"{MARK} {rng.randint(100, 9999)}")]


def repair(rng: random.Random, careless: bool) -> Episode:
    """Edit a function until its test passes. A careless programmer mostly repeats the same edit."""
    a, b, sign = broken(rng)
    said: Episode = [("user", f"f({a},{b})={RESULTS[sign](a, b)}")]
    untried, tried = list(RESULTS), ""
    for _ in range(TRIES):
        if not careless or not tried or rng.random() < HEEDS:
            tried = rng.choice(untried)
            untried.remove(tried)
        said.append(("assistant", f"<edit>a{tried}b</edit>"))
        if tried == sign:
            break
        said.append(("tool", f"AssertionError: {RESULTS[tried](a, b)}"))
    return said


def broken(rng: random.Random) -> tuple[int, int, str]:
    """Sample two numbers and an operator, such that no other operator gives the same result."""
    while True:
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        if len({result(a, b) for result in RESULTS.values()}) == len(RESULTS):
            return a, b, rng.choice(list(RESULTS))


def repair_row(rng: random.Random) -> dict[str, object]:
    """Return a task with its container: a file, a visible test and a hidden test."""
    a, b, sign = broken(rng)
    seen = f"from calc import f\nassert f({a}, {b}) == {RESULTS[sign](a, b)}, f({a}, {b})\n"
    hidden = f"from calc import f; assert f(17, 5) == {RESULTS[sign](17, 5)}"
    files = {"calc.py": "def f(a, b): return a/b\n", "test_seen.py": seen}
    container = json.dumps({"files": files, "tests": f"python3 -c '{hidden}'"})
    prompt = [{"role": "user", "content": f"f({a},{b})={RESULTS[sign](a, b)}"}]
    return {"prompt": prompt, "data_source": "examples/repair", "answer": "", "extra_info": {"container": container}}


def rows(kind: str, count: int, seed: int) -> list[dict[str, object]]:
    """Return prompts in the format of a data set."""
    rng = random.Random(seed)
    if kind == "repair":
        return [repair_row(rng) for _ in range(count)]
    episodes: list[dict[str, object]] = []
    for _ in range(count):
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        question, answer = ("guess", "") if kind == "guess" else (f"{a}*{b}=", str(a * b))
        prompt = [{"role": "user", "content": question}]
        episodes.append({"prompt": prompt, "data_source": f"examples/{kind}", "answer": answer})
    return episodes


def encode(tokenizer: PreTrainedTokenizerFast, said: Episode) -> tuple[list[int], list[int]]:
    """Return the tokens of an episode, and labels: the same tokens, with -100 for tokens that the policy did not write."""
    tokens: list[int] = []
    labels: list[int] = []
    for role, content in said:
        head = tokenizer(f"<|{role}|>", add_special_tokens=False).input_ids
        body = tokenizer(content + END, add_special_tokens=False).input_ids
        tokens += head + body
        labels += [-100] * len(head) + (body if role == "assistant" else [-100] * len(body))
    return tokens, labels


def fit_model(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    draw: Callable[[random.Random, bool], Episode],
    fit: Fit,
    seed: int,
) -> None:
    """Fit the model to the policy's tokens in episodes."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=fit.lr, betas=(0.9, 0.98), weight_decay=0.01)
    with progress(fit) as report:
        for step in range(fit.steps):
            careless = step >= CARELESS_FROM * fit.steps
            episodes = [encode(tokenizer, draw(rng, careless)) for _ in range(fit.batch_size)]
            tokens = pad_sequence([torch.tensor(ids) for ids, _ in episodes], batch_first=True)
            labels = pad_sequence([torch.tensor(ids) for _, ids in episodes], batch_first=True, padding_value=-100)
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
            optimizer.param_groups[0]["lr"] = learning_rate(fit, step)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            report(step + 1, loss.item())


DRAWS = {"guess": play, "calculator": multiply, "repair": repair}


def main(argv: Sequence[str] | None = None) -> int:
    """Make model and prompts. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Make the models and prompts of the examples of environments and agents."
    )
    parser.add_argument("kind", choices=list(DRAWS))
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fit-steps", type=int, default=150, help="updates of the supervised fit")
    options = parser.parse_args(argv)
    started = time.monotonic()
    import torch
    from transformers.utils import logging

    torch.set_num_threads(options.threads)
    tokenizer = make_tokenizer((*ROLES, "tool"))
    model = make_model(tokenizer, 3 if options.kind == "calculator" else 2, options.seed)
    fit_model(model, tokenizer, DRAWS[options.kind], Fit(options.fit_steps, 64, 2e-3), options.seed)
    logging.disable_progress_bar()
    model.save_pretrained(options.out / "model")
    tokenizer.save_pretrained(options.out / "model")
    for name, count in (("train", 512), ("eval", 100)):
        lines = [json.dumps(row) for row in rows(options.kind, count, options.seed + len(name))]
        (options.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"made model and prompts in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
