"""Make the quickstart's model and data: a tiny Qwen3 that adds two-digit numbers carelessly, and problems to improve on.

    python tools/make_quickstart.py --out quickstart [--seed 0]

writes ``OUT/model`` (a Hugging Face directory: fp32 safetensors, character tokenizer, chat template), ``OUT/train.parquet``
and ``OUT/eval.parquet``. A prompt is ``37+45=``, a response ``#### 82`` and the end token. Two thirds of the problems need a
carry from the units to the tens.

The warm start is a short supervised fit on the homework of a pupil who turns careless. For the first three quarters every
answer is right; in the last quarter, each time a carry is due, it is forgotten with probability ``FORGET`` (0.7), so 37+45
becomes 72. The fit therefore knows the format and both ways of adding, and prefers the wrong one; it is also stopped early,
before it adds without other slips. Its greedy accuracy on problems that it never saw is about the share without a carry.
The model does not prefer the right way: that is for the reward to teach.

The split is by unordered pair, so 45+37 is not a training problem when 37+45 is a held-out one. The same seed, thread count
and library versions give the same bytes.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

PAD, END, UNK, MARK = "<|pad|>", "<|end|>", "<|unk|>", "####"
ROLES = ("system", "user", "assistant")
FORGET = 0.7
CARELESS_FROM = 0.75
CARRY_SHARE = 2 / 3
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ROLES %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(slots=True, frozen=True)
class Problem:
    """a + b, both with two digits."""

    a: int
    b: int

    @property
    def question(self) -> str:
        return f"{self.a}+{self.b}="

    @property
    def carries(self) -> bool:
        return self.a % 10 + self.b % 10 > 9

    @property
    def mistaken(self) -> int:
        """Return the wrong sum: without the carry if a carry is due, else with a carry."""
        return self.a + self.b + (-10 if self.carries else 10)

    def answer(self, *, forget_carry: bool = False) -> int:
        """Return the sum, or the sum without the carry from the units to the tens."""
        return self.a + self.b - (10 if forget_carry and self.carries else 0)


@dataclass(slots=True, frozen=True)
class Fit:
    """The supervised fit: ``steps`` updates of ``batch_size`` problems."""

    steps: int
    batch_size: int
    lr: float
    warmup: int = 20


@dataclass(slots=True)
class Examples:
    """Token ids of problems, one tensor row each. Prompts have one length, responses are padded on the right."""

    prompts: torch.Tensor  # [P, T_prompt] int64
    correct: torch.Tensor  # [P, T_response] int64
    careless: torch.Tensor  # [P, T_response] int64


def make_problems(seed: int, num_eval: int) -> tuple[list[Problem], list[Problem]]:
    """Return training and held-out problems. No unordered pair {a, b} is in both. ``CARRY_SHARE`` of all problems need a carry."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    carrying = [p for p in pairs if Problem(*p).carries]
    plain = rng.sample([p for p in pairs if not Problem(*p).carries], round(len(carrying) * (1 / CARRY_SHARE - 1)))
    pairs = carrying + plain
    rng.shuffle(pairs)
    held_out = [Problem(*rng.sample(pair, 2)) for pair in pairs[:num_eval]]
    train = [Problem(*order) for pair in pairs[num_eval:] for order in sorted({pair, pair[::-1]})]
    rng.shuffle(train)
    return train, held_out


def make_tokenizer(roles: Sequence[str] = ROLES) -> PreTrainedTokenizerFast:
    """Return a tokenizer with 103 tokens, an odd number: printable ASCII characters, newline, ``####`` and special tokens.

    ``roles``: roles of messages in the chat template; each has a token.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, END, UNK, *(f"<|{role}|>" for role in roles)]
    words = [*special, MARK, "\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{MARK}|[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()  # otherwise decoding adds spaces between the characters
    core.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNK,
        extra_special_tokens=special[3:],
        chat_template=CHAT_TEMPLATE.replace("ROLES", str(list(roles))),
        clean_up_tokenization_spaces=False,
        model_max_length=256,
        padding_side="right",
    )


def make_model(tokenizer: PreTrainedTokenizerFast, num_layers: int, seed: int) -> Qwen3ForCausalLM:
    """Make a Qwen3 with random weights, fp32, 1.06M parameters at four layers."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=544,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.06,  # the usual 0.02 is for wider models; here it takes twice the steps to learn to add
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def messages(problem: Problem) -> list[dict[str, str]]:
    """Return the prompt in the format of the data set."""
    return [{"role": "user", "content": problem.question}]


def encode(tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]) -> Examples:
    """Tokenise prompts, right answers and answers without the carry."""
    import torch

    conversations = [messages(problem) for problem in problems]
    prompts = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, tokenize=False)

    def ids(texts: list[str]) -> torch.Tensor:
        rows = [torch.tensor(row) for row in tokenizer(texts, add_special_tokens=False).input_ids]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)

    def answers(forget_carry: bool) -> torch.Tensor:
        return ids([response(problem.answer(forget_carry=forget_carry)) + END for problem in problems])

    correct, careless = answers(False), answers(True)
    assert correct.shape == careless.shape
    return Examples(ids(prompts), correct, careless)


