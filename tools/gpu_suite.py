#!/usr/bin/env python3
"""What only a GPU can show, by one command on a machine with one of them:

    python tools/gpu_suite.py                     all parts, a Markdown table at the end; results and logs in gpu_suite/
    python tools/gpu_suite.py --first             the parts that show the most, in five minutes
    python tools/gpu_suite.py --only parity mfu   some parts
    python tools/gpu_suite.py --pack suite.tar.gz one archive of this checkout and the pure-Python packages that it needs

The machine needs torch >= 2.10, transformers, Python 3.11 or 3.12 and no network. Unpack the archive there and run the command in it.
The parts that show the most come first, and their table is printed when they are done. Without vLLM its parts are skipped by name, and
transformers generates. Every part is a process of its own with its own time limit, so one that fails hides no other. Without a GPU, or
with ``--device cpu``, the same code runs on tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "site"  # of an unpacked archive
PACKED = ("rlhf_mcore", "benchmarks", "tools", "configs", "tests/distributed", "tests/gpu")
PACKED_FILES = ("setup.py", "README.md", "LICENSE", "tests/*.py")
STANDINS = ROOT / "tools" / "standins"  # for xxhash, which is compiled
DISTRIBUTIONS = (
    "megatron-core",
    "einops",
    "omegaconf",
    "antlr4-python3-runtime",
    "math-verify",
    "latex2sympy2_extended",
    "rich",
    "markdown-it-py",
    "mdurl",
    "pygments",
)
MAX_ARCHIVE = 40 * 10**6
BF16_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense, of NVIDIA's data sheets

Table = list[list[str]]  # rows of the table: what, measured, expected, verdict


@dataclass(frozen=True, slots=True)
class Part:
    """Something to show. ``run`` gets the device and an empty folder, and returns its rows."""

    name: str
    limit_s: int
    run: Callable[[str, Path], Table]
    needs_vllm: bool = False
    in_process: bool = False  # its models are in the part's own process


def row(what: str, measured: object, expected: str = "-", ok: bool | None = None) -> list[str]:
    """Write a line of the table; ``ok`` is None where there is nothing to judge."""
    return [what, str(measured), expected, "-" if ok is None else "ok" if ok else "WRONG"]


# ------------------------------------------------------------------------------------------------------------------ parts
def machine(device: str, folder: Path) -> Table:
    """Describe the machine."""
    import torch

    from rlhf_mcore.expected_kernels import expected_kernels, kernels_text

    on_cuda = device == "cuda"
    name = torch.cuda.get_device_name() if on_cuda else "CPU"
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    known = metadata.packages_distributions()  # the build of vLLM for CPUs has another name than its module
    for module, package in (("transformers", "transformers"), ("megatron", "megatron-core"), ("vllm", "vllm")):
        names = [name for name in known.get(module, ()) if name.startswith(package)]
        versions[package] = metadata.version(names[0]) if names else "absent"
    return [
        row("device", name),
        row("versions", ", ".join(f"{package} {version}" for package, version in versions.items())),
        row("expected kernels", kernels_text(expected_kernels(on_cuda)).removeprefix("kernels: ")),
    ]


def parity(device: str, folder: Path) -> Table:
    """Compare logprobs of dense and MoE models with transformers, packed and padded, fp32 without TF32."""
    import torch

    from rlhf_mcore.mcore.groups import build_groups
    from rlhf_mcore.parallel.layout import ParallelLayout
    from tests.distributed import models
    from tests.distributed.setting import Settings, batch_for, build, hf_logprobs, load_hf, response_values, rows, start

    platform = start()
    torch.backends.cuda.matmul.allow_tf32 = False
    groups = build_groups(ParallelLayout(1))
    assert groups is not None
    table = []
    for name in ("llama", "qwen2", "qwen3_tied", "qwen3_moe", "qwen3_moe_mixed"):
        models.make(name, path := folder / name)
        with torch.no_grad():
            expected = [hf_logprobs(load_hf(path), line) for line in rows()]
        _, actor = build(path, groups, platform, Settings())
        for packing in (True, False):
            actor.model.trainer.packing = packing
            batch = batch_for(rows())
            values = response_values(batch, actor.compute_logprobs(batch))
            worst = max(float((torch.tensor(values[k]) - expected[k][0]).abs().max()) for k in values)
            what = f"logprobs of {name}, {'packed' if packing else 'padded'}, from transformers'"
            table.append(row(what, f"{worst:.1e}", "< 1e-3", worst < 1e-3))
    return table


def bf16(device: str, folder: Path) -> Table:
    """Compare logprobs in bf16, by Transformer Engine's layers where installed and by Megatron's own, with transformers in fp32."""
    import torch

    from rlhf_mcore.mcore.groups import build_groups
    from rlhf_mcore.parallel.layout import ParallelLayout
    from tests.distributed import models
    from tests.distributed.setting import Settings, batch_for, build, hf_logprobs, load_hf, response_values, rows, start

    platform = start()
    groups = build_groups(ParallelLayout(1))
    assert groups is not None
    has_te = device == "cuda" and find_spec("transformer_engine") is not None
    table = [] if has_te else [row("Transformer Engine", "skipped: not installed, or no CUDA device")]
    for name in ("llama", "qwen3_moe"):
        models.make(name, path := folder / name)
        with torch.no_grad():
            expected = torch.cat([hf_logprobs(load_hf(path), line)[0] for line in rows()])
        for layers in ("te", "local") if has_te else ("local",):
            _, actor = build(path, groups, platform, Settings(dtype="bf16", layer_spec=layers))
            batch = batch_for(rows())
            values = response_values(batch, actor.compute_logprobs(batch))
            gap = (torch.cat([torch.tensor(values[k]) for k in sorted(values)]) - expected).abs()
            mean, what = float(gap.mean()), f"bf16 logprobs of {name}, layers {layers}: mean and largest difference"
            table.append(row(what, f"{mean:.1e}, {float(gap.max()):.1e}", "mean < 3e-2", mean < 3e-2))
    return table


def host_syncs(device: str, folder: Path) -> Table:
    """Check that the device waits for the host nowhere between the first forward and the last backward pass of an update."""
    import torch

    if device != "cuda":
        return [row("host syncs of an update", "skipped: a CPU has none")]
    model, microbatches, _ = _sized(device, folder)
    model.add_optimizer(_optimizer())
    loss = _mean_logprob(model, len(microbatches))
    model.forward_backward(microbatches, loss)  # kernels are chosen and memory is allocated
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    place = "none"
    try:
        model.forward_backward(microbatches, loss)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).parent.name}/{Path(frame.filename).name}:{frame.lineno} {frame.line}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [row("first host sync of an update", place, "none", place == "none")]


def sleep(device: str, folder: Path) -> Table:
    """Check that vLLM sleeps at both levels, and has the trainer's weights after it: digests and canary."""
    rows = []
    for level in (1, 2):
        own = folder / f"level{level}"
        own.mkdir()
        settings = ("rollout.engine=vllm", f"rollout.sleep_level={level}", "bridge.verify=digest", "bridge.canary=true")
        rows += _trained(device, own, "grpo", "rollout.sampling.n=4", *settings, name=f"level {level}")
    return rows


