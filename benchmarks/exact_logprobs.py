"""Measure the share of sampled tokens with bit-identical logprobs in engine and trainer, with and without shared operations.

A dense Qwen3 with random weights samples responses in vLLM on the CPU. The prompts have many lengths, and the engine's
token budget splits them. The trainer computes the logprobs in packed and in padded microbatches of several sizes. The
benchmark first measures the unchanged run. Then it shares one more operation in each round, until both sides compute
all operations by the same functions. The result of a shared function for a row does not depend on the number of rows.
Products have at least 32 rows, because MKL uses other kernels for few rows. Attention processes the keys of a sequence
in blocks of 32 from its first token. Only this benchmark uses these functions.

Then it measures steps of the run, unchanged and with all operations shared. In the latter, the old logprobs come from the
forward pass of the update. The engine uses live weights in both.

The last line is the smallest share over all microbatches and steps with all operations shared.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import report, time_call
from benchmarks.one_process import loop_of
from benchmarks.vs_trl import Row
from rlhf_mcore.mcore.core_attention import SDPACoreAttention
from rlhf_mcore.parallel import logprobs
from rlhf_mcore.platform import cpu_kernels
from rlhf_mcore.platform.base import ModuleView
from rlhf_mcore.roles.policy import Actor
from rlhf_mcore.rollout.vllm.engine import VLLMEngine
from rlhf_mcore.trainer.batches import ColocatedBatches
from rlhf_mcore.trainer.loop import TrainingLoop
from rlhf_mcore.trainer.reinforcement import PolicyLearner
from rlhf_mcore.types import Completion, Request, Sampling, TrainBatch

GOAL = 1.0
ROWS = {
    "small": Row(4096, 128, 2, 4, 544, 0, 48, GOAL),  # the quickstart's width and depth
    "wide": Row(4096, 1024, 2, 16, 3072, 0, 48, GOAL),  # products with the inner sizes of Qwen3-0.6B
}
PROMPTS = (1, 2, 5, 17, 31, 32, 33, 64, 70, 100, 129, 200)  # prompt lengths, around the block size of the cache
SAMPLES, TOKEN_BUDGET = 2, 48
RESPONSES, STEPS = (
    32,
    3,
)  # size of a step, and number of steps with and without shared operations; the first step is not timed
CUTS = ((True, 2048), (True, 300), (False, 2048), (False, 300))  # microbatches: packed or padded, token limit
LEAST_ROWS, QUERIES, KEYS = 32, 16, 32


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows [..., k] with a weight [n, k], padded to at least 32 rows."""
    rows = x.reshape(-1, x.size(-1))
    out = F.linear(F.pad(rows, (0, 0, 0, max(LEAST_ROWS - len(rows), 0))), weight)[: len(rows)]
    out = out if bias is None else out + bias
    return out.view(*x.shape[:-1], -1)


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend causally with the last n of a sequence's t tokens, [n, heads, d] to [t, kv_heads, d], in blocks of queries and keys.

    The sums start at the first block of keys (Milakov and Gimelshein 2018, arXiv 1805.02867). Blocks after a query change no bit,
    because they multiply by exp(0) and add zeros.
    """
    (n, heads, size), (t, groups) = query.shape, key.shape[:2]
    place = torch.arange(t - n, t + -n % QUERIES)
    q = F.pad(query * scale, (0, 0, 0, 0, 0, -n % QUERIES)).view(-1, QUERIES, groups, heads // groups, size)
    q = q.permute(0, 2, 1, 3, 4).reshape(-1, QUERIES * heads // groups, size)  # [blocks * groups, rows, d]
    place = place.view(-1, 1, QUERIES, 1).expand(-1, groups, -1, heads // groups).reshape(len(q), -1, 1)
    k, v = (F.pad(x, (0, 0, 0, 0, 0, -t % KEYS)).view(-1, KEYS, groups, size).transpose(1, 2) for x in (key, value))
    peak, total, out = q.new_full((*q.shape[:2], 1), -torch.inf), q.new_zeros(*q.shape[:2], 1), torch.zeros_like(q)
    for block in range(len(k)):
        own_k, own_v = (x[block].repeat(len(q) // groups, 1, 1) for x in (k, v))
        scores = torch.bmm(q, own_k.transpose(1, 2))
        scores = scores.masked_fill(torch.arange(block * KEYS, (block + 1) * KEYS) > place, -torch.inf)
        higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights, kept = (scores - higher).exp(), (peak - higher).exp()
        total, out = total * kept + weights.sum(-1, keepdim=True), out * kept + torch.bmm(weights, own_v)
        peak = higher
    out = (out / total).view(-1, groups, QUERIES, heads // groups, size).transpose(1, 2)
    return out.reshape(-1, heads, size)[:n]


def log_softmax(logits: Tensor) -> Tensor:
    """Compute the logprobs [n, v] like ``parallel/logprobs.py``."""
    z = logits - logits.amax(1, keepdim=True)
    return z - z.exp().sum(1, keepdim=True).log()


def share_norms(engine: VLLMEngine) -> Iterator[AbstractContextManager[Any]]:
    """Use the trainer's norms in the engine."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    def norm(layer: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        normed = cpu_kernels.rms_norm(total, layer.weight, layer.variance_epsilon)
        return normed if residual is None else (normed, total)

    for layer in engine.model.modules():
        if type(layer) is RMSNorm:
            yield patch.object(layer, "_forward_method", partial(norm, layer))