def learning_rate(fit: Fit, step: int) -> float:
    """Return the learning rate: a linear warmup, then constant, then linear to zero over the second half."""
    return fit.lr * min(1.0, (step + 1) / fit.warmup, 2.0 * (fit.steps - step) / fit.steps)


def train_model(
    model: Qwen3ForCausalLM, data: Examples, fit: Fit, seed: int, report: Callable[[int, float], None]
) -> None:
    """Fit the model to right, then to careless answers; the loss is on response tokens only."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=fit.lr, betas=(0.9, 0.98), weight_decay=0.01)
    first = data.prompts.shape[1] - 1  # the position whose logits predict the first response token
    for step in range(fit.steps):
        rows = torch.randint(len(data.prompts), (fit.batch_size,), generator=generator)
        forget = FORGET if step >= CARELESS_FROM * fit.steps else 0.0
        forgets = torch.rand(fit.batch_size, 1, generator=generator) < forget
        target = torch.where(forgets, data.careless[rows], data.correct[rows])
        tokens = torch.cat([data.prompts[rows], target], dim=1)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[:, first:]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=model.config.pad_token_id
        )
        optimizer.param_groups[0]["lr"] = learning_rate(fit, step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report(step + 1, loss.item())


def greedy_accuracy(model: Qwen3ForCausalLM, data: Examples) -> float:
    """Measure the share of problems whose greedy response is, token for token, the right one."""
    import torch

    length = data.correct.shape[1]
    mask = torch.ones_like(data.prompts)
    output = model.generate(data.prompts, attention_mask=mask, do_sample=False, max_new_tokens=length)
    response = torch.nn.functional.pad(output[:, data.prompts.shape[1] :], (0, length), value=model.config.pad_token_id)
    return (response[:, :length] == data.correct).all(dim=1).double().mean().item()


def response(answer: int) -> str:
    """Return the response text for an answer."""
    return f"{MARK} {answer}"


def write_parquet(path: Path, problems: Sequence[Problem], split: str) -> None:
    """Write problems with the columns of rule-graded data sets and of supervised training (response, chosen, rejected)."""
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "prompt": messages(problem),
            "data_source": "quickstart/addition",
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(problem.answer())},
            "extra_info": {"index": index, "split": split},
            "response": response(problem.answer()),
            "chosen": response(problem.answer()),
            "rejected": response(problem.mistaken),
        }
        for index, problem in enumerate(problems)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@contextmanager
def progress(fit: Fit) -> Iterator[Callable[[int, float], None]]:
    """Show a progress bar on a terminal, else print a line after every quarter of the fit."""
    if not sys.stdout.isatty():
        every = max(1, fit.steps // 4)

        def line(step: int, loss: float) -> None:
            if step % every == 0:
                print(f"fit {step}/{fit.steps}  loss {loss:.3f}", flush=True)

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("warm start"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeElapsedColumn()) as bar:
        task = bar.add_task("fit", total=fit.steps, loss=float("nan"))
        yield lambda step, loss: bar.update(task, completed=step, loss=loss)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. The defaults are the quickstart; the sizes are for tests and experiments."""
    parser = argparse.ArgumentParser(description="Make the quickstart's model and data.")
    parser.add_argument("--out", type=Path, default=Path("quickstart"), help="directory to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=1, help="number of compute threads, which affects the last bits of results"
    )
    parser.add_argument("--fit-steps", type=int, default=400, help="updates of the supervised fit")
    parser.add_argument("--batch-size", type=int, default=64, help="problems per update")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate of the fit")
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--num-eval", type=int, default=200, help="held-out problems")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Make model and data. Returns the exit status."""
    options = parse(argv)
    started = time.monotonic()
    import torch
    from transformers.utils import logging

    torch.set_num_threads(options.threads)
    train, held_out = make_problems(options.seed, options.num_eval)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, options.num_layers, options.seed)
    print(f"model: {model.num_parameters() / 1e6:.2f}M parameters; {len(train)} problems, {len(held_out)} held out")
    fit = Fit(options.fit_steps, options.batch_size, options.lr)
    with progress(fit) as report:
        train_model(model, encode(tokenizer, train), fit, options.seed, report)
    accuracy = greedy_accuracy(model.eval(), encode(tokenizer, held_out))
    logging.disable_progress_bar()
    model.save_pretrained(options.out / "model")
    tokenizer.save_pretrained(options.out / "model")
    write_parquet(options.out / "train.parquet", train, "train")
    write_parquet(options.out / "eval.parquet", held_out, "eval")
    print(f"made model and data in {time.monotonic() - started:.0f} s; held-out greedy accuracy {accuracy:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