def grpo(device: str, folder: Path) -> Table:
    """Train GRPO end to end."""
    return _trained(device, folder, "grpo", "rollout.sampling.n=4", "bridge.verify=digest", "algorithm.kl.coef=0.01")


def ppo(device: str, folder: Path) -> Table:
    """Train PPO end to end."""
    return _trained(device, folder, "ppo", "rollout.sampling.n=1", "critic.optimizer.lr=1e-4")


def vllm(device: str, folder: Path) -> Table:
    """Train the same with vLLM, which shares the device."""
    return _trained(device, folder, "grpo", "rollout.sampling.n=4", "rollout.engine=vllm", "bridge.verify=digest")


def engines(device: str, folder: Path) -> Table:
    """Train with what vLLM does by other kernels or paths on CUDA: weights of 8 bits, drafts, adapters, truncated draws, no sleep."""
    variants = {
        "int8": ("rollout.quantization=int8",),
        "drafts": ("rollout.speculative.method=ngram", "rollout.speculative.num_tokens=2"),
        "adapters": ("actor.lora.rank=8",),
        "top_p": ("rollout.sampling.top_p=0.9",),
        "no sleep": ("rollout.sleep=false",),
    }
    shared, rows = (
        ("rollout.sampling.n=4", "rollout.engine=vllm", "rollout.enforce_eager=true", "bridge.verify=digest"),
        [],
    )
    for name, settings in variants.items():
        (own := folder / name.replace(" ", "_")).mkdir()
        limit = 0.5 if name == "int8" else None  # another policy than the trainer's
        rows += _trained(device, own, "grpo", *shared, *settings, name=name, limit=limit)
    return rows


