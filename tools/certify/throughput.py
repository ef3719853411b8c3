"""Measure one device: FLOP/s of an update, host syncs, moves between device and host, a save in the background.

The model has the sizes of Qwen2.5-1.5B on CUDA, and is tiny on a CPU.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import Qwen2Config

from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.bridge.files.hf_files import HFReader, load
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.config.schema import OptimizerConfig, RecomputeConfig, TrainerConfig
from rlhf_mcore.data.collate import RowTokens, make_microbatches
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.foreign import Fields
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.groups import build_groups
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import Platform, current_platform
from rlhf_mcore.residency.ledger import GRADIENTS, OPTIMIZER, WEIGHTS
from rlhf_mcore.residency.sharing import DeviceSharing
from rlhf_mcore.roles.role_files import RoleFiles
from rlhf_mcore.roles.trained_model import MinibatchPlan, TrainedModel
from tools.certify import Table, row

BF16_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense, of NVIDIA's data sheets
OPTIMIZER_CONFIG = OptimizerConfig(lr=1e-6)


def mfu(device: str, folder: Path, ranks: int) -> Table:
    """Forward, backward and update of a model of 1.5 billion parameters (tiny on the CPU), by the FLOPs of its matrices."""
    model, microbatches, geometry = _build_sized(device, folder)
    tokens = sum(sum(microbatch.lengths) for microbatch in microbatches)
    model.add_optimizer(OPTIMIZER_CONFIG)
    loss = _mean_logprob(model, len(microbatches))

    def step() -> None:
        model.forward_backward(microbatches, loss)
        model.step(1e-6)

    seconds = _time(step, model.platform.synchronize)

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


def host_syncs(device: str, folder: Path, ranks: int) -> Table:
    """Check that the device never waits for the host between the first forward and the last backward pass of an update."""
    if device != "cuda":
        return [row("host syncs of an update", "skipped: a CPU has none")]
    model, microbatches, _ = _build_sized(device, folder)
    model.add_optimizer(OPTIMIZER_CONFIG)
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


def offload(device: str, folder: Path, ranks: int) -> Table:
    """Compare the ledger of moves between device and host with torch's allocated memory."""
    model, microbatches, _ = _build_sized(device, folder)
    model.add_optimizer(OPTIMIZER_CONFIG)
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
    """Run a frozen model, once as a whole and once with layers that are copied to the device one by one."""
    platform, dtype = trained.platform, "bf16" if trained.config.bf16 else "fp32"
    options = BuildOptions(dtype, "auto", RecomputeConfig(), False, False, 0)
    model = build_model(trained.spec, trained.groups, platform, options)
    load(model.local_parameters(), model.spec.geometry, HFReader(folder / "model"))

    def forward() -> list[torch.Tensor]:
        return model.forward(
            microbatches, lambda outputs, part: model.logprobs_and_entropy(outputs, part, 1.0, with_entropy=False)[0]
        )

    whole, seconds = forward(), _time(forward, platform.synchronize)
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
        row("a pass so, and with all of them there", f"{_time(forward, platform.synchronize):.3f} s, {seconds:.3f} s"),
    ]


def save(device: str, folder: Path, ranks: int) -> Table:
    """Measure how long training waits for a background save of weights, masters and moments."""
    model, _, geometry = _build_sized(device, folder)
    model.add_optimizer(cfg := OPTIMIZER_CONFIG)
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


def _build_sized(device: str, folder: Path) -> Any:
    """Build a random trainable model of the size of Qwen2.5-1.5B, and microbatches of an update; both are tiny on the CPU."""
    on_cuda, platform = device == "cuda", _start()
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
        "bf16" if on_cuda else "fp32", "auto", RecomputeConfig(granularity="full" if on_cuda else "off"), True, False, 0
    )
    model = build_model(spec, groups, platform, options)
    load(model.local_parameters(), spec.geometry, HFReader(path))
    length, count, budget = (2048, 16, 8192) if on_cuda else (32, 4, 64)
    tokens = torch.randint(0, config.vocab_size, (length * count,), dtype=torch.int32)
    held = RowTokens(list(range(count)), [length] * count, {"token_ids": tokens})
    return model, make_microbatches(held, max_tokens=budget, packing=True), spec.geometry


def _start() -> Platform:
    """Make this process a world of one rank."""
    platform = current_platform()
    platform.setup_process(0, 1)
    dist.init_process_group(platform.collective_backend, store=dist.HashStore(), rank=0, world_size=1)
    return platform


def _mean_logprob(model: Any, count: int) -> Callable[[Any, Any], Any]:
    """Return the loss of one of ``count`` microbatches: minus the mean logprob of its tokens."""

    def loss(outputs: Any, microbatch: Any) -> tuple[Any, dict[str, Any]]:
        return -model.logprobs_and_entropy(outputs, microbatch, 1.0, with_entropy=False)[0].mean() / count, {}

    return loss


def _time(step: Callable[[], None], synchronize: Callable[[], None], rounds: int = 3) -> float:
    """Return the minimum time of some rounds in seconds, after a round that allocates memory."""
    step()
    seconds = []
    for _ in range(rounds):
        synchronize()
        begun = time.perf_counter()
        step()
        synchronize()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