def share_products(engine: VLLMEngine) -> Iterator[AbstractContextManager[Any]]:
    """Share the products of linear layers, except the output layer."""
    from megatron.core.tensor_parallel import layers

    def matmul(x: Tensor, transposed: Tensor, **options: Any) -> Tensor:
        return torch.matmul(x, transposed, **options) if options else product(x, transposed.t())

    yield patch.object(layers, "torch", ModuleView(layers.torch, {"matmul": matmul}))
    for name, layer in engine.model.named_modules():
        if hasattr(layer, "cpu_linear") and not _is_output(name):
            yield patch.object(layer, "cpu_linear", product)


def share_attention(engine: VLLMEngine) -> Iterator[AbstractContextManager[Any]]:
    """Share the attention, and write the engine's cache in a matching order."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    def write(impl: Any, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        slots = slots.long()
        rows = torch.cat([key, value], -1)[: len(slots)]
        cache[slots // cache.size(2), :, slots % cache.size(2)] = rows

    def forward(impl: Any, layer: Any, query: Tensor, *inputs: Any, output: Tensor, **scales: None) -> Tensor:
        cache, told = inputs[2:]
        starts, lengths = told.query_start_loc.tolist(), told.seq_lens.tolist()
        for number, length in enumerate(lengths):
            a, b = starts[number : number + 2]
            blocks = cache[told.block_table[number, : -(-length // cache.size(2))].long()]
            k, v = blocks.transpose(1, 2).flatten(0, 1)[:length].chunk(2, -1)
            output[a:b] = attend(query[a:b], k, v, impl.scale).view(output[a:b].shape)
        return output

    def of_trainer(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = module._scale or q.size(-1) ** -0.5
        rows = zip(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), strict=True)
        return torch.stack([attend(*row, scale) for row in rows]).transpose(1, 2)

    yield patch.object(CPUAttentionBackendImpl, "do_kv_cache_update", write)
    yield patch.object(CPUAttentionBackendImpl, "forward", forward)
    yield patch.object(SDPACoreAttention, "_attend_last", of_trainer)


def share_output(engine: VLLMEngine) -> Iterator[AbstractContextManager[Any]]:
    """Share the output layer."""
    yield patch.object(logprobs, "_logits", lambda hidden, weight, low, rows: product(hidden, weight))
    for name, layer in engine.model.named_modules():
        if hasattr(layer, "cpu_linear") and _is_output(name):
            yield patch.object(layer, "cpu_linear", product)


def share_log_softmax(engine: VLLMEngine) -> Iterator[AbstractContextManager[Any]]:
    """Use the trainer's log-softmax in the engine."""
    sampler: Any = engine._worker().model_runner.sampler.topk_topp_sampler
    drawn = sampler.forward

    def draw(logits: Tensor, *args: Any) -> Any:
        found = log_softmax(logits)
        return drawn(logits, *args)[0], found

    yield patch.object(sampler, "forward", draw)