def resume(device: str, folder: Path) -> Table:
    """Train four steps in one go, and in two runs of two: the same metrics and weights, bit for bit."""
    _data(device, folder)
    exact = (
        "deterministic=true",
        "rollout.sampling.n=4",
        "checkpoint.save_steps=1",
        "checkpoint.save_total_limit=null",
    )
    _train(device, folder, "whole", *exact, "trainer.num_steps=4")
    _train(device, folder, "halves", *exact, "trainer.num_steps=2")
    _train(device, folder, "halves", *exact, "trainer.num_steps=4")
    whole, halves = (_metrics(folder, name) for name in ("whole", "halves"))
    differing = [
        f"step {a['step']} {name}"
        for a, b in zip(whole, halves, strict=True)
        for name in a
        if not name.startswith(("timing/", "throughput/", "memory/")) and a[name] != b.get(name)
    ]
    weights = [
        (folder / "outputs/suite" / name / "latest/actor/model.safetensors").read_bytes()
        for name in ("whole", "halves")
    ]
    return [
        row("metrics of a run in two parts that differ", ", ".join(differing[:3]) or "none", "none", not differing),
        row("its weights", "equal" if weights[0] == weights[1] else "differ", "equal", weights[0] == weights[1]),
    ]


def mfu(device: str, folder: Path) -> Table:
    """Forward, backward and update of a model of 1.5 billion parameters (tiny on the CPU), by the FLOPs of its matrices."""
    import torch

    model, microbatches, geometry = _sized(device, folder)
    tokens = sum(sum(microbatch.lengths) for microbatch in microbatches)
    model.add_optimizer(_optimizer())
    loss = _mean_logprob(model, len(microbatches))

    def step() -> None:
        model.forward_backward(microbatches, loss)
        model.step(1e-6)

    seconds = _timed(step, model.platform.synchronize)
    from rlhf_mcore.bridge.map.rules import hf_shapes

    shapes = hf_shapes(geometry)
    matrices = sum(torch.Size(shape).numel() for shape in shapes.values() if len(shape) == 2)
    if not geometry.tied_embeddings:  # tied, it is the output layer too
        matrices -= torch.Size(shapes["model.embed_tokens.weight"]).numel()
    length = microbatches[0].lengths[0]
    attention = (
        2 * 2 * geometry.num_layers * geometry.num_heads * geometry.head_dim * (length / 2)
    )  # scores, values; causal
    flops = 3 * (2 * matrices + attention) * tokens
    table = [
        row("parameters", f"{sum(torch.Size(shape).numel() for shape in shapes.values()) / 1e9:.3g} billion"),
        row(f"tokens/s of an update ({tokens} tokens in rows of {length})", f"{tokens / seconds:.0f}"),
        row("TFLOP/s", f"{flops / seconds / 1e12:.3g}"),
    ]
    if device == "cuda":
        name = torch.cuda.get_device_name()
        if peak := next((peak for known, peak in BF16_FLOPS.items() if known in name), None):
            table.append(row("MFU, bf16", f"{flops / seconds / peak:.3f}"))
        table.append(row("peak memory", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"))
    return table


def offload(device: str, folder: Path) -> Table:
    """Compare the ledger of what moves between device and host with what torch has allocated."""
    import torch

    if find_spec("rlhf_mcore.residency") is None:
        return [row("offload", "skipped: this version moves nothing")]
    from rlhf_mcore.residency.ledger import GRADIENTS, OPTIMIZER, WEIGHTS
    from rlhf_mcore.residency.sharing import DeviceSharing

    model, microbatches, _ = _sized(device, folder)
    model.add_optimizer(_optimizer())
    model.forward_backward(microbatches, _mean_logprob(model, len(microbatches)))
    model.step(1e-6)  # torch's Adam allocates its moments with the first one
    before = {p.name: p.tensor.flatten()[:7].clone() for p in model.local_parameters()}
    allocated = torch.cuda.memory_allocated if device == "cuda" else lambda: 0
    held = allocated()
    sharing = DeviceSharing(model.platform)
    began = time.perf_counter()
    model.share(sharing, "actor", (WEIGHTS, OPTIMIZER, GRADIENTS))
    sharing.settle()
    model.platform.synchronize()
    seconds, moved = time.perf_counter() - began, sum(part.num_bytes for part in sharing.parts)
    freed = held - allocated()
    with model.updating():
        model.movable.ready(OPTIMIZER)
        same = all(torch.equal(p.tensor.flatten()[:7], before[p.name]) for p in model.local_parameters())
    table = [
        row("bytes that the ledger says have left", f"{moved / 1e9:.3g} GB"),
        row("the first way to the host, its memory allocated", f"{seconds:.2f} s, {moved / 1e9 / seconds:.1f} GB/s"),
        row("weights after there and back", "equal" if same else "differ", "equal", same),
    ]
    if device == "cuda":
        off = abs(freed - moved) / moved
        table.append(row("what torch.cuda.memory_allocated fell by", f"{freed / 1e9:.3f} GB", "within 2 %", off < 0.02))
    return table + _by_layer(model, microbatches, folder)


def _by_layer(trained: Any, microbatches: Sequence[Any], folder: Path) -> Table:
    """Run a frozen model, whole and with layers that come to the device one by one."""
    import torch

    from rlhf_mcore.bridge.files.hf_files import HFReader
    from rlhf_mcore.bridge.files.transfer import load
    from rlhf_mcore.config.schema import RecomputeConfig
    from rlhf_mcore.mcore.build import BuildOptions, build_model
    from rlhf_mcore.residency.ledger import WEIGHTS
    from rlhf_mcore.residency.sharing import DeviceSharing

    platform, dtype = trained.platform, "bf16" if trained.config.bf16 else "fp32"
    options = BuildOptions(dtype, "auto", RecomputeConfig(), False, False, 0)
    model = build_model(trained.spec, trained.groups, platform, options)
    load(model.local_parameters(), model.spec.geometry, HFReader(folder / "model"))

    def forward() -> list[torch.Tensor]:
        return model.forward(
            microbatches, lambda outputs, part: model.logprobs_and_entropy(outputs, part, 1.0, with_entropy=False)[0]
        )

    whole, seconds = forward(), _timed(forward, platform.synchronize)
    sharing = DeviceSharing(platform)
    model.share(sharing, "reference", (WEIGHTS,), by_layer=True)
    weights = sum(part.num_bytes for part in sharing.parts)
    sharing.pop()
    with sharing.phase("reference"):
        same = all(map(torch.equal, forward(), whole))
    there = sharing.pop()["memory/reference_bytes"]
    return [
        row("logprobs with layers that come one by one", "equal" if same else "differ", "equal", same),
        row("weights that are there at a time", f"{there / 1e9:.3g} of {weights / 1e9:.3g} GB"),
        row("a pass so, and with all of them there", f"{_timed(forward, platform.synchronize):.3f} s, {seconds:.3f} s"),
    ]


def save(device: str, folder: Path) -> Table:
    """Measure how long a save in the background keeps training waiting, of weights, masters and moments."""
    from rlhf_mcore.bridge.files.export import Exporter
    from rlhf_mcore.config.schema import TrainerConfig
    from rlhf_mcore.parallel.collectives import world_group
    from rlhf_mcore.roles.model import MinibatchPlan, TrainedModel
    from rlhf_mcore.roles.role_files import RoleFiles

    model, _, geometry = _sized(device, folder)
    model.add_optimizer(cfg := _optimizer())
    trained = TrainedModel(
        model.groups.layout, model, model.spec, TrainerConfig(), optimizer=cfg, plan=MinibatchPlan(1), name="actor"
    )
    exporter = Exporter(model.local_parameters(), geometry, [str(folder / "model")], world_group(), bucket_bytes=2**28)
    files = RoleFiles("actor", trained, exporter)
    (target := folder / "checkpoint").mkdir()
    files.snapshot()(target)  # allocates what is kept
    begun = time.perf_counter()
    write = files.snapshot()
    stall = time.perf_counter() - begun
    model.optimizer.wait_for_reader()  # type: ignore[union-attr]
    until_update = time.perf_counter() - begun
    write(target)
    whole = time.perf_counter() - begun
    size = files.num_bytes()
    verdict = stall <= 0.02 * whole if device == "cuda" else None
    return [
        row("bytes saved", f"{size / 1e9:.3g} GB"),
        row("training waits for a save in the background", f"{stall:.3f} s", "<= 2 % of it", verdict),
        row("an update that began at once would wait", f"{until_update:.3f} s"),
        row("until it is durable", f"{whole:.2f} s, {size / 1e9 / whole:.2f} GB/s"),
    ]


def benchmarks(device: str, folder: Path) -> Table:
    """Run the benchmarks that need no engine, in their quick form."""
    from benchmarks.run import ROWS, run

    wanted = ("export", "save_speed", "save_stall", "reshard_load", "packing", "balance", "step_overhead")
    table = []
    for item in (item for item in ROWS if item.name in wanted[: 1 if device == "cpu" else None]):
        outcome = run(item, quick=True, timeout_s=240)
        measured = outcome.verdict if outcome.ratio is None else f"{outcome.ratio:.3f}"
        goal = "-" if outcome.goal is None else f"{'>=' if item.at_least else '<='} {outcome.goal:g} (CPU)"
        table.append(row(f"benchmark {item.name}", measured, goal))
    return table


PARTS = (
    Part("machine", 30, machine),
    Part("bf16", 60, bf16, in_process=True),
    Part("host_syncs", 60, host_syncs, in_process=True),
    Part("mfu", 60, mfu, in_process=True),
    Part("grpo", 90, grpo),
    Part("sleep", 240, sleep, needs_vllm=True),
    Part("resume", 240, resume),
    Part("parity", 90, parity, in_process=True),
    Part("vllm", 120, vllm, needs_vllm=True),
    Part("ppo", 120, ppo),
    Part("engines", 300, engines, needs_vllm=True),
    Part("offload", 90, offload, in_process=True),
    Part("save", 90, save, in_process=True),
    Part("benchmarks", 210, benchmarks),
)
FIRST = 5  # parts that show the most
MEASURED = (
    "mfu",
    "grpo",
    "ppo",
    "vllm",
    "sleep",
    "engines",
    "offload",
    "save",
    "benchmarks",
)  # parts with rows for docs/performance.md
TOTAL_S = 30 * 60


# ------------------------------------------------------------------------------------------------------- what parts share
_REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return (sum(map(ord, solution_str)) % 17) / 16  # differs between responses, so that there is a gradient
"""


def _data(device: str, folder: Path) -> None:
    """Write a small model, prompts and a reward."""
    sys.path.insert(0, str(ROOT / "tools"))
    from make_quickstart import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    model = make_model(tokenizer, num_layers=2, seed=0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = [json.dumps({"prompt": f"{10 + k}+{20 + k}=", "answer": str(30 + 2 * k)}) for k in range(32)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "reward.py").write_text(_REWARD)


def _train(device: str, folder: Path, name: str, *settings: str) -> float:
    """Train as a user does. Returns the seconds."""
    fixed = [
        "model.path=model",
        "data.train=[train.jsonl]",
        "data.prompt_key=prompt",
        "data.max_prompt_tokens=64",
        "reward.function=reward.py:score",
        "rollout.engine=hf",
        "rollout.sampling.max_new_tokens=16",
        "trainer.prompts_per_step=4",
        "trainer.max_tokens_per_microbatch=1024",
        "actor.optimizer.lr=1e-4",
        "logging.tensorboard=false",
        "logging.console=plain",
        "project=suite",
        f"experiment={name}",
        f"model.dtype={'bf16' if device == 'cuda' else 'fp32'}",
    ]
    config = str(ROOT / "configs" / "base.yaml")
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", "train", config, *fixed, *settings]
    begun = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"training ended with {done.returncode}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    return time.perf_counter() - begun


def _metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "outputs" / "suite" / name / "metrics.jsonl").read_text().splitlines()
    return [made for made in map(json.loads, lines) if made["step"] > 0]


def _trained(
    device: str, folder: Path, algorithm: str, *settings: str, name: str = "", limit: float | None = None
) -> Table:
    """Train and report the rows.

    ``name``: of the rows, where it is not that of the algorithm. ``limit``: of the difference to the engine, if not that of the dtype.
    """
    _data(device, folder)
    name = name or algorithm
    steps = 4 if device == "cuda" else 2
    seconds = _train(device, folder, algorithm, f"algorithm={algorithm}", f"trainer.num_steps={steps}", *settings)
    made, limit = _metrics(folder, algorithm), limit or (0.1 if device == "cuda" else 1e-3)
    worst = max(line["rollout/logprob_diff_max"] for line in made)
    skipped = sum(line["actor/skipped_updates"] for line in made)
    step_s, sync_s, all_made = made[-1]["timing/step_s"], made[-1]["timing/sync_s"], len(made) == steps and not skipped
    return [
        row(f"{name}: steps, and skipped updates", f"{len(made)}, {skipped:.0f}", f"{steps}, 0", all_made),
        row(f"{name}: largest logprob difference to the engine", f"{worst:.1e}", f"< {limit:g}", worst < limit),
        row(f"{name}: whole run, last step, its sync", f"{seconds:.0f} s, {step_s:.2f} s, {sync_s:.3f} s"),
    ]


def _optimizer() -> Any:
    from rlhf_mcore.config.schema import OptimizerConfig

    return OptimizerConfig(lr=1e-6)


def _sized(device: str, folder: Path) -> Any:
    """Build a random trainable model of the size of Qwen2.5-1.5B and microbatches of an update; both tiny on the CPU."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config

    from rlhf_mcore.bridge.files.hf_files import HFReader
    from rlhf_mcore.bridge.files.transfer import load
    from rlhf_mcore.bridge.map.rules import hf_shapes
    from rlhf_mcore.config.schema import RecomputeConfig
    from rlhf_mcore.data.collate import RowTokens, make_microbatches
    from rlhf_mcore.families import FAMILIES
    from rlhf_mcore.foreign import Fields
    from rlhf_mcore.mcore.build import BuildOptions, build_model
    from rlhf_mcore.mcore.groups import build_groups
    from rlhf_mcore.mcore.model_spec import load_spec
    from rlhf_mcore.parallel.layout import ParallelLayout
    from tests.distributed.setting import start

    on_cuda, platform = device == "cuda", start()
    sizes: dict[str, Any] = dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=512
    )
    if on_cuda:
        sizes = dict(
            hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, vocab_size=151936
        )
    config = Qwen2Config(
        **sizes,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    )
    (path := folder / "model").mkdir()
    config.save_pretrained(path)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    geometry = FAMILIES["qwen2"].geometry(Fields(config.to_dict(), "config.json", ""), "lm")
    weights = {
        name: torch.randn(shape, dtype=dtype, device=platform.device()) * 0.02
        for name, shape in hf_shapes(geometry).items()
    }
    save_file({name: tensor.cpu() for name, tensor in weights.items()}, path / "model.safetensors", {"format": "pt"})
    del weights
    groups, spec = build_groups(ParallelLayout(1)), load_spec(path)
    assert groups is not None
    options = BuildOptions(
        "bf16" if on_cuda else "fp32", "auto", RecomputeConfig("full" if on_cuda else "off"), True, False, 0
    )
    model = build_model(spec, groups, platform, options)
    load(model.local_parameters(), spec.geometry, HFReader(path))
    length, count, budget = (2048, 16, 8192) if on_cuda else (32, 4, 64)
    tokens = torch.randint(0, config.vocab_size, (length * count,), dtype=torch.int32)
    held = RowTokens(list(range(count)), [length] * count, {"token_ids": tokens})
    return model, make_microbatches(held, max_tokens=budget, packing=True), spec.geometry


def _mean_logprob(model: Any, count: int) -> Callable[[Any, Any], Any]:
    """Return the loss of one of ``count`` microbatches: minus the mean logprob of its tokens."""

    def loss(outputs: Any, microbatch: Any) -> tuple[Any, dict[str, Any]]:
        return -model.logprobs_and_entropy(outputs, microbatch, 1.0, with_entropy=False)[0].mean() / count, {}

    return loss


def _timed(step: Callable[[], None], synchronize: Callable[[], None], rounds: int = 3) -> float:
    """Measure the least seconds of some rounds, after one that allocates."""
    step()
    seconds = []
    for _ in range(rounds):
        synchronize()
        begun = time.perf_counter()
        step()
        synchronize()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


# ------------------------------------------------------------------------------------------------------------ running them
def run_part(part: Part, device: str, out: Path, limit_s: float) -> Table:
    """Run a part in a process group of its own, which ends with it or at the limit."""
    if part.needs_vllm and find_spec("vllm") is None:
        return [row(part.name, "skipped: vLLM is not installed")]
    if limit_s < 10:
        return [row(part.name, f"skipped: the suite's {TOTAL_S // 60} minutes are over")]
    result, log = out / f"{part.name}.json", out / f"{part.name}.log"
    result.unlink(missing_ok=True)
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--part",
        part.name,
        "--device",
        device,
        "--out",
        str(out),
    ]
    paths = [str(ROOT), *([str(SITE)] if SITE.is_dir() else []), os.environ.get("PYTHONPATH", "")]
    if find_spec("xxhash") is None:
        paths.append(str(STANDINS))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    limit = min(part.limit_s * (1 if device == "cuda" else 3), limit_s)  # a CPU may be busy with other things
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return [row(part.name, f"stopped after {limit:.0f} s: see {log.name}", "-", False)]
    if code or not result.is_file():
        last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
        return [row(part.name, f"failed with {code}: {last[0][:200]}", "-", False)]
    table: Table = json.loads(result.read_text())
    return table


