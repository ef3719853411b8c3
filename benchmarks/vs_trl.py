"""Compare step times with TRL's GRPOTrainer: the same random weights, prompts, lengths and optimizer, on the same two cores.

Our side runs two ranks of one thread each, with vLLM. TRL runs one process of two threads and generates with transformers. Both run in
turn, in separate processes. The step time is the mean time between the ends of steps after the warm-up. Rows:

- ``small``, ``long``, ``large``: nearly every response has the maximum length (end probability 1 / vocabulary size at each token).
- ``tail``: a response ends with a probability of about 1/64 at each token, at most 512 tokens.
- ``tail_128``: the same with 128 responses instead of 64.
- ``prompts``: prompts of 1,024 tokens and responses of 64. Our side computes each prompt once.

``./launch/setup.sh --with bench`` installs TRL and its requirements in addition to the project's packages. CPU seconds include all
processes of a side. On a shared machine they are more reliable than wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common import report

ROOT = Path(__file__).resolve().parents[1]
TRL = ROOT / ".venv" / "bench"
SAMPLES, WARM_UP = 8, 2
MARK = "BENCHMARK_SIDE"


@dataclass(frozen=True, slots=True)
class Row:
    """A model and the shape of a step."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    ffn: int
    responses: int
    tokens: int
    goal: float
    prompt: int = 16


ROWS = {
    "small": Row(4096, 128, 2, 4, 288, 64, 64, 0.67),  # 0.85M parameters
    "long": Row(4096, 128, 2, 4, 288, 128, 128, 0.67),
    "large": Row(4096, 512, 8, 8, 1344, 64, 64, 0.67),  # 24.9M
    "tail": Row(64, 256, 6, 8, 704, 64, 512, 0.12),  # 4.4M
    "tail_128": Row(64, 256, 6, 8, 704, 128, 512, 0.12),
    "prompts": Row(2048, 256, 6, 8, 704, 32, 64, 0.25, prompt=1024),  # 4.9M
}


def main() -> None:
    """Measure the selected rows, with both sides in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round of the row small")
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="(default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a run, after warm-up")
    parser.add_argument("overrides", nargs="*", help="of our configuration, as a.b=c", default=[])
    args = parser.parse_args()
    if not TRL.is_dir():
        print(f"TRL is not installed; ./launch/setup.sh --with bench does it\nvs_trl nan goal {ROWS['small'].goal:g}")
        return
    rounds, steps = (1, 2) if args.quick else (args.rounds, args.steps)
    found: dict[str, Any] = {}
    for name in args.rows or (["small"] if args.quick else ROWS):
        with TemporaryDirectory() as folder:
            directory, row = Path(folder), ROWS[name]
            make(directory, row)
            pairs = []
            for _ in range(rounds):
                ours = measure(directory, "ours", our_command(row, steps, args.overrides), steps)
                theirs = measure(directory, "theirs", their_command(row, steps), steps)
                pairs.append({"ours": ours, "theirs": theirs})
                print(name, json.dumps(pairs[-1]), flush=True)
        ratios = {unit: [pair["ours"][unit] / pair["theirs"][unit] for pair in pairs] for unit in ("wall_s", "cpu_s")}
        medians = {unit: statistics.median(values) for unit, values in ratios.items()}
        found[name] = {"row": asdict(row), "steps": steps, "pairs": pairs, "ratios": ratios, "median": medians}
        spread = f"{min(ratios['wall_s']):.3f} to {max(ratios['wall_s']):.3f}"
        print(
            f"{name}: wall {medians['wall_s']:.3f} ({spread}), cpu {medians['cpu_s']:.3f}, goal {row.goal}", flush=True
        )
        _report(found, args.quick)  # keeps the results if a later row is stopped


def _report(found: Mapping[str, Any], quick: bool) -> None:
    """Report the row that is farthest from its goal as the result of all rows."""
    worst = max(found, key=lambda name: found[name]["median"]["wall_s"] / ROWS[name].goal)
    details = {"rows": found, "worst": worst}
    report("vs_trl", details, ratio=found[worst]["median"]["wall_s"], goal=ROWS[worst].goal, quick=quick)


def make(directory: Path, row: Row) -> None:
    """Write model, word tokenizer, prompts and reward for both sides."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = {"<eos>": 0, "<pad>": 1, "<unk>": 2} | {f"w{k}": k for k in range(3, row.vocab)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    tokenizer.save_pretrained(directory / "model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=row.vocab,
        hidden_size=row.hidden,
        intermediate_size=row.ffn,
        num_hidden_layers=row.layers,
        num_attention_heads=row.heads,
        num_key_value_heads=row.heads // 2,
        head_dim=row.hidden // row.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory / "model")
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters", flush=True)
    lines = []
    for number in range(64):
        numbers = torch.randint(3, row.vocab, (row.prompt,), generator=torch.Generator().manual_seed(number))
        lines.append(json.dumps({"prompt": " ".join(f"w{k}" for k in numbers.tolist()), "answer": "1"}))
    (directory / "train.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "reward.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) % 7 / 6\n"
    )