def _is_output(name: str) -> bool:
    return name.rpartition(".")[2] in ("lm_head", "embed_tokens")


Share = Callable[[VLLMEngine], Iterator[AbstractContextManager[Any]]]
SHARED: dict[str, Share] = {
    "norms": share_norms,
    "products": share_products,
    "attention": share_attention,
    "output layer": share_output,
    "log-softmax": share_log_softmax,
}


@dataclass(frozen=True, slots=True)
class Found:
    """Numbers of equal and of all logprobs for each kind of microbatch, the largest difference, and the seconds of both sides."""

    equal: dict[str, float]
    largest: float
    engine_s: float
    trainer_s: float


@contextmanager
def sharing(engine: VLLMEngine, names: Sequence[str]) -> Iterator[None]:
    """Within this block, compute the named operations by the same function on both sides."""
    from vllm import _custom_ops as ops

    with ExitStack() as stack:
        layers: list[Any] = list(engine.model.modules())
        for layer in layers:
            if hasattr(layer, "cpu_linear"):  # vLLM's kernel for weights that are not live
                packed = ops.create_onednn_mm(layer.weight.t(), 32)
                multiply = partial(lambda packed, x, weight, bias: ops.onednn_mm(packed, x, bias), packed)
                stack.enter_context(patch.object(layer, "cpu_linear", multiply))
        for name in names:
            for patched in SHARED[name](engine):
                stack.enter_context(patched)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short responses")
    parser.add_argument("--row", choices=ROWS, default="small", help="the model")
    args = parser.parse_args()
    row = replace(ROWS[args.row], tokens=8) if args.quick else ROWS[args.row]
    overrides = [
        f"rollout.max_num_batched_tokens={TOKEN_BUDGET}",
        "data.max_prompt_tokens=256",
        "bridge.live_cpu_weights=true",  # so that other kernels than the engine's can use its weights
        "actor.optimizer.lr=1e-4",
        "trainer.share_prefixes=false",  # attention over a prefix tree sums in another order than the shared function
    ]
    found: dict[str, dict[str, Any]] = {}
    with loop_of(replace(row, responses=RESPONSES), 2 * STEPS, overrides) as loop:
        _sharpen(loop)
        for count in range(len(SHARED) + 1):
            names = list(SHARED)[:count]
            title = f"and {names[-1]}" if names else "as in a run"
            found[title] = asdict(_measure(loop, row, names))
            print(f"{title:20}", found[title], flush=True)
        steps = {
            title: _steps(loop, title == "shared", first) for title, first in (("plain", 1), ("shared", STEPS + 1))
        }
        cost = steps["shared"]["cpu_s"] / steps["plain"]["cpu_s"]
        print(steps, f"CPU seconds of a step: {cost:.2f} times as many")
    details = {"row": args.row, "prompts": PROMPTS, "samples": SAMPLES, "token_budget": TOKEN_BUDGET, "shared": found}
    least = min(*found[title]["equal"].values(), *steps["shared"]["equal"])
    name = "exact_logprobs" + ("" if args.row == "small" else f"_{args.row}")
    report(name, {**details, "steps": steps, "cost": cost}, ratio=least, goal=GOAL, quick=args.quick)