def as_table(tables: dict[str, Table]) -> str:
    """Write the results as Markdown."""
    lines = ["| part | what | measured | expected | verdict |", "|---|---|---|---|---|"]
    lines += [
        f"| {name} | {' | '.join(cell.replace('|', '/') for cell in cells)} |"
        for name, rows in tables.items()
        for cells in rows
    ]
    return "\n".join(lines)


def as_rows(tables: dict[str, Table]) -> str:
    """Write the results as rows for docs/performance.md: device, part, what, measured."""
    device = next((cells[1] for cells in tables.get("machine", []) if cells[0] == "device"), "-")
    return "\n".join(
        f"| {device} | {name} | {cells[0]} | {cells[1]} |"
        for name in MEASURED
        for cells in tables.get(name, [])
        if cells[3] != "WRONG" and not cells[1].startswith("skipped")
    )


def pack(target: Path) -> int:
    """Write the archive: this checkout's files, and of installed packages what is Python."""
    with tarfile.open(target, "w:gz") as archive:
        for path in (*map(ROOT.joinpath, PACKED), *(file for name in PACKED_FILES for file in ROOT.glob(name))):
            archive.add(path, f"suite/{path.relative_to(ROOT)}", filter=_is_packed)
        for name in DISTRIBUTIONS:
            for file in metadata.files(name) or ():
                if (
                    not str(file).startswith("..")
                    and file.suffix not in (".so", ".pyc")
                    and (path := Path(str(file.locate()))).is_file()
                ):
                    archive.add(path, f"suite/site/{file}")
    size = target.stat().st_size
    print(f"{target}: {size / 1e6:.1f} MB; unpack it and run: python3 tools/gpu_suite.py")
    if size > MAX_ARCHIVE:
        print(f"error: more than {MAX_ARCHIVE / 1e6:.0f} MB", file=sys.stderr)
    return int(size > MAX_ARCHIVE)