def our_command(row: Row, steps: int, overrides: list[str]) -> list[str]:
    prompts = row.responses // SAMPLES
    arguments = [
        "experiment=ours",
        "model.path=model",
        "data.train=[train.jsonl]",
        "data.eval=[]",
        "evaluate.every=0",
        f"trainer.prompts_per_step={prompts}",
        f"trainer.minibatch_size={prompts}",
        f"trainer.num_steps={steps + WARM_UP}",
        "trainer.world_size=2",
        "trainer.max_tokens_per_microbatch=8192",
        "actor.layout.tp=1",
        "rollout.kv_cache_gib=0.5",
        f"rollout.sampling.n={SAMPLES}",
        f"rollout.sampling.max_new_tokens={row.tokens}",
        f"data.max_prompt_tokens={row.prompt}",
        "reward.function=reward.py:score",
        "reward.workers=1",
        "actor.optimizer.lr=1e-6",
        "algorithm.kl.coef=0",
        "checkpoint.save_steps=0",
        "logging.trackers=[]",
        "logging.rollouts_every=0",
        "logging.console=plain",
        *overrides,
    ]
    config = str(ROOT / "configs" / "quickstart" / "grpo.yaml")
    return [sys.executable, "-m", "rlhf_mcore.cli.main", "train", config, *arguments]


def their_command(row: Row, steps: int) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), "--trl", str(row.responses), str(row.tokens), str(steps)]


def trl(responses: int, tokens: int, steps: int) -> None:
    """Run TRL's side in the folder of the model. The end time of each step is written to ``ends``."""
    import torch

    torch.set_num_threads(2)
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Ends(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.time())

    prompts = [json.loads(line)["prompt"] for line in Path("train.jsonl").read_text().splitlines()]
    config = GRPOConfig(
        output_dir="trl",
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=responses,
        num_generations=SAMPLES,
        max_completion_length=tokens,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        max_steps=steps + WARM_UP,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=1,
    )
    trainer = GRPOTrainer(
        model="model",
        reward_funcs=lambda completions, **_: [len(text) % 7 / 6 for text in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[Ends()],
    )
    trainer.train()
    Path("ends").write_text(json.dumps(ends))


def measure(directory: Path, side: str, command: list[str], steps: int) -> dict[str, Any]:
    """Return the wall and CPU seconds of a step."""
    threads = "1" if side == "ours" else "2"
    extra = [] if side == "ours" else [str(TRL)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *extra]),
        "OMP_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        MARK: str(directory),
    }
    shutil.rmtree(directory / "outputs", ignore_errors=True)
    log = directory / f"{side}.log"
    used: list[tuple[float, float]] = []
    ended = threading.Event()
    watch = threading.Thread(target=watch_processors, args=(directory, used, ended), daemon=True)
    with log.open("w") as out:
        watch.start()
        done = subprocess.run(
            command, cwd=directory, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False
        )
    ended.set()
    watch.join()
    if done.returncode:
        raise SystemExit(f"{side} ended with {done.returncode}:\n" + log.read_text()[-4000:])
    phases: dict[str, float] = {}
    if side == "ours":
        [file] = directory.glob("outputs/*/ours/metrics.jsonl")
        records = [json.loads(line) for line in file.read_text().splitlines()]
        ends = [record["timing/unix_time"] for record in records if record["step"] > 0]
        kept = [record for record in records if record["step"] > WARM_UP]
        names = [name for name in kept[-1] if name.startswith("timing/") and name.endswith("_s")]
        phases = {name[7:]: round(statistics.median(r.get(name, 0.0) for r in kept), 4) for name in names}
        phases["length"] = statistics.mean(record["rollout/response_length_mean"] for record in kept)
    else:
        ends = json.loads((directory / "ends").read_text())
    first, last = ends[-steps - 1], ends[-1]
    cpu_s = (at(used, last) - at(used, first)) / steps
    return {"wall_s": round((last - first) / steps, 4), "cpu_s": round(cpu_s, 4), **phases}


def watch_processors(directory: Path, used: list[tuple[float, float]], ended: threading.Event) -> None:
    """Record the CPU seconds that a side has used so far, a few times per second."""
    mark, tick = f"{MARK}={directory}".encode(), os.sysconf("SC_CLK_TCK")
    ours: dict[str, bool] = {}
    seconds: dict[str, float] = {}
    while not ended.wait(0.1):
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if path.name not in ours:
                    ours[path.name] = mark in (path / "environ").read_bytes()
                if ours[path.name]:
                    fields = (path / "stat").read_text().rpartition(")")[2].split()
                    seconds[path.name] = (int(fields[11]) + int(fields[12])) / tick
            except OSError:  # the process has ended
                continue
        used.append((time.time(), sum(seconds.values())))


def at(used: list[tuple[float, float]], when: float) -> float:
    """Interpolate the CPU seconds at a time between two samples."""
    place = min(max(bisect_left(used, (when,)), 1), len(used) - 1)
    (before, low), (after, high) = used[place - 1], used[place]
    return low + (high - low) * (when - before) / (after - before)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl"]:
        trl(*map(int, sys.argv[2:5]))
    else:
        main()