def _steps(loop: TrainingLoop, shares: bool, first: int) -> dict[str, Any]:
    """Return the shares of equal logprobs in steps of the run, and the CPU seconds of all steps but the first."""
    source, learner = loop.source, loop.learner
    assert isinstance(source, ColocatedBatches)
    equal, seconds = [], []

    def learn(step: int, batch: TrainBatch) -> Any:
        results, metrics = learner.learn(step, batch)
        equal.append(metrics["rollout/logprob_exact"])
        return results, metrics

    engine: Any = source.sampler.engine
    with patch.object(loop, "learner", SimpleNamespace(learn=learn)), ExitStack() as stack:
        if shares:
            stack.enter_context(sharing(engine, list(SHARED)))
        for step in range(first, first + STEPS):
            _, took = time_call(partial(loop.step, step, 2 * STEPS))
            seconds.append(took.cpu_s)
    return {"equal": equal, "cpu_s": statistics.median(seconds[1:])}


def _sharpen(loop: TrainingLoop) -> None:
    """Multiply matrices by 4. With the small weights of a new model, all logprobs are nearly equal, and often identical by chance."""
    learner: Any = loop.learner
    with torch.no_grad():
        for parameter in learner.roles.actor.model.model.local_parameters():
            if parameter.tensor.dim() == 2:
                parameter.tensor.mul_(4)


def _measure(loop: TrainingLoop, row: Row, names: Sequence[str]) -> Found:
    source, learner = loop.source, loop.learner
    assert isinstance(source, ColocatedBatches) and isinstance(learner, PolicyLearner)
    engine, actor = source.sampler.engine, learner.roles.actor
    assert isinstance(engine, VLLMEngine) and isinstance(actor, Actor)
    loop.publisher.withdraw()
    loop.publisher.publish(0)  # also empties the prefix cache
    with sharing(engine, names):
        requests = _requests(row)
        completions, drawing = time_call(lambda: engine.generate(requests))
        batch = _batch(requests, completions)
        equal, largest, seconds = {}, 0.0, 0.0
        for packing, most in CUTS:
            config = actor.model.trainer.model_copy(update={"packing": packing, "forward_tokens": most})
            with patch.object(actor.model, "trainer", config):
                own, passing = time_call(lambda: actor.compute_logprobs(batch))
            difference = (own - batch.rollout_logprobs)[batch.loss_mask].abs()
            equal[f"{'packed' if packing else 'padded'} to {most}"] = float((difference == 0).float().mean())
            largest, seconds = max(largest, float(difference.max())), seconds + passing.cpu_s
    return Found(equal, largest, drawing.cpu_s, seconds)


def _requests(row: Row) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(max_new_tokens=row.tokens)
    prompts = [torch.randint(3, row.vocab, (length,), generator=generator).tolist() for length in PROMPTS]
    drawn = [prompt for prompt in prompts for _ in range(SAMPLES)]
    return [Request(number, str(number), prompt, sampling, seed=number) for number, prompt in enumerate(drawn)]


def _batch(requests: Sequence[Request], completions: Sequence[Completion]) -> TrainBatch:
    """Return the batch of all responses, owned by this rank."""
    pairs = list(zip(requests, completions, strict=True))
    sampled = torch.tensor([len(drawn.token_ids) for _, drawn in pairs])
    lengths = sampled + torch.tensor([len(request.prompt_ids) for request, _ in pairs])
    token_ids = [
        torch.tensor([*request.prompt_ids, *drawn.token_ids.tolist()], dtype=torch.int32) for request, drawn in pairs
    ]
    drawn_logprobs = [F.pad(torch.from_numpy(drawn.logprobs), (len(request.prompt_ids), 0)) for request, drawn in pairs]
    is_sampled = [torch.arange(int(length)) >= length - count for length, count in zip(lengths, sampled, strict=True)]
    zeros, numbers = torch.zeros(len(pairs), dtype=torch.long), torch.arange(len(pairs))
    return TrainBatch(
        lengths=lengths,
        num_sampled=sampled,
        scores=zeros.float(),
        truncated=zeros.bool(),
        group_ids=numbers // SAMPLES,
        owners=zeros,
        rows=numbers,
        token_ids=torch.cat(token_ids),
        loss_mask=torch.cat(is_sampled),
        rollout_logprobs=torch.cat(drawn_logprobs),
    )


if __name__ == "__main__":
    main()