def _is_packed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in member.name or member.name.endswith(".pyc") else member


def _device(parser: argparse.ArgumentParser, wanted: str | None) -> str:
    if absent := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        parser.error(f"{' and '.join(absent)} must be installed here; the archive has the other packages")
    import torch

    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        parser.error("--device cuda: torch finds no CUDA device; leave it out for tiny sizes on the CPU")
    if wanted is None and not has_gpu:
        print("no CUDA device: every part runs on tiny sizes on the CPU", file=sys.stderr, flush=True)
    return wanted or ("cuda" if has_gpu else "cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--device", choices=("cuda", "cpu"), help="(default: cuda where there is one)")
    parser.add_argument("--first", action="store_true", help=f"the first parts alone: {', '.join(names[:FIRST])}")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=Path("gpu_suite"), help="results and logs (default: gpu_suite)")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="write the archive instead")
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.pack is not None:
        return pack(args.pack)
    args.device = _device(parser, args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part is not None:
        part, folder = (
            next(part for part in PARTS if part.name == args.part),
            (args.out / f"{args.part}.files").resolve(),
        )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        if part.in_process:
            os.environ.update(alone)
        (args.out / f"{part.name}.json").write_text(json.dumps(part.run(args.device, folder)))
        return 0
    begun, tables = time.monotonic(), {}
    wanted = [part for part in PARTS[: FIRST if args.first else None] if args.only is None or part.name in args.only]
    for part in wanted:
        print(f"{part.name} ...", file=sys.stderr, flush=True)
        tables[part.name] = run_part(part, args.device, args.out.resolve(), TOTAL_S - (time.monotonic() - begun))
        (args.out / "table.md").write_text(as_table(tables) + "\n")
        if part is PARTS[FIRST - 1] and part is not wanted[-1]:
            print(as_table(tables), end="\n\n", flush=True)
    print(as_table(tables))
    if rows := as_rows(tables):
        print(f"\nrows for docs/performance.md:\n\n{rows}")
        (args.out / "rows.md").write_text(rows + "\n")
    return int(any(cells[3] == "WRONG" for rows in tables.values() for cells in rows))


if __name__ == "__main__":
    sys.exit(main())
